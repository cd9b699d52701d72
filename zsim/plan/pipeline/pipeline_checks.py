"""Counts that a pipeline's schedule refuses under any framework, and the nearest number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from zsim.errors import InputError, did_you_mean
from zsim.specs.strategy.parallelism import SINGLE_STAGE, V_SHAPED, ParallelismConfig

_STEPS = "training.gradient_accumulation_steps"


def check_schedule(parallelism: ParallelismConfig) -> None:
    """Raises InputError for a schedule or several passes that the framework lacks, and for stages per rank
    that the schedule does not have.
    """
    style, schedule, virtual = parallelism.style, parallelism.schedule, parallelism.virtual_stages
    if schedule not in style.schedules:
        raise InputError(
            f"parallelism.schedule: {style.schedule_title} has no '{schedule}'; expected "
            f"{' or '.join(repr(offered) for offered in style.schedules)}"
            f"{did_you_mean(schedule, style.schedules)}"
        )
    if parallelism.passes > 1 and not style.has_passes:
        raise InputError(
            f"parallelism.passes: found {parallelism.passes}, but {style.schedule_title} runs one pipeline "
            "per step; expected 1"
        )
    if schedule in V_SHAPED and virtual != 2:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', expected 2"
        )
    if schedule in SINGLE_STAGE and virtual != 1:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', which has one stage "
            "per rank; expected 1"
        )


def check_micro_batches(
    parallelism: ParallelismConfig, micro_batches: int, expected: str, is_right: Callable[[int], bool]
) -> None:
    """Raises InputError for `micro_batches` of a pass that are not right. `expected` says in words which
    are.
    """
    if is_right(micro_batches):
        return
    passes, subject = parallelism.passes, f"{parallelism.style.schedule_title}'s '{parallelism.schedule}'"
    passes_text = f" in {passes} passes of {micro_batches} micro-batches" if passes > 1 else ""
    raise InputError(
        f"{_STEPS}: found {micro_batches * passes}{passes_text}, but {subject} takes {expected}; the "
        "nearest is "
        f"{_nearest(micro_batches, is_right) * passes}"
    )


def _nearest(micro_batches: int, is_right: Callable[[int], bool]) -> int:
    """The nearest count above 0 that is right, the smaller of two."""
    return next(
        candidate
        for distance in count(1)
        for candidate in (micro_batches - distance, micro_batches + distance)
        if candidate > 0 and is_right(candidate)
    )
