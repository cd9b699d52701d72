"""Cache of the plans of a study's jobs: each distinct plan is made once."""

from __future__ import annotations

import numpy as np

from zsim.plan.make import PlanBasis, plan_basis, plan_of
from zsim.plan.ops import Plan
from zsim.specs.experiment.job import Job

_MAX_OPS = 400_000  # in all cached plans together


class Plans:
    """Cache of plans: jobs that differ only in hardware share one plan, and with it the cache of `Plan.once`.

    Jobs whose differing settings do not change the plan share it too. The most recently used plans are kept,
    up to `most_ops` ops in all.
    """

    def __init__(self, most_ops: int = _MAX_OPS) -> None:
        self._most_ops = most_ops
        self._known: list[tuple[PlanBasis, Plan]] = []  # most recently used at the end

    def of(self, job: Job) -> Plan:
        """The job's plan. Raises what `make_plan` raises."""
        basis = plan_basis(job)
        for place, (other, plan) in enumerate(self._known):
            if other == basis:
                self._known.append(self._known.pop(place))
                return plan
        made = plan_of(basis)
        plan = next((plan for _, plan in self._known if _is_equal(plan, made)), made)
        self._known.append((basis, plan))
        self._forget()
        return plan

    def _forget(self) -> None:
        """Drop the least recently used plans until at most `most_ops` ops are kept, or one plan is left."""
        total = sum({id(plan): _num_ops(plan) for _, plan in self._known}.values())
        while total > self._most_ops and len(self._known) > 1:
            _, plan = self._known.pop(0)
            if not any(other is plan for _, other in self._known):
                total -= _num_ops(plan)


def _num_ops(plan: Plan) -> int:
    return sum(len(program.ops) for program in plan.programs)


def _is_equal(plan: Plan, other: Plan) -> bool:
    """Whether two plans are equal: programs, communicators, notes and labels."""
    if not np.array_equal(plan.program_of, other.program_of) or plan.programs != other.programs:
        return False
    return (plan.framework, plan.groups, plan.notes, plan.labels) == (
        other.framework, other.groups, other.notes, other.labels
    )  # fmt: skip
