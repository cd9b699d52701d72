"""Rates of asynchronous reads and writes on idle drives.

A request of one rank is cut into blocks, of which `threads` threads keep `queue_depth` each in flight.
Little's law then bounds the rank's rate.
"""

from __future__ import annotations

from typing import Literal

from zsim.specs.cluster.cluster import Nvme

Direction = Literal["read", "write"]


def blocks_in_flight(queue_depth: int, threads: int) -> int:
    """Maximum of blocks that one rank has in flight: its threads' queues, which are never overfilled."""
    return queue_depth * threads


def stream_bytes_per_second(
    nvme: Nvme, direction: Direction, block_bytes: int, queue_depth: int, threads: int
) -> float:
    """Bytes per second that one rank's stream of blocks reaches in isolation.

        x = min(D B e, n b / (L + b / (B e)))

    D: drives (RAID0, blocks spread over all). B: bandwidth of one. e: `efficiency`. n: blocks in flight,
    queue depth x threads. b: block in bytes. L: latency of one request. Little's law: Little 1961.
    """
    drive_bandwidth = _bandwidth(nvme, direction) * nvme.efficiency
    latency = nvme.read_latency if direction == "read" else nvme.write_latency
    in_flight = blocks_in_flight(queue_depth, threads)
    return min(
        nvme.drives * drive_bandwidth, in_flight * block_bytes / (latency + block_bytes / drive_bandwidth)
    )


def drive_bytes_per_second(nvme: Nvme, direction: Direction, written_bytes: float = 0.0) -> float:
    """Bytes per second that all drives of a node reach in total.

    With a write cache, the `written_bytes` (of one step, all drives) beyond it go at the sustained rate:

        x = W / (C / B + (W - C) / S) for W > C, else B

    W: bytes written. C: caches of all drives. B: bandwidth into the cache. S: bandwidth beyond it.
    """
    fast = nvme.drives * _bandwidth(nvme, direction) * nvme.efficiency
    if direction == "read" or nvme.write_cache is None or nvme.sustained_write_bandwidth is None:
        return fast
    cache = nvme.drives * nvme.write_cache
    if written_bytes <= cache:
        return fast
    slow = nvme.drives * nvme.sustained_write_bandwidth * nvme.efficiency
    return written_bytes / (cache / fast + (written_bytes - cache) / slow)


def _bandwidth(nvme: Nvme, direction: Direction) -> float:
    return nvme.read_bandwidth if direction == "read" else nvme.write_bandwidth
