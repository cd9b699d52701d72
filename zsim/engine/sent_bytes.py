"""Bytes that GPUs send, by phase, kind of collective and group."""

from __future__ import annotations

from collections import Counter

from zsim.fabric.fabric import Fabric
from zsim.fabric.messages import sends
from zsim.plan.columns import op_columns
from zsim.plan.ops import Collective, Plan, PointToPoint


def sent_by_phase(plan: Plan, fabric: Fabric) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(bytes inside the node, bytes between nodes) per GPU and step, by phase, kind of collective and
    group."""
    totals: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (number, phase, group, work), count in plan.memoize(_calls_by_phase).items():
        if fabric.groups[work.group].size > 1:
            inside, between = fabric.sent_bytes(work, number)
            key = phase, work.kind, group
            totals_before = totals.get(key, (0.0, 0.0))
            totals[key] = totals_before[0] + count * inside, totals_before[1] + count * between
    return totals


def _calls_by_phase(plan: Plan) -> Counter[tuple[int, str, str, Collective]]:
    """How often a rank makes a call in a step, by program, phase and the call's group (for messages, the
    group of their ranks).
    """
    calls: Counter[tuple[int, str, str, Collective]] = Counter()
    for number, program in enumerate(plan.programs):
        columns = program.memoize(op_columns)
        # by identity: ops share works, and equal works take long to compare
        num_issued = Counter(zip(columns.phase, map(id, columns.work), strict=True))
        for (phase, work_id), count in num_issued.items():
            call = program.unique_work.get(work_id)
            if not isinstance(call, Collective | PointToPoint):
                continue
            for work in [call] if isinstance(call, Collective) else sends(call, plan.groups):
                calls[number, phase, call.group, work] += count
    return calls
