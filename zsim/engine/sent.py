"""Bytes that GPUs send, by phase, kind of collective and group."""

from __future__ import annotations

from collections import Counter

from zsim.fabric.fabric import Fabric
from zsim.fabric.messages import sends
from zsim.plan.ops import Collective, Plan, PointToPoint


def sent_by_phase(plan: Plan, fabric: Fabric) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(bytes inside the node, bytes between nodes) per GPU and step, by phase, kind of collective and
    group."""
    totals: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (number, phase, group, work), count in plan.once(_calls_by_phase).items():
        if fabric.groups[work.group].size > 1:
            inside, between = fabric.sent(work, number)
            key = phase, work.kind, group
            before = totals.get(key, (0.0, 0.0))
            totals[key] = before[0] + count * inside, before[1] + count * between
    return totals


def _calls_by_phase(plan: Plan) -> Counter[tuple[int, str, str, Collective]]:
    """How often a rank makes a call in a step, by program, phase and the call's group (of messages, the one
    of their ranks)."""
    calls: Counter[tuple[int, str, str, Collective]] = Counter()
    for number, program in enumerate(plan.programs):
        works = {id(op.work): op.work for op in program.ops if isinstance(op.work, Collective | PointToPoint)}
        # by identity: ops share works, and equal works take long to compare
        issued = Counter((op.phase, id(op.work)) for op in program.ops if id(op.work) in works)
        for (phase, place), count in issued.items():
            call = works[place]
            for work in [call] if isinstance(call, Collective) else sends(call, plan.groups):
                calls[number, phase, call.group, work] += count
    return calls
