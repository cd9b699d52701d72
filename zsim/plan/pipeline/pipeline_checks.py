"""Counts that a framework's pipeline schedule refuses, and the nearest that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from zsim.errors import InputError, did_you_mean
from zsim.frameworks.megatron.pipeline import MegatronPipeline
from zsim.specs.strategy.parallelism import V_SHAPED

OFFERED: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble",
        "dualpipe-v",
    ),
    "megatron": ("1f1b", "interleaved-1f1b"),
    "deepspeed": ("1f1b",),
    "nanotron": ("gpipe", "1f1b"),
}  # fmt: skip
NAMES = {"torch": "torch", "megatron": "Megatron", "deepspeed": "DeepSpeed", "nanotron": "nanotron"}
_STEPS = "training.gradient_accumulation_steps"


def check_counts(
    style: str,
    schedule: str,
    ranks: int,
    virtual: int,
    micro_batches: int,
    passes: int,
    settings: MegatronPipeline,
) -> None:
    """Raises InputError for what the framework's own code refuses: torch 2.13 `pipelining/schedules.py`,
    Megatron-Core 0.16.1 `schedules.py` and `training/arguments.py`, nanotron's `pipeline_parallel/engine.py`
    (commit 2411b022)."""
    name = NAMES[style]
    if schedule not in OFFERED[style]:
        raise InputError(
            f"parallelism.schedule: {name} has no '{schedule}'; expected "
            f"{' or '.join(repr(offered) for offered in OFFERED[style])}"
            f"{did_you_mean(schedule, OFFERED[style])}"
        )
    if passes > 1 and style != "torch":
        raise InputError(
            f"parallelism.passes: found {passes}, but {name} runs one pipeline per step; expected 1"
        )
    _check_virtual(style, schedule, virtual)
    if style == "megatron" and schedule == "interleaved-1f1b":
        _check_megatron(ranks, micro_batches, settings)
    elif rule := _rule(style, schedule, ranks):
        expected, is_right = rule
        _check_micro_batches(f"{name}'s '{schedule}'", micro_batches, passes, expected, is_right)


def _check_virtual(style: str, schedule: str, virtual: int) -> None:
    if schedule in V_SHAPED and virtual != 2:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', expected 2"
        )
    if schedule in ("gpipe", "1f1b") and virtual != 1:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with schedule '{schedule}', which has one stage "
            "per rank; expected 1"
        )
    if style == "megatron" and schedule == "interleaved-1f1b" and virtual < 2:
        raise InputError(
            f"parallelism.virtual_stages: found {virtual} with Megatron's '{schedule}', expected 2 or more"
        )


def _rule(style: str, schedule: str, ranks: int) -> tuple[str, Callable[[int], bool]] | None:
    """A schedule's demand on the micro-batches of a pass, in words and as a test. None if it has none."""
    if style == "torch" and schedule == "1f1b":
        return (
            f"at least one per pipeline rank, {ranks}",
            lambda num_micro_batches: num_micro_batches >= ranks,
        )
    if style == "torch" and schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        return (
            f"a multiple of its rounds, micro-batches // {ranks} pipeline ranks",
            lambda num_micro_batches: num_micro_batches % max(1, num_micro_batches // ranks) == 0,
        )
    if schedule == "dualpipe-v":
        return (
            f"at least one per stage, {2 * ranks}",
            lambda num_micro_batches: num_micro_batches >= 2 * ranks,
        )
    if style == "nanotron" and schedule == "1f1b":
        return (
            f"at least pipeline ranks - 1, {ranks - 1}",
            lambda num_micro_batches: num_micro_batches >= ranks - 1,
        )
    return None


def _check_micro_batches(
    subject: str, micro_batches: int, passes: int, expected: str, is_right: Callable[[int], bool]
) -> None:
    if is_right(micro_batches):
        return
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


def _check_megatron(ranks: int, micro_batches: int, settings: MegatronPipeline) -> None:
    group = settings.group_size or ranks
    if settings.flushes_ahead and not settings.overlaps_p2p:
        raise InputError(
            "overlap_p2p_comm_warmup_flush: found true without overlap_p2p_comm, which Megatron refuses; "
            "expected both, or neither"
        )
    if ranks == 2 and not settings.overlaps_p2p:
        raise InputError(
            "parallelism.pipeline: found 2, but Megatron's interleaved schedule without overlapped p2p takes "
            "more than 2; expected 3 or more, or the overlap"
        )
    if group < ranks:
        raise InputError(
            f"parallelism.pipeline: found {ranks} with microbatch_group_size_per_vp_stage = {group}; "
            f"Megatron takes a group of at least the pipeline ranks: {ranks}"
        )

    def is_right(num_micro_batches: int) -> bool:
        return num_micro_batches >= group and (
            num_micro_batches % group == 0 or num_micro_batches % group >= ranks
        )

    _check_micro_batches(
        "Megatron's 'interleaved-1f1b'", micro_batches, 1,
        f"at least a group of {group}, and behind whole groups none or at least {ranks}, the pipeline ranks",
        is_right,
    )  # fmt: skip
