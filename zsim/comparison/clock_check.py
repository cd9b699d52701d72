"""The clock check: the step and its parts, each class of ops, each stream, [Note: inconclusive].

For a collective, transfers are compared where both sides know them. Otherwise full spans are compared, which
in a recording include waits for other ranks. The busy time of a stream always includes these waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from zsim.comparison.op_classes import (
    KERNELS,
    OpPair,
    OpsOfClass,
    explain_error,
    group_ops,
    has_kernels,
    has_phases_recorded,
    pair_ops,
    waiting_seconds,
)
from zsim.comparison.plan_check import PlanCheck
from zsim.comparison.verdict import Metric, Tolerances, judge
from zsim.report.breakdown import compute_stream, step_breakdown
from zsim.report.traffic import overlap_fraction
from zsim.report.views.meanings import BREAKDOWN
from zsim.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class OpClass:
    """All ops of one class on both sides."""

    name: str
    simulated_count: int
    recorded_count: int
    metric: Metric
    pairs: tuple[OpPair, ...] = ()
    """The ops that were matched individually."""

    @property
    def median_ratio(self) -> float | None:
        """Median of recorded over simulated seconds of the matched ops. None without any."""
        ratios = [
            pair.recorded_seconds / pair.simulated_seconds
            for pair in self.pairs
            if pair.simulated_seconds > 0
        ]
        return float(np.median(ratios)) if ratios else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "class": self.name,
            "simulated_count": self.simulated_count,
            "recorded_count": self.recorded_count,
            "simulated_seconds": self.metric.simulated,
            "recorded_seconds": self.metric.recorded,
            "matched": len(self.pairs),
            "median_ratio": self.median_ratio,
        }


@dataclass(frozen=True, slots=True)
class ClockCheck:
    """Judged figures of the step, of classes of ops and of streams."""

    step: tuple[Metric, ...]
    classes: tuple[OpClass, ...]
    streams: tuple[Metric, ...]

    @property
    def not_checked(self) -> tuple[str, ...]:
        return () if self.streams else ("kernels (known to one side only)",)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.step, *(row.metric for row in self.classes), *self.streams)


def check_clock(
    simulated: Trace, recorded: Trace, plan: PlanCheck, tolerances: Tolerances, doubt: str
) -> ClockCheck:
    """Compare two traces of one rank each. A `doubt` makes every time inconclusive.

    Where one side has no kernels (a profile of collectives only), only the step and the collectives are
    compared.
    """
    if not (has_kernels(simulated) and has_kernels(recorded)):
        step = judge(
            "step",
            simulated.step_seconds,
            recorded.step_seconds,
            unit="seconds",
            total=recorded.step_seconds,
            tolerance=tolerances.step,
            doubt=doubt,
        )
        rows = _class_metrics(simulated, recorded, plan, False, tolerances, doubt)
        return ClockCheck((step,), tuple(row for row in rows if row.name != KERNELS), ())
    has_phases = has_phases_recorded(simulated) and has_phases_recorded(recorded)
    return ClockCheck(
        tuple(_step_metrics(simulated, recorded, has_phases, tolerances, doubt)),
        tuple(_class_metrics(simulated, recorded, plan, has_phases, tolerances, doubt)),
        tuple(_stream_metrics(simulated, recorded, plan, tolerances, doubt)),
    )


def _step_metrics(
    simulated: Trace, recorded: Trace, has_phases: bool, tolerances: Tolerances, doubt: str
) -> Iterator[Metric]:
    judge_seconds = partial(judge, unit="seconds", total=recorded.step_seconds, doubt=doubt)
    yield judge_seconds("step", simulated.step_seconds, recorded.step_seconds, tolerance=tolerances.step)
    simulated_seconds, recorded_seconds = step_breakdown(simulated).seconds, step_breakdown(recorded).seconds
    if not has_phases:
        simulated_seconds, recorded_seconds = (
            _merge_optimizer(simulated_seconds),
            _merge_optimizer(recorded_seconds),
        )
    if recorded.source == "recorded" and not recorded.allocator_blocks:
        simulated_seconds, recorded_seconds = (
            _merge_allocator(simulated_seconds),
            _merge_allocator(recorded_seconds),
        )
    for name in simulated_seconds:
        if simulated_seconds[name] or recorded_seconds[name]:
            yield judge_seconds(
                BREAKDOWN[name].label,
                simulated_seconds[name],
                recorded_seconds[name],
                tolerance=tolerances.time,
            )
    simulated_waits, recorded_waits = waiting_seconds(simulated), waiting_seconds(recorded)
    if simulated_waits or recorded_waits:
        yield judge_seconds(
            "waiting for other ranks",
            simulated_waits or 0.0,
            recorded_waits or 0.0,
            tolerance=tolerances.time,
        )
    simulated_overlap, recorded_overlap = overlap_fraction(simulated), overlap_fraction(recorded)
    if simulated_overlap is not None and recorded_overlap is not None:
        tolerance = tolerances.overlap
        yield judge(
            "overlap",
            simulated_overlap,
            recorded_overlap,
            unit="fraction",
            total=1.0,
            tolerance=tolerance,
            doubt=doubt,
        )


def _merge_optimizer(seconds: Mapping[str, float]) -> dict[str, float]:
    """The breakdown with the optimizer as part of compute. Without phases a recording cannot distinguish
    them.
    """
    other_parts = {name: value for name, value in seconds.items() if name != "optimizer"}
    return other_parts | {"compute": seconds["compute"] + seconds["optimizer"]}


def _merge_allocator(seconds: Mapping[str, float]) -> dict[str, float]:
    """The breakdown with torch's allocator as part of host-bound. Only zsim's traces distinguish them."""
    other_parts = {name: value for name, value in seconds.items() if name != "allocator"}
    return other_parts | {"host_bound": seconds["host_bound"] + seconds["allocator"]}


def _class_metrics(
    simulated: Trace, recorded: Trace, plan: PlanCheck, has_phases: bool, tolerances: Tolerances, doubt: str
) -> Iterator[OpClass]:
    simulated_classes, recorded_classes = group_ops(simulated, has_phases), group_ops(recorded, has_phases)
    pairs = pair_ops(simulated, recorded, plan, has_phases)
    no_ops = OpsOfClass((), 0.0)
    for name in dict.fromkeys([*simulated_classes, *recorded_classes]):
        simulated_ops, recorded_ops, matched = (
            simulated_classes.get(name, no_ops),
            recorded_classes.get(name, no_ops),
            pairs.get(name, []),
        )
        metric = judge(
            name,
            simulated_ops.seconds,
            recorded_ops.seconds,
            unit="seconds",
            total=recorded.step_seconds,
            tolerance=tolerances.time,
            doubt=doubt,
            reason=_reason(simulated_ops, recorded_ops, matched, tolerances.time),
        )
        yield OpClass(name, len(simulated_ops.spans), len(recorded_ops.spans), metric, tuple(matched))


def _reason(
    simulated_ops: OpsOfClass, recorded_ops: OpsOfClass, matched: Sequence[OpPair], tolerance: float
) -> str:
    """The number of missing or extra ops, else how the matched ops differ."""
    num_missing = len(simulated_ops.spans) - len(recorded_ops.spans)
    if num_missing and matched:
        ops = f"{abs(num_missing):,} op{'s' * (abs(num_missing) > 1)}"
        return f"{ops} {'fewer' if num_missing > 0 else 'more'} recorded"
    return explain_error(matched, tolerance)


def _stream_metrics(
    simulated: Trace, recorded: Trace, plan: PlanCheck, tolerances: Tolerances, doubt: str
) -> Iterator[Metric]:
    """Busy time of each stream with a counterpart: the compute streams, and streams that share calls."""
    votes: dict[str, Counter[str]] = {}
    for i, j in plan.pairs:
        simulated_stream, recorded_stream = plan.simulated[i].stream, plan.recorded[j].stream
        if simulated_stream and recorded_stream:
            votes.setdefault(simulated_stream, Counter())[recorded_stream] += 1
    partners = {compute_stream(simulated): compute_stream(recorded)}
    for stream, counter in votes.items():
        partners.setdefault(stream, counter.most_common(1)[0][0])
    for stream, partner in partners.items():
        busy = _busy_seconds(simulated, stream), _busy_seconds(recorded, partner)
        if list(partners.values()).count(partner) == 1 and any(busy):
            yield judge(
                f"stream {stream}" + (f" (recorded: {partner})" if partner != stream else ""),
                *busy,
                unit="seconds",
                total=recorded.step_seconds,
                tolerance=tolerances.time,
                doubt=doubt,
            )


def _busy_seconds(trace: Trace, stream: str) -> float:
    """Seconds during which the stream ran a span."""
    is_on_stream = np.array(
        [info.stream == stream and info.kind != "host" for info in trace.infos], dtype=bool
    )
    spans = np.flatnonzero(is_on_stream[trace.info_indices])
    spans = spans[np.argsort(trace.start_seconds[spans], kind="stable")]
    busy_until = total = 0.0
    for start, end in zip(
        trace.start_seconds[spans].tolist(), trace.end_seconds[spans].tolist(), strict=True
    ):
        total += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return total
