"""The casts around a product of 512 tokens, 64 inputs and 96 outputs: 32,768 elements in, 49,152 out, 6,144
weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import BACKWARD, FORWARD
from zsim.specs.model.spec import Linear, Module, Norm, Parameter
from zsim.specs.strategy.fp8 import RECIPES, Fp8, Fp8Recipe

X, Y, W = 512 * 64, 512 * 96, 64 * 96
SHAPE = BatchShape(1, 512)


def product(**changes: object) -> Module:
    work = replace(Linear(64, 96), **changes)  # type: ignore[arg-type]
    return Module("fc1", work, (Parameter("weight", (96, 64)),))


def options(recipe: Fp8Recipe, micro_batches: int = 1, **changes: object) -> WorkOptions:
    """Megatron on a Hopper, unless changed."""
    made = Fp8(recipe, keeps_weights=recipe in ("delayed", "current", "block", "mxfp8", "nvfp4"))
    return WorkOptions("fp8", fp8=replace(made, **changes), micro_batches=micro_batches)  # type: ignore[arg-type]


def casts(kernels: tuple[Kernel, ...]) -> list[float]:
    """Bytes of every kernel but the products and the 8 bytes of a scale."""
    return [kernel.hbm_bytes for kernel in kernels if kernel.kind != "gemm" and kernel.hbm_bytes > 8]


@pytest.mark.parametrize(
    ("recipe", "forward", "backward"),
    [
        ("delayed", [4 * X, 4 * W], [4 * Y]),
        ("current", [2 * X, 4 * X, 2 * W, 4 * W], [2 * Y, 4 * Y]),
        ("block", [(2 + 33 / 16) * X, (2 + 33 / 16) * W], [(2 + 33 / 16) * Y]),
        ("mxfp8", [(2 + 33 / 16) * X, (2 + 33 / 16) * W], [(2 + 33 / 16) * Y]),
        ("nvfp4", [2 * X, (2 + 9 / 8) * X, 2 * W, (2 + 9 / 8) * W], [2 * Y, (2 + 9 / 8) * Y]),
        ("torchao-tensorwise", [5 * X, 5 * W], [5 * Y, 5 * W, 2 * Y, 5 * X]),
        ("torchao-rowwise", [3 * X, 3 * W], [3 * Y, 5 * W, 5 * Y, 5 * X]),
    ],
)
def test_every_recipe_casts_each_tensor_for_two_directions(
    recipe: Fp8Recipe, forward: list[float], backward: list[float]
) -> None:
    """2 bytes read for a maximum, 2 for a cast; a byte written per direction, with 1/32 of scales, or half a
    byte and 1/16."""
    made = options(recipe)
    assert casts(product().kernels(FORWARD, SHAPE, made)) == forward
    assert casts(product().kernels(BACKWARD, SHAPE, made)) == backward


def test_blackwell_makes_no_transposed_copies_of_tensors_with_one_scale() -> None:
    for recipe, sizes in (("delayed", [3 * X, 3 * W]), ("current", [2 * X, 3 * X, 2 * W, 3 * W])):
        made = options(recipe, transposes=False)  # type: ignore[arg-type]
        assert casts(product().kernels(FORWARD, SHAPE, made)) == sizes
    blocks = options("mxfp8", transposes=False)
    assert casts(product().kernels(FORWARD, SHAPE, blocks)) == [(2 + 33 / 16) * X, (2 + 33 / 16) * W]


def test_kept_weights_are_cast_once_a_step() -> None:
    """Of four micro-batches each has a quarter; who keeps none casts them whenever it needs them."""
    assert casts(product().kernels(FORWARD, SHAPE, options("delayed", 4))) == [4 * X, W]
    kept_until_backward = options("delayed", 4, keeps_weights=False)
    assert casts(product().kernels(FORWARD, SHAPE, kept_until_backward)) == [4 * X, 4 * W]
    assert casts(product().kernels(BACKWARD, SHAPE, kept_until_backward)) == [4 * Y]
    again = options("delayed", 4, keeps_weights=False, recasts_weights=True)
    assert casts(product().kernels(FORWARD, SHAPE, again)) == [4 * X, 3 * W]
    assert casts(product().kernels(BACKWARD, SHAPE, again)) == [4 * Y, 4 * W]


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        ("delayed", [4 * X, 2 * W]),
        ("block", [(2 + 33 / 16) * X]),
        ("mxfp8", [(2 + 33 / 16) * X, (2 + 33 / 16) * W]),
    ],
)
def test_quantised_parameters_are_transposed_and_mxfp8s_cast(recipe: Fp8Recipe, sizes: list[float]) -> None:
    """After the gather: a byte read and one written; mxfp8's were gathered in 16 bits."""
    made = options(recipe, has_quantized_weights=True)
    found = casts(product().kernels(FORWARD, SHAPE, made))
    assert found == ([*sizes, 2 * W] if recipe == "block" else sizes)


