"""The CPU side of a node at work: copies over PCIe, host memory, the CPU's own optimizer and casts.

All ranks of a node share its memory bandwidth and cores; GPUs under one PCIe switch share its uplink.
"""

from __future__ import annotations

from zsim.cost.host_optimizer import copy_bytes_per_second, core_share, optimizer_bytes_per_second
from zsim.devices.pool import NodePool, Usage
from zsim.plan.ops import Copy, HostWork

# What a copy that is not pinned moves in host memory per byte: the driver's thread reads and writes it once
# more than the copy engine.
_PAGEABLE_TRAFFIC = 3.0


def add_host(pool: NodePool) -> None:
    """`dram`: bytes per second of a node's memory; `cpu`: the time of its cores; `pageable`: the time of the
    driver's thread of one rank."""
    cluster = pool.topology.cluster
    pool.add("dram", "node", cluster.host.memory_bandwidth * cluster.offload.dma_fraction)
    pool.add("cpu", "node", 1.0)
    pool.add("pageable", "rank", 1.0)


def copy_usage(pool: NodePool, work: Copy, rank: int) -> Usage:
    """One byte between GPU and host: its PCIe link, its switch's uplink, host memory."""
    side = "down" if work.direction == "h2d" else "up"
    own = {f"pcie_{side}": 1.0, f"uplink_{side}": 1.0, "dram": 1.0}
    if not work.is_pinned:
        own["dram"] = _PAGEABLE_TRAFFIC
        own["pageable"] = 1.0 / pool.topology.cluster.offload.pageable_bandwidth
    return pool.usage(rank, own)


def host_work_usage(pool: NodePool, work: HostWork, rank: int) -> Usage:
    """One byte of the CPU's work on memory: memory bandwidth, and the cores that it keeps busy.

    A rank that uses few threads is slower without leaving more to others: its share of the cores is less.
    """
    cluster = pool.topology.cluster
    host, rates = cluster.host, cluster.offload
    rate = optimizer_bytes_per_second if work.kind == "optimizer" else copy_bytes_per_second
    share = core_share(host, rates, pool.ranks_beside(rank))
    return pool.usage(rank, {"dram": 1.0, "cpu": 1.0 / (rate(host, rates) * share)})
