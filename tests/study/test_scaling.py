"""Scaling studies: the batch of every mode, bends and their reasons, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest

from tests.browser import as_plotly, check_page, in_browser
from tests.expect import about
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.scaling.result import (
    EfficiencyChange,
    ScalingPoint,
    ScalingResult,
    best_of,
    causes,
    range_of_efficiency,
    sentences,
)
from zsim.study.scaling.scaling import parse_counts, run_scaling
from zsim.study.search import largest_fitting
from zsim.validated.ratios import NO_DIFFERENCE, ratio_range, shipped_bound

GPT2: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "training": {"sequence_length": 256}}


def ran(folder: Path, counts: list[int], mode: Any = "weak", **changes: Any) -> ScalingResult:
    batch = changes.pop("global_batch", None)
    experiment = Experiment(**{**GPT2, **changes})
    return run_scaling(experiment, counts, mode, folder, global_batch=batch, is_quiet=True)


def batches(scaling: ScalingResult) -> list[tuple[int, int, int]]:
    return [(s.gpus, s.micro_batch_size, s.gradient_accumulation_steps) for s in scaling.runs]


def by_hand(*costs: tuple[int, dict[str, float]]) -> ScalingResult:
    """Scales of one token per GPU and step, with what it costs by cause."""
    scales = tuple(
        ScalingPoint(gpus, None, 1, 1, 1, sum(parts.values()), gpus, 0.4, True, 10**9, 2 * 10**9, parts)
        for gpus, parts in costs
    )
    return ScalingResult("by hand", "weak", scales, scales[0])  # against the first, whichever is best


# -- counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8..64", [8, 16, 32, 64]),
        ("8..100", [8, 16, 32, 64]),
        ("8..4096:8", [8, 64, 512, 4096]),
        ("64,8,24", [8, 24, 64]),
        ("16", [16]),
    ],
)
def test_counts_are_written_short(text: str, counts: list[int]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "8..", "64..8", "8..64:1", "a,b", "0,8", "-8", "8..64:x"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--gpus"):
        parse_counts(text)


# -- batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "found"), [("weak", [(8, 1, 8), (16, 1, 8)]), ("strong", [(8, 1, 32), (16, 1, 16)])]
)
def test_a_batch_given_for_all_gpus_is_kept_by_gpu_or_in_all(tmp_path: Path, mode: str, found: Any) -> None:
    """256 sequences on the experiment's 32 GPUs are 8 for each: every count was refused, since the batch was
    asked of it too."""
    training = {"sequence_length": 256, "global_batch_size": 256}
    assert batches(ran(tmp_path, [8, 16], mode, nodes=4, training=training)) == found


def test_weak_scaling_keeps_every_gpus_batch(tmp_path: Path) -> None:
    training = {"sequence_length": 256, "micro_batch_size": 3, "gradient_accumulation_steps": 2}
    scaling = ran(tmp_path, [8, 16], training=training)
    assert batches(scaling) == [(8, 3, 2), (16, 3, 2)]
    assert [scale.step_tokens for scale in scaling.runs] == [8 * 6 * 256, 16 * 6 * 256]


def test_strong_scaling_keeps_the_batch_of_all(tmp_path: Path) -> None:
    """96 sequences: 12, 6 and 3 per GPU; of micro-batches of at most 4 that is 3 x 4, 2 x 3 and 1 x 3. 64
    GPUs do not divide it."""
    training = {"sequence_length": 256, "micro_batch_size": 4}
    scaling = ran(tmp_path, [8, 16, 32, 64], "strong", training=training, global_batch=96)
    assert batches(scaling) == [(8, 4, 3), (16, 3, 2), (32, 3, 1)]
    assert scaling.points[3].error == "a batch of 96 sequences does not divide over 64 GPUs"


def test_strong_scaling_takes_the_experiments_own_batch(tmp_path: Path) -> None:
    training = {"sequence_length": 256, "micro_batch_size": 2}
    scaling = ran(tmp_path, [8, 32], "strong", training=training, gpus=16)
    assert batches(scaling) == [(8, 2, 2), (32, 1, 1)]


def test_a_batch_in_deepspeeds_json_scales_too(tmp_path: Path) -> None:
    """32 sequences of the JSON on 8 GPUs; on 16 the JSON's train_batch_size would contradict."""
    config = {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }  # fmt: skip
    strategy = {"kind": "deepspeed", "config": config}
    assert batches(ran(tmp_path, [8, 16], strategy=strategy, gpus=8)) == [(8, 2, 2), (16, 2, 2)]
    assert batches(ran(tmp_path, [16], "strong", strategy=strategy, gpus=8)) == [(16, 2, 1)]


