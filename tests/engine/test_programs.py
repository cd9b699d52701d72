"""Plans of several programs: pipelines made by hand, whose steps, memory and messages can be worked out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import simpy
from rich.console import Console

from tests.pipelines import (
    ON,
    PIPELINE,
    Schedule,
    gpipe,
    groups_of,
    one_f_one_b,
    pipeline_plan,
    without_latency,
)
from zsim.comparison.plan_check import calls_of_plan
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import KernelPricer
from zsim.engine.folding import find_classes
from zsim.engine.jitter.steps import run_once
from zsim.engine.prepare import StepRequest, prepare
from zsim.engine.simulate import Outcome, simulate_job
from zsim.explain.report_of import report_of
from zsim.explain.variants import step_variants
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.memory.capacity import framework_memory, step_peak_bytes
from zsim.plan.memory.tensors import plan_peaks
from zsim.plan.ops import Group, Message, Plan
from zsim.plan.passes.repeated_step import is_drained
from zsim.report.critical.path import critical_path
from zsim.report.memory import memory_peaks, memory_profile
from zsim.report.views.text.plan import plan_to_dict, print_plan
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.chrome import write_chrome_traces
from zsim.trace.readers.read import read_trace

SHORT, LONG = Kernel("copy", 0.0, 3e9), Kernel("copy", 0.0, 7e9)  # 1 and 2 ms


def job_of(gpus: int = 8, cluster: str = "dgx-h100", **data: object) -> Job:
    return resolve(Experiment(model="llama-2-7b", cluster=cluster, gpus=gpus, **data))  # type: ignore[arg-type]


def seconds_of(kernel: Kernel, job: Job) -> float:
    return KernelPricer(job.cluster.gpu).seconds(kernel)


def spans(outcome: Outcome, rank: int) -> list[tuple[str, float, float]]:
    return [(info.name, start, end) for _, info, start, end in outcome.trace.select_rank(rank).rows()]


# -- the pipeline's own law ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 3)])
@pytest.mark.parametrize("kernels", [(SHORT, LONG), (LONG, SHORT)])
def test_a_pipeline_takes_m_plus_p_minus_1_forwards_and_backwards(
    schedule: Schedule, stages: int, micro_batches: int, kernels: tuple[Kernel, Kernel]
) -> None:
    """Messages of no bytes on a fabric without latency; before the first kernel the host launches it."""
    job = without_latency(job_of(stages))
    plan = pipeline_plan(schedule, stages, micro_batches, kernels, sent_bytes=0)
    outcome = simulate_job(job, plan=plan)
    both = sum(seconds_of(kernel, job) for kernel in kernels)
    launch = job.cluster.host.seconds_per_launch
    expected = (micro_batches + stages - 1) * both + launch
    assert outcome.trace.step_seconds == pytest.approx(expected, rel=1e-12)


def test_the_slowest_stage_paces_a_pipeline() -> None:
    """3 stages and 6 micro-batches, the middle stage twice as slow: its 6 forwards and backwards, and around
    them one of each of the other two."""
    job = without_latency(job_of(3, placement={"gpus_per_node": [3]}))
    slow = (Kernel("copy", 0.0, 6e9), Kernel("copy", 0.0, 14e9))
    plan = pipeline_plan(gpipe, 3, 6, [(SHORT, LONG), slow, (SHORT, LONG)], sent_bytes=0)
    f, b, slow_f, slow_b = (seconds_of(kernel, job) for kernel in (SHORT, LONG, *slow))
    expected = job.cluster.host.seconds_per_launch + 6 * (slow_f + slow_b) + 2 * (f + b)
    assert simulate_job(job, plan=plan).trace.step_seconds == pytest.approx(expected, rel=1e-12)


# -- messages --------------------------------------------------------------------------------------------


def one_message(size: int, world: int, peer: int) -> Plan:
    """Rank 0 sends to a peer, who comes a millisecond later; the others do nothing."""
    groups = [Group("pair", np.array([[0, peer]]))]
    first, second = PlanBuilder(groups), PlanBuilder(groups)
    first.point_to_point([Message("send", size, ON)], "bf16", "pair", stream="pair")
    second.kernels("late", [SHORT])
    second.stream_wait("pair", second.record(COMPUTE))
    second.point_to_point([Message("recv", size, ON)], "bf16", "pair", stream="pair")
    program_of = np.full(world, 2)
    program_of[[0, peer]] = 0, 1
    programs = (first.program(()), second.program(()), PlanBuilder(groups).program(()))
    return Plan("test", programs, program_of, {"pair": groups[0]})


@pytest.mark.parametrize(("peer", "tier"), [(1, "intra"), (8, "inter")])
def test_a_message_moves_at_the_rate_of_its_links_once_both_sides_have_come(peer: int, tier: str) -> None:
    """1 GiB: over NVLink at 450 GB/s with its efficiency, to another node over one card; the sender waits for
    the receiver, and both end at once."""
    job = job_of(16)
    plan = one_message(2**30, 16, peer)
    outcome = simulate_job(job, plan=plan, unfold=True)
    ((_, sent_at, sent),) = spans(outcome, 0)
    (_, _, late), (_, came, received) = spans(outcome, peer)
    costs = job.cluster.collectives.protocols["simple"]
    link, nic = job.cluster.node_link, job.cluster.nic
    if tier == "intra":
        rate = link.bandwidth * link.efficiency * costs.intra_fraction
        latency = costs.base + costs.intra_round
    else:
        rate = nic.bandwidth * nic.efficiency * costs.inter_fraction
        latency = costs.base + costs.inter_round
    ramp = (costs.ramp + (costs.network_ramp if tier == "inter" else 0.0)) * 2**5
    assert sent == received
    assert sent_at < came == late
    assert received - came == pytest.approx(latency + ramp + 2**30 / rate, rel=1e-6)


def test_a_call_with_two_messages_is_over_when_both_are() -> None:
    """Neighbours exchange 1 GiB and 1 KiB: full duplex, as long as the larger message alone."""
    job = job_of(8)
    groups = [Group("pair", np.array([[0, 1]]))]
    programs = []
    for sent, taken in ((2**30, 2**10), (2**10, 2**30)):
        builder = PlanBuilder(groups)
        messages = [Message("send", sent, ON), Message("recv", taken, ON)]
        builder.point_to_point(messages, "bf16", "pair", stream="pair")
        programs.append(builder.program(()))
    programs.append(PlanBuilder(groups).program(()))
    program_of = np.array([0, 1, 2, 2, 2, 2, 2, 2])
    both = simulate_job(job, plan=Plan("test", tuple(programs), program_of, {"pair": groups[0]}), unfold=True)
    alone = simulate_job(job, plan=one_message(2**30, 8, 1), unfold=True)
    (_, start, end), (_, came, received) = spans(both, 0)[0], spans(alone, 1)[1]
    assert spans(both, 0)[0][2] == spans(both, 1)[0][2]
    assert end - start == pytest.approx(received - came, rel=1e-2)


def ring_plan(world: int, size: int) -> Plan:
    """Every rank passes on to the next and takes from the one before, `size` bytes, twice: one program."""
    builder = PlanBuilder([Group.regular("ring", world)])
    for _ in range(2):
        builder.kernels("k", [SHORT])
        builder.wait_stream("ring", COMPUTE)
        call = builder.point_to_point(
            [Message("send", size, ON), Message("recv", size, -ON)], "bf16", "ring", stream="ring"
        )
        builder.stream_wait(COMPUTE, call)
    return builder.finish("test", world, [])


def test_a_ring_of_messages_folds_to_its_places() -> None:
    """Two nodes: the ranks at the borders are unlike those inside, and all are as unfolded."""
    job, plan = job_of(16), ring_plan(16, 2**28)
    folded, unfolded = (simulate_job(job, plan=plan, unfold=unfold) for unfold in (False, True))
    assert len(folded.classes.sizes) < 16
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    same_node = simulate_job(job_of(8), plan=ring_plan(8, 2**28))
    assert len(same_node.classes.sizes) == 1
    assert same_node.trace.step_seconds < folded.trace.step_seconds


# -- folding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["dgx-h100", "rtx-4090-x8", "aws-p4d"])
@pytest.mark.parametrize(("stages", "replicas"), [(4, 8), (2, 8), (4, 4)])
@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
def test_folded_pipelines_equal_unfolded_ones(
    schedule: Schedule, stages: int, replicas: int, cluster: str
) -> None:
    """Stages on nodes of their own, and several on a node; replicas all-reduce at the end."""
    job = job_of(stages * replicas, cluster)
    plan = pipeline_plan(
        schedule, stages, 6, (SHORT, LONG), replicas=replicas, sent_bytes=2**27, gradient_bytes=10**9
    )
    folded, unfolded = (simulate_job(job, plan=plan, unfold=unfold) for unfold in (False, True))
    assert len(folded.classes.sizes) < stages * replicas
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    for rank in folded.classes.representatives:
        theirs = spans(unfolded, rank)
        for own, other in zip(spans(folded, rank), theirs, strict=True):
            assert own[0] == other[0]
            assert own[1:] == pytest.approx(other[1:], rel=1e-9)


def test_a_slow_gpu_in_one_stage_tells_its_pipeline_and_its_replicas_apart() -> None:
    job = job_of(32, faults=FaultsTable(slow_gpus={"9": 1.5}))
    plan = pipeline_plan(one_f_one_b, 4, 6, (SHORT, LONG), replicas=8, gradient_bytes=10**9)
    folded, unfolded = (simulate_job(job, plan=plan, unfold=unfold) for unfold in (False, True))
    assert 4 < len(folded.classes.sizes) < 32
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)


def test_links_carry_the_same_bytes_folded_and_unfolded() -> None:
    """8 pipelines of 4 stages, one per node: each of 6 micro-batches goes 3 times on and 3 times back."""
    job, size = job_of(32), 2**27
    plan = pipeline_plan(one_f_one_b, 4, 6, (SHORT, LONG), replicas=8, sent_bytes=size)
    for unfold in (False, True):
        outcome = simulate_job(job, plan=plan, unfold=unfold)
        assert outcome.traffic["nic_out"].total_bytes == pytest.approx(8 * 6 * 6 * size)
        assert sum(between for _, between in outcome.sent_bytes.values()) == pytest.approx(
            8 * 6 * 6 * size / 32
        )


# -- unequal programs on one communicator ----------------------------------------------------------------


def uneven_plan(kernels: Sequence[int]) -> Plan:
    """Ranks that issue different numbers of kernels before each of three all-reduces of the world."""
    groups = [Group.regular("world", len(kernels))]
    programs = []
    for number, count in enumerate(kernels):
        builder = PlanBuilder(groups)
        for call in range(3):
            for _ in range(count):
                builder.kernels("k", [SHORT])
            builder.collective("all_reduce", 4, "fp32", "world", stream=COMPUTE, name=f"call {call}")
        programs.append(builder.program((), f"rank {number}"))
    return Plan("test", tuple(programs), np.arange(len(kernels)), {"world": groups[0]})


def test_members_of_a_communicator_meet_at_its_n_th_call() -> None:
    """Op numbers differ by rank; all end each call together, when the rank of four kernels has come."""
    plan = uneven_plan([1, 2, 4, 3, 0, 1, 1, 1])
    outcome = simulate_job(job_of(), plan=plan)
    for call in range(3):
        ends = {end for rank in range(8) for name, _, end in spans(outcome, rank) if name == f"call {call}"}
        assert len(ends) == 1
    by_hand = 12 * seconds_of(SHORT, outcome.job)
    calls = [end - start for name, start, end in spans(outcome, 2) if name.startswith("call")]
    launch = outcome.job.cluster.host.seconds_per_launch
    assert outcome.trace.step_seconds == pytest.approx(by_hand + sum(calls) + launch, rel=1e-9)


def test_a_group_may_hold_the_first_and_the_last_stage_only() -> None:
    """Megatron's embedding group: its all-reduce waits for both, and no other rank is in it."""
    plan = pipeline_plan(one_f_one_b, 4, 4, (SHORT, LONG), replicas=2)
    embedding = Group("embedding", np.array([[0, 6], [1, 7]]))
    groups = {**plan.groups, "embedding": embedding}
    programs = list(plan.programs)
    for number in (0, 3):
        builder = PlanBuilder([embedding])
        builder.ops += list(programs[number].ops)
        builder.wait_stream("embedding", COMPUTE)
        builder._waits["embedding"] = [len(builder.ops) - 1]
        builder.collective("all_reduce", 2**20, "fp32", "embedding", stream="embedding", name="tied")
        programs[number] = replace(programs[number], ops=tuple(builder.ops))
    plan = replace(plan, programs=tuple(programs), groups=groups)
    folded, unfolded = (simulate_job(job_of(), plan=plan, unfold=unfold) for unfold in (False, True))
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    ends = [end for rank in (0, 1, 6, 7) for name, _, end in spans(unfolded, rank) if name == "tied"]
    assert len(ends) == 4
    assert ends == pytest.approx([ends[0]] * 4)
    assert not any(name == "tied" for rank in (2, 3, 4, 5) for name, _, _ in spans(unfolded, rank))