def test_a_fused_norm_has_cast_its_output_but_for_what_must_be_transposed() -> None:
    """With delayed scales it writes a byte less; with current ones it has found the maximum."""
    behind = product(follows_norm=True)
    assert casts(behind.kernels(FORWARD, SHAPE, options("delayed"))) == [2 * X, 4 * W]
    assert casts(behind.kernels(FORWARD, SHAPE, options("current"))) == [4 * X, 2 * W, 4 * W]
    assert casts(behind.kernels(FORWARD, SHAPE, options("delayed", transposes=False))) == [3 * W]
    norm = Module("norm", Norm(64), (Parameter("weight", (64,)),))
    fused = replace(norm, op_spec=Norm(64, writes_fp8=True))
    made = replace(options("delayed"), compile=True)
    (alone,), (writes,) = norm.kernels(FORWARD, SHAPE, made), fused.kernels(FORWARD, SHAPE, made)
    assert alone.hbm_bytes - writes.hbm_bytes == X


def test_of_gathered_operands_each_rank_casts_its_part_and_transposes_the_whole() -> None:
    """Four ranks: a quarter is cast for one direction; gathered again in backward, it is transposed."""
    split = product(input_cast_ranks=4, gradient_cast_ranks=4)
    made = options("delayed")
    assert casts(split.kernels(FORWARD, SHAPE, made)) == [3 * X / 4, 4 * W]
    assert casts(split.kernels(BACKWARD, SHAPE, made)) == [3 * Y / 4, 2 * Y, 2 * X]
    blocks = options("mxfp8")
    assert casts(split.kernels(BACKWARD, SHAPE, blocks)) == [(2 + 33 / 16) * Y / 4]


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [
        ("delayed", X), ("current", X), ("mxfp8", 33 * X // 32), ("nvfp4", 9 * X // 16),
        ("torchao-tensorwise", 2 * X), ("torchao-rowwise", 2 * X),
    ],
)  # fmt: skip
def test_transformer_engine_keeps_what_it_has_cast(recipe: Fp8Recipe, kept: int) -> None:
    assert product().saved_bytes(SHAPE, options(recipe)) == kept


def test_weights_that_are_not_kept_live_until_backward_in_both_directions() -> None:
    assert product().saved_bytes(SHAPE, options("delayed", keeps_weights=False)) == X + 2 * W
    assert product().saved_bytes(SHAPE, options("delayed", keeps_weights=False, transposes=False)) == X + W
    assert product().saved_bytes(SHAPE, options("delayed", keeps_weights=False, recasts_weights=True)) == X


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_reads_quantised_operands_and_writes_16_bits(recipe: Fp8Recipe) -> None:
    """12.6 MFLOP in the recipe's type."""
    made = options(recipe)
    last = product().kernels(FORWARD, SHAPE, made)[-1]
    assert (last.kind, last.flops, last.dtype) == ("gemm", 2.0 * 512 * 64 * 96, made.fp8.dtype)
    assert last.hbm_bytes == made.fp8.operand_bytes(X) + made.fp8.operand_bytes(W) + 2 * Y


def test_layers_at_the_ends_stay_in_16_bits() -> None:
    left_out = product(in_bf16=True)
    assert [kernel.dtype for kernel in left_out.kernels(FORWARD, SHAPE, options("current"))] == ["bf16"]


@pytest.mark.parametrize(
    ("recipe", "forward", "kept"),
    [
        ("delayed", [3 * X, 4 * W], 0),
        ("current", [2 * X, 3 * X, 2 * W, 4 * W], 0),
        ("mxfp8", [(2 + 33 / 32) * X, (2 + 33 / 16) * W], 0),
        ("nvfp4", [2 * X, (2 + 9 / 16) * X, 2 * W, (2 + 9 / 8) * W], 0),
        ("torchao-rowwise", [3 * X, 3 * W], 2 * X),
    ],
)
def test_a_frozen_weights_input_is_cast_for_forward_and_not_kept(
    recipe: Fp8Recipe, forward: list[float], kept: int
) -> None:
    """Only the weight's gradient reads the input in its second direction. Transformer Engine 2.17
    pytorch/module/linear.py: `set_usage(rowwise=True, columnwise=backward_needs_input)`, and nothing is saved
    unless the weight requires a gradient. torchao saves both operands whatever it is of (16 bits, 2 X)."""
    frozen = replace(product(), parameters=(Parameter("weight", (96, 64), trainable=False),))
    assert casts(frozen.kernels(FORWARD, SHAPE, options(recipe))) == forward
    assert frozen.saved_bytes(SHAPE, options(recipe)) == kept


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_frozen_weight_that_is_kept_in_8_bits_is_never_cast_again(recipe: Fp8Recipe) -> None:
    """Nothing updates it. A trained one is transposed (2 W), or cast from what was gathered (mxfp8); of
    both only the input's casts stay."""
    made = options(recipe, has_quantized_weights=True)
    frozen = replace(product(), parameters=(Parameter("weight", (96, 64), trainable=False),))
    weight = [2 * W] if recipe != "mxfp8" else [(2 + 33 / 16) * W]
    assert casts(product().kernels(FORWARD, SHAPE, made))[-1:] == weight
    assert not {*weight} & {*casts(frozen.kernels(FORWARD, SHAPE, made))}
