"""The files of tensors that DeepSpeed has on drives, and how its aio handle reads and writes them."""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import AioConfig
from zsim.plan.shared.host_side import DriveAccess

_MIN_SWAP_BYTES = 2**20  # MIN_AIO_BYTES of DeepSpeed's swap_tensor/utils.py
_ALIGNMENT_BYTES = 1024  # AIO_ALIGNED_BYTES of the same file, per thread


def drive_access(aio: AioConfig) -> DriveAccess:
    """The settings of reads and writes under the JSON's `aio`."""
    return DriveAccess(aio.block_size_bytes, aio.queue_depth, aio.intra_op_parallelism)


def swap_floor_bytes(aio: AioConfig) -> int:
    """The size in bytes below which tensors stay in memory."""
    return max(_MIN_SWAP_BYTES, aio.block_size_bytes)


def aligned_numel(numel: int, element_bytes: int, aio: AioConfig) -> int:
    """Elements of the file of a tensor of `numel` elements: padded to aligned pieces of equal size per
    thread."""
    alignment = _ALIGNMENT_BYTES * aio.intra_op_parallelism // element_bytes
    return -(-numel // alignment) * alignment