# -- memory ----------------------------------------------------------------------------------------------


def test_a_stage_holds_what_is_in_flight_and_the_fullest_is_reported() -> None:
    """1F1B keeps p - r micro-batches on stage r, here of 2 GB each, beside r + 1 GB of parameters: 9, 8, 7
    and 6 GB."""
    job = job_of(4, placement={"gpus_per_node": [4]})
    plan = pipeline_plan(one_f_one_b, 4, 8, (SHORT, LONG), micro_bytes=2 * 10**9)
    outcome = simulate_job(job, plan=plan)
    events = outcome.trace.memory
    assert events is not None
    for rank in range(4):
        own = events.ranks == rank
        framework = framework_memory(job, plan, rank).bytes
        assert np.cumsum(events.deltas[own]).max() - framework == 10**9 * (rank + 1) + 2 * 10**9 * (4 - rank)
    peak = memory_peaks(events)["gpu"].total
    assert peak == step_peak_bytes(job, plan) == 9 * 10**9 + framework_memory(job, plan, 0).bytes
    assert outcome.allocation is not None
    assert outcome.allocation.active_bytes == pytest.approx(9 * 10**9, rel=1e-3)


def test_a_rank_pays_for_the_communicators_that_it_is_in() -> None:
    """Of a pipeline of 4: the ends have one neighbour, the others two; all are in the pipeline's group."""
    job, plan = job_of(4, placement={"gpus_per_node": [4]}), pipeline_plan(gpipe, 4, 1, (SHORT, LONG))
    memory = job.cluster.framework_memory
    others = memory.context + 2 * 2**25  # cuBLAS's workspaces
    held = [framework_memory(job, plan, number).bytes - others for number in range(4)]
    assert held == [memory.communicator + pairs * 544_000_000 for pairs in (1, 2, 2, 1)]


