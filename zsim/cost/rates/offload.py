"""Rates of offloading: asynchronous reads and writes on idle drives, and an optimizer on the CPU.

A request of one rank is cut into blocks, of which `threads` threads keep `queue_depth` each in flight.
Little's law then bounds the rank's rate.

Bytes that an optimizer step on the CPU moves through host memory, and the rates it reaches.

DeepSpeed's CPU-Adam and torch's fused AdamW for CPUs are vectorised over all threads and read and write every
state once, so they are bound by memory, not by arithmetic. torch's other implementations make a pass over
memory per operation (`zsim.cost.kernels.update.update_bytes`).
"""

from __future__ import annotations

from typing import Literal

from zsim.dtypes import DTYPE_BYTES
from zsim.specs.cluster.cluster import HostDevice, Nvme
from zsim.specs.cluster.host_speeds import OffloadRates

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


def cast_bytes(numel: int, from_dtype: str, to_dtype: str) -> int:
    """Bytes read plus written by a cast."""
    return numel * (DTYPE_BYTES[from_dtype] + DTYPE_BYTES[to_dtype])


def scale_bytes(numel: int, dtype: str = "fp32") -> int:
    """Bytes read plus written by a multiplication in place."""
    return 2 * numel * DTYPE_BYTES[dtype]


def optimizer_bytes_per_second(host: HostDevice, rates: OffloadRates) -> float:
    """Bytes per second that the CPU optimizers of all ranks of a node reach together, with all cores."""
    return host.memory_bandwidth * rates.optimizer_fraction


def copy_bytes_per_second(host: HostDevice, rates: OffloadRates) -> float:
    """Bytes per second that casts, copies and scaling on the CPUs of a node reach together."""
    return host.memory_bandwidth * rates.copy_fraction


def thread_share(
    host: HostDevice,
    rates: OffloadRates,
    num_ranks: int,
    bytes_per_second: float,
    element_fraction: float = 1.0,
) -> float:
    """Fraction of a node's `bytes_per_second` that `num_ranks` ranks reach with `threads_per_rank` threads.

        s = min(1, n t f b / R)

    n: ranks. t: threads of each, in total at most one a core. b: `thread_bandwidth`. R: the node's rate. f:
    `element_fraction`, bytes of an element over those of an fp32 one, because a thread is bound by its
    arithmetic as much as by memory, and takes as long for an element of any type. Without b a thread has a
    core's even share of R. Without t all cores work.
    """
    if rates.threads_per_rank is None:
        return 1.0
    threads = min(num_ranks * rates.threads_per_rank, host.cores)
    if rates.thread_bandwidth is None:
        return threads / host.cores
    return min(1.0, threads * element_fraction * rates.thread_bandwidth / bytes_per_second)
