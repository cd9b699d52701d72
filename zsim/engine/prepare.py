"""Preparation of a job's step for the executor: priced programs, classes, fabric, offloaded work."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain

import simpy

from zsim.arrays import Floats
from zsim.cost.collectives.rounds import CallLimit
from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, shipped_host_costs
from zsim.dataclass import dataclass
from zsim.devices.allocator import Allocator
from zsim.engine.executor import Executor
from zsim.engine.offload import Offload
from zsim.engine.priced_program import PricedProgram, price_program, slowed
from zsim.fabric.fabric import Fabric, Usages
from zsim.fabric.folding.classes import Classes
from zsim.fabric.messages import communicators_of, counted, fabric_works
from zsim.plan.by_type import gpu_of, host_of, type_of_program
from zsim.plan.ops import Collective, Plan, PointToPoint, Program
from zsim.specs.experiment.job import Job
from zsim.specs.topology.topology import Topology

Seconds = Sequence[float | None]


@dataclass(frozen=True)
class Prepared:
    """A job ready to run."""

    job: Job
    plan: Plan
    """The plan of one step."""
    topology: Topology
    classes: Classes
    slowdowns: Floats
    programs: tuple[PricedProgram, ...]
    """The priced programs of the steps that run in a row."""
    fabric: Fabric
    offload: Offload
    works: tuple[Mapping[Collective, int], ...]
    """How often each program makes each of its calls on links, collectives and messages, in one step."""
    allocators: tuple[Allocator, ...] = ()
    """Per program, the allocator of a GPU before the step. Empty if none runs short."""

    @property
    def program_of(self) -> list[int]:
        """Per class, the index of its program."""
        found: list[int] = self.plan.program_of[self.classes.representatives].tolist()
        return found

    @property
    def kernel_seconds(self) -> list[Seconds]:
        """Per class, the seconds of its program's kernels on its GPUs."""
        slowdowns = [float(self.slowdowns[rank]) for rank in self.classes.representatives]
        keys = list(zip(self.program_of, slowdowns, strict=True))
        kernels = {key: slowed(self.programs[key[0]].kernel_seconds, key[1]) for key in set(keys)}
        return [kernels[key] for key in keys]

    @property
    def link_bytes(self) -> Floats:
        """Bytes of all ranks on every link in one step."""
        usages = [self.fabric.usage(works, program) for program, works in enumerate(self.works)]
        total: Floats = sum(usages[1:], usages[0])
        return total

    def call_limits(self) -> dict[Collective | PointToPoint, CallLimit]:
        """The limit of each collective, and of a call with messages the limit of its slowest message."""
        sides = [side for priced in self.programs for own in priced.sides.values() for side in own]
        own_works = list(chain.from_iterable(self.works))
        works = dict.fromkeys([*own_works, *(side.work for side in sides)])
        limits = {work: self.fabric.limit(work) for work in works}
        found: dict[Collective | PointToPoint, CallLimit] = {work: limits[work] for work in own_works}
        for priced in self.programs:
            for number, own in priced.sides.items():
                work = priced.program.ops[number].work
                assert isinstance(work, PointToPoint)
                found[work] = max((limits[side.work] for side in own), key=lambda one: one.seconds)
        return found

    def executor(self, kernel_seconds: Sequence[Seconds] | None = None) -> Executor:
        """An executor of one run of the programs from now on.

        `kernel_seconds` is per class, by default `self.kernel_seconds`.
        """
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
        )


def prepare(
    job: Job,
    plan: Plan,
    repeated: Plan,
    topology: Topology,
    classes: Classes,
    slowdowns: Floats,
    env: simpy.Environment,
    *,
    is_connected: bool = True,
    is_serial: bool = False,
) -> Prepared:
    """Price `repeated` (the plan, once or several times in a row) and register its collectives with the
    links.

    Where `is_connected` is False, `zsim.fabric.fabric.connect` connects the links later. Where `is_serial` is
    set, kernels and collectives run one after the other.
    """
    offload = Offload(topology, plan, classes)
    works = plan.once(_works_of_programs)
    fabric = Fabric(
        env,
        topology,
        communicators_of(plan),
        blocks=classes.blocks,
        extra=offload.extra(),
        works=chain.from_iterable(works),
        program_of=plan.program_of,
        is_connected=is_connected,
        usages=None if topology.form is None else plan.once(_known_usages, topology.form),
    )
    pricers = [KernelPricer(gpu) for gpu in job.cluster.gpus]
    programs = tuple(
        _priced(job, program, plan, pricers[type_of_program(job, plan, number)], number, is_serial=is_serial)
        for number, program in enumerate(repeated.programs)
    )
    return Prepared(job, plan, topology, classes, slowdowns, programs, fabric, offload, works)


def _priced(
    job: Job, program: Program, plan: Plan, pricer: KernelPricer, number: int, *, is_serial: bool
) -> PricedProgram:
    """Price `program`, which is the plan's program of this number (once or several times in a row), for its
    ranks' nodes.
    """
    costs, host = shipped_host_costs(), host_of(job, plan, number)
    return price_program(
        program,
        plan.groups,
        pricer.seconds,
        lambda op: host_seconds(op.overhead, op.events, op.launches, host, costs),
        launch_queue=host.launch_queue,
        connections=job.training.device_max_connections,
        is_serial=is_serial,
    )


def _works_of_programs(plan: Plan) -> tuple[dict[Collective, int], ...]:
    return tuple(counted(fabric_works(program, plan.groups)) for program in plan.programs)


def _known_usages(_plan: Plan, _form: Hashable) -> Usages:
    """An empty table of usages, which the plan's fabrics of one form fill."""
    return {}