def test_a_communicator_with_one_gpu_of_each_node_has_buffers_of_its_own() -> None:
    """Two nodes of two GPUs: ranks 1 and 2 are neighbours over the network, the pipeline's group is not with
    one GPU of each node."""
    job = job_of(4, placement={"gpus_per_node": [2, 2]})
    table = job.cluster.framework_memory.model_copy(update={"network_communicator": 10**6})
    job = replace(job, cluster=job.cluster.model_copy(update={"framework_memory": table}))
    plan = pipeline_plan(gpipe, 4, 1, (SHORT, LONG))
    others = table.context + 2 * 2**25
    held = [framework_memory(job, plan, number).bytes - others for number in range(4)]
    ends, middle = table.communicator + 544_000_000, table.communicator + 544_000_000 + 10**6
    assert held == [ends, middle, middle, ends]


def test_what_a_communicator_takes_is_by_its_own_nodes_not_by_those_of_its_kind() -> None:
    """Ranks 0 and 1 share a node, 2 and 3 do not."""
    job = job_of(4, placement={"gpus_per_node": [2, 1, 1]})
    table = job.cluster.framework_memory.model_copy(update={"network_communicator": 10**6})
    job = replace(job, cluster=job.cluster.model_copy(update={"framework_memory": table}))
    pairs = {"pair": Group("pair", np.array([[0, 1], [2, 3]]))}
    plan = replace(pipeline_plan(gpipe, 4, 1, (SHORT, LONG)), groups=pairs)
    others = table.context + 2 * 2**25
    held = [framework_memory(job, plan, number).bytes - others for number in range(4)]
    assert held == 2 * [544_000_000] + 2 * [10**6]


