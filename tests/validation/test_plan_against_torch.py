"""The plan check: zsim's plans against PyTorch's own code, exact in collectives.

Against the oracle's recorded answers and the recorded runs without torch; against a live oracle and a live
FSDP2 on gloo with it; against DeepSpeed where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import zsim
from tests.validation.live_deepspeed import need_live_deepspeed
from validation import plan_check, plan_check_page
from validation.cases.cases import oracle_experiment
from validation.oracle.answer import Answer
from validation.oracle.case import Case
from zsim.comparison.plan_check import Call, calls_of_plan, unfold
from zsim.plan.memory.tensors import bytes_before_update, plan_peaks

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install zsim[validate]"
)
ORACLE = pytest.mark.parametrize("path", plan_check.oracle_answers(), ids=lambda path: path.stem)
RECORDED = pytest.mark.parametrize("path", plan_check.recordings(), ids=lambda path: path.parent.name)


# Nine per block, embedding, final norm, head (one with the embedding when tied).
TENSORS = {"llama-2-7b": 291, "llama-3-8b": 291, "llama-3-70b": 723, "llama-3.2-1b": 146}


@ORACLE
def test_collectives_are_the_oracles(path: Path) -> None:
    answer = Answer.read(path)
    plan = zsim.make_plan(oracle_experiment(asdict(answer.case)))
    assert plan_check.first_difference(calls_of_plan(plan), answer.calls) is None


@ORACLE
def test_memory_by_category_is_within_one_percent_of_the_oracles(path: Path) -> None:
    """Model states to the byte but for AdamW's step counters, 4 bytes per parameter tensor. The sum within
    0.03 percent.
    """
    answer = Answer.read(path)
    plan = zsim.make_plan(oracle_experiment(asdict(answer.case)))
    errors, peaks = plan_check.memory_errors(plan, answer), plan_peaks(plan)
    assert abs(errors.pop("total")) <= 0.0003
    assert max(map(abs, errors.values())) <= 0.01, errors
    assert errors["parameters"] == errors["gradients"] == 0
    counters = 4 * TENSORS[answer.case.model]
    assert peaks["optimizer_states"] == answer.peak_bytes["optimizer_states"] - counters


@RECORDED
def test_collectives_are_the_recorded_runs(path: Path) -> None:
    summary = json.loads(path.read_text())
    plan = plan_check.recorded_plan(summary)
    assert plan_check.first_difference(calls_of_plan(plan), unfold(summary["calls"])) is None


@RECORDED
def test_model_states_are_the_recorded_runs(path: Path) -> None:
    """When the last backward has ended, on the rank that holds most, to the byte. DeepSpeed's stages 1 and 2
    keep whole what begins or ends in a rank's partition; what is not the rank's own counts as a buffer here.
    """
    summary = json.loads(path.read_text())
    planned = bytes_before_update(plan_check.recorded_plan(summary))
    held = [rank["device"] for rank in summary["held_bytes_before_update"]]
    if path.parent.name.startswith(("deepspeed1", "deepspeed2")):
        planned["gradients"] += planned["buffers"]
    for category in ("parameters", "gradients", "optimizer_states"):
        assert planned[category] == max(rank.get(category, 0) for rank in held), category


# What zsim leaves out: rotary tables, labels, two scalars of the loss; norms' reciprocals, 4 bytes a token.
TABLES, LABELS, SCALARS = 2 * 8192 * 128 * 2, 8192 * 8, 8
RECIPROCAL = 8192 * 4
LAYERS = {"llama-3-8b": 32, "llama-3-70b": 80}
AT_SCALE = [
    path
    for path in plan_check.oracle_answers()
    if re.fullmatch(r"llama-3-\d+b_w\d+_reshard-(true|false|\d)(_hsdp\d+)?(_ac-full)?", path.stem)
]


def test_the_whole_grid_is_there() -> None:
    """8B and 70B; 8, 64 and 1,024 ranks; true, false, a group, HSDP; with and without checkpoints."""
    assert len(AT_SCALE) == 2 * 3 * 4 * 2


@pytest.mark.parametrize("path", AT_SCALE, ids=lambda path: path.stem)
def test_every_byte_of_difference_is_accounted_for(path: Path) -> None:
    """validation/plan_check.md says why."""
    answer = Answer.read(path)
    model, is_again = answer.case.model, answer.case.activation_checkpointing == "full"
    peaks = plan_peaks(zsim.make_plan(oracle_experiment(asdict(answer.case))))
    off = {name: peaks[name] - size for name, size in answer.peak_bytes.items()}
    norms = 1 if is_again else 1 + 2 * LAYERS[model]
    left_out = TABLES + LABELS + SCALARS + norms * RECIPROCAL
    counters = 4 * TENSORS[model]
    assert off["parameters"] == off["gradients"] == off["buffers"] == 0
    assert off["optimizer_states"] == -counters
    assert off["activations"] == -left_out
    in_loss = -left_out - counters
    in_backward = -TABLES - 2 * LABELS - SCALARS - counters  # tokens too; no norm is alive there
    assert off["total"] == (in_backward if "All Gather" in answer.at_peak else in_loss)


def test_the_page_is_todays() -> None:
    """After a change: python -m validation.plan_check_page."""
    assert plan_check_page.TARGET.read_text() == plan_check_page.page()


# -- the check itself -------------------------------------------------------------------------------------

RIGHT = [
    Call("all_gather", 800, "bf16", 8, 1, module="root"),
    Call("all_gather", 400, "bf16", 8, 1, module="block"),
    Call("reduce_scatter", 800, "fp32", 8, 1, module="block"),
]


@pytest.mark.parametrize(
    "wrong",
    [
        RIGHT[:-1],
        [*RIGHT, RIGHT[0]],
        [RIGHT[1], RIGHT[0], RIGHT[2]],
        [replace(RIGHT[0], bytes=801), *RIGHT[1:]],
        [replace(RIGHT[0], dtype="fp32"), *RIGHT[1:]],
        [replace(RIGHT[0], kind="all_reduce"), *RIGHT[1:]],
        [replace(RIGHT[0], group_size=4), *RIGHT[1:]],
        [replace(RIGHT[0], group_stride=2), *RIGHT[1:]],
    ],
)
def test_a_wrong_plan_fails(wrong: list[Call]) -> None:
    assert plan_check.first_difference(wrong, RIGHT) is not None
    assert plan_check.first_difference(RIGHT, RIGHT) is None


def test_a_plan_of_another_wrapping_fails_with_the_call_where_they_part() -> None:
    """Hugging Face's wrapping gathers the last block again: 33 gathers in, torchtitan 0.1 reduces."""
    answer = Answer.read(plan_check.TRACES / "oracle" / "llama-3-8b_w64_reshard-true.json")
    plan = zsim.make_plan(oracle_experiment(asdict(replace(answer.case, wrapping="huggingface"))))
    difference = plan_check.first_difference(calls_of_plan(plan), answer.calls)
    assert difference is not None
    assert difference.startswith("call 34: zsim ('all_gather', 436224000")


