"""Simulate one job: plan, classes, executor and allocator. The result is an `Outcome`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import simpy

from zsim import garbage_collection
from zsim.arrays import Floats
from zsim.cost.collectives.rounds import CallLimit
from zsim.dataclass import dataclass
from zsim.devices.allocator import Allocator
from zsim.engine.allocation import Allocation, Settled, has_room_at, make_allocator, settle_once
from zsim.engine.executor import Executor
from zsim.engine.folding import find_classes, node_ranks, with_firsts_apart
from zsim.engine.jitter.steps import Jittered, ProgramRun, run_jittered, run_once
from zsim.engine.lane import Lane
from zsim.engine.offload import DeviceTraffic
from zsim.engine.one_stream import is_one_rank, serial_times
from zsim.engine.prepare import Prepared, prepare
from zsim.engine.sent import sent_by_phase
from zsim.engine.together import ConcurrentJob, run_together
from zsim.errors import NotSimulatedError
from zsim.fabric.communicators import LinkLoad
from zsim.fabric.folding.classes import Classes
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import excess_bytes
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.plan.passes.twice import is_drained, twice
from zsim.plan.plans import Plans
from zsim.specs.experiment.faults import kernel_slowdowns
from zsim.specs.experiment.job import Job, job_topology, slowdowns_of, slowest_of, topology_beside
from zsim.specs.topology.topology import Topology
from zsim.trace.stats import SimulationStats
from zsim.trace.trace import Trace

_MAX_DRAWN = 16  # ranks that are all simulated when they vary


OWN_NAME = "this job"


@dataclass(frozen=True, slots=True)
class JobTimes:
    """A co-located job on a fabric: seconds of its step in isolation and concurrently with the others."""

    name: str
    job: Job
    alone_seconds: float
    together_seconds: float
    steps: int


@dataclass(frozen=True)
class Outcome:
    """One simulated step, with the allocator of each program and the limit of each collective."""

    job: Job
    plan: Plan
    topology: Topology
    classes: Classes
    slowdowns: Floats
    prepared: Prepared
    """The input of its run, whose fabric is idle again."""
    trace: Trace
    stats: SimulationStats
    traffic: dict[str, LinkLoad]
    devices: tuple[DeviceTraffic, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    allocation: Allocation | None = None
    """That of torch's allocator of the fullest rank, if it was simulated."""
    settled: tuple[Settled, ...] = ()
    notes: tuple[str, ...] = ()
    calls: Mapping[Collective | PointToPoint, CallLimit] = field(default_factory=dict)
    meetings: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """By (group, simulated rank), the index of the communicator in which the rank waits for others."""
    peers: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By (simulated rank, op) of a call with messages, the calls that it exchanged messages with."""
    jittered: Jittered | None = None
    sent: Mapping[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)
    """Bytes per GPU inside its node and between nodes, by phase, kind of collective and group."""
    together: tuple[JobTimes, ...] = ()
    """All co-located jobs, this job first."""


def simulate_job(
    job: Job,
    *,
    unfold: bool = False,
    plan: Plan | None = None,
    is_for_network: bool = False,
    is_serial: bool = False,
    plans: Plans | None = None,
) -> Outcome:
    """Simulate a steady step, the steps that `[jitter]` draws, or a few while other `[jobs]` run theirs.

    One simulated rank represents all ranks of a class, which run the same program on equal hardware at
    symmetric positions. `unfold` simulates every rank instead. A given `plan` is run once, from an idle
    machine, without co-located jobs. `is_for_network` serves to compare fabrics: it leaves out the cost of a
    torch allocator that runs short, and groups that do the same are as slow as the slowest. With `is_serial`,
    kernels and collectives run one after the other. `plans` is the cache of plans that simulations share. A
    job that does not fit runs as if torch's allocator had room for it. A job that is `known_to_fit` does so
    only if its tensors exceed the GPU's memory.
    """
    plans = plans or Plans()
    began = time.perf_counter()
    topology = job_topology(job)
    slowdowns = slowdowns_of(job, topology)
    with garbage_collection.paused():
        if job.others and plan is None:
            outcome = _beside_others(job, topology, slowdowns, unfold, plans)
        else:
            outcome = _by_itself(
                job,
                topology,
                slowdowns,
                unfold,
                plan or plans.of(job),
                is_steady=plan is None,
                has_allocator=not is_for_network,
                by_links=not is_for_network,
                is_serial=is_serial,
            )
    stats = replace(outcome.stats, wall_seconds=time.perf_counter() - began)
    beside = node_ranks(outcome.topology, outcome.classes)
    trace = replace(outcome.trace, metadata={**outcome.trace.metadata, "node_ranks": beside})
    return replace(outcome, trace=trace, stats=stats)


def _by_itself(
    job: Job,
    topology: Topology,
    slowdowns: Floats,
    unfold: bool,
    plan: Plan,
    *,
    is_steady: bool = True,
    has_allocator: bool = False,
    by_links: bool = True,
    is_serial: bool = False,
) -> Outcome:
    """Simulate a job without co-located jobs. `has_allocator` simulates torch's allocator too. `by_links` is
    that of `find_classes`. With `is_steady` the step follows other steps.
    """
    jitter = job.jitter
    if jitter is not None and len(job.types) > 1 and plan.has_messages:
        raise NotSimulatedError(
            "jitter: a pipeline on nodes of several types is not simulated with jitter yet; leave "
            "out one of them"
        )
    unfold = unfold or (jitter is not None and job.world_size <= _MAX_DRAWN)
    classes, notes = find_classes(topology, plan, slowdowns, unfold=unfold, by_links=by_links)
    if jitter is not None and not unfold:
        classes = with_firsts_apart(topology, plan, slowdowns, classes)
    repeated = plan.once(twice) if is_steady and not plan.once(is_drained) else plan
    prepared = prepare(
        job, plan, repeated, topology, classes, slowdowns, simpy.Environment(), is_serial=is_serial
    )
    allocation: Allocation | None = None
    settled: tuple[Settled, ...] = ()
    if has_allocator and _has_allocator(job, plan):
        empty = [make_allocator(job, plan, repeated, number) for number in range(len(plan.programs))]
        prepared, run, allocation, settled = _with_allocators(prepared, run_once(prepared), empty)
    else:
        run = run_once(prepared)
    outcome = _outcome(prepared, run.executor, run.trace, notes)
    outcome = replace(outcome, allocation=allocation, settled=settled)
    if jitter is None:
        return outcome
    jittered = run_jittered(prepared, run, jitter)
    events = outcome.stats.events + jittered.events
    stats = replace(outcome.stats, events=events, steps=len(jittered.steps))
    return replace(outcome, trace=jittered.median, stats=stats, jittered=jittered)


def seconds_alone(job: Job) -> float:
    """Seconds of one steady step as `simulate_job` has them without jitter and other jobs, if torch's
    allocator has room. No trace is made, and no allocator is simulated.
    """
    topology, plan = job_topology(job), make_plan(job)
    slowdowns = slowdowns_of(job, topology)
    with garbage_collection.paused():
        classes, _ = find_classes(topology, plan, slowdowns, unfold=False)
        repeated = plan if plan.once(is_drained) else plan.once(twice)
        env = simpy.Environment()
        return run_once(prepare(job, plan, repeated, topology, classes, slowdowns, env)).step_seconds


def step_seconds_again(outcome: Outcome, *, is_serial: bool = False, connections: int | None = None) -> float:
    """Seconds of the step of an `outcome` of `simulate_job` without jitter and other jobs, if kernels and
    collectives ran one after the other (`is_serial`), or with `connections` hardware queues. Plan, classes
    and the allocators before the first step are taken from the outcome.
    """
    if is_serial:
        seconds = _serial_seconds(outcome)
        if seconds is not None:
            return seconds
    job, plan, classes = outcome.job, outcome.plan, outcome.classes
    if connections is not None:
        job = replace(job, training=replace(job.training, device_max_connections=connections))
    if len(classes.representatives) == job.world_size:  # maybe unfolded
        classes, _ = find_classes(outcome.topology, plan, outcome.slowdowns, unfold=False)
    repeated = plan if plan.once(is_drained) else plan.once(twice)
    with garbage_collection.paused():
        prepared = prepare(
            job, plan, repeated, outcome.topology, classes, outcome.slowdowns, simpy.Environment(),
            is_serial=is_serial,
        )  # fmt: skip
        run = run_once(prepared)
        times = [(lane.issue, lane.ended) for lane in _first_lanes(prepared, run)]
        if _have_room(prepared, outcome.settled, times):
            return run.step_seconds
        empty = [one.empty for one in outcome.settled]
        return _with_allocators(prepared, run, empty)[1].step_seconds


def _serial_seconds(outcome: Outcome) -> float | None:
    """Seconds of the step with kernels and collectives one after the other. None where they need a clock:
    with several simulated ranks, offloading or messages, or where an allocator runs short.
    """
    prepared = outcome.prepared
    if not is_one_rank(prepared):
        return None
    times = serial_times(prepared)
    has_room = _have_room(prepared, outcome.settled, [(times.issue, times.ended)])
    return times.step_seconds if has_room else None


def _have_room(
    prepared: Prepared,
    settled: Sequence[Settled],
    times: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> bool:
    """Whether the allocators, with results at other times in `steady_allocators`, have room at these `times`
    of issue and end, program by program. True also where none is simulated.
    """
    return all(
        has_room_at(priced.program, one.empty, one.allocation, *own)
        for one, priced, own in zip(settled, prepared.programs, times, strict=False)
    )


def _has_room(job: Job, plan: Plan) -> bool:
    """Whether a job's tensors fit, so that it is simulated with its allocator's waits."""
    return excess_bytes(job, plan, with_margin=not job.simulation.known_to_fit) <= 0


def _has_allocator(job: Job, plan: Plan) -> bool:
    """Whether torch's allocator is simulated: if all tensors fit, or if the job is known to have run."""
    if not (plan.changes_memory and job.cluster.gpu.has_caching_allocator):
        return False
    return job.simulation.known_to_fit or _has_room(job, plan)