def test_shard_groups_keep_their_size(tmp_path: Path) -> None:
    """2 replicas of 8 are 4 replicas of 8 on 32 GPUs; 4 GPUs are no multiple of 8."""
    scaling = ran(tmp_path, [4, 32], gpus=16, strategy={"kind": "fsdp2", "replicate": 2})
    assert scaling.points[0].error == "gpus: found 4, expected a multiple of the shard group's 8"
    own = resolve(Experiment(**GPT2, gpus=32, strategy={"kind": "fsdp2", "replicate": 4}))
    assert scaling.points[1].step_seconds == simulate_job(own).trace.step_seconds


def test_filling_takes_the_largest_micro_batch_that_fits(tmp_path: Path) -> None:
    """More ranks hold less each, so more fits."""
    training = {"sequence_length": 1024, "activation_checkpointing": "full"}
    changes: dict[str, Any] = {"model": "llama-2-7b", "training": training}
    scaling = ran(tmp_path, [8, 32], "fill", **changes)
    few, many = (scale.largest_micro_batch or scale.micro_batch_size for scale in scaling.runs)
    assert 1 <= few < many
    assert all(scale.fits for scale in scaling.runs)
    more = Experiment(
        model="llama-2-7b", cluster="dgx-h100", gpus=8,
        training={**training, "micro_batch_size": few + 1},
    )  # fmt: skip
    job = resolve(more)
    assert not fits(job, make_plan(job))


def test_filling_says_where_it_takes_less_than_fits_and_why(tmp_path: Path) -> None:
    training = {"sequence_length": 1024, "activation_checkpointing": "none"}
    changes: dict[str, Any] = {"model": "llama-3-8b", "training": training, "strategy": {"kind": "fsdp2"}}
    scaling = ran(tmp_path, [32], "fill", **changes, cluster="dgx-a100-40gb")
    (scale,) = scaling.runs
    assert scale.largest_micro_batch is not None
    assert scale.micro_batch_size < scale.largest_micro_batch
    assert not scale.allocator_retries
    said = [words for words in sentences(scaling) if "torch's allocator runs short with it" in words]
    assert len(said) == 1
    (found,) = scaling.to_dict()["scales"]
    assert found["largest_micro_batch_size"] == scale.largest_micro_batch


def test_bends_begin_where_it_fits() -> None:
    """The first of three does not fit: no sentence starts from it."""
    scales = [
        ScalingPoint(gpus, None, fits=gpus > 8, step_seconds=1.0, step_tokens=gpus) for gpus in (8, 16, 32)
    ]
    scaling = ScalingResult("t", "weak", tuple(scales), scales[1])
    assert [(bend.start, bend.end) for bend in scaling.changes()] == [(16, 32)]


def test_the_most_that_fits_may_be_none_or_all() -> None:
    big = Experiment(model="llama-3-70b", cluster="dgx-h100", gpus=8, strategy={"kind": "ddp"})
    assert largest_fitting(lambda _: big) == 0
    small = Experiment(**GPT2, gpus=8)
    assert largest_fitting(lambda _: small, upper_bound=5) == 5


