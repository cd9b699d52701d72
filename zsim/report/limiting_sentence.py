"""One sentence on what limits the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints, factorize
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Plan
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.report.breakdown import Breakdown
from zsim.report.critical.path import predecessors
from zsim.report.views.meanings import WHOLE_STEP, span_meaning
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import SpanInfos, Trace
from zsim.units import format_seconds

_BOUND = {
    "compute": "Compute-bound",
    "exposed_communication": "Communication-bound",
    "bubble": "Pipeline-bound",
    "offload_stall": "Offload-bound",
    "optimizer": "Optimizer-bound",
    "allocator": "Short of memory",
    "host_bound": "Host-bound",
    "data_loading": "Bound by data loading",
}
_WORTH_SAYING = 0.005  # of the step


def limiting_sentence(
    trace: Trace,
    breakdown: Breakdown,
    overlap_fraction: float | None = None,
    kernel_fraction: float | None = None,
    peak_dtype: str = "",
) -> str:
    """The sentence on what limits the step, such as "Compute-bound: 84 % compute; exposed communication 11 %,
    mostly the all-gather of ...".

    Where the step mostly computes, the sentence goes on with the fraction of communication that is hidden and
    the fraction of the peak (fp8's peak where the step computes in fp8) that the kernels reach.
    """
    total = sum(breakdown.seconds.values())
    if total <= 0:
        return "An empty step."
    first = max(breakdown.seconds, key=lambda name: breakdown.seconds[name])
    share = _share(breakdown.seconds[first] / total)
    clauses = [f"{share} {WHOLE_STEP[first].label}{_main_wait(trace, breakdown, first)}"]
    other_causes = sorted(
        (name for name in breakdown.seconds if name != first), key=lambda n: -breakdown.seconds[n]
    )
    for name in other_causes:
        fraction = breakdown.seconds[name] / total
        if fraction >= _WORTH_SAYING:
            clauses.append(f"{WHOLE_STEP[name].label} {_share(fraction)}{_main_wait(trace, breakdown, name)}")
    if first == "compute" and overlap_fraction is not None:
        clauses.append(f"{_share(overlap_fraction)} of communication is hidden")
    if first == "compute" and kernel_fraction is not None:
        peak = f"{peak_dtype}'s peak" if peak_dtype in ("fp8", "fp4") else "the peak"
        clauses.append(f"kernels reach {_share(kernel_fraction)} of {peak}")
    return f"{_BOUND[first]}: {'; '.join(clauses)}."


def overlap_doubt_sentence(framework: str, step_seconds: float, without_overlap: float | None) -> str:
    """The sentence to add where the overlap is in doubt. Empty where it makes no difference."""
    if without_overlap is None or without_overlap < step_seconds * (1 + _WORTH_SAYING):
        return ""
    return (
        f" Without overlap the step would take {format_seconds(without_overlap)}; most published runs of "
        f"{framework} on several nodes are closer to that."
    )


def _share(fraction: float) -> str:
    """Whole percents, and tenths of a percent below 1 % and above 99 %."""
    is_extreme = 0 < fraction < 0.01 or 0.99 < fraction < 1
    return f"{fraction * 100:.1f} %" if is_extreme else f"{fraction * 100:.0f} %"


def _main_wait(trace: Trace, breakdown: Breakdown, cause: str) -> str:
    """Words for the one op, or else the one kind of op, that more than half of the waits with this cause were
    for. Empty without one.
    """
    infos, seconds = breakdown.waits.select_cause(cause)
    if not len(infos):
        return ""
    words = trace.infos.memoize(_op_words)
    cause_seconds = breakdown.seconds[cause]
    op, group_seconds = _largest_group(words.name_of_op[infos], seconds)
    if group_seconds > cause_seconds / 2:
        kind, name, phase = words.names[op]
        where = (f" of {name}" if name else "s") + (f" in {phase}" if phase else "")
        return f", mostly the {span_meaning(kind).label}{where}"
    kind_index, group_seconds = _largest_group(words.kind_of_op[infos], seconds)
    if group_seconds > cause_seconds / 2:
        return (
            f", mostly {span_meaning(words.kinds[kind_index]).label} "
            f"({_share(group_seconds / cause_seconds)} of it)"
        )
    return ""


def _largest_group(groups: Ints, seconds: Floats) -> tuple[int, float]:
    """The group with the most seconds (of equal ones the first), and its seconds."""
    sums = np.bincount(groups, seconds)
    largest = float(sums.max())
    return next(group for group in groups.tolist() if sums[group] == largest), largest


class _OpWords(NamedTuple):
    """The distinct (kind, name or "", phase) of ops and the distinct kinds, and the index of each op's."""

    names: list[tuple[str, str, str]]
    name_of_op: Ints
    kinds: list[str]
    kind_of_op: Ints


def _op_words(infos: SpanInfos) -> _OpWords:
    """The words for the ops, to be cached with the infos."""
    words = [
        (info.kind, info.module or (info.name if info.name != info.kind else ""), info.phase)
        for info in infos
    ]
    return _OpWords(*factorize(words), *factorize([info.kind for info in infos]))


# -- Overlap that is lost to hardware queues that streams share (`zsim.plan.passes.hardware_queues`) -------


_TOLERANCE = 0.001  # of the step


def queue_wait_seconds(plan: Plan, trace: Trace, connections: int) -> float:
    """Seconds that launches of the first rank's compute stream, issued and otherwise ready, waited for other
    launches in their hardware queue. `trace` is the simulated trace of `plan`.
    """
    rank_trace = trace.select_rank(int(trace.ranks[0]))
    program = plan.program_on(int(trace.ranks[0]))
    dependencies = program.memoize(predecessors, connections)
    order = np.argsort(rank_trace.info_indices, kind="stable")
    issue, start, end = (
        seconds[order].tolist()
        for seconds in (rank_trace.issue_seconds, rank_trace.start_seconds, rank_trace.end_seconds)
    )
    total = 0.0
    for position, number in enumerate(dependencies.numbers):
        if program.ops[number].stream == COMPUTE and position in dependencies.previous_in_queue:
            ready = max(
                issue[position],
                *(end[predecessor] for predecessor in dependencies.predecessors_of(position)),
                0.0,
            )
            total += max(start[position] - ready, 0.0)
    return total


def shared_queues_notes(
    terms: Sequence[tuple[float, Plan, Trace]], connections: int, default_step_seconds: float | None
) -> list[str]:
    """The note on the cost of hardware queues that the streams of a step share. There is none where they do
    not. The step is the weighted sum of `terms`, simulated traces of plans.
    """
    programs = terms[0][1].programs
    if all(program.memoize(program_next_in_queue, connections) is None for program in programs):
        return []
    wait_seconds = sum(factor * queue_wait_seconds(plan, trace, connections) for factor, plan, trace in terms)
    seconds = sum(factor * trace.step_seconds for factor, _, trace in terms)
    return [shared_queues_note(connections, wait_seconds, seconds, default_step_seconds)]


def shared_queues_note(
    connections: int, wait_seconds: float, seconds: float, default_seconds: float | None
) -> str:
    """The note on shared hardware queues.

    `seconds` is the step as it is. `default_seconds` is the step with CUDA's default number of queues, where
    that was simulated.
    """
    queues = "one hardware queue" if connections == 1 else f"{connections} hardware queues"
    compute = (
        f", the compute stream's for {format_seconds(wait_seconds)} of the step" if wait_seconds > 0 else ""
    )
    note = (
        f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: all streams' launches pass through {queues}, and one "
        f"that waits holds up those behind it{compute}"
    )
    if default_seconds is None:
        return note
    is_same = abs(seconds / default_seconds - 1) < _TOLERANCE
    takes = "takes as long" if is_same else f"takes {format_seconds(default_seconds)}"
    return f"{note}; with {DEFAULT_CONNECTIONS}, the default, the step {takes}"
