"""Overlap that is lost to hardware queues that streams share (`zsim.plan.passes.queues`)."""

from __future__ import annotations

import numpy as np

from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Plan
from zsim.plan.passes.queues import queued_behind
from zsim.report.critical.predecessors import predecessors
from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.trace.trace import Trace
from zsim.units import format_seconds

_SAME = 0.001  # of the step


def held_up_seconds(plan: Plan, trace: Trace, connections: int) -> float:
    """Seconds that launches of the first rank's compute stream, issued and otherwise ready, waited for other
    launches in their hardware queue. `trace` is the simulated trace of `plan`.
    """
    own = trace.of_rank(int(trace.ranks[0]))
    program = plan.program_on(int(trace.ranks[0]))
    before = program.once(predecessors, connections)
    order = np.argsort(own.info_indices, kind="stable")
    issue, start, end = (
        seconds[order].tolist() for seconds in (own.issue_seconds, own.start_seconds, own.end_seconds)
    )
    total = 0.0
    for place, number in enumerate(before.numbers):
        if program.ops[number].stream == COMPUTE and place in before.ahead:
            ready = max(issue[place], *(end[other] for other in before.of(place)), 0.0)
            total += max(start[place] - ready, 0.0)
    return total


def shared_queues_notes(
    plan: Plan, trace: Trace, connections: int, step_seconds_apart: float | None
) -> list[str]:
    """The note on the cost of hardware queues that the streams of `plan` share. There is none where they do
    not.
    """
    if all(program.once(queued_behind, connections) is None for program in plan.programs):
        return []
    held_up = held_up_seconds(plan, trace, connections)
    return [shared_queues_note(connections, held_up, trace.step_seconds, step_seconds_apart)]


def shared_queues_note(connections: int, held_up: float, seconds: float, seconds_apart: float | None) -> str:
    """The note on shared hardware queues.

    `seconds` is the step as it is. `default_seconds` is the step with CUDA's default number of queues, where
    that was simulated.
    """
    queues = "one hardware queue" if connections == 1 else f"{connections} hardware queues"
    compute = f", the compute stream's for {format_seconds(held_up)} of the step" if held_up > 0 else ""
    note = (
        f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: all streams' launches pass through {queues}, and one "
        f"that waits holds up those behind it{compute}"
    )
    if seconds_apart is None:
        return note
    is_same = abs(seconds / seconds_apart - 1) < _SAME
    takes = "takes as long" if is_same else f"takes {format_seconds(seconds_apart)}"
    return f"{note}; with {DEFAULT_CONNECTIONS}, the default, the step {takes}"
