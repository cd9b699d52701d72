"""Preparation of the step that is asked of the executor: priced programs, classes, fabric, offloaded work."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import simpy

from zsim.arrays import Floats
from zsim.cost.collectives.rounds import CallLimit
from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.devices.allocator import Allocator
from zsim.engine.executor import Executor
from zsim.engine.offload import Offload
from zsim.engine.priced_program import PricedProgram, price_program, scale_seconds
from zsim.fabric.fabric import Fabric, Usages
from zsim.fabric.folding.classes import RankClasses
from zsim.fabric.messages import communicators_of, count_collectives, fabric_collectives
from zsim.plan.node_types import gpu_of, host_of, type_of_program
from zsim.plan.ops import Collective, Plan, PointToPoint, Program
from zsim.plan.passes.repeated_step import is_drained, repeat_step
from zsim.specs.cluster.collectives import exchange_slowdown
from zsim.specs.experiment.job import Job, job_topology, slowdowns_of
from zsim.specs.topology.topology import Topology

Seconds = Sequence[float | None]


@dataclass(frozen=True)
class StepRequest:
    """A step to simulate."""

    job: Job
    plan: Plan
    """The plan of one step."""
    topology: Topology
    """The positions of its ranks."""
    slowdowns: Floats
    """Per rank, the factor on kernels' seconds."""
    is_steady: bool = True
    """The step follows other steps. Otherwise it starts from an idle machine."""
    is_serial: bool = False
    """Kernels and collectives run one after the other."""
    is_for_network: bool = False
    """The step serves to compare fabrics: groups that do the same are as slow as the slowest, and torch's
    allocator has room.
    """

    @classmethod
    def of(cls, job: Job, plan: Plan) -> StepRequest:
        """A steady step of a job on its cluster."""
        topology = job_topology(job)
        return cls(job, plan, topology, slowdowns_of(job, topology))

    @property
    def repeated_plan(self) -> Plan:
        """The plan as often in a row as a step needs to be steady: once where it ends with all work done."""
        if not self.is_steady or self.plan.memoize(is_drained):
            return self.plan
        return self.plan.memoize(repeat_step)


@dataclass(frozen=True)
class PreparedJob:
    """A job ready to run."""

    request: StepRequest
    classes: RankClasses
    programs: tuple[PricedProgram, ...]
    """The priced programs of the steps that run in a row."""
    fabric: Fabric
    offload: Offload
    collective_counts: tuple[Mapping[Collective, int], ...]
    """How often each program makes each of its calls on links, collectives and messages, in one step."""
    allocators: tuple[Allocator, ...] = ()
    """Per program, the allocator of a GPU before the step. Empty if none runs short."""

    @property
    def job(self) -> Job:
        return self.request.job

    @property
    def plan(self) -> Plan:
        """The plan of one step."""
        return self.request.plan

    @property
    def program_of(self) -> list[int]:
        """Per class, the index of its program."""
        programs: list[int] = self.plan.program_of[self.classes.representatives].tolist()
        return programs

    @property
    def kernel_seconds(self) -> list[Seconds]:
        """Per class, the seconds of its program's kernels on its GPUs."""
        slowdowns = [float(self.request.slowdowns[rank]) for rank in self.classes.representatives]
        keys = list(zip(self.program_of, slowdowns, strict=True))
        kernels = {key: scale_seconds(self.programs[key[0]].kernel_seconds, key[1]) for key in set(keys)}
        return [kernels[key] for key in keys]

    @property
    def link_bytes(self) -> Floats:
        """Bytes of all ranks on every link in one step."""
        usages = [self.fabric.usage(counts, program) for program, counts in enumerate(self.collective_counts)]
        total: Floats = sum(usages[1:], usages[0])
        return total

    def call_limits(self) -> dict[Collective | PointToPoint, CallLimit]:
        """The limit of each collective, and of a call with messages the limit of its slowest message."""
        sides = [side for priced in self.programs for op_sides in priced.sides.values() for side in op_sides]
        collectives = list(chain.from_iterable(self.collective_counts))
        all_collectives = dict.fromkeys([*collectives, *(side.work for side in sides)])
        limits = {work: self.fabric.limit(work) for work in all_collectives}
        limit_of_call: dict[Collective | PointToPoint, CallLimit] = {
            work: limits[work] for work in collectives
        }
        for priced in self.programs:
            for number, op_sides in priced.sides.items():
                work = priced.program.ops[number].work
                assert isinstance(work, PointToPoint)
                limit_of_call[work] = max(
                    (limits[side.work] for side in op_sides), key=lambda limit: limit.seconds
                )
        return limit_of_call

    def executor(self, kernel_seconds: Sequence[Seconds] | None = None) -> Executor:
        """An executor of one run of the programs from now on.

        `kernel_seconds` is per class, by default `self.kernel_seconds`.
        """
        dispatcher = self.job.parallelism.experts.dispatcher
        return Executor(
            self.fabric.env,
            [self.programs[program] for program in self.program_of],
            self.fabric,
            self.classes.representatives,
            kernel_seconds or self.kernel_seconds,
            [
                gpu_of(self.job, self.plan, program).interference.compute_slowdown
                for program in self.program_of
            ],
            self.offload,
            [self.allocators[program] for program in self.program_of] if self.allocators else (),
            [
                exchange_slowdown(gpu_of(self.job, self.plan, program), dispatcher)
                for program in self.program_of
            ],
        )


def prepare(
    request: StepRequest, classes: RankClasses, env: simpy.Environment, *, is_connected: bool = True
) -> PreparedJob:
    """Price the plan as often as it runs in a row, and register its collectives with the links.

    Where `is_connected` is False, `zsim.fabric.fabric.connect` connects the links later.
    """
    job, plan, topology = request.job, request.plan, request.topology
    offload = Offload(topology, plan, classes)
    collective_counts = plan.memoize(_collective_counts)
    fabric = Fabric(
        env,
        topology,
        communicators_of(plan),
        communicator_indices=classes.class_of_group,
        extra=offload.extra_resources(),
        collectives=chain.from_iterable(collective_counts),
        program_of=plan.program_of,
        is_connected=is_connected,
        usages=None if topology.route_key is None else plan.memoize(_new_usages, topology.route_key),
    )
    pricers = [KernelPricer(gpu) for gpu in job.cluster.gpus]
    programs = tuple(
        _price(request, program, pricers[type_of_program(job, plan, number)], number)
        for number, program in enumerate(request.repeated_plan.programs)
    )
    return PreparedJob(request, classes, programs, fabric, offload, collective_counts)


def _price(request: StepRequest, program: Program, pricer: KernelPricer, number: int) -> PricedProgram:
    """Price `program`, which is the plan's program of this number (once or several times in a row), for its
    ranks' nodes.
    """
    job, plan = request.job, request.plan
    costs, host = shipped_host_costs(), host_of(job, plan, number)
    return price_program(
        program,
        plan.groups,
        pricer.seconds,
        lambda op: host_seconds(op.overhead, op.events, op.launches, host, costs),
        launch_queue=host.launch_queue,
        connections=job.training.device_max_connections,
        is_serial=request.is_serial,
    )


def _collective_counts(plan: Plan) -> tuple[dict[Collective, int], ...]:
    return tuple(count_collectives(fabric_collectives(program, plan.groups)) for program in plan.programs)


def _new_usages(_plan: Plan, _form: Hashable) -> Usages:
    """An empty table of usages, which the plan's fabrics of one form fill."""
    return {}