# -- live -------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize(
    "case",
    [
        Case("llama-3-70b@3", 2048, replicate=16, gradient_clipping=1.0, sequence_length=1024),
        Case("llama-3-8b@5", 24, reshard_after_forward=3, wrapping="torchtitan", sequence_length=1024),
        Case("llama-2-7b@2", 24, wrapping="huggingface", param_dtype="fp32", sequence_length=512),
        Case("llama-3-8b@3", 96, reduce_dtype="bf16", gradient_accumulation_steps=3, sequence_length=512),
    ],
    ids=lambda case: case.name,
)
def test_questions_nobody_recorded_are_answered_alike(case: Case) -> None:
    """Real FSDP2 now, on worlds and shapes outside the recorded ones: 2,048 ranks, uneven divisions, fp32."""
    from validation.oracle.run import ask

    base, _, layers = case.model.partition("@")
    answer = ask(case)
    experiment = oracle_experiment(asdict(replace(case, model=base)))
    config = {**_preset(base), "num_hidden_layers": int(layers)}
    shortened = zsim.Experiment(**{**experiment.model_dump(exclude_unset=True), "model": config})
    plan = zsim.make_plan(shortened)
    assert plan_check.first_difference(calls_of_plan(plan), answer.calls) is None


def _preset(name: str) -> dict[str, object]:
    """The Hugging Face config that zsim ships under this name."""
    folder = Path(zsim.__file__).parent / "presets" / "models"
    config: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    return config


@needs_torch
@pytest.mark.torch
def test_live_fsdp2_on_gloo_is_what_was_recorded_and_what_zsim_plans(tmp_path: Path) -> None:
    check_live(tmp_path, "fsdp2-reshard-uneven")


@needs_torch
@pytest.mark.torch
@pytest.mark.parametrize("name", ["deepspeed1-even", "deepspeed3-uneven"])
def test_live_deepspeed_is_what_was_recorded_and_what_zsim_plans(tmp_path: Path, name: str) -> None:
    need_live_deepspeed("not checked live here")
    check_live(tmp_path, name)


def check_live(folder: Path, name: str) -> None:
    """Train now on two ranks; the recording and the plan say the same."""
    from validation.launch import run
    from validation.record.cases import MODELS, find
    from validation.record.run import Order

    strategy, model = find(name)
    header = {"provenance": {}, "model": MODELS[model]}
    results = run("validation.record.run:record", 2, (strategy, model, Order(str(folder), 1), header))
    path = plan_check.TRACES / "gloo" / f"{name}-2ranks" / "summary.json"
    summary = json.loads(path.read_text())
    plan = plan_check.recorded_plan(summary)
    for result in results:
        assert result.calls == summary["calls"]
        assert plan_check.first_difference(calls_of_plan(plan), unfold(result.calls)) is None
