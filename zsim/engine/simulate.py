"""A job in, a trace and a report out."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import simpy

from zsim.cost.collectives import CallLimit
from zsim.engine.offload import DeviceTraffic
from zsim.engine.prepare import prepare
from zsim.engine.repeat import Jittered, run_jittered, run_once
from zsim.engine.sent import sent_by_phase
from zsim.engine.steady import is_drained, twice
from zsim.engine.symmetry import find_classes
from zsim.fabric.classes import Classes, first_apart
from zsim.fabric.fabric import LinkLoad
from zsim.fabric.rings import Floats
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan
from zsim.specs.faults import kernel_slowdowns
from zsim.specs.jitter import resolve_jitter
from zsim.specs.job import Job, job_topology
from zsim.specs.topology import Topology
from zsim.trace.spans import Trace


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """What the simulation itself took: seconds of this process, events of the clock, ranks simulated."""

    wall_seconds: float
    events: int
    rank_classes: int


_MOST_DRAWN = 16  # ranks that are all simulated when they vary


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
    what bounds each collective; `meetings`: by (group, simulated rank) where ranks wait for each other;
    `sent`: bytes per GPU inside its node and between nodes, by phase, kind of collective and group."""

    job: Job
    plan: Plan
    topology: Topology
    classes: Classes
    slowdowns: Floats
    trace: Trace
    stats: SimulationStats
    traffic: dict[str, LinkLoad]
    devices: tuple[DeviceTraffic, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    allocator_retries: int = 0
    notes: tuple[str, ...] = ()
    calls: Mapping[Collective, CallLimit] = field(default_factory=dict)
    meetings: Mapping[tuple[str, int], int] = field(default_factory=dict)
    jittered: Jittered | None = None
    sent: Mapping[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)


def simulate_job(job: Job, *, unfold: bool = False, plan: Plan | None = None) -> Outcome:
    """Run one steady step, or as many as `[jitter]` draws.

    One lane stands for all ranks of a class, which run the same program on equal hardware at symmetric
    places; `unfold` simulates every rank instead. A `plan` that is given is run once, from an idle machine.
    """
    began = time.perf_counter()
    is_steady = plan is None
    plan = plan or make_plan(job)
    topology = job_topology(job)
    slowdowns = kernel_slowdowns(topology, job.experiment.faults)
    jitter = resolve_jitter(job.experiment.jitter)
    unfold = unfold or (jitter is not None and job.world_size <= _MOST_DRAWN)
    is_plain = job.placement.is_plain
    classes, notes = find_classes(topology, plan, slowdowns, is_plain=is_plain, unfold=unfold)
    if jitter is not None and not unfold:
        classes = first_apart(classes)
    repeated = twice(plan) if is_steady and not is_drained(plan) else plan
    prepared = prepare(job, plan, repeated, topology, classes, slowdowns, simpy.Environment())
    with _no_garbage_collection():
        run = run_once(prepared)
        spread = run_jittered(prepared, run, jitter) if jitter is not None else None
    trace = spread.median if spread is not None else run.trace
    step_seconds = trace.step_seconds
    fabric, offload = prepared.fabric, prepared.offload
    traffic = fabric.traffic(prepared.works)
    events = run.executor.num_events + fabric.num_transfers + (spread.events if spread is not None else 0)
    stats = SimulationStats(time.perf_counter() - began, events, len(run.executor.lanes))
    retries = run.executor.num_allocator_retries
    devices, limits = offload.traffic(step_seconds), offload.limits()
    calls = {work: fabric.limit(work) for work in dict.fromkeys(prepared.works)}
    meetings = {
        (name, lane.rank): number for lane in run.executor.lanes for name, number in lane.instances.items()
    }
    return Outcome(
        job, plan, topology, classes, slowdowns, trace, stats, traffic, devices, limits, retries, notes,
        calls, meetings, spread, sent_by_phase(plan, fabric),
    )  # fmt: skip
