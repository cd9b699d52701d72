"""Everything that a job's step needs on the clock: its program priced, its classes, its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from zsim.arrays import Floats
from zsim.cost.rates.gpu import KernelPricer
from zsim.cost.rates.host_calls import host_seconds, load_host_costs
from zsim.devices.allocator import Allocator
from zsim.engine.executor import Executor
from zsim.engine.offload import Offload
from zsim.engine.priced_program import Program, make_program, slowed
from zsim.fabric.fabric import Fabric
from zsim.fabric.folding.classes import Classes
from zsim.plan.ops import Collective, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.topology.topology import Topology

Seconds = Sequence[float | None]


@dataclass(frozen=True)
class Prepared:
    """A job ready to run: `plan` is one step, `program` that step as often as it runs in a row, `allocator`
    is a GPU's before the step, where it runs short."""

    job: Job
    plan: Plan
    topology: Topology
    classes: Classes
    slowdowns: Floats
    program: Program
    fabric: Fabric
    offload: Offload
    works: list[Collective]
    allocator: Allocator | None = None

    @property
    def kernel_seconds(self) -> list[Seconds]:
        """Per class, the program's kernels on its GPUs."""
        slowdowns = [float(self.slowdowns[rank]) for rank in self.classes.representatives]
        kernels = {each: slowed(self.program.kernel_seconds, each) for each in set(slowdowns)}
        return [kernels[each] for each in slowdowns]

    def executor(self, kernel_seconds: Sequence[Seconds] | None = None) -> Executor:
        """One run of the program from now on, with each class's kernels as long as it usually has them or
        as given."""
        return Executor(
            self.fabric.env,
            self.program,
            self.fabric,
            self.classes.representatives,
            kernel_seconds or self.kernel_seconds,
            self.job.cluster.gpu.interference.compute_slowdown,
            self.offload,
            self.allocator,
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
    """Price `repeated` (the plan, once or several times) and put its collectives on the links.

    `is_connected` false leaves the links to `zsim.fabric.fabric.connect`; `is_serial` runs kernels and
    collectives one after the other.
    """
    offload = Offload(topology, plan, classes)
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    fabric = Fabric(
        env,
        topology,
        plan.groups,
        blocks=classes.blocks,
        extra=offload.extra(),
        works=works,
        is_connected=is_connected,
    )
    pricer, costs, host = KernelPricer(job.cluster.gpu), load_host_costs(), job.cluster.host
    program = make_program(
        repeated,
        pricer.seconds,
        lambda op: host_seconds(op.overhead, op.events, op.launches, host, costs),
        launch_queue=host.launch_queue,
        connections=job.training.device_max_connections,
        is_serial=is_serial,
    )
    return Prepared(job, plan, topology, classes, slowdowns, program, fabric, offload, works)
