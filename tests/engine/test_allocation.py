"""What torch's allocator makes of a step: reserved bytes, and what running short of them costs."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import zsim
from zsim.comparison.clock_check import check_clock
from zsim.comparison.plan_check import calls_of_trace, check_plan
from zsim.comparison.verdict import Tolerances
from zsim.engine.allocation import has_room_at, make_allocator, reach_steady_state, steady_state
from zsim.engine.simulate import simulate_job
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import step_peak_bytes
from zsim.plan.memory.tensors import plan_peaks
from zsim.plan.passes.repeated_step import repeat_step
from zsim.report.fit import fit_of
from zsim.report.views.html.report import html_report
from zsim.report.views.text.report import print_report
from zsim.specs.experiment.resolve import resolve
from zsim.ui.answer import answer
from zsim.ui.words import answer_words
from zsim.units import GIGABYTES, format_bytes

SOURCE = 'source = "made up for this test"\nevidence = "assumed"\n'


def cluster(folder: Path, memory: str) -> str:
    """A node of 8 H100 with `memory` each."""
    folder.mkdir(exist_ok=True)
    (folder / "gpu.toml").write_text(
        f'extends = "h100-sxm-80gb"\nname = "small"\n[memory]\n{SOURCE}capacity = "{memory}"\n'
    )
    (folder / "cluster.toml").write_text('extends = "dgx-h100"\nname = "small"\ngpu = "gpu.toml"\n')
    return str(folder / "cluster.toml")


def experiment(where: str, strategy: dict[str, Any] | None = None, **training: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model="llama-2-7b",
        cluster=where,
        nodes=1,
        training={"sequence_length": 2048, "micro_batch_size": 2, **training},
        strategy=strategy or {"kind": "fsdp1", "wrapping": "huggingface", "limit_all_gathers": False},
    )


def step(where: str, strategy: dict[str, Any] | None = None, **training: Any) -> zsim.Result:
    return zsim.simulate(experiment(where, strategy, **training))


def test_more_is_reserved_than_allocated_and_less_than_there_is() -> None:
    report = step("dgx-h100").report
    peak = report.peaks["gpu"]
    assert report.allocator is not None
    assert report.allocator.retries == 0
    own = peak.total - peak.by_category["framework"]
    assert own <= report.allocator.reserved_bytes < 79.2 * 2**30


def test_states_that_the_first_update_makes_stand_in_the_room_of_activations() -> None:
    """The same step with states that are there before reserves less. (Micro-batches of which each tensor is
    larger than a state, so that the two do not fit next to each other.)"""
    job = resolve(experiment("dgx-h100", {"kind": "fsdp1"}, micro_batch_size=4))
    plan = make_plan(job)
    states = next(memory for memory in plan.resident if memory.lazy_tensors)
    assert sum(states.lazy_tensors) == states.bytes
    assert len(states.lazy_tensors) == 2 * 33  # of 32 blocks and the root
    eager = tuple(replace(memory, lazy_tensors=()) for memory in plan.resident)
    early = plan.map_programs(lambda program: replace(program, resident=eager))
    reserved = []
    for one in (plan, early):
        times = [float(number) for number in range(len(one.ops))]
        reserved.append(reach_steady_state(make_allocator(job, one, one), times, times).reserved_bytes)
    assert reserved[0] > 1.02 * reserved[1]


@pytest.mark.parametrize(
    ("strategy", "frees"), [({"kind": "fsdp2"}, False), ({"kind": "deepspeed", "stage": 2}, True)]
)
def test_states_are_made_when_the_host_comes_to_the_update(strategy: dict[str, Any], *, frees: bool) -> None:
    """After backward, and after DeepSpeed has cast its gradients and let go of them."""
    job = resolve(experiment("dgx-h100", strategy, optimizer_implementation="foreach"))
    plan = make_plan(job)
    changes = make_allocator(job, plan, plan).first_changes
    assert changes is not None
    update = next(number for number, op in enumerate(plan.ops) if op.name == "optimizer step")
    there = changes.changes_of_op[update]
    first = next(place for place, change in enumerate(there) if change.tensor < 0)
    assert (first > 0) == frees
    assert not any(change.bytes for change in there[:first])
    assert any(change.bytes for change in there[first:] if change.tensor >= 0)  # its square roots


def test_segments_of_what_the_parameters_were_made_from_stay_where_there_was_room(tmp_path: Path) -> None:
    """DeepSpeed puts 13.5 GB of parameters together on the GPU since 0.18.7: pieces of a weight each."""
    table = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    reserved = {}
    for version in ("0.18.6", "0.18.7"):
        job = resolve(experiment("dgx-h100", {"config": table, "version": version}))
        plan = make_plan(job)
        allocator = make_allocator(job, plan, plan)
        held = sum(memory.bytes for memory in plan.resident if not memory.lazy_tensors)
        assert allocator.memory.active_bytes == pytest.approx(held, abs=2**20)
        reserved[version] = allocator.memory.reserved_bytes
    parameters = plan.resident[0]
    assert sum(parameters.leftovers) == pytest.approx(parameters.bytes, rel=1e-6)
    assert reserved["0.18.7"] - reserved["0.18.6"] == pytest.approx(parameters.bytes, rel=0.02)
    tight = resolve(experiment(cluster(tmp_path, "24 GB"), {"config": table, "version": "0.18.7"}))
    assert make_allocator(tight, plan, plan).memory.reserved_bytes < 24e9


def test_active_bytes_lie_between_allocated_and_reserved(tmp_path: Path) -> None:
    """Also of a step that the allocator holds up, which is run again."""
    roomy = simulate_job(resolve(experiment("dgx-h100")))
    own = plan_peaks(roomy.plan)["total"]
    few = cluster(tmp_path, f"{step_peak_bytes(roomy.job, roomy.plan) + 3_000_000_000} B")
    tight = simulate_job(resolve(experiment(few)))
    assert tight.allocation is not None
    assert roomy.allocation is not None
    assert tight.allocation.is_short
    for allocation in (roomy.allocation, tight.allocation):
        assert own <= allocation.active_bytes <= allocation.reserved_bytes
    assert tight.allocation.active_bytes < roomy.allocation.active_bytes  # the host is less far ahead


def test_expandable_segments_reserve_less() -> None:
    """FSDP2 has one pool for nearly everything: less than with segments, still at least what is allocated."""
    strategy = {"kind": "fsdp2"}
    fixed, grown = (step("dgx-h100", strategy, expandable_segments=grows).report for grows in (False, True))
    assert fixed.allocator is not None
    assert grown.allocator is not None
    peak = fixed.peaks["gpu"]
    assert peak.total - peak.by_category["framework"] <= grown.allocator.reserved_bytes
    assert grown.allocator.reserved_bytes < fixed.allocator.reserved_bytes
    assert grown.step_seconds == fixed.step_seconds


def test_an_allocator_with_room_costs_nothing(tmp_path: Path) -> None:
    large, larger = step("dgx-h100"), step(cluster(tmp_path, "400 GB"))
    assert large.report.step_seconds == larger.report.step_seconds


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[zsim.Result, zsim.Result]:
    """The same step with plenty of memory, and with what it allocates at most and 4 GB."""
    plenty = step("dgx-h100")
    peak = plenty.report.peaks["gpu"].total
    return plenty, step(cluster(tmp_path_factory.mktemp("short"), f"{peak + 4_000_000_000} B"))


def test_a_step_that_runs_short_pays_for_every_retry(short: tuple[zsim.Result, zsim.Result]) -> None:
    """0.21 s of presets/frameworks.toml times 1 + ... + 1/8, for eight ranks, or as long as they have been
    apart since the last retry, and the driver's calls; the GPU idles meanwhile."""
    plenty, tight = short
    assert tight.report.allocator is not None
    assert tight.report.allocator.retries > 0
    extra = tight.report.step_seconds - plenty.report.step_seconds
    assert extra == pytest.approx(tight.report.allocator.extra_seconds)
    calls = 8 * (207e-6 + 115e-6) * tight.report.allocator.released_segments
    assert 0.57 < extra < 0.571 * tight.report.allocator.retries + calls


