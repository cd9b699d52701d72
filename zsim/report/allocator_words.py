"""What torch's allocator did in a step, as a row and in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.units import format_seconds


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """torch's caching allocator on the first rank in a steady step: `reserved_bytes` at most
    (`torch.cuda.max_memory_reserved`, without the CUDA context and NCCL's buffers); how often per step it ran
    short and gave its cache back to the driver (`retries`, torch's `num_alloc_retries`), how many seconds the
    step is longer for it, how many segments that were, and how many requests did not fit even so
    (`failures`: out of memory in torch)."""

    reserved_bytes: int
    retries: int
    extra_seconds: float
    released_segments: int
    failures: int


def allocator_notes(row: AllocatorRow | None, *, fits: bool) -> Iterator[str]:
    """What a user should know of an allocator that ran short; nothing of one that did not, or where the
    tensors alone are too large (`fits`)."""
    if row is None or not row.retries or not fits:
        return
    times = {1: "once", 2: "twice"}.get(row.retries, f"{row.retries:,} times")
    yield (
        f"torch's allocator runs short about {times} a step, waits for the GPU and gives "
        f"{row.released_segments:,} cached segments back to the driver; the step takes "
        f"{format_seconds(row.extra_seconds)} longer for it, counted as host-bound (num_alloc_retries; "
        'DeepSpeed warns of "allocator cache flushes"): memory is asked for in pieces that do not fit what '
        "was freed, or what was freed is still in use on another stream"
    )
    if row.failures:
        yield (
            f"about {row.failures:,} of its requests do not fit even then: torch may stop with an "
            "out-of-memory error that names memory reserved but unallocated; training.expandable_segments "
            "shows the step with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
