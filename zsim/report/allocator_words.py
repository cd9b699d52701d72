"""What torch's allocator did in a step, as a row and in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.units import format_bytes


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """torch's caching allocator on `rank` in a steady step: `reserved_bytes` at most
    (`torch.cuda.max_memory_reserved`, without the CUDA context and NCCL's buffers); how often per step it ran
    short and gave its cache back to the driver (`retries`, torch's `num_alloc_retries`), how many segments
    that were, and how many requests did not fit even so (`failures`: out of memory in torch)."""

    reserved_bytes: int
    retries: int
    released_segments: int
    failures: int


def allocator_notes(row: AllocatorRow | None) -> Iterator[str]:
    """What a user should know of an allocator that ran short; nothing of one that did not."""
    if row is None or not row.retries:
        return
    times = {1: "once", 2: "twice"}.get(row.retries, f"{row.retries:,} times")
    yield (
        f"torch's allocator ran short {times} in the step, waited for the GPU and gave "
        f"{row.released_segments:,} cached segments back to the driver (num_alloc_retries; DeepSpeed warns of "
        '"allocator cache flushes"): memory is asked for in pieces that do not fit what was freed, or freed '
        "blocks are still in use by another stream; published steps like this are 1.1 to 5 times as long"
    )
    if row.failures:
        yield (
            f"{row.failures:,} of its requests did not fit even then: torch may stop with an out-of-memory "
            "error that names memory reserved but unallocated; training.expandable_segments shows the step "
            "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )


def margin_notes(gpu_bytes: int, limit_bytes: int, margin: float) -> Iterator[str]:
    """Why the capacity is less than the GPU's, or, where the peak is closer to it, why it is not."""
    if not margin:
        return
    if limit_bytes == gpu_bytes:
        yield (
            f"the peak leaves less than the allocator's margin of {margin:.0%}: whether the job runs hangs "
            "on how its blocks fall; here they all found room"
        )
    else:
        yield f"capacity is the GPU's {format_bytes(gpu_bytes)} less the allocator's margin of {margin:.0%}"