# -- what is read off a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("unfold", [False, True])
@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
def test_the_critical_path_is_the_step(schedule: Schedule, unfold: bool) -> None:
    """Its parts add up without gaps, and it passes several stages."""
    plan = pipeline_plan(schedule, 4, 6, (SHORT, LONG), replicas=8, gradient_bytes=10**9)
    outcome = simulate_job(job_of(32), plan=plan, unfold=unfold)
    links = critical_path(plan, outcome.trace, outcome.communicators, peers=outcome.peers)
    assert sum(link.seconds for link in links) == pytest.approx(outcome.trace.step_seconds, rel=1e-9)
    for one, other in pairwise(links):
        assert one.end_seconds == pytest.approx(other.start_seconds, abs=1e-12)
    assert len({int(plan.program_of[link.rank]) for link in links}) >= 3


def test_jitter_makes_a_pipeline_longer_and_folds_as_it_does_unfolded() -> None:
    """Of 64 ranks the slowest of each stage's 16 paces its stage; unfolded, every rank draws for itself."""
    jitter = {"seed": 1, "steps": 8, "kernel_sigma": 0.05, "rank_sigma": 0.0}
    plan = pipeline_plan(one_f_one_b, 4, 6, (SHORT, LONG), replicas=16, gradient_bytes=10**6)
    folded = simulate_job(job_of(64, jitter=jitter), plan=plan)
    unfolded = simulate_job(job_of(64, jitter=jitter), plan=plan, unfold=True)
    assert folded.jitter_run is not None
    assert unfolded.jitter_run is not None
    plain = folded.jitter_run.plain_seconds
    assert unfolded.jitter_run.plain_seconds == pytest.approx(plain, rel=1e-9)
    lengths = [
        float(np.mean([step.step_seconds for step in jittered.steps]))
        for jittered in (folded.jitter_run, unfolded.jitter_run)
    ]
    assert min(lengths) > 1.01 * plain
    assert lengths[0] / plain - 1 == pytest.approx(lengths[1] / plain - 1, rel=0.25)