def _first_lanes(prepared: Prepared, run: ProgramRun) -> list[Lane]:
    """The first simulated rank of each program."""
    program_of = prepared.program_of
    return [run.executor.lanes[program_of.index(n)] for n in range(len(prepared.plan.programs))]


def _with_allocators(
    prepared: Prepared, run: ProgramRun, empty: Sequence[Allocator]
) -> tuple[Prepared, ProgramRun, Allocation, tuple[Settled, ...]]:
    """The run, the allocation of the fullest rank, and the allocations of all programs. If the fullest rank's
    allocator runs short, the run is repeated with the allocators' delays. A job whose tensors do not fit is
    run as if they did. `initial` has each program's allocator before the first step.
    """
    job, plan = prepared.job, prepared.plan
    lanes = _first_lanes(prepared, run)
    allocators = tuple(one.copy() for one in empty)
    allocations = [
        settle_once(priced.program, one, lane.issue, lane.ended)
        for priced, one, lane in zip(prepared.programs, allocators, lanes, strict=True)
    ]
    settled = tuple(map(Settled, empty, allocations))
    whole = max(one.limit_bytes for one in allocations) if len(job.cluster.gpus) > 1 else 0
    fullest = max(  # of GPUs of several sizes, the one with the least room left
        range(len(allocations)),
        key=lambda n: (
            allocations[n].counts.retries,
            allocations[n].reserved_bytes + (whole - allocations[n].limit_bytes if whole else 0),
        ),
    )
    allocation = allocations[fullest]
    if not allocation.is_short or not _has_room(job, plan):
        return prepared, run, allocation, settled
    short = replace(prepared, allocators=allocators)
    held = run_once(short)
    allocator = _first_lanes(short, held)[fullest].allocator
    assert allocator is not None
    memory, limit = allocator.memory, allocation.limit_bytes
    allocation = replace(
        allocation,
        active_bytes=memory.peak_active_bytes,
        reserved_bytes=min(memory.peak_reserved_bytes, limit),
        counts=allocator.counts,
        extra_seconds=held.step_seconds - run.step_seconds,
    )
    return short, held, allocation, settled


