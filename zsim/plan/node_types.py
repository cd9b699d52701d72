"""Ranks on several types of nodes: a program for each role and type, with prices and limits of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.arrays import Ints
from zsim.plan.checks import check_plan
from zsim.plan.ops import Plan
from zsim.specs.cluster.cluster import HostDevice
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.job import Job


@dataclass(frozen=True, slots=True)
class NodeTypes:
    """The types of the nodes that ranks are on."""

    names: tuple[str, ...]
    """The names of all types."""
    runs: tuple[tuple[int, int], ...]
    """(type, number of ranks) of each run of equal types, in the order of ranks."""
    micro_batch_sizes: tuple[int, ...] = ()
    """The micro-batch size per type; () if all are the same."""

    @property
    def type_per_rank(self) -> Ints:
        types, counts = zip(*self.runs, strict=True)
        return np.repeat(np.array(types, dtype=np.int64), counts)


def node_types_of(job: Job) -> NodeTypes | None:
    """The types of a job's nodes. None if it is on nodes of one type."""
    if len(job.types) == 1:
        return None
    types = job.rank_types
    firsts = np.flatnonzero(np.diff(types, prepend=-1))
    counts = np.diff(firsts, append=len(types))
    runs = tuple(zip(types[firsts].tolist(), counts.tolist(), strict=True))
    return NodeTypes(tuple(node.name for node in job.cluster.nodes), runs, job.micro_batch_sizes)


def plan_by_type(types: NodeTypes, plans: Sequence[Plan | None]) -> Plan:
    """The plan of ranks on several types of nodes. `plans` has the plan of each type as if all ranks were on
    it, and None for types without ranks. Programs are in the order of their first ranks.
    """
    type_per_rank = types.type_per_rank
    first_plan = next(plan for plan in plans if plan is not None)
    pairs = np.stack([first_plan.program_of, type_per_rank], axis=1)
    roles, firsts, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    programs = []
    for program_index, node_type in roles[order].tolist():
        plan = plans[node_type]
        assert plan is not None, f"ranks on {types.names[node_type]} without a plan"
        program = plan.programs[program_index]
        role = f"{program.name}, " if program.name else ""
        programs.append(replace(program, name=f"{role}{types.names[node_type]}", pipeline_rank=program_index))
    notes = dict.fromkeys(note for plan in plans if plan is not None for note in plan.notes)
    combined = replace(
        first_plan, programs=tuple(programs), program_of=position[inverse.ravel()], notes=tuple(notes)
    )
    check_plan(combined)
    return combined


def pipeline_rank_of(plan: Plan, program: int) -> int:
    """The pipeline rank of a program's ranks. It is `pipeline_rank` if programs of several types of nodes
    have the same, and otherwise the program's number.
    """
    pipeline_rank = plan.programs[program].pipeline_rank
    return program if pipeline_rank is None else pipeline_rank


def type_of_program(job: Job, plan: Plan, program: int) -> int:
    """The type of the nodes of a program's ranks, as an index into the cluster's `gpus`."""
    if len(job.cluster.gpus) == 1:
        return 0
    return int(job.rank_types[int(np.argmax(plan.program_of == program))])


def gpu_of(job: Job, plan: Plan, program: int) -> Gpu:
    """The GPU of a program's ranks."""
    return job.cluster.gpus[type_of_program(job, plan, program)]


def host_of(job: Job, plan: Plan, program: int) -> HostDevice:
    """The host of a program's ranks."""
    return job.cluster.hosts[type_of_program(job, plan, program)]
