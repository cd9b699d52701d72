"""`compare`: the comparison of two traces: calls of every rank, times of one rank, memory of the fullest.

The three checks are separate, so that a miss points at the part of the model at fault: the plan check (same
calls, exact), the clock check (times, with tolerances) and the memory check (bytes, with a tolerance).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from zsim.comparison.clock_check import check_clock
from zsim.comparison.comparison import Comparison
from zsim.comparison.memory_check import check_memory
from zsim.comparison.op_classes import match_transfers
from zsim.comparison.plan_check import PlanCheck, calls_of_trace, check_plan, convert_to_gloo
from zsim.comparison.verdict import PREDICTIONS, Tolerances, timing_doubt
from zsim.errors import InputError
from zsim.trace.trace import Trace
from zsim.units import format_seconds


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
    resolved_tolerances = PREDICTIONS if tolerances is None and are_simulated else Tolerances.of(tolerances)
    notes = _notes_of(recorded)
    simulated, recorded = match_transfers(simulated.typical_step(), recorded.typical_step())
    partners = _partners(simulated, recorded, names, notes)
    rank = next(iter(partners)) if rank is None else rank
    if rank not in partners:
        recorded_ranks = ", ".join(str(partner_rank) for partner_rank in list(partners)[:8])
        raise InputError(f"compare: found rank {rank}, expected one that {names[1]} holds: {recorded_ranks}")
    is_gloo = _shows_gloo_calls(recorded)
    if is_gloo:
        notes.append("gloo runs a reduce-scatter as an all-reduce or an all-to-all; it is compared as one")
    plans: dict[int, PlanCheck] = {}
    for recorded_rank, simulated_rank in partners.items():
        simulated_calls = calls_of_trace(simulated.select_rank(simulated_rank), simulated_rank)
        recorded_calls = calls_of_trace(recorded.select_rank(recorded_rank), recorded_rank)
        plans[recorded_rank] = check_plan(
            convert_to_gloo(simulated_calls, recorded_calls) if is_gloo else simulated_calls, recorded_calls
        )
    doubt = timing_doubt(recorded) or timing_doubt(simulated)
    simulated_trace, recorded_trace = simulated.select_rank(partners[rank]), recorded.select_rank(rank)
    notes += dict.fromkeys(
        [
            *_step_rank_note(simulated_trace, names[0], partners[rank]),
            *_step_rank_note(recorded_trace, names[1], rank),
        ]
    )
    return Comparison(
        simulated=simulated_trace,
        recorded=recorded_trace,
        rank=rank,
        tolerances=resolved_tolerances,
        plans=plans,
        clock=check_clock(simulated_trace, recorded_trace, plans[rank], resolved_tolerances, doubt),
        memory=check_memory(simulated, recorded, resolved_tolerances),
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


def _step_rank_note(trace: Trace, name: str, rank: int) -> list[str]:
    """A note where the step is that of another rank than the one whose times are compared."""
    if not trace.steps:
        return []
    step, rank_seconds = trace.steps[0], format_seconds(trace.steps[0].seconds_of(rank))
    if rank_seconds == format_seconds(step.seconds):
        return []
    return [
        f"{name}: the step is that of rank {step.slowest_rank()}, the slowest; it took rank {rank}, whose "
        f"times are compared, {rank_seconds}, and what remains is counted as host-bound"
    ]


def _shows_gloo_calls(trace: Trace) -> bool:
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
    simulated_ranks = np.unique(simulated.ranks).tolist()
    partners = {
        rank: simulated_ranks[max(bisect_right(simulated_ranks, rank) - 1, 0)]
        for rank in np.unique(recorded.ranks).tolist()
    }
    num_representatives = sum(rank != partner for rank, partner in partners.items())
    if num_representatives:
        notes.append(
            f"{num_representatives} of {len(partners)} recorded ranks are compared with a simulated rank "
            "that stands for them"
        )
    return partners
