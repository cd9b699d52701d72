"""The drives of a node: striped, shared by all its ranks, reading and writing at once.

Data go through host memory (a bounce buffer), or with GPUDirect Storage directly to the GPU's link. Drives
under the GPUs' PCIe switches use the switches' uplinks, as NICs and copies do.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.cost.rates.nvme import drive_bytes_per_second, stream_bytes_per_second
from zsim.devices.host import memory_weights
from zsim.devices.node_resources import NodePool, ResourceUsage
from zsim.devices.sockets import Shares, Sockets, crossings
from zsim.plan.ops import DriveIo
from zsim.specs.cluster.cluster import Nvme


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
