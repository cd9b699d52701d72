"""Plans with all-to-alls of unequal parts: folded and unfolded, traced and reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from zsim.comparison.plan_check import calls_of_plan
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.explain.report_of import report_of
from zsim.explain.variants import step_variants
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.checks import check_plan
from zsim.plan.ops import Group, Plan, Program, SplitSizes
from zsim.report.views.text.plan import plan_to_dict
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

MIB = 2**20
SHORT = Kernel("copy", 0.0, 3e9)  # 1 ms


def job_of(gpus: int, **data: object) -> Job:
    return resolve(Experiment(model="llama-2-7b", cluster="dgx-h100", gpus=gpus, **data))  # type: ignore[arg-type]


def table(size: int, seed: int) -> SplitSizes:
    """Up to 64 MiB from each to each, a quarter of them none."""
    parts = np.random.default_rng(seed).integers(-21, 64, (size, size)).clip(0) * MIB
    return tuple(tuple(row) for row in parts.tolist())


def transposed(parts: SplitSizes) -> SplitSizes:
    return tuple(zip(*parts, strict=True))


def program_of(groups: Sequence[Group], parts: SplitSizes, name: str = "") -> Program:
    """There and back among experts, twice, while another stream reduces over the expert's replicas."""
    builder = PlanBuilder(groups)
    for _ in range(2):
        builder.kernels("router", [SHORT])
        builder.all_to_all(parts, "bf16", "ep", stream=COMPUTE, name="dispatch")
        builder.kernels("experts", [SHORT])
        if any(group.name == "dp" for group in groups):
            builder.wait_stream("dp", COMPUTE)
            builder.collective("all_reduce", 64 * MIB, "bf16", "dp", stream="dp")
        builder.all_to_all(transposed(parts), "bf16", "ep", stream=COMPUTE, name="combine")
    builder.stream_wait(COMPUTE, builder.record("dp"))
    return builder.program((), name)


def plan_of(world: int, size: int, stride: int, *, by_program: bool = False) -> Plan:
    """Experts on `size` ranks that are `stride` apart; `by_program`: every communicator has its own table."""
    ep = Group.regular("ep", world, size, stride)
    dp = Group("dp", np.ascontiguousarray(ep.members.T))
    groups = [ep, dp]
    count = len(ep.members) if by_program else 1
    programs = tuple(program_of(groups, table(size, seed), f"{seed}") for seed in range(count))
    plan = Plan(
        "test",
        programs,
        ep.row_per_rank(world) if by_program else np.zeros(world, dtype=np.int64),
        {group.name: group for group in groups},
    )
    check_plan(plan)
    return plan


@pytest.mark.parametrize("by_program", [False, True])
@pytest.mark.parametrize(
    ("size", "stride"), [(4, 1), (8, 1), (4, 2), (4, 8), (16, 2), (16, 1), (8, 4), (32, 1)]
)
def test_folded_equals_unfolded(size: int, stride: int, by_program: bool) -> None:
    """Inside nodes, across them and both; replicas whose all-reduces pass cards that are unequally busy."""
    plan, job = plan_of(32, size, stride, by_program=by_program), job_of(32)
    folded, unfolded = (simulate_job(job, plan=plan, unfold=unfold) for unfold in (False, True))
    assert folded.trace.step_seconds == pytest.approx(unfolded.trace.step_seconds, rel=1e-9)
    first = folded.classes.representatives
    for rank, number in enumerate(folded.classes.class_of_rank.tolist()):
        one, other = folded.trace.select_rank(first[number]), unfolded.trace.select_rank(rank)
        assert one.end_seconds == pytest.approx(other.end_seconds, rel=1e-9), rank
    for kind, load in unfolded.traffic.items():
        assert folded.traffic[kind].total_bytes == pytest.approx(load.total_bytes, rel=1e-9), kind
    assert folded.sent_bytes.keys() == unfolded.sent_bytes.keys()
    for key, sent in unfolded.sent_bytes.items():
        assert folded.sent_bytes[key] == pytest.approx(sent, rel=1e-9)


def test_communicators_of_other_tables_are_other_classes() -> None:
    """Four nodes, each with experts of its own, and two tables: two classes of 16 ranks."""
    ep = Group.regular("ep", 32, 8)
    programs = tuple(program_of([ep], table(8, seed), f"{seed}") for seed in range(2))
    plan = Plan("test", programs, np.arange(32) // 8 % 2, {"ep": ep})
    assert simulate_job(job_of(32), plan=plan).classes.sizes.tolist() == [16, 16]


def test_one_table_on_equal_nodes_is_one_class() -> None:
    """Members send unequal bytes, and come and go together."""
    ep = Group.regular("ep", 32, 8)
    plan = Plan.uniform("test", 32, program_of([ep], table(8, 0)), {"ep": ep})
    assert simulate_job(job_of(32), plan=plan).classes.sizes.tolist() == [32]


def test_replicas_are_told_apart_by_the_bytes_beside_theirs() -> None:
    """Experts on two nodes each, and their all-reduces between the pairs of nodes on the cards that the
    all-to-alls use unequally: every place of a pair is a class."""
    plan = plan_of(32, 16, 1)
    assert simulate_job(job_of(32), plan=plan).classes.sizes.tolist() == [2] * 16


def test_a_call_of_equal_parts_changes_nothing() -> None:
    parts = ((8 * MIB,) * 8,) * 8
    told = plan_with(parts, job := job_of(16))
    ep = Group.regular("ep", 16, 8)
    builder = PlanBuilder([ep])
    for _ in range(2):
        builder.kernels("router", [SHORT])
        builder.collective("all_to_all", 64 * MIB, "bf16", "ep", stream=COMPUTE, name="dispatch")
        builder.kernels("experts", [SHORT])
        builder.collective("all_to_all", 64 * MIB, "bf16", "ep", stream=COMPUTE, name="combine")
    builder.stream_wait(COMPUTE, builder.record("dp"))
    plain = Plan.uniform("test", 16, builder.program(()), {"ep": ep})
    assert told.ops == plain.ops
    one, other = (simulate_job(job, plan=plan).trace for plan in (told, plain))
    assert one.step_seconds == other.step_seconds
    assert one.infos == other.infos


def plan_with(parts: SplitSizes, job: Job) -> Plan:
    ep = Group.regular("ep", job.world_size, len(parts))
    return Plan.uniform("test", job.world_size, program_of([ep], parts), {"ep": ep})


def test_the_trace_the_report_and_comparisons_tell_the_largest_input() -> None:
    job, parts = job_of(16), table(8, 3)
    plan = plan_with(parts, job)
    outcome = simulate_job(job, plan=plan)
    report = report_of(outcome, 0.0, step_variants(outcome, has_range=False))
    inputs, outputs = (max(map(sum, one)) for one in (parts, transposed(parts)))
    assert [(row.kind, row.bytes, row.count) for row in report.collectives] == [
        ("all_to_all", inputs, 2),
        ("all_to_all", outputs, 2),
    ]
    assert sum((report.critical_path_seconds or {}).values()) == pytest.approx(report.step_seconds, rel=1e-9)
    assert [call.bytes for call in calls_of_plan(plan, rank=9)] == [inputs, outputs] * 2
    rows = plan_to_dict(plan)["collectives"]
    assert [row["parts"] for row in rows] == [parts, transposed(parts)]
