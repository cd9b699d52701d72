"""Simulate one job: plan, classes, executor and allocator. The result is an `Outcome`.

# [Note: co-located jobs]
Jobs share one fabric and one clock. All jobs start at the same instant, and every job repeats its step until
each has run `_ROUNDS` rounds. They share links as the flows of one job do. All other resources are per job.
The first round of each job is not counted, because the other jobs are not in their steady state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import simpy

from zsim import garbage_collection
from zsim.arrays import Floats
from zsim.cost.collectives.rounds import CallLimit
from zsim.devices.allocator import Allocator
from zsim.engine.allocation import Allocation, SteadyAllocator, has_room_at, make_allocator, steady_state
from zsim.engine.executor import Executor
from zsim.engine.folding import find_classes, find_concurrent_classes, isolate_first_ranks, node_ranks
from zsim.engine.jitter.steps import JitterRun, ProgramRun, draw_steps, run_once
from zsim.engine.micro_batch_period import Period, find_period
from zsim.engine.offload import DeviceTraffic
from zsim.engine.one_stream import is_one_rank, serial_times
from zsim.engine.prepare import PreparedJob, StepRequest, prepare
from zsim.engine.record import make_trace
from zsim.engine.simulated_rank import SimulatedRank
from zsim.errors import NotSimulatedError
from zsim.fabric.communicators import LinkLoad
from zsim.fabric.fabric import Fabric, connect
from zsim.fabric.folding.classes import RankClasses
from zsim.fabric.messages import sends
from zsim.plan.columns import op_columns
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import excess_bytes
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.plan.passes.repeated_step import is_drained
from zsim.plan.plans import Plans
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.experiment.faults import kernel_slowdowns
from zsim.specs.experiment.job import Job, colocated_topology, slowest_gpu_slowdown
from zsim.specs.topology.topology import Topology
from zsim.trace.trace import SimulationStats, Trace

_MAX_JITTER_RANKS = 16  # ranks that are all simulated when they vary
LOOP_COUNTS = (6, 12)  # micro-batches of a step in which a loop is looked for


THIS_JOB = "this job"


@dataclass(frozen=True, slots=True)
class JobTimes:
    """A co-located job on a fabric: seconds of its step in isolation and concurrently with the others."""

    name: str
    job: Job
    isolated_seconds: float
    concurrent_seconds: float
    steps: int


@dataclass(frozen=True)
class Outcome:
    """One simulated step, with the allocator of each program and the limit of each collective."""

    job: Job
    plan: Plan
    topology: Topology
    classes: RankClasses
    slowdowns: Floats
    prepared: PreparedJob
    """The input of its run, whose fabric is idle again."""
    trace: Trace
    stats: SimulationStats
    traffic: dict[str, LinkLoad]
    devices: tuple[DeviceTraffic, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    allocation: Allocation | None = None
    """That of torch's allocator of the fullest rank, if it was simulated."""
    steady_allocators: tuple[SteadyAllocator, ...] = ()
    notes: tuple[str, ...] = ()
    call_limits: Mapping[Collective | PointToPoint, CallLimit] = field(default_factory=dict)
    communicators: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """By (group, simulated rank), the index of the communicator in which the rank waits for others."""
    peers: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """By (simulated rank, op) of a call with messages, the calls that it exchanged messages with."""
    jitter_run: JitterRun | None = None
    sent_bytes: Mapping[tuple[str, str, str], tuple[float, float]] = field(default_factory=dict)
    """Bytes per GPU inside its node and between nodes, by phase, kind of collective and group."""
    concurrent_jobs: tuple[JobTimes, ...] = ()
    """All co-located jobs, this job first."""
    period: Period | None = None
    """What a further micro-batch adds, in a step of one of `LOOP_COUNTS`, where it is known."""


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
    only if its tensors exceed the GPU's memory, or with expandable segments its usable part.
    """
    plans = plans or Plans()
    start_time = time.perf_counter()
    with garbage_collection.pause():
        if job.colocated_jobs and plan is None:
            outcome = _simulate_jobs(job, unfold, plans)
        else:
            request = replace(
                StepRequest.of(job, plan or plans.of(job)),
                is_steady=plan is None,
                is_serial=is_serial,
                is_for_network=is_for_network,
            )
            outcome = _simulate_isolated(request, unfold, has_allocator=not is_for_network)
    stats = replace(outcome.stats, wall_seconds=time.perf_counter() - start_time)
    ranks_of_node = node_ranks(outcome.topology, outcome.classes)
    trace = replace(outcome.trace, metadata={**outcome.trace.metadata, "node_ranks": ranks_of_node})
    return replace(outcome, trace=trace, stats=stats)


def _simulate_isolated(request: StepRequest, unfold: bool, *, has_allocator: bool = False) -> Outcome:
    """Simulate a job without co-located jobs. `has_allocator` simulates torch's allocator too."""
    job, plan, jitter = request.job, request.plan, request.job.jitter
    if jitter is not None and len(job.types) > 1 and plan.has_messages:
        raise NotSimulatedError(
            "jitter: a pipeline on nodes of several types is not simulated with jitter yet; leave "
            "out one of them"
        )
    unfold = unfold or (jitter is not None and job.world_size <= _MAX_JITTER_RANKS)
    classes, notes = find_classes(request, unfold=unfold)
    if jitter is not None and not unfold:
        classes = isolate_first_ranks(request, classes)
    prepared = prepare(request, classes, simpy.Environment())
    allocation: Allocation | None = None
    steady_allocators: tuple[SteadyAllocator, ...] = ()
    if has_allocator and _has_allocator(job, plan):
        prepared, run, allocation, steady_allocators = _run_allocators(
            prepared, run_once(prepared), _new_allocators(request)
        )
    else:
        run = run_once(prepared)
    outcome = _outcome(prepared, run.executor, run.trace, notes)
    outcome = replace(outcome, allocation=allocation, steady_allocators=steady_allocators)
    if jitter is None:
        has_loop = job.training.gradient_accumulation_steps in LOOP_COUNTS and not prepared.allocators
        return replace(outcome, period=find_period(prepared, run.executor.ranks) if has_loop else None)
    jitter_run = draw_steps(prepared, run, jitter)
    events = outcome.stats.events + jitter_run.events
    stats = replace(outcome.stats, events=events, steps=len(jitter_run.steps))
    return replace(outcome, trace=jitter_run.median, stats=stats, jitter_run=jitter_run)


