"""The CPU side of a node at work: copies over PCIe, host memory, optimizer steps and casts on the CPU.

All ranks of a node share its memory bandwidth and cores, socket by socket. GPUs under one PCIe switch share
the switch's uplink.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.cost.rates.cpu_optimizer import copy_bytes_per_second, optimizer_bytes_per_second, thread_share
from zsim.devices.node_resources import NodePool, ResourceUsage
from zsim.devices.sockets import Shares, Sockets, crossings
from zsim.plan.ops import Copy, HostWork

# Bytes that a copy of one unpinned byte moves in host memory: the driver's thread reads and writes it, in
# addition to the copy engine's access.
_PAGEABLE_TRAFFIC = 3.0
_FP32_ADAM_BYTES = 28  # of an element; `thread_bandwidth` was measured with it


def add_host(pool: NodePool) -> None:
    """Add the resources of the hosts. Each node has its own, and all have as many sockets as the first.

    - `dram`: bytes per second of a socket's memory
    - `cpu`: time of its cores
    - `socket_out`, `socket_in`: bytes per second to and from other sockets
    - `pageable`: time of one rank's driver thread
    """
    cluster = pool.topology.cluster
    sockets, part = cluster.host.sockets, cluster.offload.dma_fraction / cluster.host.sockets
    pool.add("dram", "socket", *(host.memory_bandwidth * part for host in cluster.hosts))
    pool.add("cpu", "socket", 1.0)
    if sockets > 1:
        between = [host.socket_bandwidth or cluster.host.socket_bandwidth for host in cluster.hosts]
        assert all(between)
        pool.add("socket_out", "socket", *(rate for rate in between if rate))
        pool.add("socket_in", "socket", *(rate for rate in between if rate))
    pool.add("pageable", "rank", 1.0)


def on_memory(weight: float, sockets: Sockets) -> list[float]:
    """`weight` bytes of host memory, per socket, where the rank's memory is."""
    return [weight * share for share in sockets.memory]


def copy_usage(pool: NodePool, work: Copy, rank: int) -> ResourceUsage:
    """Usage of one byte copied between GPU and host: PCIe link, uplink of the switch, host memory."""
    side = "down" if work.direction == "h2d" else "up"
    own = {f"pcie_{side}": 1.0, f"uplink_{side}": 1.0}
    traffic = 1.0
    if not work.is_pinned:
        traffic = _PAGEABLE_TRAFFIC
        own["pageable"] = 1.0 / pool.topology.cluster.offload.pageable_bandwidth

    def on_sockets(sockets: Sockets) -> Mapping[str, Shares]:
        ends = (sockets.memory, sockets.gpu) if work.direction == "h2d" else (sockets.gpu, sockets.memory)
        return {"dram": on_memory(traffic, sockets), **crossings(*ends)}

    return pool.usage(rank, own, on_sockets=on_sockets)


def host_work_usage(pool: NodePool, work: HostWork, rank: int) -> ResourceUsage:
    """Usage of one byte of CPU work on memory: memory bandwidth, and the time of the cores.

    A rank with few threads is slower, but leaves no more cores to the others: a byte takes more core time.
    Unbound threads run on all sockets. Of their bytes on other sockets half are read and half are written.
    """
    cluster = pool.topology.cluster
    host, rates = cluster.hosts[pool.type_of(rank)], cluster.offload
    is_update = work.kind == "optimizer"
    rate = (optimizer_bytes_per_second if is_update else copy_bytes_per_second)(host, rates)
    of_element = work.bytes / (_FP32_ADAM_BYTES * work.numel) if is_update and work.numel else 1.0
    share = thread_share(host, rates, pool.ranks_beside(rank), rate, min(of_element, 1.0))
    seconds = 1.0 / (rate * share)

    def on_sockets(sockets: Sockets) -> Mapping[str, Shares]:
        there, back = crossings(sockets.memory, sockets.threads), crossings(sockets.threads, sockets.memory)
        both = {name: [(a + b) / 2 for a, b in zip(there[name], back[name], strict=True)] for name in there}
        cores = [seconds * sockets.count * part for part in sockets.threads]
        return {"dram": on_memory(1.0, sockets), "cpu": cores, **both}

    return pool.usage(rank, {}, on_sockets=on_sockets)
