"""Bubbles of pipelines made by hand, against the papers' fraction and against times added up by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.pipelines import (
    BACK,
    ON,
    PIPELINE,
    Schedule,
    Stage,
    gpipe,
    groups_of,
    one_f_one_b,
    pipeline_plan,
    without_latency,
)
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import KernelPricer
from zsim.engine.simulate import Outcome, simulate_job
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Group, Message, Plan
from zsim.report.breakdown import Breakdown, step_breakdown
from zsim.report.pipeline import Bubbles, is_pipeline, mark_bubbles
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SHORT, LONG = Kernel("copy", 0.0, 3e9), Kernel("copy", 0.0, 7e9)  # 1 and 2 ms


def job_of(gpus: int, **data: object) -> Job:
    return resolve(Experiment(model="llama-2-7b", cluster="dgx-h100", gpus=gpus, **data))  # type: ignore[arg-type]


def free_job(gpus: int, **data: object) -> Job:
    """Messages of no bytes and launches take no time."""
    job = without_latency(job_of(gpus, **data))
    host = job.cluster.host.model_copy(update={"seconds_per_launch": 0.0})
    return replace(job, cluster=job.cluster.model_copy(update={"host": host}))


def seconds_of(kernel: Kernel, job: Job) -> float:
    return KernelPricer(job.cluster.gpu).seconds(kernel)


def breakdown_of(outcome: Outcome, rank: int) -> Breakdown:
    bubbles = Bubbles(outcome.plan, outcome.trace, outcome.peers).intervals(rank)
    return mark_bubbles(step_breakdown(outcome.trace, rank), bubbles)


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 8), (8, 3), (3, 1)])
@pytest.mark.parametrize("kernels", [(SHORT, LONG), (LONG, SHORT)])
def test_equal_stages_idle_the_papers_part_of_the_step(
    schedule: Schedule, stages: int, micro_batches: int, kernels: tuple[Kernel, Kernel]
) -> None:
    """(p - 1) / (m + p - 1) of the step on every rank (GPipe, Huang et al. 2019, section 2.3; Narayanan et
    al. 2021, section 2.2.1, has it over the ideal time), where messages are free."""
    job = free_job(stages, placement={"gpus_per_node": [stages]})
    plan = pipeline_plan(schedule, stages, micro_batches, kernels, sent_bytes=0)
    outcome = simulate_job(job, plan=plan)
    step = outcome.trace.step_seconds
    both = sum(seconds_of(kernel, job) for kernel in kernels)
    for rank in range(stages):
        seconds = breakdown_of(outcome, rank).seconds
        assert seconds["bubble"] == pytest.approx((stages - 1) * both, rel=1e-9)
        assert seconds["bubble"] / step == pytest.approx(
            (stages - 1) / (micro_batches + stages - 1), rel=1e-9
        )
        assert seconds["compute"] == pytest.approx(micro_batches * both, rel=1e-9)
        assert sum(seconds.values()) == pytest.approx(step, rel=1e-12)


def test_a_message_s_own_time_is_exposed_and_its_wait_a_bubble() -> None:
    """Two stages, one micro-batch, 1 GiB each way: the first forwards, the message goes, the second forwards
    and backs, the message returns, the first backs. Each rank idles while the other computes, and while it
    waits for what the other then has to deliver; the transfer of that is exposed: the first's own send goes
    out in a bubble, and so does the second's, which is in the drain."""
    job = job_of(2, placement={"gpus_per_node": [2]})
    plan = pipeline_plan(gpipe, 2, 1, (SHORT, LONG), sent_bytes=2**30)
    outcome = simulate_job(job, plan=plan)
    forward, backward = seconds_of(SHORT, job), seconds_of(LONG, job)
    (first, second) = (breakdown_of(outcome, rank).seconds for rank in range(2))
    message = next(
        end - start for _, info, start, end in outcome.trace.select_rank(0).rows() if info.kind == "send"
    )
    launch = job.cluster.host.seconds_per_launch
    assert message > 2e-3
    assert first["bubble"] == pytest.approx(message + forward + backward, rel=1e-2)
    assert second["bubble"] == pytest.approx(launch + message + forward + backward, rel=1e-2)
    for seconds in (first, second):
        assert seconds["exposed_communication"] == pytest.approx(message, rel=1e-2)
        assert sum(seconds.values()) == pytest.approx(outcome.trace.step_seconds, rel=1e-12)