def isolated_seconds(job: Job) -> float:
    """Seconds of one steady step as `simulate_job` has them without jitter and other jobs, if torch's
    allocator has room. No trace is made, and no allocator is simulated.
    """
    request = StepRequest.of(job, make_plan(job))
    with garbage_collection.pause():
        classes, _ = find_classes(request, unfold=False)
        return run_once(prepare(request, classes, simpy.Environment())).step_seconds


def resimulate_seconds(outcome: Outcome, *, is_serial: bool = False, connections: int | None = None) -> float:
    """Seconds of the step of an `outcome` of `simulate_job` without jitter and other jobs, if kernels and
    collectives ran one after the other (`is_serial`), or with `connections` hardware queues. Plan, classes
    and the allocators before the first step are taken from the outcome.
    """
    if is_serial:
        seconds = _serial_seconds(outcome)
        if seconds is not None:
            return seconds
    job = outcome.job
    if connections is not None:
        job = replace(job, training=replace(job.training, device_max_connections=connections))
    request = StepRequest(job, outcome.plan, outcome.topology, outcome.slowdowns, is_serial=is_serial)
    return _resimulate(
        request,
        outcome.classes,
        outcome.steady_allocators,
        lambda: [allocator.initial for allocator in outcome.steady_allocators],
    )


def resimulate_with_hosts(outcome: Outcome, cluster: Cluster) -> float:
    """Seconds of the step of an `outcome` of `simulate_job` without jitter and other jobs, on an idle machine
    whose `cluster` differs only in its hosts' speeds. Plan, links, classes, and allocators that still have
    room are taken from the outcome.
    """
    job, plan = replace(outcome.job, cluster=cluster), outcome.plan
    request = StepRequest(job, plan, outcome.topology, outcome.slowdowns, is_steady=False)
    return _resimulate(
        request,
        outcome.classes,
        outcome.steady_allocators if plan.memoize(is_drained) else (),
        lambda: _new_allocators(request) if _has_allocator(job, plan) else [],
    )