def test_a_global_batch_is_for_strong_scaling(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--global-batch: only strong scaling"):
        ran(tmp_path, [8], "weak", global_batch=64)


def test_counts_that_cannot_be_are_rows_unless_none_can(tmp_path: Path) -> None:
    scaling = ran(tmp_path, [8, 12])
    assert "expected a multiple of the 8 GPUs" in (scaling.points[1].error or "")
    with pytest.raises(InputError, match=r"none of 2 counts of GPUs can be simulated: gpus: found 12"):
        ran(tmp_path, [12, 20])


# -- bends -----------------------------------------------------------------------------------------------

LOST = by_hand(
    (8, {"compute": 0.9, "network": 0.1}),
    (16, {"compute": 0.9, "network": 0.1}),
    (32, {"compute": 0.9, "network": 0.35}),
    (64, {"compute": 0.9, "network": 1.1}),
    (128, {"compute": 0.9, "network": 1.1, "latency": 1.0}),
)


def test_efficiency_is_what_a_token_costs_where_it_costs_least() -> None:
    assert [LOST.efficiency(scale) for scale in LOST.runs] == pytest.approx([1, 1, 0.8, 0.5, 1 / 3])


def test_a_bend_is_judged_by_its_own_ends_and_by_the_degree_that_grows() -> None:
    """A token costs more at 32 GPUs, between what is told apart with a rank to a replica at both ends and
    with several at one, whatever the base has."""
    bounds = [shipped_bound(["GPUs"], is_shared=is_shared) for is_shared in (False, True)]
    between = sum(bounds) / 2
    found = by_hand((8, {"compute": 1.0}), (16, {"compute": 1.0}), (32, {"compute": exp(between)}))
    *others, last = found.points
    other = replace(found, points=(*others, replace(last, is_shared=True)))
    said = [next(sentences(scaling)) for scaling in (found, other)]
    assert [NO_DIFFERENCE in words for words in said] == [bound > between for bound in bounds]
    grown = range_of_efficiency(0.9, replace(found, grow="tensor"), last)
    assert grown == ratio_range(0.9, ["GPUs", "parallelism"], is_shared=False)


def test_a_knee_has_the_cause_that_grew_most_and_neighbours_are_one() -> None:
    """16 to 64: a token costs 1.0 more for the network; 64 to 128: 1.0 more for latency, of 2.0."""
    first, second = LOST.knees()
    one = about(1.0)
    assert first == EfficiencyChange(16, 64, 1.0, 0.5, "network", one, one, one)
    assert second == EfficiencyChange(64, 128, 0.5, about(1 / 3), "latency", 0.5, 0.5, 0.5)
    assert LOST.gains() == []


def test_a_gain_has_the_cause_that_shrank_most() -> None:
    gained = by_hand((8, {"compute": 1.0, "cpu": 1.0}), (16, {"compute": 1.0, "cpu": 0.6}))
    assert gained.gains() == [EfficiencyChange(8, 16, 1.0, 1.25, "cpu", -0.2, about(-0.2), about(-0.2))]
    assert list(sentences(gained)) == [
        "8 -> 16 GPUs: efficiency rises from 100 % to 125 %; a token costs 20 % less because of the CPU."
    ]


def test_a_cause_is_netted_against_what_it_replaced() -> None:
    """A token costs 2.0, then 2.5: latency grew by 2.0 and the network by 0.5, while computing shrank by 2.0.
    The 25 % more are 20 % latency's and 5 % the network's, as 2.0 to 0.5."""
    moved = by_hand((8, {"compute": 2.0}), (16, {"latency": 2.0, "network": 0.5}))
    (knee,) = moved.knees()
    assert knee == EfficiencyChange(8, 16, 1.0, 0.8, "latency", 1.0, 0.25, 0.2, "compute")
    assert list(sentences(moved)) == [
        "8 -> 16 GPUs: efficiency falls from 100 % to 80 %; a token costs 25 % more, 20 % because of "
        "collectives' latency (100 % more, partly offset by less compute on the critical path)."
    ]


def scale_of(gpus: int, seconds: float, **more: Any) -> ScalingPoint:
    return ScalingPoint(gpus, None, step_seconds=seconds, step_tokens=gpus, **{"fits": True, **more})


def test_linear_is_the_best_point_that_has_room() -> None:
    """Tokens per second per GPU: 1 on 8, where the allocator runs short, 2 on 16, 1.6 on 32; 4 is no fit."""
    scales = [
        scale_of(4, 0.1, fits=False),
        scale_of(8, 1.0, allocator_retries=3),
        scale_of(16, 0.5, allocator_retries=0),
        scale_of(32, 0.625, allocator_retries=0),
    ]
    assert best_of(scales).gpus == 16
    short = [scale_of(8, 0.25, allocator_retries=3), *scales[2:]]
    assert best_of(short).gpus == 16
    assert best_of(scales[:2]).gpus == 8
    assert best_of(scales[:1]).gpus == 4


def test_a_slow_slope_is_no_knee() -> None:
    """4 points in a doubling, and 12 in three."""
    flat = by_hand((8, {"compute": 1.0}), (16, {"compute": 1.0, "network": 0.04}),
                   (128, {"compute": 1.0, "network": 0.19}))  # fmt: skip
    assert flat.knees() == []
    assert list(sentences(flat)) == [
        "No knee up to 128 GPUs: 84 % of linear there, and no doubling loses 5 points."
    ]


def test_efficiency_is_against_a_point_that_fits(tmp_path: Path) -> None:
    """Llama 3 70B under ZeRO-3 does not fit 8 GPUs; 64 do."""
    strategy, training = {"stage": 3}, {"sequence_length": 2048, "activation_checkpointing": "full"}
    scaling = ran(tmp_path, [8, 64], model="llama-3-70b", strategy=strategy, training=training)
    assert [scale.fits for scale in scaling.runs] == [False, True]
    assert scaling.base.gpus == 64


# -- pages -----------------------------------------------------------------------------------------------


def test_bars_are_percent_of_the_cost_at_the_best_point() -> None:
    bars = {trace.name: list(trace.y) for trace in as_plotly(causes(LOST)).data}
    assert bars["compute"] == pytest.approx([90.0] * 5)
    assert bars["network cards"] == pytest.approx([10, 10, 35, 110, 110])
    assert bars["collectives' latency"] == pytest.approx([0, 0, 0, 0, 100])


def test_the_json_has_what_the_page_has(tmp_path: Path) -> None:
    content = json.loads(json.dumps(ran(tmp_path, [8, 12, 16]).to_dict()))
    assert [scale["gpus"] for scale in content["scales"]] == [8, 12, 16]
    assert content["scales"][1]["error"]
    first = content["scales"][0]
    best = [s["gpus"] for s in content["scales"] if s.get("efficiency_fraction") == 1.0]
    assert best == [content["base_gpus"]]
    per_token = sum(first["token_gpu_seconds"].values())
    assert per_token == pytest.approx(8 / first["tokens_per_second"])


@in_browser
def test_the_page_is_alive(tmp_path: Path) -> None:
    dom = check_page(LOST.page(), ["efficiency", "throughput", "causes", "memory"], tmp_path)
    assert "efficiency falls from 100 % to 50 %; a token costs 100 % more because of network cards" in dom
    assert ">knee</text>" in dom


def test_degrees_stay_or_one_of_them_grows(tmp_path: Path) -> None:
    """4 GPUs as tensor 2 x 2 replicas: 8 GPUs have 4 replicas, or tensor 4 and the same 2, with the same
    sequences in each; on 2 GPUs tensor is 1."""
    small = Experiment(
        model={
            "model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 512,
            "vocab_size": 4096,
        },
        cluster="dgx-h100", nodes=1, gpus=4, strategy={"kind": "megatron"}, parallelism={"tensor": 2},
        training={"sequence_length": 512, "gradient_accumulation_steps": 2},
    )  # fmt: skip
    kept = run_scaling(small, [4, 8], "weak", tmp_path, is_quiet=True)
    grown = run_scaling(small, [2, 4, 8], "weak", tmp_path, grow="tensor", is_quiet=True)
    assert [scale.step_tokens for scale in kept.points] == [2048, 4096]
    assert [scale.step_tokens for scale in grown.points] == [2048, 2048, 2048]
    assert kept.points[0].step_seconds == grown.points[1].step_seconds
    strong = run_scaling(small, [8], "strong", tmp_path, grow="tensor", is_quiet=True)
    assert strong.points[0].gradient_accumulation_steps == 2
    odd = run_scaling(small, [4, 5], "weak", tmp_path, grow="tensor", is_quiet=True)
    expected = "gpus: found 5, expected a multiple of 2: tensor grows from 2 on 4 GPUs"
    assert odd.points[1].error == expected
    with pytest.raises(InputError, match="did you mean 'tensor'"):
        run_scaling(small, [4], "weak", tmp_path, grow="tensr", is_quiet=True)