def test_the_slowest_stage_has_the_least_bubble() -> None:
    """3 stages and 6 micro-batches, the middle one twice as slow: it idles while the first forwards once and
    the last forwards and backs once and the first backs, the others for all but their own six rounds."""
    job = free_job(3, placement={"gpus_per_node": [3]})
    slow = (Kernel("copy", 0.0, 6e9), Kernel("copy", 0.0, 14e9))
    plan = pipeline_plan(gpipe, 3, 6, [(SHORT, LONG), slow, (SHORT, LONG)], sent_bytes=0)
    outcome = simulate_job(job, plan=plan)
    f, b, slow_f, slow_b = (seconds_of(kernel, job) for kernel in (SHORT, LONG, *slow))
    step = 6 * (slow_f + slow_b) + 2 * (f + b)
    bubbles = [breakdown_of(outcome, rank).seconds["bubble"] for rank in range(3)]
    assert bubbles == pytest.approx([step - 6 * (f + b), 2 * (f + b), step - 6 * (f + b)], rel=1e-9)


def reduced_plan(stages: int, micro_batches: int, gradient_bytes: int, stream: str) -> Plan:
    """1F1B whose stages reduce their gradients on `stream` when they have done their last backward, and then
    meet in an all-reduce of the world, as for the gradient norm; two replicas."""
    groups = groups_of(stages, 2)
    world = Group.regular("world", 2 * stages)
    programs = []
    for number in range(stages):
        stage = Stage(number, stages, [*groups, world], (SHORT, LONG), sent_bytes=0)
        one_f_one_b(stage, micro_batches)
        stage.builder.wait_stream(stream, COMPUTE)
        stage.builder.collective("all_reduce", gradient_bytes, "fp32", "data", stream=stream)
        stage.builder.wait_stream(COMPUTE, stream)
        stage.builder.phase = "optimizer"
        stage.builder.collective("all_reduce", 4, "fp32", "world", stream=COMPUTE, name="norm")
        stage.builder.kernels("update", [SHORT])
        programs.append(stage.builder.program((), f"pipeline rank {number}"))
    named = {group.name: group for group in [*groups, world]}
    return Plan("by hand", tuple(programs), np.repeat(np.arange(stages), 2), named)


@pytest.mark.parametrize("stream", [COMPUTE, "data"])
def test_gradients_reduced_in_the_drain_are_bubble_and_the_last_stage_to_end_is_exposed(stream: str) -> None:
    """4 stages, 8 micro-batches. Backward ends on rank r at (p - 1 - r) backwards before the end on rank 0; a
    reduction of about a millisecond hides in the drain of ranks 0 < r, and shows on rank 0. What all wait
    for it is no bubble: another stage delivers nothing any more."""
    job = free_job(8)
    outcome = simulate_job(job, plan=reduced_plan(4, 8, 2**28, stream))
    both = seconds_of(SHORT, job) + seconds_of(LONG, job)
    reduction, norm = (
        end - start
        for _, info, start, end in outcome.trace.select_rank(0).rows()
        if info.kind == "all_reduce"
    )
    assert 5e-4 < reduction < seconds_of(LONG, job)
    ranks = sorted({int(rank) for rank in outcome.trace.ranks})
    for rank in ranks:
        seconds = breakdown_of(outcome, rank).seconds
        assert seconds["bubble"] == pytest.approx(3 * both, rel=1e-6)
        assert seconds["exposed_communication"] == pytest.approx(reduction + norm, rel=1e-6)
        assert sum(seconds.values()) == pytest.approx(outcome.trace.step_seconds, rel=1e-12)
    assert len(ranks) == 4


def test_communication_that_runs_in_a_bubble_does_not_end_it() -> None:
    """The second of two stages gathers 2 GiB at the step's beginning, and its forward waits for that too: the
    lead-in is a bubble up to the message, and what the gather then still takes is exposed."""
    job = free_job(4)
    groups = groups_of(2, 2)
    programs = []
    for number in range(2):
        stage = Stage(number, 2, groups, (SHORT, LONG), sent_bytes=0)
        if number == 1:
            gather = stage.builder.collective("all_gather", 2**31, "bf16", "data", stream="gather")
            stage.builder.stream_wait(COMPUTE, gather)
        gpipe(stage, 1)
        programs.append(stage.builder.program((), f"pipeline rank {number}"))
    named = {group.name: group for group in groups}
    plan = Plan("by hand", tuple(programs), np.array([0, 0, 1, 1]), named)
    outcome = simulate_job(job, plan=plan)
    gathered = next(
        end for _, info, _, end in outcome.trace.select_rank(2).rows() if info.kind == "all_gather"
    )
    forward, backward = seconds_of(SHORT, job), seconds_of(LONG, job)
    assert gathered > 1.5 * forward
    seconds = breakdown_of(outcome, 2).seconds
    assert seconds["exposed_communication"] == pytest.approx(gathered - forward, rel=1e-6)
    assert seconds["bubble"] == pytest.approx(forward + backward, rel=1e-6)