def _resimulate(
    request: StepRequest,
    classes: RankClasses,
    steady_allocators: Sequence[SteadyAllocator],
    initial_allocators: Callable[[], Sequence[Allocator]],
) -> float:
    """Seconds of a step. `steady_allocators` are those of its programs at other times. Where one of them
    has no room at the new times, all start again from `initial_allocators`, of which there are none where no
    allocator is simulated.
    """
    with garbage_collection.pause():
        if len(classes.representatives) == request.job.world_size:  # maybe unfolded
            classes, _ = find_classes(request, unfold=False)
        prepared = prepare(request, classes, simpy.Environment())
        run = run_once(prepared)
        times = [(rank.issue, rank.ended) for rank in _first_ranks(prepared, run)]
        if steady_allocators and _have_room(prepared, steady_allocators, times):
            return run.step_seconds
        allocators = initial_allocators()
        return _run_allocators(prepared, run, allocators)[1].step_seconds if allocators else run.step_seconds


def _new_allocators(request: StepRequest) -> list[Allocator]:
    """Each program's allocator before the first step."""
    return [
        make_allocator(request.job, request.plan, request.repeated_plan, number)
        for number in range(len(request.plan.programs))
    ]


def _serial_seconds(outcome: Outcome) -> float | None:
    """Seconds of the step with kernels and collectives one after the other. None where they need a clock:
    with several simulated ranks, offloading or messages, or where an allocator runs short.
    """
    prepared = outcome.prepared
    if not is_one_rank(prepared):
        return None
    times = serial_times(prepared)
    has_room = _have_room(prepared, outcome.steady_allocators, [(times.issue, times.ended)])
    return times.step_seconds if has_room else None