def _beside_others(job: Job, topology: Topology, slowdowns: Floats, unfold: bool, plans: Plans) -> Outcome:
    """The job's step while its co-located jobs run theirs, and the times of each job in isolation and
    concurrently. The cost of allocators that run short is left out.
    """
    if job.jitter is not None:
        raise NotSimulatedError(
            "jitter of jobs that share a fabric is not simulated yet; leave out one of them"
        )
    all_placed = {OWN_NAME: ConcurrentJob(job, topology, slowdowns, plans.of(job))}
    for name, other in job.others.items():
        place = topology_beside(topology, other)
        slow = kernel_slowdowns(place, job.faults, is_beside=True) * slowest_of(other)
        all_placed[name] = ConcurrentJob(other, place, slow, plans.of(other))
    alone = [
        _by_itself(one.job, one.topology, one.slowdowns, unfold, one.plan) for one in all_placed.values()
    ]
    loops, notes = run_together(list(all_placed.values()), unfold=unfold)
    own = loops[0]
    outcome = _outcome(own.prepared, own.executor, own.typical, notes)
    times = [
        JobTimes(name, placed.job, by_itself.trace.step_seconds, loop.typical.step_seconds, len(loop.traces))
        for (name, placed), by_itself, loop in zip(all_placed.items(), alone, loops, strict=True)
    ]
    if job.cluster.gpu.has_caching_allocator:
        notes = (*notes, "jobs that share a fabric are simulated without torch's allocator: what it would "
                 "cost one that runs short is left out")  # fmt: skip
    tight = [name for name, placed in all_placed.items() if name != OWN_NAME and not _fits(placed)]
    notes = (*notes, *(f"job '{name}' does not fit its GPUs; it runs as if it did" for name in tight))
    seconds = outcome.trace.step_seconds
    beside = sum(loop.prepared.link_bytes * seconds / loop.typical.step_seconds for loop in loops[1:])
    stats = replace(outcome.stats, events=sum(loop.events for loop in loops))
    traffic = own.prepared.fabric.loads(own.prepared.link_bytes, beside)
    return replace(outcome, stats=stats, traffic=traffic, notes=notes, together=tuple(times))


