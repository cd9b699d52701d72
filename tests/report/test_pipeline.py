"""The report of a pipeline made by hand: stages, bubbles, the schedule as it ran, groups and the mesh."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.browser import as_plotly, check_text
from tests.pipelines import Stage, gpipe, groups_of, one_f_one_b, pipeline_plan
from tests.report.test_bubbles import LONG, SHORT, free_job, seconds_of
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import Outcome, simulate_job
from zsim.explain.pipeline import pipeline_of, rank_layers, seconds_by_cause
from zsim.explain.report_of import report_of
from zsim.plan.actions import Action
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.ops import Group, Plan
from zsim.report.pipeline import Box, PipelineSection, boxes
from zsim.report.rank_map import ranges, rank_map
from zsim.report.report import Report
from zsim.report.traffic import CollectiveRow, group_rows, reported_group
from zsim.report.views.html import pipeline as page
from zsim.report.views.html.report import html_report
from zsim.report.views.text.pipeline import parallel_tables, schedule_sketch
from zsim.report.views.text.report import print_report, report_lines
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.strategy.parallelism import Mesh, ParallelismConfig


def parallel(job: Job, **changes: Any) -> Job:
    """The job with `[parallelism]` as if it had been asked for."""
    degrees = {"pipeline": 4, "layers_per_stage": (7, 9, 9, 7)}
    return replace(job, parallelism=ParallelismConfig(**{**degrees, **changes}))


def simulated(
    micro_batches: int = 8, replicas: int = 2, sent_bytes: int = 0, **plan: Any
) -> tuple[Outcome, PipelineSection]:
    job = parallel(free_job(4 * replicas))
    made = pipeline_plan(
        one_f_one_b, 4, micro_batches, (SHORT, LONG), replicas=replicas, sent_bytes=sent_bytes,
        micro_bytes=2 * 10**9, **plan,
    )  # fmt: skip
    outcome = simulate_job(job, plan=made)
    section = pipeline_of(outcome)
    assert section is not None
    return outcome, section


# -- stages ----------------------------------------------------------------------------------------------


def test_json_has_the_promised_keys_with_the_pipelines_figures() -> None:
    """4 equal stages, 8 micro-batches: 3 / 11 of the step is bubble on every rank; 1F1B keeps 4 - r
    micro-batches of 2 GB on rank r beside r + 1 GB of parameters: 9, 8, 7, 6 GB."""
    outcome, _ = simulated()
    found = report_of(outcome, 0.0).to_dict()
    both = seconds_of(SHORT, outcome.job) + seconds_of(LONG, outcome.job)
    assert found["bubble_fraction"] == pytest.approx(3 / 11, rel=1e-9)
    assert [row["rank"] for row in found["stages"]] == [0, 1, 2, 3]
    assert [row["first_rank"] for row in found["stages"]] == [0, 2, 4, 6]
    assert [row["layers"] for row in found["stages"]] == [7, 9, 9, 7]
    for number, row in enumerate(found["stages"]):
        framework = framework_memory(outcome.job, outcome.plan, number).bytes
        assert row["peak_bytes"] == (9 - number) * 10**9 + framework
        assert row["bytes_at_peak"]["activations"] == 2 * (4 - number) * 10**9
        assert sum(row["bytes_at_peak"].values()) == row["peak_bytes"]
        assert row["busy_seconds"] == pytest.approx(8 * both, rel=1e-9)
        assert row["bubble_seconds"] == pytest.approx(3 * both, rel=1e-9)
    assert found["peak_bytes"]["gpu"]["total"] == found["stages"][0]["peak_bytes"]
    whole = outcome.job.model.numel
    assert found["model"] == {"parameters": whole, "active_parameters": whole, "mtp_parameters": 0}
    assert found["parallelism"].items() >= {"pipeline": 4, "data": 2, "tensor": 1, "schedule": "1f1b"}.items()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_breakdown_is_of_the_slowest_rank_and_adds_up_to_the_step() -> None:
    """Of 4 stages the third is twice as slow, so it waits least."""
    slow = (Kernel("copy", 0.0, 6e9), Kernel("copy", 0.0, 14e9))
    job = parallel(free_job(4, placement={"gpus_per_node": [4]}))
    kernels = [(SHORT, LONG), (SHORT, LONG), slow, (SHORT, LONG)]
    outcome = simulate_job(job, plan=pipeline_plan(gpipe, 4, 6, kernels, sent_bytes=2**24))
    report = report_of(outcome, 0.0)
    assert report.pipeline is not None
    assert report.pipeline.slowest.rank == report.rank == 2
    assert report.breakdown.seconds == report.pipeline.rows[2].breakdown.seconds
    for row in report.pipeline.rows:
        assert sum(row.breakdown.seconds.values()) == pytest.approx(report.step_seconds, rel=1e-12)
        assert row.bubble_seconds >= report.breakdown.seconds["bubble"]
    assert min(report.breakdown.seconds.values()) >= 0.0
    assert sum((report.critical_path_seconds or {}).values()) == pytest.approx(report.step_seconds, rel=1e-9)


def test_energy_is_of_the_mean_rank_and_bubbles_are_idle() -> None:
    outcome, section = simulated()
    energy = report_of(outcome, 0.0).energy
    assert energy is not None
    assert energy.activity_seconds["communication"] == pytest.approx(
        section.mean_seconds()["exposed_communication"], abs=1e-12
    )
    assert energy.activity_seconds["idle"] >= section.mean_seconds()["bubble"]
    assert sum(energy.activity_seconds.values()) == pytest.approx(section.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "virtual", "layers", "expected"),
    [
        ("1f1b", 1, (1, 2, 3, 4), [1, 2, 3, 4]),
        ("interleaved-1f1b", 2, (1, 2, 3, 4, 5, 6, 7, 8), [6, 8, 10, 12]),
        ("zbv-zero-bubble", 2, (1, 2, 3, 4, 5, 6, 7, 8), [9, 9, 9, 9]),
        ("1f1b", 1, (), []),
    ],
)
def test_layers_of_a_rank_are_those_of_its_stages(
    schedule: Any, virtual: int, layers: tuple[int, ...], expected: list[int]
) -> None:
    """In a loop rank r has stages r and r + 4, in a V r and 7 - r."""
    job = parallel(free_job(4), schedule=schedule, virtual_stages=virtual, layers_per_stage=layers)
    assert rank_layers(job) == expected


def test_a_straggler_in_a_pipeline_is_still_told() -> None:
    """Ranks that differ by stage alone have the pipeline's table; with a slow GPU, classes are told apart,
    and their exposed communication has no bubbles in it: the other pipelines wait for the slow one's end."""
    plan = pipeline_plan(one_f_one_b, 4, 8, (SHORT, LONG), replicas=2, sent_bytes=0)
    plain = simulate_job(parallel(free_job(8)), plan=plan)
    assert report_of(plain, 0.0).ranks == ()
    replicated = pipeline_plan(one_f_one_b, 4, 8, (SHORT, LONG), replicas=4, sent_bytes=0)
    slow = simulate_job(parallel(free_job(16, faults=FaultsTable(slow_gpus={"1": 2.0}))), plan=replicated)
    rows = report_of(slow, 0.0).ranks
    assert len(rows) == 8
    both = (seconds_of(SHORT, slow.job) + seconds_of(LONG, slow.job)) * slow.slowdowns[0]
    for row in rows:
        waits = 0.0 if row.rank % 4 == 1 else slow.trace.step_seconds - 11 * both
        assert row.exposed_communication_seconds == pytest.approx(waits, rel=1e-6, abs=1e-9)