def _have_room(
    prepared: PreparedJob,
    steady_allocators: Sequence[SteadyAllocator],
    times: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> bool:
    """Whether the allocators have room when ops are issued and end at `times`, program by program.
    `steady_allocators` have the results at other times. True also where no allocator is simulated.
    """
    return all(
        has_room_at(priced.program, allocator.initial, allocator.allocation, *run_times)
        for allocator, priced, run_times in zip(steady_allocators, prepared.programs, times, strict=False)
    )


def _has_room(job: Job, plan: Plan) -> bool:
    """Whether a job's tensors fit, so that it is simulated with its allocator's waits."""
    return excess_bytes(job, plan, includes_margin=not job.simulation.known_to_fit) <= 0


def _is_known_to_have_room(job: Job, plan: Plan) -> bool:
    """Whether a job ran although it was said not to fit. Expandable segments leave no gaps between blocks, so
    that an allocator that runs short then is one more sign that the tensors are overestimated, as where they
    exceed the memory of a job that is known to have run.
    """
    is_known = job.simulation.known_to_fit and job.training.expandable_segments
    return is_known and excess_bytes(job, plan, includes_margin=True) > 0


def _has_allocator(job: Job, plan: Plan) -> bool:
    """Whether torch's allocator is simulated: if all tensors fit, or if the job is known to have run."""
    if not (plan.changes_memory and job.cluster.gpu.has_caching_allocator):
        return False
    return job.simulation.known_to_fit or _has_room(job, plan)


def _first_ranks(prepared: PreparedJob, run: ProgramRun) -> list[SimulatedRank]:
    """The first simulated rank of each program."""
    program_of = prepared.program_of
    return [run.executor.ranks[program_of.index(n)] for n in range(len(prepared.plan.programs))]


def _run_allocators(
    prepared: PreparedJob, run: ProgramRun, initial_allocators: Sequence[Allocator]
) -> tuple[PreparedJob, ProgramRun, Allocation, tuple[SteadyAllocator, ...]]:
    """The run, the allocation of the fullest rank, and the allocations of all programs. If the fullest rank's
    allocator runs short, the run is repeated with the allocators' delays. A job whose tensors do not fit is
    run as if they did. `initial_allocators` has each program's allocator before the first step.
    """
    job, plan = prepared.job, prepared.plan
    ranks = _first_ranks(prepared, run)
    allocators = tuple(allocator.copy() for allocator in initial_allocators)
    allocations = [
        steady_state(priced.program, allocator, rank.issue, rank.ended)
        for priced, allocator, rank in zip(prepared.programs, allocators, ranks, strict=True)
    ]
    steady_allocators = tuple(map(SteadyAllocator, initial_allocators, allocations))
    capacity = max(allocation.limit_bytes for allocation in allocations) if len(job.cluster.gpus) > 1 else 0
    fullest = max(  # of GPUs of several sizes, the one with the least room left
        range(len(allocations)),
        key=lambda n: (
            allocations[n].counts.retries,
            allocations[n].reserved_bytes + (capacity - allocations[n].limit_bytes if capacity else 0),
        ),
    )
    allocation = allocations[fullest]
    if not allocation.is_short or not _has_room(job, plan) or _is_known_to_have_room(job, plan):
        return prepared, run, allocation, steady_allocators
    short_job = replace(prepared, allocators=allocators)
    short_run = run_once(short_job)
    allocator = _first_ranks(short_job, short_run)[fullest].allocator
    assert allocator is not None
    memory, limit = allocator.memory, allocation.limit_bytes
    allocation = replace(
        allocation,
        active_bytes=memory.peak_active_bytes,
        reserved_bytes=min(memory.peak_reserved_bytes, limit),
        counts=allocator.counts,
        extra_seconds=short_run.step_seconds - run.step_seconds,
    )
    return short_job, short_run, allocation, steady_allocators


def _simulate_jobs(job: Job, unfold: bool, plans: Plans) -> Outcome:
    """The job's step while its co-located jobs run theirs, and the times of each job in isolation and
    concurrently. The cost of allocators that run short is left out.
    """
    if job.jitter is not None:
        raise NotSimulatedError(
            "jitter of jobs that share a fabric is not simulated yet; leave out one of them"
        )
    requests = {THIS_JOB: StepRequest.of(job, plans.of(job))}
    for name, other_job in job.colocated_jobs.items():
        other_topology = colocated_topology(requests[THIS_JOB].topology, other_job)
        other_slowdowns = kernel_slowdowns(
            other_topology, job.faults, is_colocated=True
        ) * slowest_gpu_slowdown(other_job)
        requests[name] = StepRequest(other_job, plans.of(other_job), other_topology, other_slowdowns)
    isolated_outcomes = [_simulate_isolated(request, unfold) for request in requests.values()]
    loops, notes = run_concurrently(list(requests.values()), unfold=unfold)
    this_loop = loops[0]
    outcome = _outcome(this_loop.prepared, this_loop.executor, this_loop.median_step, notes)
    job_times = [
        JobTimes(
            name,
            request.job,
            isolated_outcome.trace.step_seconds,
            loop.median_step.step_seconds,
            len(loop.traces),
        )
        for (name, request), isolated_outcome, loop in zip(
            requests.items(), isolated_outcomes, loops, strict=True
        )
    ]
    if job.cluster.gpu.has_caching_allocator:
        notes = (*notes, "jobs that share a fabric are simulated without torch's allocator: what it would "
                 "cost one that runs short is left out")  # fmt: skip
    others = {name: request for name, request in requests.items() if name != THIS_JOB}
    misfits = [name for name, request in others.items() if excess_bytes(request.job, request.plan) > 0]
    notes = (*notes, *(f"job '{name}' does not fit its GPUs; it runs as if it did" for name in misfits))
    seconds = outcome.trace.step_seconds
    background = sum(loop.prepared.link_bytes * seconds / loop.median_step.step_seconds for loop in loops[1:])
    stats = replace(outcome.stats, events=sum(loop.events for loop in loops))
    traffic = this_loop.prepared.fabric.loads(this_loop.prepared.link_bytes, background)
    return replace(outcome, stats=stats, traffic=traffic, notes=notes, concurrent_jobs=tuple(job_times))


def _outcome(prepared: PreparedJob, executor: Executor, trace: Trace, notes: tuple[str, ...]) -> Outcome:
    """The outcome of a run of `executor`, with `trace` as its step."""
    fabric, offload, ranks = prepared.fabric, prepared.offload, prepared.classes.representatives
    return Outcome(
        job=prepared.job,
        plan=prepared.plan,
        topology=prepared.request.topology,
        classes=prepared.classes,
        slowdowns=prepared.request.slowdowns,
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
        call_limits=prepared.call_limits(),
        peers=_peers(prepared, executor),
        communicators={
            (name, rank): fabric.communicator_of(name, rank)
            for name in prepared.plan.groups
            for rank in ranks
        },
        sent_bytes=_sent_by_phase(prepared.plan, fabric),
    )


def _peers(prepared: PreparedJob, executor: Executor) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
    """By (rank, op) of a step, the (rank, op) that it exchanged messages with in the last run."""
    programs = prepared.plan.programs
    first_op = {
        rank.number: rank.program.num_ops - len(programs[program].ops)
        for rank, program in zip(executor.ranks, prepared.program_of, strict=True)
    }
    return {
        (rank.number, op - first_op[rank.number]): tuple(
            (peer, peer_op - first_op[peer]) for peer, peer_op in calls
        )
        for rank in executor.ranks
        for op, calls in rank.peers.items()
        if op >= first_op[rank.number]
    }


def _sent_by_phase(plan: Plan, fabric: Fabric) -> dict[tuple[str, str, str], tuple[float, float]]:
    """(bytes inside the node, bytes between nodes) per GPU and step, by phase, kind of collective and
    group."""
    totals: dict[tuple[str, str, str], tuple[float, float]] = {}
    for (number, phase, group, work), count in plan.memoize(_calls_by_phase).items():
        if fabric.groups[work.group].size > 1:
            inside, between = fabric.sent_bytes(work, number)
            key = phase, work.kind, group
            totals_before = totals.get(key, (0.0, 0.0))
            totals[key] = totals_before[0] + count * inside, totals_before[1] + count * between
    return totals


def _calls_by_phase(plan: Plan) -> Counter[tuple[int, str, str, Collective]]:
    """How often a rank makes a call in a step, by program, phase and the call's group (for messages, the
    group of their ranks).
    """
    calls: Counter[tuple[int, str, str, Collective]] = Counter()
    for number, program in enumerate(plan.programs):
        columns = program.memoize(op_columns)
        # by identity: ops share works, and equal works take long to compare
        num_issued = Counter(zip(columns.phase, map(id, columns.work), strict=True))
        for (phase, work_id), count in num_issued.items():
            call = program.unique_work.get(work_id)
            if not isinstance(call, Collective | PointToPoint):
                continue
            for work in [call] if isinstance(call, Collective) else sends(call, plan.groups):
                calls[number, phase, call.group, work] += count
    return calls


_ROUNDS = 4  # per job; the first is not counted


@dataclass
class JobLoop:
    """A job that repeats its step until all jobs have run enough rounds."""

    prepared: PreparedJob
    all_done: simpy.Event
    loops: list[JobLoop] = field(default_factory=list)
    """The loops of all jobs, this one included."""
    traces: list[Trace] = field(default_factory=list)
    """Its counted steps."""
    rounds: int = 0
    events: int = 0
    executor: Executor = field(init=False)

    def begin(self) -> None:
        """Start a round."""
        self.executor = self.prepared.executor()
        self.executor.on_finish = self._finish
        self.executor.begin()

    def _finish(self) -> None:
        executor, prepared = self.executor, self.prepared
        self.rounds += 1
        self.events += executor.num_events
        if self.rounds > 1:
            self.traces.append(make_trace(prepared.job, prepared.plan, executor, executor.end()))
        if all(loop.rounds >= _ROUNDS for loop in self.loops):
            self.all_done.succeed()
        else:
            self.begin()

    @property
    def median_step(self) -> Trace:
        """The counted step of median length (the shorter of two)."""
        order = sorted(range(len(self.traces)), key=lambda n: (self.traces[n].step_seconds, n))
        return self.traces[order[(len(order) - 1) // 2]]


def run_concurrently(
    requests: Sequence[StepRequest], *, unfold: bool
) -> tuple[list[JobLoop], tuple[str, ...]]:
    """The jobs' loops after they have run, and notes on the approximations of their classes.

    Raises StuckError if the clock stops with work left.
    """
    env = simpy.Environment()
    classes, notes = find_concurrent_classes(requests, unfold=unfold)
    prepared = [
        prepare(request, job_classes, env, is_connected=False)
        for request, job_classes in zip(requests, classes, strict=True)
    ]
    connect([prepared_job.fabric for prepared_job in prepared])
    all_done = env.event()
    loops = [JobLoop(prepared_job, all_done) for prepared_job in prepared]
    for loop in loops:
        loop.loops = loops
        loop.begin()
    try:
        env.run(until=all_done)
    except RuntimeError:  # simpy: no events are left
        for loop in loops:
            loop.executor.end()
        raise
    return loops, notes
