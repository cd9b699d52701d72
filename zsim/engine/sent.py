"""What GPUs send, by what it is for."""

from __future__ import annotations

from collections import Counter

from zsim.fabric.fabric import Fabric
from zsim.plan.ops import Collective, Plan


def sent_by_phase(plan: Plan, fabric: Fabric) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Bytes per GPU and step inside its node and between nodes, by phase, kind of collective and group."""
    calls = Counter((op.phase, op.work) for op in plan.ops if isinstance(op.work, Collective))
    totals: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (phase, work), count in calls.items():
        if fabric.groups[work.group].size > 1:
            inside, between = fabric.sent(work)
            key = phase, work.kind, work.group
            before = totals.get(key, (0.0, 0.0))
            totals[key] = before[0] + count * inside, before[1] + count * between
    return totals