def test_it_fits_all_the_same_and_says_that_it_runs_short(short: tuple[zsim.Result, zsim.Result]) -> None:
    _, tight = short
    assert tight.report.fits
    assert tight.report.peaks["gpu"].total == short[0].report.peaks["gpu"].total
    assert any("runs short" in note and "num_alloc_retries" in note for note in tight.report.notes)
    assert tight.report.to_dict()["verdict"] == "runs short"


def test_what_running_short_takes_is_a_part_of_the_step_and_of_its_critical_path(
    short: tuple[zsim.Result, zsim.Result],
) -> None:
    """Were it not for its allocator the step would be the other one: all that it is longer by is the
    allocator's, and nothing of it is host-bound."""
    plenty, tight = (result.report.to_dict() for result in short)
    extra = tight["step_seconds"] - plenty["step_seconds"]
    assert extra > 1
    assert tight["breakdown_seconds"]["allocator"] == pytest.approx(extra, rel=0.02)
    assert plenty["breakdown_seconds"]["allocator"] == 0
    assert tight["breakdown_seconds"]["host_bound"] < 0.1
    assert math.fsum(tight["breakdown_seconds"].values()) == pytest.approx(tight["step_seconds"], rel=1e-9)
    assert tight["critical_path_seconds"]["allocator"] == pytest.approx(extra, rel=0.05)
    assert sum(tight["critical_path_seconds"].values()) == pytest.approx(tight["step_seconds"])


