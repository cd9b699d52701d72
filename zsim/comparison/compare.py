"""A simulated step against a recorded one: what differs, by how much, and what matters most.

Three checks that stay apart, so that a miss names the guilty floor: the plan check (same calls, exact), the
clock check (times, with tolerances) and the memory check (bytes, with a tolerance).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zsim.comparison.calls import as_gloo_runs_them, calls_of_trace
from zsim.comparison.clock_check import ClockCheck, check_clock
from zsim.comparison.memory_check import MemoryCheck, check_memory
from zsim.comparison.op_times import with_alike_times
from zsim.comparison.plan_check import PlanCheck, check_plan
from zsim.comparison.verdict import PREDICTIONS, Metric, Tolerances, Verdict, doubt_about_times, overall
from zsim.errors import InputError
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_seconds
from zsim.validated.validation import range_words
from zsim.version import __version__

STEP_RANGE = "step_seconds_range"  # of a simulated trace's metadata: between what its step lies with 80 %
SIMULATED = "zsim, simulated"  # the source, in its metadata, of a read trace that zsim itself simulated
_DIGITS = 6  # of a share: what differs by less is equally important


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same. `check` is plan, clock or memory; `share` is its part of the step's
    time, of the peak's bytes, or of the calls."""

    check: str
    sentence: str
    share: float
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Both traces, the three checks, and what they say. Times are of `rank`, `plans` of every rank."""

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
        """Between what the recorded step was expected with 80 %, where one side was simulated with it."""
        if self.recorded.source == "simulated":
            return None
        found: tuple[float, float] | None = self.simulated.metadata.get(STEP_RANGE)
        return found

    @property
    def is_within_range(self) -> bool | None:
        """Whether the recorded step lies inside the interval of the simulated one."""
        found = self.step_seconds_range
        return None if found is None else found[0] <= self.recorded.step_seconds <= found[1]

    @property
    def range_sentence(self) -> str:
        """Whether it does, in words; "" where there is no interval."""
        found = self.step_seconds_range
        if found is None:
            return ""
        where = "inside" if self.is_within_range else "outside"
        recorded = format_seconds(self.recorded.step_seconds)
        whose = "other trace's" if self.recorded.metadata.get("source") == SIMULATED else "recorded"
        return f"the {whose} step, {recorded}, lies {where} {range_words(found)} (80 %)"

    @property
    def verdict(self) -> Verdict:
        """Fail where the plan or a figure fails; else inconclusive where a figure is."""
        return overall([self.plan_verdict, *(metric.verdict for metric in self.metrics)])

    @property
    def plan_verdict(self) -> Verdict:
        return overall(plan.verdict for plan in self.plans.values())

    @property
    def plan(self) -> PlanCheck:
        """The plan check of the rank whose times are compared."""
        return self.plans[self.rank]

    @property
    def not_checked(self) -> tuple[str, ...]:
        found = [text for plan in self.plans.values() for text in plan.not_checked]
        return tuple(dict.fromkeys([*found, *self.clock.not_checked, *self.memory.not_checked]))

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What is not the same, what matters most first: wrong calls, then misses, then what is in doubt."""
        found = [*_plan_differences(self.plans), *_metric_differences(self)]
        found.sort(key=lambda row: (row.verdict != "fail", row.check != "plan", -round(row.share, _DIGITS)))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """What `zsim compare --json` writes."""
        return {
            "zsim_version": __version__,
            "verdict": self.verdict,
            "rank": self.rank,
            "step_seconds_range": None if self.step_seconds_range is None else [*self.step_seconds_range],
            "is_within_range": self.is_within_range,
            "plan": {str(rank): plan.to_dict() for rank, plan in self.plans.items()},
            "metrics": [_metric(metric) for metric in self.metrics],
            "classes": [row.to_dict() for row in self.clock.classes],
            "differences": [
                {"check": d.check, "verdict": d.verdict, "share": d.share, "sentence": d.sentence}
                for d in self.differences
            ],
            "inconclusive_because": self.doubt or None,
            "not_checked": list(self.not_checked),
            "notes": list(self.notes),
        }

    def write_html(self, path: str | Path) -> Path:
        """One page with both timelines and the differences; it fetches nothing."""
        from zsim.comparison.views.page import write_compare_page

        return write_compare_page(self, path)

    def __str__(self) -> str:
        from zsim.comparison.views.text import comparison_lines

        return "\n".join(comparison_lines(self))


