"""A job in, a trace and a report out."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import simpy

from zsim.cost.collectives import CallLimit
from zsim.cost.compute import KernelPricer
from zsim.cost.host import host_seconds, load_host_costs
from zsim.engine.capacity import resident_bytes, step_peak_bytes, usable_bytes
from zsim.engine.executor import Executor
from zsim.engine.offload import DeviceTraffic, Offload
from zsim.engine.program import make_program, slowed
from zsim.engine.record import make_trace
from zsim.engine.steady import is_drained, twice
from zsim.engine.symmetry import find_classes
from zsim.fabric.classes import Classes
from zsim.fabric.fabric import Fabric, LinkLoad
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.faults import kernel_slowdowns
from zsim.specs.job import Job, job_topology
from zsim.specs.topology import Topology
from zsim.trace.spans import Trace


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """What the simulation itself took: seconds of this process, events of the clock, ranks simulated."""

    wall_seconds: float
    events: int
    rank_classes: int


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A run makes millions of small tuples and no cycles; looking for cycles took a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Outcome:
    """One simulated step. `allocator_retries`: how often rank 0's allocator ran short and waited; `calls`:
    what bounds each collective; `meetings`: by (group, simulated rank) where ranks wait for each other."""

    job: Job
    plan: Plan
    topology: Topology
    classes: Classes
    trace: Trace
    stats: SimulationStats
    traffic: dict[str, LinkLoad]
    devices: tuple[DeviceTraffic, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    allocator_retries: int = 0
    notes: tuple[str, ...] = ()
    calls: Mapping[Collective, CallLimit] = field(default_factory=dict)
    meetings: Mapping[tuple[str, int], int] = field(default_factory=dict)


def simulate_job(job: Job, *, unfold: bool = False, plan: Plan | None = None) -> Outcome:
    """Run one steady step.

    One lane stands for all ranks of a class, which run the same program on equal hardware at symmetric
    places; `unfold` simulates every rank instead. A `plan` that is given is run once, from an idle machine.
    """
    began = time.perf_counter()
    is_steady = plan is None
    plan = plan or make_plan(job)
    topology = job_topology(job)
    slowdowns = kernel_slowdowns(topology, job.experiment.faults)
    is_plain = job.placement.is_plain
    classes, notes = find_classes(topology, plan, slowdowns, is_plain=is_plain, unfold=unfold)
    env = simpy.Environment()
    offload = Offload(topology, plan, classes)
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    fabric = Fabric(env, topology, plan.groups, blocks=classes.blocks, extra=offload.extra(), works=works)
    pricer, costs = KernelPricer(job.cluster.gpu), load_host_costs()
    host = job.cluster.host
    resident, peak = resident_bytes(job, plan), step_peak_bytes(job, plan)
    fits = peak <= usable_bytes(job.cluster)
    program = make_program(
        twice(plan) if is_steady and not is_drained(plan) else plan,
        pricer.seconds,
        lambda event, launches: host_seconds(event, launches, host, costs),
        launch_queue=host.launch_queue,
        is_limited=fits,
    )
    ranks = classes.representatives
    kernels = [slowed(program.kernel_seconds, float(slowdowns[rank])) for rank in ranks]
    slowdown = job.cluster.gpu.interference.compute_slowdown
    free_bytes = usable_bytes(job.cluster) - resident
    executor = Executor(env, program, fabric, ranks, kernels, slowdown, offload, free_bytes)
    with _no_garbage_collection():
        end_seconds = executor.run()
    trace = make_trace(job, plan, executor, end_seconds)
    step_seconds = trace.step_seconds
    traffic = fabric.traffic(works)
    events = executor.num_events + fabric.num_transfers
    stats = SimulationStats(time.perf_counter() - began, events, len(ranks))
    retries = executor.num_allocator_retries
    devices, limits = offload.traffic(step_seconds), offload.limits()
    calls = {work: fabric.limit(work) for work in dict.fromkeys(works)}
    meetings = {
        (name, lane.rank): number for lane in executor.lanes for name, number in lane.instances.items()
    }
    return Outcome(
        job, plan, topology, classes, trace, stats, traffic, devices, limits, retries, notes, calls, meetings
    )
