"""The clock check: the step and its parts, each class of ops, each stream, [Note: inconclusive].

For a collective, transfers are compared where both sides know them. Otherwise full spans are compared, which
in a recording include waits for other ranks. The busy time of a stream always includes these waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from zsim.comparison.op_classes import (
    KERNELS,
    OpPair,
    OpsOfClass,
    explain,
    has_kernels,
    knows_phases,
    ops_by_class,
    pairs_by_class,
)
from zsim.comparison.op_times import waiting_seconds
from zsim.comparison.plan_check import PlanCheck
from zsim.comparison.verdict import Metric, Tolerances, judge
from zsim.dataclass import dataclass
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
            whole=recorded.step_seconds,
            tolerance=tolerances.step,
            doubt=doubt,
        )
        rows = _class_metrics(simulated, recorded, plan, False, tolerances, doubt)
        return ClockCheck((step,), tuple(row for row in rows if row.name != KERNELS), ())
    has_phases = knows_phases(simulated) and knows_phases(recorded)
    return ClockCheck(
        tuple(_step_metrics(simulated, recorded, has_phases, tolerances, doubt)),
        tuple(_class_metrics(simulated, recorded, plan, has_phases, tolerances, doubt)),
        tuple(_stream_metrics(simulated, recorded, plan, tolerances, doubt)),
    )


def _step_metrics(
    simulated: Trace, recorded: Trace, has_phases: bool, tolerances: Tolerances, doubt: str
) -> Iterator[Metric]:
    time = partial(judge, unit="seconds", whole=recorded.step_seconds, doubt=doubt)
    yield time("step", simulated.step_seconds, recorded.step_seconds, tolerance=tolerances.step)
    mine, theirs = step_breakdown(simulated).seconds, step_breakdown(recorded).seconds
    if not has_phases:
        mine, theirs = _without_optimizer(mine), _without_optimizer(theirs)
    if recorded.source == "recorded" and not recorded.allocator_blocks:
        mine, theirs = _without_allocator(mine), _without_allocator(theirs)
    for name in mine:
        if mine[name] or theirs[name]:
            yield time(BREAKDOWN[name].label, mine[name], theirs[name], tolerance=tolerances.time)
    mine_waits, theirs_wait = waiting_seconds(simulated), waiting_seconds(recorded)
    if mine_waits or theirs_wait:
        yield time(
            "waiting for other ranks", mine_waits or 0.0, theirs_wait or 0.0, tolerance=tolerances.time
        )
    one, other = overlap_fraction(simulated), overlap_fraction(recorded)
    if one is not None and other is not None:
        tolerance = tolerances.overlap
        yield judge("overlap", one, other, unit="fraction", whole=1.0, tolerance=tolerance, doubt=doubt)


def _without_optimizer(seconds: Mapping[str, float]) -> dict[str, float]:
    """The breakdown with the optimizer as part of compute. Without phases a recording cannot distinguish
    them.
    """
    kept = {name: value for name, value in seconds.items() if name != "optimizer"}
    return kept | {"compute": seconds["compute"] + seconds["optimizer"]}


def _without_allocator(seconds: Mapping[str, float]) -> dict[str, float]:
    """The breakdown with torch's allocator as part of host-bound. Only zsim's traces distinguish them."""
    kept = {name: value for name, value in seconds.items() if name != "allocator"}
    return kept | {"host_bound": seconds["host_bound"] + seconds["allocator"]}


def _class_metrics(
    simulated: Trace, recorded: Trace, plan: PlanCheck, has_phases: bool, tolerances: Tolerances, doubt: str
) -> Iterator[OpClass]:
    mine, theirs = ops_by_class(simulated, has_phases), ops_by_class(recorded, has_phases)
    pairs = pairs_by_class(simulated, recorded, plan, has_phases)
    nothing = OpsOfClass((), 0.0)
    for name in dict.fromkeys([*mine, *theirs]):
        one, other, matched = mine.get(name, nothing), theirs.get(name, nothing), pairs.get(name, [])
        metric = judge(
            name,
            one.seconds,
            other.seconds,
            unit="seconds",
            whole=recorded.step_seconds,
            tolerance=tolerances.time,
            doubt=doubt,
            reason=_reason(one, other, matched, tolerances.time),
        )
        yield OpClass(name, len(one.spans), len(other.spans), metric, tuple(matched))


def _reason(one: OpsOfClass, other: OpsOfClass, matched: Sequence[OpPair], tolerance: float) -> str:
    """The number of missing or extra ops, else how the matched ops differ."""
    fewer = len(one.spans) - len(other.spans)
    if fewer and matched:
        ops = f"{abs(fewer):,} op{'s' * (abs(fewer) > 1)}"
        return f"{ops} {'fewer' if fewer > 0 else 'more'} recorded"
    return explain(matched, tolerance)


def _stream_metrics(
    simulated: Trace, recorded: Trace, plan: PlanCheck, tolerances: Tolerances, doubt: str
) -> Iterator[Metric]:
    """Busy time of each stream with a counterpart: the compute streams, and streams that share calls."""
    votes: dict[str, Counter[str]] = {}
    for i, j in plan.pairs:
        mine, theirs = plan.simulated[i].stream, plan.recorded[j].stream
        if mine and theirs:
            votes.setdefault(mine, Counter())[theirs] += 1
    partners = {compute_stream(simulated): compute_stream(recorded)}
    for stream, counted in votes.items():
        partners.setdefault(stream, counted.most_common(1)[0][0])
    for stream, other in partners.items():
        busy = _busy_seconds(simulated, stream), _busy_seconds(recorded, other)
        if list(partners.values()).count(other) == 1 and any(busy):
            yield judge(
                f"stream {stream}" + (f" (recorded: {other})" if other != stream else ""),
                *busy,
                unit="seconds",
                whole=recorded.step_seconds,
                tolerance=tolerances.time,
                doubt=doubt,
            )


def _busy_seconds(trace: Trace, stream: str) -> float:
    """Seconds during which the stream ran a span."""
    is_on = np.array([info.stream == stream and info.kind != "host" for info in trace.infos], dtype=bool)
    spans = np.flatnonzero(is_on[trace.info_indices])
    spans = spans[np.argsort(trace.start_seconds[spans], kind="stable")]
    reached = total = 0.0
    for start, end in zip(
        trace.start_seconds[spans].tolist(), trace.end_seconds[spans].tolist(), strict=True
    ):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