def test_a_pipeline_s_trace_is_written_and_read(tmp_path: Path) -> None:
    plan = pipeline_plan(one_f_one_b, 2, 4, (SHORT, LONG), replicas=4, gradient_bytes=10**8)
    outcome = simulate_job(job_of(8), plan=plan, unfold=True)
    write_chrome_traces(outcome.trace, tmp_path)
    read = read_trace(tmp_path)
    assert read.world_size == 8
    kinds = [info.kind for info in read.infos]
    assert {"send", "recv", "all_reduce"} <= set(kinds)
    own, theirs = outcome.trace, read
    for rank in (0, 7):
        written = [
            (end - start) for _, info, start, end in own.select_rank(rank).rows() if info.kind == "compute"
        ]
        again = [
            (end - start) for _, info, start, end in theirs.select_rank(rank).rows() if info.kind == "compute"
        ]
        assert again == pytest.approx(written, abs=2e-9)
    assert read.metadata["groups"][PIPELINE] == (2, 4)


def test_groups_of_a_pipeline_are_rows_of_ranks() -> None:
    """4 stages of 2 replicas, stage by stage."""
    pipeline, data, first, *_ = groups_of(4, 2)
    assert pipeline.members.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert data.members.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first.members.tolist() == [[0, 2], [1, 3]]
    assert (pipeline.stride, first.ranks_of(3)) == (2, [1, 3])


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
def test_a_second_step_of_a_pipeline_takes_what_the_first_does(schedule: Schedule) -> None:
    """Run twice on one clock, the host ahead of the GPU: m + p - 1 forwards and backwards, and no launch."""
    job = without_latency(job_of(4, placement={"gpus_per_node": [4]}))
    plan = pipeline_plan(schedule, 4, 6, (SHORT, LONG), sent_bytes=0)
    assert not is_drained(plan)
    request = StepRequest(job, plan, job_topology(job), np.ones(4))
    classes, _ = find_classes(request, unfold=False)
    prepared = prepare(request, classes, simpy.Environment())
    both = seconds_of(SHORT, job) + seconds_of(LONG, job)
    assert run_once(prepared).trace.step_seconds == pytest.approx(9 * both, rel=1e-9)


def test_a_pipeline_s_step_is_reported_and_its_plan_printed() -> None:
    """Readers of plans read several programs: the report, its notes and variants, the plan's text."""
    job = job_of(8)
    plan = pipeline_plan(one_f_one_b, 4, 6, (SHORT, LONG), replicas=2, micro_bytes=10**9)
    outcome = simulate_job(job, plan=plan)
    report = report_of(outcome, 0.0, step_variants(outcome, has_range=False))
    assert report.step_seconds == outcome.trace.step_seconds
    assert sum((report.critical_path_seconds or {}).values()) == pytest.approx(report.step_seconds, rel=1e-9)
    assert report.peaks["gpu"].total == step_peak_bytes(job, plan)
    data = plan_to_dict(plan)
    assert [program["name"] for program in data["programs"]] == [f"pipeline rank {n}" for n in range(4)]
    assert data["program_of"] == [0, 0, 1, 1, 2, 2, 3, 3]
    kinds = [row["kind"] for row in data["programs"][0]["collectives"]]
    assert kinds == ["send", "send_recv", "recv"]
    console = Console(record=True, width=80)
    print_plan(plan, limit=3, console=console)
    assert "pipeline rank 3 (2 ranks)" in console.export_text()
    assert [call.kind for call in calls_of_plan(plan, rank=7)][:2] == ["recv", "send_recv"]
    assert memory_profile(plan).peak.total == plan_peaks(plan)["total"] == 5 * 10**9
