"""torch's allocator in a step, as a row and in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.cost.rates.host_calls import MEASURED_RANKS
from zsim.report.framework import allocator_warnings
from zsim.units import format_seconds


@dataclass(frozen=True, slots=True)
class AllocatorRow:
    """torch's caching allocator in a steady step, on the rank where it runs short most, or reserves most."""

    reserved_bytes: int
    """The maximum (`torch.cuda.max_memory_reserved`), without the CUDA context and NCCL's buffers."""
    limit_bytes: int
    """The bytes that the GPU has without these."""
    retries: int
    """Times per step that it ran short and gave its cache back to the driver (torch's
    `num_alloc_retries`).
    """
    extra_seconds: float
    """The seconds that the retries add to the step."""
    released_segments: int
    """The number of segments given back."""
    failures: int
    """Requests that did not fit even then (out of memory in torch), in this step or in an earlier one."""
    step_seconds_without_retries: float
    """The step as it is while the allocator has room."""

    @property
    def may_run_out(self) -> bool:
        """Whether torch may stop with an out-of-memory error though all tensors fit."""
        return self.failures > 0


def allocator_notes(row: AllocatorRow | None, *, is_expandable: bool) -> Iterator[str]:
    """Notes on an allocator that ran short. There are none where it did not."""
    if row is None:
        return
    remedy = "" if is_expandable else "; training.expandable_segments shows the step without such pieces"
    if row.retries:
        times = {1: "once", 2: "twice"}.get(row.retries, f"{row.retries:,} times")
        yield (
            f"torch's allocator runs short about {times} a step, waits for the GPU and gives "
            f"{row.released_segments:,} cached segments back to the driver "
            f"(num_alloc_retries{allocator_warnings()}): memory is asked for in pieces that do not fit "
            f"what was freed, or what was freed is still in use on another stream{remedy}"
        )
        yield (
            f"the step takes {format_seconds(row.extra_seconds)} longer because the allocator runs short "
            '("torch\'s allocator" in the breakdown, of which something else may have taken a part), and '
            f"{format_seconds(row.step_seconds_without_retries)} if it does not; this is the least certain "
            "part of a prediction, so the step's range spans both. What a retry takes was measured on 1 to "
            f"{MEASURED_RANKS} GPUs and is taken to be the same on more (docs/accuracy.md)"
        )
    if row.failures:
        requests = "one request" if row.failures == 1 else f"about {row.failures:,} requests"
        yield (
            "torch may stop with an out-of-memory error that names memory reserved but unallocated: "
            f"{requests} of the steady step, or of one before it, cannot be met even when its allocator has "
            f"given its cache back{remedy}"
        )