def test_a_recording_does_not_say_that_its_host_waits_for_the_allocator(
    short: tuple[zsim.Result, zsim.Result],
) -> None:
    """Held against one, what the allocator takes is host-bound in both."""
    tight = short[1]
    calls = calls_of_trace(tight.trace, 0)
    recorded = replace(tight.trace, source="recorded", allocator_blocks=())
    check = check_clock(tight.trace, recorded, check_plan(calls, calls), Tolerances(), "")
    names = [metric.name for metric in check.step]
    assert "host-bound" in names
    assert "torch's allocator" not in names


@pytest.mark.parametrize("which", ["plenty", "tight", "crowded", "too much"])
def test_the_verdict_is_one_in_the_terminal_the_file_and_on_the_page(
    which: str,
    short: tuple[zsim.Result, zsim.Result],
    crowded: zsim.Result,
    tmp_path: Path,
) -> None:
    """Word and sentence, with what torch allocates and reserves, neither with the CUDA context, where its
    allocator was simulated."""
    if which == "too much":
        result = step(cluster(tmp_path, "10 GB"))
    else:
        result = {"plenty": short[0], "tight": short[1], "crowded": crowded}[which]
    fit = fit_of(result.report)
    verdicts = {
        "plenty": "fits",
        "tight": "runs short",
        "crowded": "likely does not fit",
        "too much": "does not fit",
    }
    assert fit.verdict.word == result.report.to_dict()["verdict"] == verdicts[which]
    report = result.report
    allocated = report.peaks["gpu"].total - report.to_dict()["peak_bytes"]["gpu"]["framework"]
    said = f"; torch allocates {format_bytes(allocated)} and reserves "
    assert (said in fit.words) == (" in use on the fullest GPU" in fit.words) == (which != "too much")
    printed = io.StringIO()
    print_report(result.report, Console(file=printed, width=1000))
    assert f"{fit.verdict.word.upper()}  {fit.words}" in printed.getvalue()
    page = unescape(html_report(result.report, result.trace))
    assert f'<p class="verdict {fit.tone}"><strong>{fit.label}</strong> {fit.words}</p>' in page
    # the page looks for what would fit beside the answer
    missing = result.report.out_of_memory
    bare = None if missing is None else replace(missing, least_gpus=None, remedy=None, tried=())
    fit = fit_of(replace(result.report, out_of_memory=bare))
    shown = answer_words(answer(result.job.experiment))[1]
    assert shown.className == f"verdict {fit.tone}"
    assert [shown.children[0].children, *shown.children[1:]] == [fit.label, " ", fit.words]
    assert all(GIGABYTES in text for text in (printed.getvalue(), page))


