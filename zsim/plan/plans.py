"""Cache of the plans of a study's jobs: each distinct plan is made once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from zsim.plan.make import PlanBasis, paged_basis, plan_for_ranks, plan_of
from zsim.plan.ops import Plan, Program
from zsim.plan.workload.workload import Workloads
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
        self._cached: list[tuple[PlanBasis, Plan]] = []  # most recently used at the end
        self._workloads = Workloads()

    def of(self, job: Job) -> Plan:
        """The job's plan. Raises what `make_plan` raises."""
        return self._plan_of_basis(paged_basis(job, self._plan_of_basis))

    def _plan_of_basis(self, basis: PlanBasis) -> Plan:
        for index, (cached_basis, plan) in enumerate(self._cached):
            if cached_basis == basis:
                self._cached.append(self._cached.pop(index))
                return plan
        plan = self._derive_from_cached(basis) or self._share_equal_programs(plan_of(basis, self._workloads))
        self._cached.append((basis, plan))
        self._forget()
        return plan

    def _derive_from_cached(self, basis: PlanBasis) -> Plan | None:
        derived = (plan_for_ranks(basis, cached_basis, plan) for cached_basis, plan in reversed(self._cached))
        return next((plan for plan in derived if plan is not None), None)

    def _share_equal_programs(self, new_plan: Plan) -> Plan:
        """The cached plan that is equal, or this one, with cached programs for equal ones."""
        programs_in_cache = [program for _, plan in reversed(self._cached) for program in plan.programs]
        programs = tuple(
            next((cached for cached in programs_in_cache if cached == program), program)
            for program in new_plan.programs
        )
        if all(shared is original for shared, original in zip(programs, new_plan.programs, strict=True)):
            return new_plan
        new_plan = replace(new_plan, programs=programs)
        return next((plan for _, plan in self._cached if _is_equal(plan, new_plan)), new_plan)

    def _forget(self) -> None:
        """Drop the least recently used plans until at most `most_ops` ops are kept, or one plan is left."""
        while len(self._cached) > 1 and _num_ops(plan for _, plan in self._cached) > self._most_ops:
            self._cached.pop(0)


def _num_ops(plans: Iterable[Plan]) -> int:
    """The ops of the programs of all plans, each program counted once."""
    programs: dict[int, Program] = {id(program): program for plan in plans for program in plan.programs}
    return sum(len(program.ops) for program in programs.values())


def _is_equal(plan: Plan, second: Plan) -> bool:
    """Whether two plans are equal: programs, communicators, notes and labels."""
    if not np.array_equal(plan.program_of, second.program_of) or plan.programs != second.programs:
        return False
    return (plan.framework, plan.groups, plan.notes, plan.labels) == (
        second.framework, second.groups, second.notes, second.labels
    )  # fmt: skip