def test_drawn_steps_of_a_pipeline_count_bubbles_with_its_waits() -> None:
    """A step drawn with jitter is traced on one rank, which does not tell for whom it waits."""
    jitter = {"seed": 1, "steps": 4, "kernel_sigma": 0.05, "rank_sigma": 0.0}
    plan = pipeline_plan(one_f_one_b, 4, 6, (SHORT, LONG), replicas=2, sent_bytes=0)
    report = report_of(simulate_job(parallel(free_job(8, jitter=jitter)), plan=plan), 0.0)
    assert report.jitter is not None
    assert report.pipeline is not None
    both = seconds_of(SHORT, free_job(8)) + seconds_of(LONG, free_job(8))
    assert report.jitter.exposed_communication_seconds["p50"] > 2.5 * both
    assert report.pipeline.rows[0].bubble_seconds > 2.5 * both
    assert "exposed communication and bubbles" in printed(report)


def test_ranks_whose_steps_begin_apart_are_broken_down_on_their_own_clocks() -> None:
    """Nothing at its end makes all ranks of this step wait for each other, so that the last stage begins the
    next one first. Each rank computes for as long as its kernels take."""
    job = resolve(
        Experiment(
            model={
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "vocab_size": 50257,
                "n_positions": 1024,
                "tie_word_embeddings": False,
            },
            cluster="dgx-h100",
            gpus=4,
            strategy={"kind": "fsdp2"},
            parallelism={"pipeline": 2},
            training={"micro_batch_size": 8, "sequence_length": 1024, "gradient_accumulation_steps": 4},
        )
    )
    outcome = simulate_job(job)
    section = pipeline_of(outcome)
    assert section is not None
    assert any(outcome.trace.begins.values())
    for row in section.rows:
        own = outcome.trace.select_rank(row.first_rank).rows()
        kernels = sum(
            end - start
            for _, info, start, end in own
            if info.stream == COMPUTE and info.kind in ("compute", "optimizer", "copy")
        )
        assert row.busy_seconds == pytest.approx(kernels, rel=1e-9)
        idle = sum(end - start for start, end in row.bubbles)
        assert row.bubble_seconds == pytest.approx(idle, rel=1e-9)
        assert sum(row.breakdown.seconds.values()) == pytest.approx(section.step_seconds, rel=1e-9)


