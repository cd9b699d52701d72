"""Rows of experts in fp8: padded to a multiple, by copies or in the routing map."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.errors import InputError
from zsim.plan.make import stages_of
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 1024, 512, 256, 8, 2
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 512,
    "moe_intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "tie_word_embeddings": False,
}  # fmt: skip
ROWS = TOKENS * TOP_K


def products(
    recipe: str | None = "delayed", dispatcher: str = "all-to-all", **strategy: Any
) -> list[ModuleCall]:
    """Both products of the experts, all on one rank; in bf16 without a recipe."""
    training = {"sequence_length": TOKENS, "precision": "bf16"}
    if recipe is not None:
        training |= {"precision": "fp8", "fp8_recipe": recipe}
    job = resolve(
        Experiment(
            model=MODEL,
            cluster="hgx-b200" if recipe == "mxfp8" else "dgx-h100",
            gpus=1,
            training=training,
            strategy={"kind": "megatron", "moe_grouped_gemm": True, **strategy},
            parallelism={"dispatcher": dispatcher},
        )
    )
    segments = make_workload(stages_of(job.model, job.parallelism)[0], job.training).segments
    calls = [call for one in segments for call in one.calls]
    return [call for call in calls if call.name.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def moved(call: ModuleCall, other: ModuleCall, *, is_forward: bool) -> float:
    """Bytes of elementwise kernels that the one has and the other has not."""
    sums = []
    for one in (call, other):
        issued = one.work.forward if is_forward else one.work.backward
        sums.append(sum(each.hbm_bytes for each in kernels_of(issued).kernels if each.kind == "elementwise"))
    return sums[0] - sums[1]


@pytest.mark.parametrize(("recipe", "multiple"), [("delayed", 16), ("current", 16), ("mxfp8", 32)])
def test_half_a_multiple_is_missing_of_every_expert(recipe: str, multiple: int) -> None:
    """2 R n k FLOPs with R of 2,048 rows and half of a multiple less one for each of 8 experts."""
    rows = ROWS + EXPERTS * (multiple - 1) // 2
    for call, width in zip(products(recipe), (2 * WIDTH * HIDDEN, WIDTH * HIDDEN), strict=True):
        assert total_flops(kernels_of(call.work.forward).kernels) == 2.0 * rows * width


def test_rows_are_copied_before_the_first_and_behind_the_second_product() -> None:
    """Read with one size and written with the other, in bf16; backward the other way round. With the map
    padded neither is."""
    rows = ROWS + EXPERTS * 15 // 2
    for call, other in zip(products(), products(moe_router_padding=True), strict=True):
        for is_forward in (True, False):
            assert moved(call, other, is_forward=is_forward) == 2 * (ROWS + rows) * HIDDEN


def test_experts_in_16_bits_pad_nothing() -> None:
    for call in products(recipe=None):
        flops = total_flops(kernels_of(call.work.forward).kernels)
        assert flops in (2.0 * ROWS * 2 * WIDTH * HIDDEN, 2.0 * ROWS * WIDTH * HIDDEN)


def launched(call: ModuleCall, *, is_forward: bool) -> int:
    issued = call.work.forward if is_forward else call.work.backward
    return sum(one.launches for one in kernels_of(issued).kernels if one.kind == "elementwise")


def test_experts_one_by_one_join_their_outputs_and_their_inputs_gradients() -> None:
    """Megatron-Core 0.16.1's SequentialMLP in bf16 on a CPU, 8 experts: one `cat` of all rows forward, one
    backward. Each reads and writes 2,048 rows of 512 in bf16."""
    first, last = products(recipe=None, moe_grouped_gemm=False)
    other_first, other_last = products(recipe=None)
    joined = 2 * 2 * ROWS * HIDDEN
    assert moved(first, other_first, is_forward=True) == moved(last, other_last, is_forward=False) == 0
    assert moved(first, other_first, is_forward=False) == moved(last, other_last, is_forward=True) == joined


def test_experts_one_by_one_pad_in_fp8_with_zeros_that_are_joined() -> None:
    """The same on a CPU with fp8: of every expert whose rows are no multiple of 16 zeros and a `cat`, of rows
    and of scores, before; backward a `slice_backward` of all rows for each, zeros and a copy. All with a
    multiple missing by half: 60 rows of 8 experts, which 15 of 16 have to join."""
    padded = ROWS + EXPERTS * 15 // 2
    for recipe, is_fp8 in (("delayed", True), (None, False)):
        for call in products(recipe, moe_grouped_gemm=False):
            rows = padded if is_fp8 else ROWS
            flops = total_flops(kernels_of(call.work.forward).kernels)
            assert flops in (2.0 * rows * 2 * WIDTH * HIDDEN, 2.0 * rows * WIDTH * HIDDEN)
    first, last = products(moe_grouped_gemm=False)
    map_first, map_last = products(moe_grouped_gemm=False, moe_router_padding=True)
    before, behind = 2 * (2 * 15 / 16 * ROWS + 3 * (padded - ROWS)) * HIDDEN, 2 * (padded + 2 * ROWS) * HIDDEN
    assert moved(first, map_first, is_forward=True) == before
    assert moved(last, map_last, is_forward=False) == behind
    assert moved(first, map_first, is_forward=False) == moved(last, map_last, is_forward=True) == 0
    assert launched(first, is_forward=True) - launched(map_first, is_forward=True) == 4 * EXPERTS
    assert launched(last, is_forward=False) - launched(map_last, is_forward=False) == 2 * EXPERTS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": None}, "found true with precision bf16"),
        ({"dispatcher": "all-gather"}, "found true with dispatcher 'all-gather'"),
    ],
)
def test_megatron_pads_no_map_in_16_bits_nor_before_a_gather(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        products(**given, moe_router_padding=True)