def test_a_slow_pipeline_beside_lets_no_bubble_grow() -> None:
    """Two pipelines of which one has a slow GPU: the other waits for it in the reduction of gradients, which
    is exposed communication and no bubble, since no stage of its own keeps it waiting."""
    job = free_job(8, faults=FaultsTable(slow_gpus={"1": 2.0}))
    plan = pipeline_plan(one_f_one_b, 4, 8, (SHORT, LONG), replicas=2, sent_bytes=0, gradient_bytes=2**20)
    outcome = simulate_job(job, plan=plan, unfold=True)
    both = seconds_of(SHORT, job) + seconds_of(LONG, job)
    for rank in (0, 2, 4, 6):
        assert breakdown_of(outcome, rank).seconds["bubble"] == pytest.approx(3 * both, rel=1e-6)
    assert breakdown_of(outcome, 0).seconds["exposed_communication"] > 5 * both
    assert breakdown_of(outcome, 3).seconds["bubble"] > 8 * both


def test_a_rank_that_is_over_waits_for_the_others_communication() -> None:
    """Without an end that all share, the last stage has reduced its gradients in the drain; from there on it
    waits while the first stage reduces its own: 1 GB over NVLink, in which the others wait too."""
    job = free_job(8)
    plan = pipeline_plan(one_f_one_b, 4, 8, (SHORT, LONG), replicas=2, sent_bytes=0, gradient_bytes=10**9)
    outcome = simulate_job(job, plan=plan)
    both = seconds_of(SHORT, job) + seconds_of(LONG, job)
    reduction = outcome.trace.step_seconds - 11 * both
    assert 1e-3 < reduction < 1e-2
    bubbles = Bubbles(outcome.plan, outcome.trace, outcome.peers)
    for rank in (0, 2, 4, 6):
        seconds = bubbles.split_breakdown(step_breakdown(outcome.trace, rank), rank).seconds
        assert seconds["bubble"] == pytest.approx(3 * both, rel=1e-6)
        assert seconds["exposed_communication"] == pytest.approx(reduction, rel=1e-6)
        assert seconds["host_bound"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
def test_a_folded_pipeline_has_the_bubbles_of_an_unfolded_one(schedule: Schedule) -> None:
    plan = pipeline_plan(schedule, 4, 6, (SHORT, LONG), replicas=8, sent_bytes=2**27, gradient_bytes=10**9)
    folded, unfolded = (simulate_job(job_of(32), plan=plan, unfold=unfold) for unfold in (False, True))
    for rank in folded.classes.representatives:
        one, other = breakdown_of(folded, rank).seconds, breakdown_of(unfolded, rank).seconds
        assert one["bubble"] > 0
        assert list(one.values()) == pytest.approx(list(other.values()), rel=1e-6, abs=1e-12)


def test_messages_of_ranks_that_do_the_same_are_no_pipeline() -> None:
    """Rings of context parallelism send too; a plan of one program has no stages."""
    plan = pipeline_plan(gpipe, 2, 1, (SHORT, LONG))
    assert is_pipeline(plan)
    assert not is_pipeline(replace(plan, programs=plan.programs[:1], program_of=np.zeros(2, dtype=np.int64)))
    silent = [replace(program, ops=()) for program in plan.programs]
    assert not is_pipeline(replace(plan, programs=tuple(silent)))


def waiting(makes: Callable[[Stage], None], **training: object) -> Outcome:
    """Two stages of two replicas; the first forwards and sends, the second does what `makes` has it do."""
    groups = groups_of(2, 2)
    first, second = (Stage(number, 2, groups, (SHORT, LONG), sent_bytes=0) for number in range(2))
    first.forward(0)
    first.batch(("send", ON))
    makes(second)
    programs = tuple(stage.builder.program((), f"pipeline rank {stage.number}") for stage in (first, second))
    plan = Plan("by hand", programs, np.array([0, 0, 1, 1]), {group.name: group for group in groups})
    job = free_job(4)
    return simulate_job(replace(job, training=replace(job.training, **training)), plan=plan)  # type: ignore[arg-type]


def receive(stage: Stage, stream: str = PIPELINE) -> int:
    """Post the receive of the first stage's output, without a wait."""
    return stage.builder.point_to_point([Message("recv", 0, BACK)], "bf16", PIPELINE, stream=stream)


def test_a_host_that_blocks_on_a_message_waits_in_a_bubble() -> None:
    """As Megatron's `batch_p2p_sync`: the next kernel is issued when the message has come."""

    def makes(stage: Stage) -> None:
        message = receive(stage)
        stage.builder.host_wait(message)
        stage.builder.host("synchronize")
        stage.forward(0)

    outcome = waiting(makes)
    seconds = breakdown_of(outcome, 2).seconds
    assert seconds["bubble"] == pytest.approx(seconds_of(SHORT, outcome.job), rel=1e-9)


def test_a_message_on_the_compute_stream_itself_waits_in_a_bubble() -> None:
    """As torch's blocking `send` and `recv` since 2.8, which run on the caller's stream."""

    def makes(stage: Stage) -> None:
        receive(stage, COMPUTE)
        stage.forward(0)

    outcome = waiting(makes)
    seconds = breakdown_of(outcome, 2).seconds
    late = seconds_of(SHORT, outcome.job)
    assert seconds["bubble"] + seconds["host_bound"] == pytest.approx(late, rel=1e-9)
    assert seconds["bubble"] > 0.9 * late


@pytest.mark.parametrize(("connections", "is_held"), [(1, True), (8, False)])
def test_a_kernel_behind_a_launch_that_waits_for_a_message_waits_in_a_bubble(
    connections: int, is_held: bool
) -> None:
    """A gather waits for the message, and the forward for neither; with one hardware queue it is held up
    behind the gather's launch."""

    def makes(stage: Stage) -> None:
        message = receive(stage)
        stage.builder.stream_wait("gather", message)
        stage.builder.collective("all_gather", 2**20, "bf16", "data", stream="gather")
        stage.forward(0)

    outcome = waiting(makes, device_max_connections=connections)
    bubbles = Bubbles(outcome.plan, outcome.trace, outcome.peers, connections)
    seconds = bubbles.split_breakdown(step_breakdown(outcome.trace, 2), 2).seconds
    late = seconds_of(SHORT, outcome.job)
    assert seconds["bubble"] == pytest.approx(late if is_held else 0.0, rel=1e-9)


def test_messages_between_ranks_of_one_stage_are_exposed() -> None:
    """As a ring of context parallelism, beside a GPU at half the speed: the other waits for that, and not for
    another stage. The first stage forwards from 0 to 1 and from 2 to 3, and is in the drain until 6; the
    second waits for its message until 3, forwards to 4, waits for the ring and forwards from 5 to 6."""
    groups = groups_of(2, 2)
    programs = []
    for number in range(2):
        stage = Stage(number, 2, groups, (SHORT, LONG), sent_bytes=0)
        stage.batch(("recv", BACK))
        stage.forward(0)
        stage.builder.wait_stream("ring", COMPUTE)
        ring = [Message("send", 0, ON), Message("recv", 0, -ON)]
        stage.builder.stream_wait(COMPUTE, stage.builder.point_to_point(ring, "bf16", "data", stream="ring"))
        stage.forward(1)
        stage.batch(("send", ON))
        programs.append(stage.builder.program((), f"pipeline rank {number}"))
    plan = Plan("by hand", tuple(programs), np.array([0, 0, 1, 1]), {group.name: group for group in groups})
    job = free_job(4, faults=FaultsTable(slow_gpus={"1": 2.0}))
    outcome = simulate_job(job, plan=plan, unfold=True)
    forward = seconds_of(SHORT, job)
    for rank in (0, 2):
        seconds = breakdown_of(outcome, rank).seconds
        assert seconds["exposed_communication"] == pytest.approx(forward, rel=1e-2)
        assert seconds["bubble"] == pytest.approx(3 * forward, rel=1e-2)


def test_a_message_that_the_next_kernels_do_not_need_makes_no_bubble() -> None:
    """The second stage posts its receive and first gathers, which its own forward of another micro-batch
    waits for, not the message."""
    groups = groups_of(2, 2)
    first, second = (Stage(number, 2, groups, (LONG, LONG), sent_bytes=0) for number in range(2))
    first.forward(0)
    first.batch(("send", ON))
    message = second.builder.point_to_point([Message("recv", 0, BACK)], "bf16", "pipeline", stream="pipeline")
    gather = second.builder.collective("all_gather", 2**28, "bf16", "data", stream="gather")
    second.builder.stream_wait(COMPUTE, gather)
    second.forward(1)
    second.builder.stream_wait(COMPUTE, message)
    second.forward(0)
    programs = tuple(stage.builder.program((), f"pipeline rank {stage.number}") for stage in (first, second))
    plan = Plan("by hand", programs, np.array([0, 0, 1, 1]), {group.name: group for group in groups})
    outcome = simulate_job(free_job(4), plan=plan)
    start, gathered = next(
        (start, end)
        for _, info, start, end in outcome.trace.select_rank(2).rows()
        if info.kind == "all_gather"
    )
    assert gathered < seconds_of(LONG, outcome.job)
    seconds = breakdown_of(outcome, 2).seconds
    assert seconds["bubble"] == 0
    assert seconds["exposed_communication"] == pytest.approx(gathered - start, rel=1e-6)