def _fits(placed: ConcurrentJob) -> bool:
    return excess_bytes(placed.job, placed.plan) <= 0


def _outcome(prepared: Prepared, executor: Executor, trace: Trace, notes: tuple[str, ...]) -> Outcome:
    """The outcome of a run of `executor`, with `trace` as its step."""
    fabric, offload, ranks = prepared.fabric, prepared.offload, prepared.classes.representatives
    return Outcome(
        job=prepared.job,
        plan=prepared.plan,
        topology=prepared.topology,
        classes=prepared.classes,
        slowdowns=prepared.slowdowns,
        prepared=prepared,
        trace=trace,
        stats=SimulationStats(
            wall_seconds=0.0,
            events=executor.num_events + fabric.num_transfers,
            rank_classes=len(ranks),
            world_size=prepared.job.world_size,
        ),
        traffic=fabric.loads(prepared.link_bytes),
        devices=offload.traffic(trace.step_seconds),
        limits=offload.limits(),
        notes=notes,
        calls=prepared.call_limits(),
        peers=_peers(prepared, executor),
        meetings={
            (name, rank): fabric.communicator_of(name, rank)
            for name in prepared.plan.groups
            for rank in ranks
        },
        sent=sent_by_phase(prepared.plan, fabric),
    )


def _peers(prepared: Prepared, executor: Executor) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """By (rank, op) of a step, the (rank, op) that it exchanged messages with in the last run."""
    programs = prepared.plan.programs
    first = {
        lane.rank: lane.program.num_ops - len(programs[program].ops)
        for lane, program in zip(executor.lanes, prepared.program_of, strict=True)
    }
    return {
        (lane.rank, op - first[lane.rank]): tuple((other, n - first[other]) for other, n in others)
        for lane in executor.lanes
        for op, others in lane.peers.items()
        if op >= first[lane.rank]
    }
