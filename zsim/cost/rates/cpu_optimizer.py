"""Bytes that an optimizer step on the CPU moves through host memory, and the rates it reaches.

DeepSpeed's CPU-Adam and torch's fused AdamW for CPUs are vectorised over all threads and read and write every
state once, so they are bound by memory, not by arithmetic. torch's other implementations make a pass over
memory per operation (`zsim.cost.kernels.update.update_bytes`).
"""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.host_speeds import OffloadRates


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
