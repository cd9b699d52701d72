"""A simulated step compared with a recorded one: the three checks, and the differences ranked.

The checks are separate, so that a miss points at the part of the model at fault: the plan check (same calls,
exact), the clock check (times, with tolerances) and the memory check (bytes, with a tolerance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zsim.comparison.clock_check import ClockCheck
from zsim.comparison.memory_check import MemoryCheck
from zsim.comparison.plan_check import PlanCheck
from zsim.comparison.verdict import Metric, Tolerances, Verdict, overall_verdict
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_percent, format_seconds
from zsim.validated.validation import format_range
from zsim.version import __version__

STEP_RANGE = "step_seconds_range"  # key in a simulated trace's metadata: the 80 % interval of its step
SIMULATED = "zsim, simulated"  # source in the metadata of a trace that was read, but simulated by zsim
_DIGITS = 6  # of a share: smaller differences do not change the order


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference."""

    check: str
    """plan, clock or memory."""
    sentence: str
    share: float
    """Its fraction of the step's time, of the peak's bytes, or of the calls."""
    verdict: Verdict


@dataclass(frozen=True)
class ComparedRuns:
    """Both traces, the three checks and their results. Times are of `rank`, `plans` of every rank."""

    simulated: Trace
    recorded: Trace
    rank: int
    tolerances: Tolerances
    plans: Mapping[int, PlanCheck]
    clock: ClockCheck
    memory: MemoryCheck
    doubt: str
    notes: tuple[str, ...]
    names: tuple[str, str] = ("simulated", "recorded")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.clock.metrics, *self.memory.metrics)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """The 80 % interval in which the recorded step was expected.

        None where the simulation has none, and between two simulations.
        """
        if self.recorded.source == "simulated":
            return None
        interval: tuple[float, float] | None = self.simulated.metadata.get(STEP_RANGE)
        return interval

    @property
    def is_within_range(self) -> bool | None:
        """Whether the recorded step lies inside the interval of the simulated one."""
        interval = self.step_seconds_range
        return None if interval is None else interval[0] <= self.recorded.step_seconds <= interval[1]

    @property
    def range_sentence(self) -> str:
        """Whether the recorded step lies inside the interval, in words, or "" where there is no interval."""
        interval = self.step_seconds_range
        if interval is None:
            return ""
        where = "inside" if self.is_within_range else "outside"
        recorded = format_seconds(self.recorded.step_seconds)
        whose = "other trace's" if self.recorded.metadata.get("source") == SIMULATED else "recorded"
        return f"the {whose} step, {recorded}, lies {where} {format_range(interval)} (80 %)"

    @property
    def verdict(self) -> Verdict:
        """Fail where the plan or a figure fails, else inconclusive where a figure is, else pass."""
        return overall_verdict([self.plan_verdict, *(metric.verdict for metric in self.metrics)])

    @property
    def plan_verdict(self) -> Verdict:
        return overall_verdict(plan.verdict for plan in self.plans.values())

    @property
    def plan(self) -> PlanCheck:
        """The plan check of the rank whose times are compared."""
        return self.plans[self.rank]

    @property
    def not_checked(self) -> tuple[str, ...]:
        plan_texts = [text for plan in self.plans.values() for text in plan.not_checked]
        return tuple(dict.fromkeys([*plan_texts, *self.clock.not_checked, *self.memory.not_checked]))

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, the most important first: wrong calls, then misses, then inconclusive figures."""
        differences = [*_plan_differences(self.plans), *_metric_differences(self)]
        differences.sort(
            key=lambda row: (row.verdict != "fail", row.check != "plan", -round(row.share, _DIGITS))
        )
        return tuple(differences)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim compare --json` writes."""
        return {
            "zsim_version": __version__,
            "verdict": self.verdict,
            "rank": self.rank,
            "step_seconds_range": None if self.step_seconds_range is None else [*self.step_seconds_range],
            "is_within_range": self.is_within_range,
            "plan": {str(rank): plan.to_dict() for rank, plan in self.plans.items()},
            "metrics": [_metric_content(metric) for metric in self.metrics],
            "classes": [row.to_dict() for row in self.clock.classes],
            "differences": [asdict(difference) for difference in self.differences],
            "inconclusive_because": self.doubt or None,
            "not_checked": list(self.not_checked),
            "notes": list(self.notes),
        }


# -- what differs -----------------------------------------------------------------------------------------


def _plan_differences(plans: Mapping[int, PlanCheck]) -> Iterator[Difference]:
    """Each wrong call once, with the ranks that have it."""
    seen: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    for rank, plan in plans.items():
        for row in plan.differences:
            seen.setdefault(row.sentence, []).append(rank)
            shares[row.sentence] = row.count / max(len(plan.recorded), len(plan.simulated), 1)
    for sentence, ranks in seen.items():
        where = "" if len(ranks) == len(plans) else f" (rank{'s' * (len(ranks) > 1)} {_format_ranks(ranks)})"
        yield Difference("plan", sentence + where, min(shares[sentence], 1.0), "fail")


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _metric_differences(comparison: ComparedRuns) -> Iterator[Difference]:
    """Differences of metrics that did not pass, first those with a reason."""
    for check, metrics in (("clock", comparison.clock.metrics), ("memory", comparison.memory.metrics)):
        for metric in sorted(metrics, key=lambda metric: not metric.reason):
            if metric.verdict != "pass" and metric.simulated != metric.recorded:
                yield Difference(
                    check, metric_sentence(metric, comparison.doubt), metric.share, metric.verdict
                )


def metric_sentence(metric: Metric, doubt: str = "") -> str:
    """`all-gather, 64 ranks: 1.10 s simulated, 1.21 s recorded (-9.1 %): every call 1.10 times as long`."""
    show = {"seconds": format_seconds, "bytes": format_bytes, "fraction": format_percent}[metric.unit]
    text = f"{metric.name}: {show(metric.simulated)} simulated, {show(metric.recorded)} recorded"
    if metric.error is not None:
        points = " points" if metric.unit == "fraction" else " %"
        text += f" ({metric.error * 100:+.1f}{points})"
    return text + (f": {metric.reason}" if metric.reason and metric.reason != doubt else "")


def _metric_content(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "unit": metric.unit,
        "simulated": metric.simulated,
        "recorded": metric.recorded,
        "error": metric.error,
        "tolerance": metric.tolerance,
        "verdict": metric.verdict,
        "reason": metric.reason or None,
    }
