"""Overlap that is lost to hardware queues that streams share (`zsim.plan.passes.hardware_queues`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Plan
from zsim.plan.passes.hardware_queues import program_next_in_queue
from zsim.report.critical.predecessors import predecessors
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace
from zsim.units import format_seconds

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
