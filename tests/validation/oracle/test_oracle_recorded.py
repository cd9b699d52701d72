"""The recorded answers against closed forms; no torch needed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from validation.oracle.answer import Answer
from validation.oracle.case import Case
from validation.oracle.recorded import recorded_cases
from zsim.comparison.plan_check import Call

FOLDER = Path(__file__).parents[3] / "traces" / "oracle"
LAYERS = {"llama-3-8b": 32, "llama-3-70b": 80, "llama-3.2-1b": 16, "llama-2-7b": 32}
# Counted on the meta device with Hugging Face's own classes.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
}
ALL_CASES = pytest.mark.parametrize("case", list(recorded_cases()), ids=lambda case: case.name)


def recorded(case: Case) -> Answer:
    return Answer.read(FOLDER / f"{case.name}.json")


@ALL_CASES
def test_the_file_answers_its_own_question(case: Case) -> None:
    answer = recorded(case)
    assert answer.case == case
    assert answer.parameters == PARAMETERS[case.model]
    assert "torch" in json.loads((FOLDER / f"{case.name}.json").read_text())["provenance"]["versions"]


@ALL_CASES
def test_collectives_are_counted_by_the_closed_form(case: Case) -> None:
    """N blocks and the root (torchtitan: embedding and head, or both in one unit when tied).

    Each unit is gathered once in forward, and again in backward where it was resharded; each is reduced once;
    HSDP adds one all-reduce per reduction. torchtitan 0.1 keeps root and last block, huggingface the root,
    torchtitan the head. blocks:4 is torchtitan with 4 blocks in a unit; of none, the root is all there is.
    """
    layers, steps = LAYERS[case.model], case.gradient_accumulation_steps
    blocks = {"blocks:4": layers // 4, "none": 0}.get(case.wrapping, layers)
    units, kept = blocks + 1, 2 if case.wrapping == "torchtitan-0.1" else 1
    if case.wrapping in ("torchtitan", "blocks:4") and case.model == "llama-3-8b":
        units += 1
    count = Counter(call.kind for call in recorded(case).calls)
    assert count["all_gather"] == steps * (units if not case.reshard_after_forward else 2 * units - kept)
    assert count["reduce_scatter"] == steps * units
    assert count["all_reduce"] == (units if case.replicate > 1 else 0) + (case.gradient_clipping > 0)


@ALL_CASES
def test_groups_are_the_shard_group_the_reshard_group_and_the_replicas(case: Case) -> None:
    shard = case.world_size // case.replicate
    for call in recorded(case).calls:
        if call.kind == "all_reduce" and call.module != "root":
            assert (call.group_size, call.group_stride) == (case.replicate, shard)
    gathers = [call for call in recorded(case).calls if call.kind == "all_gather"]
    sizes = {call.group_size for call in gathers}
    assert sizes == {shard, case.reshard_after_forward} - {True, False}


@ALL_CASES
def test_bytes_reduced_are_all_gradients_in_fp32_and_padding(case: Case) -> None:
    """Each parameter's first dimension is padded to a multiple of the shard group: less than 1 % here."""
    reduced = sum(call.bytes for call in recorded(case).calls if call.kind == "reduce_scatter")
    exact = 4 * PARAMETERS[case.model] * case.gradient_accumulation_steps
    assert exact <= reduced < 1.01 * exact


@ALL_CASES
def test_model_states_are_a_share_of_fp32_parameters_gradients_and_two_moments(case: Case) -> None:
    peak, share = recorded(case).peak_bytes, 4 * PARAMETERS[case.model] * case.replicate / case.world_size
    for category, times in (("parameters", 1), ("gradients", 1), ("optimizer_states", 2)):
        assert times * share <= peak[category] < 1.01 * times * share + 4096


def test_llama_8b_on_64_ranks_is_issued_as_written_down_here() -> None:
    """Block: 218,112,000 parameters. Root: (2 x 128,256 + 1) x 4,096 = 1,050,677,248. bf16 out, fp32 back.

    Backward: the last block and the root are there; the block before is fetched while a block computes.
    """
    gather = ("all_gather", 436_224_000, "bf16", 64, 1)
    reduce = ("reduce_scatter", 872_448_000, "fp32", 64, 1)
    expected = [
        ("all_gather", 2_101_354_496, "bf16", 64, 1),
        *[gather] * 32,
        gather,
        *[reduce, gather] * 30,
        *[reduce] * 2,
        ("reduce_scatter", 4_202_708_992, "fp32", 64, 1),
    ]
    assert [call.wire for call in recorded(Case("llama-3-8b", 64)).calls] == expected


def test_clipping_adds_one_number_to_all_reduce() -> None:
    """torch stacks the squared norms of the 291 parameters and sums them over ranks in one call."""
    last = recorded(Case("llama-3-8b", 64, gradient_clipping=1.0)).calls[-1]
    assert last.wire == Call("all_reduce", 4 * 291, "fp32", 64, 1).wire
