"""Cache of the plans of a study's jobs: each distinct plan is made once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from zsim.plan.make import PlanBasis, paged_basis, plan_for_ranks, plan_of
from zsim.plan.ops import Plan, Program
from zsim.plan.workload.workloads import Workloads
from zsim.specs.experiment.job import Job

_MAX_OPS = 400_000  # in all cached plans together


class Plans:
    """Cache of plans. Jobs that differ only in hardware share one plan, and with it the cache of
    `Plan.memoize`.

    Jobs whose differing settings do not change the plan share it too. Plans of which only some programs are
    equal (of other ranks with equal shards) share these, and the cache of `Program.memoize`. The most
    recently used plans are kept, up to `most_ops` ops in all.
    """

    def __init__(self, most_ops: int = _MAX_OPS) -> None:
        self._most_ops = most_ops
        self._known: list[tuple[PlanBasis, Plan]] = []  # most recently used at the end
        self._workloads = Workloads()

    def of(self, job: Job) -> Plan:
        """The job's plan. Raises what `make_plan` raises."""
        return self._of(paged_basis(job, self._of))

    def _of(self, basis: PlanBasis) -> Plan:
        for place, (other, plan) in enumerate(self._known):
            if other == basis:
                self._known.append(self._known.pop(place))
                return plan
        plan = self._from_known(basis) or self._shared(plan_of(basis, self._workloads))
        self._known.append((basis, plan))
        self._forget()
        return plan

    def _from_known(self, basis: PlanBasis) -> Plan | None:
        made = (plan_for_ranks(basis, other, plan) for other, plan in reversed(self._known))
        return next((plan for plan in made if plan is not None), None)

    def _shared(self, made: Plan) -> Plan:
        """The cached plan that is equal, or this one, with cached programs for equal ones."""
        known = [program for _, plan in reversed(self._known) for program in plan.programs]
        programs = tuple(
            next((other for other in known if other == program), program) for program in made.programs
        )
        if all(one is other for one, other in zip(programs, made.programs, strict=True)):
            return made
        made = replace(made, programs=programs)
        return next((plan for _, plan in self._known if _is_equal(plan, made)), made)

    def _forget(self) -> None:
        """Drop the least recently used plans until at most `most_ops` ops are kept, or one plan is left."""
        while len(self._known) > 1 and _num_ops(plan for _, plan in self._known) > self._most_ops:
            self._known.pop(0)


def _num_ops(plans: Iterable[Plan]) -> int:
    """The ops of the programs of all plans, each program counted once."""
    programs: dict[int, Program] = {id(program): program for plan in plans for program in plan.programs}
    return sum(len(program.ops) for program in programs.values())


def _is_equal(plan: Plan, other: Plan) -> bool:
    """Whether two plans are equal: programs, communicators, notes and labels."""
    if not np.array_equal(plan.program_of, other.program_of) or plan.programs != other.programs:
        return False
    return (plan.framework, plan.groups, plan.notes, plan.labels) == (
        other.framework, other.groups, other.notes, other.labels
    )  # fmt: skip