def test_the_object_of_json_names_reserved_bytes_and_retries(short: tuple[zsim.Result, zsim.Result]) -> None:
    found = short[1].report.to_dict()["allocator"]
    assert set(found) == {
        "reserved_bytes", "limit_bytes", "retries", "extra_seconds", "released_segments", "failures",
        "step_seconds_without_retries",
    }  # fmt: skip
    assert found["released_segments"] > 0
    assert found["reserved_bytes"] <= found["limit_bytes"]


@pytest.fixture(scope="module")
def crowded() -> zsim.Result:
    """All tensors fit, but in a warm-up step one finds no room, and in the steady one all do."""
    return zsim.simulate(
        zsim.Experiment(
            model="llama-3.2-1b",
            cluster="dgx-h100",
            nodes=1,
            training={
                "sequence_length": 6795,
                "micro_batch_size": 5,
                "gradient_accumulation_steps": 2,
                "activation_checkpointing": "selective-op",
            },
            strategy={"kind": "deepspeed", "stage": 2},
        )
    )


def test_requests_that_find_no_room_are_said_though_the_tensors_fit(crowded: zsim.Result) -> None:
    report = crowded.report
    assert report.fits
    assert report.allocator is not None
    assert (report.allocator.retries, report.allocator.failures) == (0, 1)
    assert any(note.startswith("torch may stop with an out-of-memory error") for note in report.notes)


def test_a_job_that_does_not_fit_runs_as_if_its_allocator_had_room(tmp_path: Path) -> None:
    """Within the GPU's memory and beyond what may be used of it: no seconds of the allocator, no figure."""
    plenty = step("dgx-h100")
    tight = step(cluster(tmp_path, f"{plenty.report.peaks['gpu'].total + 1_000_000_000} B"))
    assert not tight.report.fits
    assert tight.report.allocator is None
    assert tight.report.step_seconds == plenty.report.step_seconds


def test_waiting_in_every_layer_keeps_the_host_from_gathering_ahead() -> None:
    """Gathers of FSDP1 without its limiter pile up as far as the host is ahead; one that may gather two units
    ahead reserves less."""
    free = step("dgx-h100").report.allocator
    limited = step("dgx-h100", {"kind": "fsdp1", "wrapping": "huggingface"}).report.allocator
    assert free is not None
    assert limited is not None
    assert limited.reserved_bytes < free.reserved_bytes - 5e9


def test_ranks_of_one_node_take_turns_at_the_driver() -> None:
    """8 GPUs in one node, and in four nodes of two."""
    calls = []
    for nodes in (1, 4):
        job = resolve(zsim.Experiment(model="gpt2", cluster="dgx-h100", nodes=nodes, gpus=8))
        plan = make_plan(job)
        allocator = make_allocator(job, plan, plan)
        calls.append((allocator.malloc_seconds, allocator.free_seconds))
    assert calls[0] == pytest.approx([4 * seconds for seconds in calls[1]])


