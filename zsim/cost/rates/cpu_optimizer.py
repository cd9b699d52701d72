"""Bytes that an optimizer step on the CPU moves through host memory, and the rates it reaches.

DeepSpeed's CPU-Adam and torch's fused AdamW for CPUs are vectorised over all threads and read and write every
state once, so they are bound by memory, not by arithmetic; torch's other implementations make a pass over
memory per operation (`zsim.cost.kernels.update.update_bytes`).
"""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.offload_rates import OffloadRates


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


def core_share(host: HostDevice, rates: OffloadRates, num_ranks: int) -> float:
    """Fraction of a node's cores that `num_ranks` ranks use: all, or `threads_per_rank` cores each."""
    if rates.threads_per_rank is None:
        return 1.0
    return min(1.0, num_ranks * rates.threads_per_rank / host.cores)
