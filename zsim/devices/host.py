"""The host of a node at work: copies over PCIe, host memory, optimizer steps and casts on the CPU, drives.

All ranks of a node share its memory bandwidth and cores, socket by socket. GPUs under one PCIe switch share
the switch's uplink.

# [Note: the drives of a node]
They are striped and shared by all its ranks, and read and write at once. Data go through host memory (a
bounce buffer), or with GPUDirect Storage directly to the GPU's link. Drives under the GPUs' PCIe switches use
the switches' uplinks, as NICs and copies do.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.cost.rates.offload import (
    copy_bytes_per_second,
    drive_bytes_per_second,
    optimizer_bytes_per_second,
    stream_bytes_per_second,
    thread_share,
)
from zsim.devices.node_resources import NodePool, ResourceUsage, Shares, Sockets, crossings
from zsim.plan.ops import Copy, DriveIo, HostWork
from zsim.specs.cluster.cluster import Nvme

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
    sockets, socket_fraction = cluster.host.sockets, cluster.offload.dma_fraction / cluster.host.sockets
    pool.add("dram", "socket", *(host.memory_bandwidth * socket_fraction for host in cluster.hosts))
    pool.add("cpu", "socket", 1.0)
    if sockets > 1:
        socket_bandwidths = [host.socket_bandwidth or cluster.host.socket_bandwidth for host in cluster.hosts]
        assert all(socket_bandwidths)
        pool.add("socket_out", "socket", *(rate for rate in socket_bandwidths if rate))
        pool.add("socket_in", "socket", *(rate for rate in socket_bandwidths if rate))
    pool.add("pageable", "rank", 1.0)


def memory_weights(weight: float, sockets: Sockets) -> list[float]:
    """`weight` bytes of host memory, per socket, where the rank's memory is."""
    return [weight * share for share in sockets.memory]


def copy_usage(pool: NodePool, work: Copy, rank: int) -> ResourceUsage:
    """Usage of one byte copied between GPU and host: PCIe link and uplink of the switch, or the C2C link
    that takes their place, and host memory.
    """
    side = "down" if work.direction == "h2d" else "up"
    has_c2c = pool.topology.cluster.c2c is not None
    links = ("c2c",) if has_c2c else ("pcie", "uplink")
    rank_weights = {f"{link}_{side}": 1.0 for link in links}
    traffic = 1.0
    if not work.is_pinned and not has_c2c:
        traffic = _PAGEABLE_TRAFFIC
        rank_weights["pageable"] = 1.0 / pool.topology.cluster.offload.pageable_bandwidth

    def weights_of_sockets(sockets: Sockets) -> Mapping[str, Shares]:
        ends = (sockets.memory, sockets.gpu) if work.direction == "h2d" else (sockets.gpu, sockets.memory)
        return {"dram": memory_weights(traffic, sockets), **crossings(*ends)}

    return pool.usage(rank, rank_weights, weights_of_sockets=weights_of_sockets)


def host_work_usage(pool: NodePool, work: HostWork, rank: int) -> ResourceUsage:
    """Usage of one byte of CPU work on memory: memory bandwidth, and the time of the cores.

    A rank with few threads is slower, but leaves no more cores to the others: a byte takes more core time.
    Unbound threads run on all sockets. Of their bytes on other sockets half are read and half are written.
    """
    cluster = pool.topology.cluster
    host, rates = cluster.hosts[pool.type_of(rank)], cluster.offload
    is_update = work.kind == "optimizer"
    rate = (optimizer_bytes_per_second if is_update else copy_bytes_per_second)(host, rates)
    element_fraction = work.bytes / (_FP32_ADAM_BYTES * work.numel) if is_update and work.numel else 1.0
    share = thread_share(host, rates, pool.ranks_on_node(rank), rate, min(element_fraction, 1.0))
    seconds = 1.0 / (rate * share)

    def weights_of_sockets(sockets: Sockets) -> Mapping[str, Shares]:
        reads, writes = crossings(sockets.memory, sockets.threads), crossings(sockets.threads, sockets.memory)
        link_weights = {
            name: [(a + b) / 2 for a, b in zip(reads[name], writes[name], strict=True)] for name in reads
        }
        cores = [seconds * sockets.count * share for share in sockets.threads]
        return {"dram": memory_weights(1.0, sockets), "cpu": cores, **link_weights}

    return pool.usage(rank, {}, weights_of_sockets=weights_of_sockets)


def add_drives(pool: NodePool, nvme: Nvme, written_bytes: float) -> None:
    """Add the resources of drives. `written_bytes` are those that all ranks of a node write per step, for the
    write cache.

    - `drive_read`, `drive_write`: bytes per second of a node's drives
    - `drive_time`: time of the drives, which reads and writes share
    - `read_queue`, `write_queue`: time of one rank's queues
    """
    pool.add("drive_read", "node", drive_bytes_per_second(nvme, "read"))
    pool.add("drive_write", "node", drive_bytes_per_second(nvme, "write", written_bytes))
    pool.add("drive_time", "node", nvme.mixed_overlap)
    pool.add("read_queue", "rank", 1.0)
    pool.add("write_queue", "rank", 1.0)


def drive_usage(pool: NodePool, nvme: Nvme, work: DriveIo, rank: int) -> ResourceUsage:
    """Usage of one byte read from or written to the drives."""
    bandwidth = pool.classes[f"drive_{work.direction}"].capacity
    queue_bandwidth = stream_bytes_per_second(
        nvme, work.direction, work.block_bytes, work.queue_depth, work.threads
    )
    is_read = work.direction == "read"
    rank_weights = {
        f"drive_{work.direction}": 1.0,
        "drive_time": 1.0 / bandwidth,
        f"{work.direction}_queue": 1.0 / queue_bandwidth,
    }
    switch_weights: dict[str, float] = {}
    if work.is_direct:
        rank_weights["pcie_down" if is_read else "pcie_up"] = 1.0
        rank_weights["uplink_down" if is_read else "uplink_up"] = 1.0

    def weights_of_sockets(sockets: Sockets) -> Mapping[str, Shares]:
        """Weights per socket. A stripe is on the drives of all sockets."""
        rank_shares = sockets.gpu if work.is_direct else sockets.memory
        ends = (sockets.interleaved, rank_shares) if is_read else (rank_shares, sockets.interleaved)
        memory = {} if work.is_direct else {"dram": memory_weights(1.0, sockets)}
        return {**memory, **crossings(*ends)}

    if nvme.attached == "switch":
        # A stripe is on the drives of all switches. 1 / switches of direct traffic stays under the GPU's own
        # switch.
        local_fraction = 1.0 / pool.topology.switches_per_node if work.is_direct else 0.0
        if work.is_direct:
            rank_weights["uplink_down" if is_read else "uplink_up"] = 1.0 - local_fraction
        switch_weights["uplink_up" if is_read else "uplink_down"] = 1.0 - local_fraction
    return pool.usage(rank, rank_weights, switch_weights, weights_of_sockets)
