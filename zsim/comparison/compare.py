"""`compare`: the comparison of two traces: calls of every rank, times of one rank, memory of the fullest.

The three checks are separate, so that a miss points at the part of the model at fault: the plan check (same
calls, exact), the clock check (times, with tolerances) and the memory check (bytes, with a tolerance).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from zsim.comparison.calls import as_gloo_runs_them, calls_of_trace
from zsim.comparison.clock_check import check_clock
from zsim.comparison.comparison import ComparedRuns
from zsim.comparison.memory_check import check_memory
from zsim.comparison.op_times import with_alike_times
from zsim.comparison.plan_check import PlanCheck, check_plan
from zsim.comparison.verdict import PREDICTIONS, Tolerances, doubt_about_times
from zsim.comparison.views.page import write_compare_page
from zsim.comparison.views.text import comparison_lines
from zsim.errors import InputError
from zsim.trace.trace import Trace
from zsim.units import format_seconds


class Comparison(ComparedRuns):
    """Compared runs with their views: `print` shows the table, `write_html` writes the page."""

    def write_html(self, path: str | Path) -> Path:
        """Write one page with both timelines and the differences, which fetches nothing."""
        return write_compare_page(self, path)

    def __str__(self) -> str:
        return "\n".join(comparison_lines(self))


def compare(
    simulated: Trace,
    recorded: Trace,
    *,
    tolerances: Tolerances | Mapping[str, float] | float | None = None,
    rank: int | None = None,
    names: tuple[str, str] = ("simulated", "recorded"),
) -> Comparison:
    """Compare two traces: calls of every recorded rank, times of `rank` (by default the first), memory of the
    fullest rank.

    For a recording of several steps the typical one is compared. `tolerances` is one number for all, or some
    of {"step", "time", "memory", "overlap"}, as fractions. Between two simulations they are small by default,
    because nothing jitters.

    Raises InputError for traces without spans or of different world sizes, and for a `rank` that is not
    recorded.
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
    """The notes of the recording's reader, without its note on how it estimates transfers from few ranks."""
    notes = [str(note) for note in recorded.metadata.get("notes", ()) if "transfer" not in str(note)]
    if recorded.metadata.get("transfers_bounded"):
        notes.append("too few ranks to tell waiting from transfer: collectives are compared with their waits")
    return notes


def _whose_step(trace: Trace, name: str, rank: int) -> list[str]:
    """A note where the step is that of another rank than the one whose times are compared."""
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
    """Whether the recording has the calls that gloo ran, not those that were requested (as a Flight Recorder
    has)."""
    kinds = {info.kind for info in trace.infos}
    return trace.metadata.get("backend") == "gloo" and "reduce_scatter" not in kinds


def _partners(simulated: Trace, recorded: Trace, names: tuple[str, str], notes: list[str]) -> dict[int, int]:
    """The simulated rank for each recorded rank: the same rank, or its representative (the nearest rank
    before it)."""
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