@pytest.mark.parametrize(
    "strategy", [{"kind": "fsdp1"}, {"kind": "deepspeed", "stage": 3}, {"kind": "fsdp2"}]
)
def test_room_at_other_times_is_found_without_settling_again(strategy: dict[str, Any]) -> None:
    """A GPU that does all at once, and one that does nothing before the step's end: what `record_stream`
    protects comes back late. There is room for just what that reserves, and for not a byte less."""
    job = resolve(experiment("dgx-h100", strategy, micro_batch_size=1))
    plan = make_plan(job)
    issue = [float(number) for number in range(len(plan.ops))]
    late = [float(len(plan.ops))] * len(plan.ops)
    empty = make_allocator(job, plan, plan)
    prompt, slow = (
        reach_steady_state(empty.copy(), issue, issue),
        reach_steady_state(empty.copy(), issue, late),
    )
    assert sum(prompt.pools.values()) == prompt.reserved_bytes <= slow.reserved_bytes
    assert has_room_at(plan.programs[0], empty, prompt, issue, issue)
    assert has_room_at(plan.programs[0], empty, prompt, issue, late) == bool(slow.pools)
    if slow.pools:  # it has never given anything back
        for limit, has_room in ((slow.reserved_bytes, True), (slow.reserved_bytes - 1, False)):
            tight = empty.copy()
            tight.memory.capacity_bytes = limit
            assert has_room_at(plan.programs[0], tight, prompt, issue, late) == has_room
            assert reach_steady_state(tight, issue, late).pools == (slow.pools if has_room else {})


@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize(
    "strategy", [{"kind": "fsdp1"}, {"kind": "deepspeed", "stage": 3}, {"kind": "fsdp2"}, {"kind": "ddp"}]
)
def test_runs_of_one_program_are_settled_as_each_by_itself(
    strategy: dict[str, Any], is_expandable: bool
) -> None:
    """At the times of runs on GPUs that are late by random amounts, with room and without: every figure, and
    the segments and counts that the allocator is left with where it ran short."""
    training = {"micro_batch_size": 1, "sequence_length": 512, "expandable_segments": is_expandable}
    job = resolve(
        zsim.Experiment(model="gpt2", cluster="dgx-h100", nodes=1, training=training, strategy=strategy)
    )
    plan = make_plan(job)
    repeated = repeat_step(plan)
    program, empty = repeated.program, make_allocator(job, plan, repeated)
    random = np.random.default_rng(0)
    issue = np.arange(float(len(program.ops))).tolist()
    whole, num_short = reach_steady_state(empty.copy(), issue, issue).reserved_bytes, 0
    for part in (2.0, 1.1, 1.0, 0.9):
        for lead in (0.0, 30.0, 300.0):
            late = lead * random.random(len(issue))
            ended = np.maximum.accumulate(np.array(issue) + late).tolist()
            for _ in range(2):  # not known, and known
                once, alone = empty.copy(), empty.copy()
                once.memory.capacity_bytes = alone.memory.capacity_bytes = int(part * whole)
                assert steady_state(program, once, issue, ended) == reach_steady_state(alone, issue, ended)
                assert once.has_retried == alone.has_retried
                if alone.has_retried:
                    num_short += 1
                    assert once.counts == alone.counts
                    assert once.first_changes is None
                    assert once.memory.reserved_by_pool() == alone.memory.reserved_by_pool()
                    assert reach_steady_state(once, issue, ended) == reach_steady_state(alone, issue, ended)
    assert num_short


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_programs_of_a_pipeline_are_settled_as_each_by_itself(schedule: str) -> None:
    """16 micro-batches over two stages: their changes repeat, and most of them are not made."""
    job = resolve(
        zsim.Experiment(
            model="gpt2", cluster="dgx-h100", nodes=1, strategy={"kind": "megatron"},
            parallelism={"pipeline": 2, "schedule": schedule},
            training={"gradient_accumulation_steps": 16, "activation_checkpointing": "full"},
        )
    )  # fmt: skip
    plan = make_plan(job)
    for number, program in enumerate(plan.programs):
        empty = make_allocator(job, plan, plan, number)
        issue = np.arange(float(len(program.ops))).tolist()
        for delay in (0.0, 40.0):
            ended = [time + delay for time in issue]
            assert steady_state(program, empty.copy(), issue, ended) == reach_steady_state(
                empty.copy(), issue, ended
            )