def compare(
    simulated: Trace,
    recorded: Trace,
    *,
    tolerances: Tolerances | Mapping[str, float] | float | None = None,
    rank: int | None = None,
    names: tuple[str, str] = ("simulated", "recorded"),
) -> Comparison:
    """Compare two traces: calls of every rank that both hold, times and memory of `rank` (else the first);
    of a recording of several steps the typical one.

    `tolerances` is one number for all, or some of {"step", "time", "memory", "overlap"}, as fractions;
    between two simulations they are small, because nothing jitters. Raises InputError for traces of different
    worlds, or without a rank in common.
    """
    are_simulated = simulated.source == recorded.source == "simulated"
    chosen = PREDICTIONS if tolerances is None and are_simulated else Tolerances.of(tolerances)
    notes = _notes_of(recorded)
    simulated, recorded = with_alike_times(simulated.typical_step(), recorded.typical_step())
    partners = _partners(simulated, recorded, names, notes)
    rank = next(iter(partners)) if rank is None else rank
    if rank not in partners:
        known = ", ".join(str(other) for other in list(partners)[:8])
        raise InputError(f"compare: found rank {rank}, expected one that {names[1]} holds: {known}")
    is_gloo = _shows_gloos_own_calls(recorded)
    if is_gloo:
        notes.append("gloo runs a reduce-scatter as an all-reduce or an all-to-all; it is compared as one")
    plans: dict[int, PlanCheck] = {}
    for theirs, mine in partners.items():
        calls = calls_of_trace(simulated.of_rank(mine), mine)
        others = calls_of_trace(recorded.of_rank(theirs), theirs)
        plans[theirs] = check_plan(as_gloo_runs_them(calls, others) if is_gloo else calls, others)
    doubt = doubt_about_times(recorded) or doubt_about_times(simulated)
    one, other = simulated.of_rank(partners[rank]), recorded.of_rank(rank)
    notes += dict.fromkeys([*_whose_step(one, names[0], partners[rank]), *_whose_step(other, names[1], rank)])
    return Comparison(
        simulated=one,
        recorded=other,
        rank=rank,
        tolerances=chosen,
        plans=plans,
        clock=check_clock(one, other, plans[rank], chosen, doubt),
        memory=check_memory(simulated, recorded, chosen),
        doubt=doubt,
        notes=tuple(notes),
        names=names,
    )


def _notes_of(recorded: Trace) -> list[str]:
    """What the reader of the recording noted; how it estimates transfers from few ranks is not used here."""
    notes = [str(note) for note in recorded.metadata.get("notes", ()) if "transfer" not in str(note)]
    if recorded.metadata.get("transfers_bounded"):
        notes.append("too few ranks to tell waiting from transfer: collectives are compared with their waits")
    return notes


def _whose_step(trace: Trace, name: str, rank: int) -> list[str]:
    """A note where the step is another rank's than the one whose times are compared."""
    if not trace.steps:
        return []
    step, own = trace.steps[0], format_seconds(trace.steps[0].seconds_of(rank))
    if own == format_seconds(step.seconds):
        return []
    return [
        f"{name}: the step is that of rank {step.slowest_rank()}, the slowest; it took rank {rank}, whose "
        f"times are compared, {own}, and what remains is counted as host-bound"
    ]


def _shows_gloos_own_calls(trace: Trace) -> bool:
    """Whether the record is of what gloo ran, not of what was asked for (a Flight Recorder's is)."""
    kinds = {info.kind for info in trace.infos}
    return trace.metadata.get("backend") == "gloo" and "reduce_scatter" not in kinds


def _partners(simulated: Trace, recorded: Trace, names: tuple[str, str], notes: list[str]) -> dict[int, int]:
    """Recorded rank -> the simulated rank that does what it does: itself, or the one that stands for its
    class (the nearest before it)."""
    for trace, name in ((simulated, names[0]), (recorded, names[1])):
        if not len(trace):
            raise InputError(f"compare: {name} has no spans; expected a trace of at least one step")
    if simulated.world_size != recorded.world_size:
        raise InputError(
            f"compare: {names[0]} is of {simulated.world_size:,} ranks and {names[1]} of "
            f"{recorded.world_size:,}; expected traces of the same job"
        )
    mine = np.unique(simulated.ranks).tolist()
    partners = {
        rank: mine[max(bisect_right(mine, rank) - 1, 0)] for rank in np.unique(recorded.ranks).tolist()
    }
    stand_ins = sum(rank != partner for rank, partner in partners.items())
    if stand_ins:
        notes.append(
            f"{stand_ins} of {len(partners)} recorded ranks are compared with a simulated rank that stands "
            "for them"
        )
    return partners


# -- what differs -----------------------------------------------------------------------------------------


def _plan_differences(plans: Mapping[int, PlanCheck]) -> Iterator[Difference]:
    """Each wrong call once, with the ranks that show it."""
    seen: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    for rank, plan in plans.items():
        for row in plan.differences:
            seen.setdefault(row.sentence, []).append(rank)
            shares[row.sentence] = row.count / max(len(plan.recorded), len(plan.simulated), 1)
    for sentence, ranks in seen.items():
        where = "" if len(ranks) == len(plans) else f" (rank{'s' * (len(ranks) > 1)} {_listed(ranks)})"
        yield Difference("plan", sentence + where, min(shares[sentence], 1.0), "fail")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _metric_differences(comparison: Comparison) -> Iterator[Difference]:
    """Of equal ones those first that say why."""
    for check, metrics in (("clock", comparison.clock.metrics), ("memory", comparison.memory.metrics)):
        for metric in sorted(metrics, key=lambda metric: not metric.reason):
            if metric.verdict != "pass" and metric.simulated != metric.recorded:
                yield Difference(
                    check, metric_sentence(metric, comparison.doubt), metric.share, metric.verdict
                )


def metric_sentence(metric: Metric, doubt: str = "") -> str:
    """`all-gather, 64 ranks: 1.10 s simulated, 1.21 s recorded (-9.1 %): every call 1.10 times as long`."""
    show = {"seconds": format_seconds, "bytes": format_bytes, "fraction": _percent}[metric.unit]
    text = f"{metric.name}: {show(metric.simulated)} simulated, {show(metric.recorded)} recorded"
    if metric.error is not None:
        points = " points" if metric.unit == "fraction" else " %"
        text += f" ({metric.error * 100:+.1f}{points})"
    return text + (f": {metric.reason}" if metric.reason and metric.reason != doubt else "")


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


def _metric(metric: Metric) -> dict[str, Any]:
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