# -- the schedule as it ran ------------------------------------------------------------------------------


def test_boxes_are_forwards_and_backwards_where_they_ran() -> None:
    """Two stages, two micro-batches, 1F1B: rank 0 has F0 F1 B0 B1, and rank 1 F0 B0 F1 B1 one forward
    later."""
    job = free_job(2, placement={"gpus_per_node": [2]})
    outcome = simulate_job(job, plan=pipeline_plan(one_f_one_b, 2, 2, (SHORT, LONG), sent_bytes=0))
    f, b = seconds_of(SHORT, job), seconds_of(LONG, job)
    first, second = (boxes(outcome.plan, outcome.trace, rank) for rank in range(2))
    assert [(box.kind, box.micro_batch, box.stage) for box in first] == [
        ("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0),
    ]  # fmt: skip
    assert [f"{box.kind}{box.micro_batch}" for box in second] == ["F0", "B0", "F1", "B1"]
    starts = [0, f, 2 * f + b, 3 * f + 2 * b]
    assert [box.start_seconds for box in first] == pytest.approx(starts, abs=1e-9)
    assert [box.start_seconds for box in second] == pytest.approx([f, 2 * f, 2 * f + b, 3 * f + b], abs=1e-9)
    assert [box.seconds for box in first] == pytest.approx([f, f, b, b], rel=1e-9)


def chunked_plan() -> Plan:
    """One program of two virtual stages, 1 and 3, with split backwards and an update."""
    builder = PlanBuilder(groups_of(2))
    for kind, stage in (("F", 1), ("F", 3), ("UNSHARD", 1), ("I", 3), ("B", 1), ("W", 3)):
        builder.begin(Action(kind, stage, None if kind == "UNSHARD" else 5))  # type: ignore[arg-type]
        builder.phase = "forward" if kind in ("F", "UNSHARD") else "backward"
        builder.kernels(f"{kind}{stage}", [SHORT])
        builder.kernels("more", [SHORT])
    builder.wait_stream("other", COMPUTE)
    builder.kernels("beside", [SHORT], stream="other")
    builder.wait_stream(COMPUTE, "other")
    builder.phase = "optimizer"
    builder.kernels("update", [SHORT])
    return Plan.uniform("by hand", 2, builder.program(()), builder.groups)


def test_virtual_stages_are_chunks_and_split_backwards_are_boxes_of_their_own() -> None:
    """Unsharding is no box; kernels of other streams and the update are in no action's box."""
    plan = chunked_plan()
    job = free_job(2, placement={"gpus_per_node": [2]})
    outcome = simulate_job(job, plan=plan)
    found = boxes(plan, outcome.trace, 0)
    f = seconds_of(SHORT, job)
    assert [(box.kind, box.stage, box.chunk) for box in found] == [
        ("F", 1, 0), ("F", 3, 1), ("I", 3, 1), ("B", 1, 0), ("W", 3, 1), ("", -1, -1),
    ]  # fmt: skip
    assert {box.micro_batch for box in found[:-1]} == {5}
    assert [box.seconds for box in found] == pytest.approx([2 * f] * 5 + [f], rel=1e-6)


def test_an_optimizer_that_waits_for_others_is_cut_where_it_waits() -> None:
    """The norm of the gradients before an all-reduce of all, which the last stage reaches three backwards
    before the first, and the update after it."""
    stages, groups = 4, [*groups_of(4), Group.regular("world", 4)]
    programs = []
    for number in range(stages):
        stage = Stage(number, stages, groups, (SHORT, LONG), sent_bytes=0)
        one_f_one_b(stage, 4)
        stage.builder.phase = "optimizer"
        stage.builder.kernels("norm", [SHORT])
        stage.builder.collective("all_reduce", 4, "fp32", "world", stream=COMPUTE)
        stage.builder.kernels("update", [SHORT])
        programs.append(stage.builder.program((), f"pipeline rank {number}"))
    plan = Plan("by hand", tuple(programs), np.arange(4), {group.name: group for group in groups})
    job = free_job(4, placement={"gpus_per_node": [4]})
    outcome = simulate_job(job, plan=plan)
    updates = [[box.seconds for box in boxes(plan, outcome.trace, rank) if not box.kind] for rank in (0, 3)]
    f = seconds_of(SHORT, job)
    assert updates[0] == [pytest.approx(2 * f, rel=0.05)]
    assert updates[1] == pytest.approx([f, f], rel=1e-6)


def test_the_sketch_has_a_line_per_rank_and_a_cell_per_70th_of_the_step() -> None:
    """2 stages, 1 micro-batch: a forward is 0.3003 of both kernels, 10.51 of 70 cells."""
    job = free_job(2, placement={"gpus_per_node": [2]})
    outcome = simulate_job(job, plan=pipeline_plan(gpipe, 2, 1, (SHORT, LONG), sent_bytes=0))
    section = pipeline_of(outcome)
    assert section is not None
    first, second = schedule_sketch(section)
    assert first == "0  " + "0" * 11 + "." * 35 + "a" * 24
    assert second == "1  " + "." * 11 + "0" * 10 + "a" * 25 + "." * 24


# -- on the terminal -------------------------------------------------------------------------------------


def printed(report: Report) -> str:
    console = Console(width=80, record=True, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(report, console)
    return console.export_text()


def test_the_terminal_has_stages_memory_groups_and_nodes_within_80_columns() -> None:
    outcome, _ = simulated(sent_bytes=2**24, gradient_bytes=10**9)
    text = printed(report_of(outcome, 0.0))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "Pipeline ranks: " in text
    assert "8 micro-batches" in text
    assert "pipeline bubble" in text
    rows = [line.split() for line in text.splitlines() if re.match(r"[0-3] +[79] ", line)]
    assert [row[:2] for row in rows] == [["0", "7"], ["1", "9"], ["2", "9"], ["3", "7"]]
    assert "fullest" in next(line for line in text.splitlines() if line.startswith("0   "))
    assert "node 0    0-7       0-3   0-1" in text
    (pipeline,) = (line.split() for line in text.splitlines() if line.startswith("pipeline  "))
    assert pipeline[0] == "pipeline"
    assert "pipeline 0-1" not in text


def test_many_ranks_are_told_by_the_first_the_last_the_slowest_and_the_fullest() -> None:
    """Of 32 ranks eight and four, and rank 20, which is slow; none are sketched."""
    kernels = [(SHORT, LONG)] * 20 + [(LONG, LONG)] + [(SHORT, LONG)] * 11
    job = parallel(free_job(32), pipeline=32, layers_per_stage=(1,) * 32)
    outcome = simulate_job(job, plan=pipeline_plan(one_f_one_b, 32, 4, kernels, sent_bytes=0))
    report = report_of(outcome, 0.0)
    table, *_ = parallel_tables(report)
    assert [int(str(row[0])) for row in table.rows] == [*range(8), 20, *range(28, 32)]
    assert table.rows[8][-1] == "slowest"
    assert report.pipeline is not None
    assert schedule_sketch(report.pipeline) == []
    assert max(len(line) for line in printed(report).splitlines()) <= 80


def test_a_job_of_data_parallelism_alone_has_no_word_of_it() -> None:
    job = resolve(Experiment(model="gpt2", cluster="dgx-h100", gpus=2))
    report = report_of(simulate_job(job), 0.0)
    found = report.to_dict()
    assert (found["bubble_fraction"], found["stages"]) == (None, [])
    assert found["parallelism"]["data"] == 2
    assert found["breakdown_seconds"]["bubble"] == 0.0
    assert list(parallel_tables(report)) == []
    assert "bubble" not in printed(report)


# -- groups ----------------------------------------------------------------------------------------------


def test_calls_are_added_up_by_group_and_pairs_are_the_pipeline() -> None:
    """Stage 1 of 3 exchanges 6 micro-batches with both neighbours: 24 messages of 16 MiB, on two
    communicators of two ranks; and one all-reduce of 1 GB."""
    job = parallel(free_job(6, placement={"gpus_per_node": [6]}), pipeline=3, layers_per_stage=(10, 12, 10))
    kernels = [(SHORT, LONG), (LONG, LONG), (SHORT, LONG)]
    plan = pipeline_plan(gpipe, 3, 6, kernels, replicas=2, gradient_bytes=10**9)
    outcome = simulate_job(job, plan=plan)
    report = report_of(outcome, 0.0)
    assert report.rank == 2
    found = {row["group"]: row for row in report.to_dict()["collectives_by_group"]}
    assert list(found) == ["pipeline", "data"]
    assert (found["pipeline"]["count"], found["pipeline"]["bytes"]) == (24, 24 * 2**24)
    assert (found["data"]["count"], found["data"]["bytes"]) == (1, 10**9)
    assert {row["group"] for row in report.to_dict()["collectives"]} == {"pipeline", "data"}
    messages = [row for row in report.collectives if row.group == "pipeline"]
    assert {(row.kind, row.group_size, row.count) for row in messages} == {("recv", 2, 12), ("send", 2, 12)}
    assert {row.group for row in report.sent} == {"pipeline", "data"}
    exposed = sum(row.exposed_seconds for row in report.collectives)
    after = report.step_seconds - outcome.trace.select_rank(2).end_seconds.max()  # of all of the rank's calls
    assert exposed + after == pytest.approx(report.breakdown.seconds["exposed_communication"], rel=1e-6)


def test_long_names_of_groups_stay_on_one_line(make_step_report: Callable[..., Report]) -> None:
    """A blank less between columns, where two make the table wider than 80."""
    calls = CollectiveRow("reduce_scatter", "expert_model", 16, 384, 268_435_456, "bf16", 0.31162)
    lines = list(report_lines(replace(make_step_report(), collectives=(calls,))))
    (row,) = (line for line in lines if "expert_model" in line and "GB/s" in line)
    assert row.startswith("reduce-scatter (expert_model, 16)")
    assert len(row) <= 80
    short = list(report_lines(replace(make_step_report(), collectives=(replace(calls, group="data"),))))
    assert "bf16  311.62 ms" in next(line for line in short if "(data, 16)" in line and "GB/s" in line)


def test_groups_keep_their_names_but_for_pairs() -> None:
    names = ["tensor", "context", "pipeline", "pipeline 3-4", "embedding", "data", "shard", ""]
    assert [reported_group(name) for name in names] == [
        "tensor", "context", "pipeline", "pipeline", "embedding", "data", "shard", "",
    ]  # fmt: skip
    rows = [
        CollectiveRow("all_gather", "tensor", 8, 3, 100, "bf16", 1.0, 0.5),
        CollectiveRow("send", "pipeline", 2, 2, 7, "bf16", 2.0),
        CollectiveRow("reduce_scatter", "tensor", 8, 1, 50, "bf16", 4.0, 0.25),
    ]
    tensor, pipeline = group_rows(rows)
    assert (tensor.count, tensor.bytes, tensor.busy_seconds, tensor.exposed_seconds) == (4, 350, 5.0, 0.75)
    assert (pipeline.count, pipeline.bytes) == (2, 14)


# -- the mesh --------------------------------------------------------------------------------------------

MESH = Mesh((("pipeline", 2), ("data", 3), ("context", 1), ("tensor", 2)))


def test_nodes_have_the_coordinates_of_their_ranks() -> None:
    """12 ranks on nodes of 8 and 4: rank = 6 pipeline + 2 data + tensor."""
    found = rank_map(MESH, (8, 4), (3, 5))
    first, second = found.nodes
    assert (first.node, first.first_rank, first.num_ranks) == (3, 0, 8)
    assert (second.node, second.first_rank, second.num_ranks) == (5, 8, 4)
    assert first.coordinates["pipeline"] == (0, 0, 0, 0, 0, 0, 1, 1)
    assert second.coordinates["data"] == (1, 1, 2, 2)
    assert second.coordinates["tensor"] == (0, 1, 0, 1)
    assert found.shown_axes == ("pipeline", "data", "tensor")
    assert found.num_nodes == 2


def test_nodes_have_the_coordinates_of_their_experts_too() -> None:
    """Megatron's second mesh: 12 ranks as 2 pipeline ranks of 6 that share the experts two by three."""
    experts = Mesh((("pipeline", 2), ("expert_data", 1), ("expert", 3), ("expert_tensor", 2)))
    found = rank_map(MESH, (6, 6), (0, 1), experts)
    assert found.shown_axes == ("pipeline", "data", "tensor", "expert", "expert_tensor")
    assert found.nodes[0].coordinates["expert"] == (0, 0, 1, 1, 2, 2)
    assert found.nodes[1].coordinates["expert_tensor"] == (0, 1, 0, 1, 0, 1)
    caption = page.mesh_caption(found)
    assert caption.startswith(
        "pipeline 2 x data 3 x tensor 2, the last axis on adjacent ranks; routed experts: "
    )
    assert "expert 3 x expert_tensor 2; P pipeline" in caption
    assert as_plotly(page.mesh_figure(found)).data[0].text[0][5] == "<b>5</b><br>P0 D2 T1 E2 ET1"


@pytest.mark.parametrize(("numbers", "words"), [([0, 1, 2, 3], "0-3"), ([5, 5], "5"), ([4, 0, 2], "0, 2, 4")])
def test_coordinates_are_written_as_ranges(numbers: Sequence[int], words: str) -> None:
    assert ranges(numbers) == words


def test_a_mesh_is_drawn_with_a_row_per_node_and_a_cell_per_gpu() -> None:
    figure = as_plotly(page.mesh_figure(rank_map(MESH, (8, 4), (3, 5))))
    (heat,) = figure.data
    assert [list(row) for row in heat.z] == [[0] * 6 + [1] * 2, [1] * 4 + [None] * 4]
    assert heat.text[1][0] == "<b>8</b><br>P1 D1 T0"
    assert list(figure.layout.yaxis.ticktext) == ["node 3", "node 5"]
    many = rank_map(Mesh((("pipeline", 4), ("data", 512), ("tensor", 8))), (8,) * 2048, range(2048))
    assert len(as_plotly(page.mesh_figure(many)).data[0].z) == 8
    assert "The first 8 of 2,048 nodes." in page.mesh_caption(many)
    assert "pipeline 4 x data 512 x tensor 8" in page.mesh_caption(many)


# -- the page --------------------------------------------------------------------------------------------


def test_the_schedule_is_drawn_as_papers_draw_it() -> None:
    """A row per rank from the top, a box per forward and backward with its number, bubbles white."""
    outcome, section = simulated()
    figure = as_plotly(page.schedule_figure(section))
    bars = {bar.name: bar for bar in figure.data}
    assert list(bars) == ["communication and host", "bubble", "forward", "backward"]
    scale = 1e3
    f = seconds_of(SHORT, outcome.job) * scale
    forward = bars["forward"]
    assert len(forward.x) == 4 * 8
    assert list(forward.text[:8]) == [str(number) for number in range(8)]
    assert list(forward.y) == [rank for rank in range(4) for _ in range(8)]
    assert forward.base[8] == pytest.approx(f, rel=1e-5)
    assert list(forward.x) == pytest.approx([f] * 32, rel=1e-5)
    assert bars["bubble"].marker.color == "#FFFFFF"
    mean = sum(bars["bubble"].x) / 4 / (section.step_seconds * scale)
    assert mean == pytest.approx(3 / 11, rel=1e-4)
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]
    assert "3 / 11" not in page.schedule_caption(section)
    assert "8 micro-batches: bubbles are 27.3 % of the step" in page.schedule_caption(section)


def row_of(section: PipelineSection, found: Sequence[Box]) -> PipelineSection:
    return replace(section, rows=(replace(section.rows[0], boxes=tuple(found)), *section.rows[1:]))


def test_later_chunks_are_paler_and_gradients_of_weights_have_a_colour() -> None:
    _, section = simulated(micro_batches=1)
    found = [
        Box(kind, chunk, chunk, 0, float(at), at + 1.0)
        for at, (kind, chunk) in enumerate([("F", 0), ("F", 1), ("I", 1), ("W", 1)])
    ]
    section = replace(
        row_of(section, [*found, Box("", -1, -1, -1, 5.0, 6.0)]), step_seconds=6.0, shown_seconds=6.0
    )
    bars = {bar.name: bar for bar in as_plotly(page.schedule_figure(section)).data}
    assert bars["forward, chunk 0"].marker.color == "#2F7FBF"
    assert bars["forward, chunk 1"].marker.color == page.paler("#2F7FBF", 0.6) == "#ACCCE5"
    assert "gradients of weights, chunk 1" in bars
    assert "backward of inputs, chunk 1" in bars
    assert list(bars["optimizer"].x) == [1.0]
    assert page.schedule_caption(section).startswith("1 micro-batches on 2 stages per rank")


def test_ranks_that_begin_their_steps_apart_are_drawn_where_they_are() -> None:
    """Without an end that all share the last stage begins its next step first, here two of ten seconds
    before: the figure is 12 seconds wide, and has ten of each rank."""
    _, section = simulated(micro_batches=1)
    late = replace(section.rows[0], bubbles=(), boxes=(Box("F", 0, 0, 0, 0.0, 1.2),))
    early = replace(late, rank=1, begin_seconds=-2.0, boxes=(Box("F", 1, 0, 0, 1.1, 2.3),))
    two = PipelineSection((late, early), 1, 10.0)
    assert two.bounds == (-2.0, 10.0)
    figure = as_plotly(page.schedule_figure(two))
    between, _, forward = figure.data
    assert (list(between.base), list(between.x)) == ([2.0, 0.0], [10.0, 10.0])
    assert list(forward.base) == [2.0, 3.1]
    assert tuple(figure.layout.xaxis.range) == (0, 12.0)
    assert [line.count("0") for line in schedule_sketch(two)] == [
        1 + 7,
        7,
    ]  # of 70 cells of 12 s, and the name of rank 0


def test_the_figure_of_a_long_pipeline_is_compact() -> None:
    """32 ranks, 64 micro-batches, 2 chunks: 8,192 boxes in a megabyte, within the page's height."""
    _, section = simulated(micro_batches=1)
    rows = tuple(
        replace(
            section.rows[0],
            rank=rank,
            boxes=tuple(
                Box(kind, rank + 32 * chunk, chunk, number, start := rank + 0.37 * number, start + 0.31)
                for kind in "FB" for chunk in (0, 1) for number in range(64)
            ),
        )
        for rank in range(32)
    )  # fmt: skip
    figure = page.schedule_figure(PipelineSection(rows, 64, 100.0))
    assert sum(len(bar["x"]) for bar in figure.data[2:]) == 8192
    assert len(figure.to_json()) < 1_000_000
    assert as_plotly(figure).layout.height <= 760


def test_the_page_has_schedule_tables_and_mesh() -> None:
    outcome, _ = simulated(sent_bytes=2**20)
    report = report_of(outcome, 0.0)
    text = html_report(report, outcome.trace)
    assert '<section class="card" id="parallelism">' in text
    names = (
        "step",
        "schedule",
        "mesh",
        "timeline",
        "waterfall-gpu",
        "memory-gpu",
        "collectives",
        "links",
        "errors",
    )
    check_text(text, names)
    for part in ("plot-schedule", "plot-mesh", "<h3>Pipeline ranks: ", "<h3>Communication by group</h3>"):
        assert part in text
    plain = html_report(replace(report, pipeline=None, rank_map=None), outcome.trace)
    assert 'id="parallelism"' not in plain


def test_validation_is_by_the_slowest_rank_without_its_bubbles() -> None:
    """The first of 4 stages waits for the others most of the step; the second is slow, and waits for
    nobody's links, so that its step is not bound by the network."""
    kernels = [(SHORT, SHORT), (LONG, LONG), (SHORT, SHORT), (SHORT, SHORT)]
    job = parallel(free_job(4, placement={"gpus_per_node": [4]}))
    outcome = simulate_job(job, plan=pipeline_plan(gpipe, 4, 8, kernels, sent_bytes=0))
    section = pipeline_of(outcome)
    assert section is not None
    assert section.slowest.rank == 1
    assert seconds_by_cause(outcome) == section.rows[1].breakdown.seconds
    assert seconds_by_cause(outcome)["exposed_communication"] < 1e-9
    plain = simulate_job(resolve(Experiment(model="gpt2", cluster="dgx-h100", gpus=1)))
    assert seconds_by_cause(plain)["bubble"] == 0.0
