"""Recipes of training in 8 bits or fewer.

A recipe says which tensors of a product are cast, along which direction, and what their scales are of. Read
in Transformer Engine 2.17 (`common/recipe/__init__.py`, `pytorch/quantization.py`, `pytorch/utils.py`,
`pytorch/module/linear.py`) and torchao 0.15 (`torchao/float8/config.py`, `float8_linear.py`).

# [Note: two directions]
A product sums over the rows of both operands. Forward sums over features, the gradient of the input over
outputs, that of the weight over tokens: every tensor is read in two directions. A tensor with one scale has
the same values in both. It needs a transposed copy only where the tensor cores read 8-bit operands along one
direction (Ada, Hopper, `is_non_tn_fp8_gemm_supported`). A tensor with a scale per block is quantised once per
direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Fp8Recipe = Literal["delayed", "current", "block", "mxfp8", "nvfp4", "torchao-tensorwise", "torchao-rowwise"]
TRANSFORMER_ENGINE_RECIPES: tuple[Fp8Recipe, ...] = ("delayed", "current", "block", "mxfp8", "nvfp4")
TORCHAO_RECIPES: tuple[Fp8Recipe, ...] = ("torchao-tensorwise", "torchao-rowwise")
RECIPES = (*TRANSFORMER_ENGINE_RECIPES, *TORCHAO_RECIPES)

# Bytes of an element of an input or a gradient with its scales: one byte and 4 per 128 elements (block), 1
# per 32 (mxfp8), half a byte and 1 per 16 (nvfp4). A weight's blocks are squares of 128 or 16, of which
# block's scales are neglected and nvfp4's stored as if they were rows.
_ELEMENT: dict[Fp8Recipe, Fraction] = {
    "block": Fraction(33, 32),
    "mxfp8": Fraction(33, 32),
    "nvfp4": Fraction(9, 16),
}
# Divisors of tokens and features (`assert_dim_for_fp8_exec`, torch's _scaled_mm; mxfp8's of
# csrc/quantizer.cpp), and of the tokens of a part that is gathered quantised (`is_quantizable` of
# float8_blockwise_tensor.py).
_MULTIPLES: dict[Fp8Recipe, int] = {"mxfp8": 32}
_GATHERED_MULTIPLES: dict[Fp8Recipe, int] = {"block": 128, "mxfp8": 32, "nvfp4": 16}


@dataclass(frozen=True, slots=True)
class Fp8:
    """A recipe on a GPU and in a framework."""

    recipe: Fp8Recipe = "torchao-tensorwise"
    transposes: bool = True
    """Tensors with one scale need a transposed copy. See [Note: two directions]."""
    keeps_weights: bool = False
    """Weights are cast in the first micro-batch of a step and kept."""
    recasts_weights: bool = False
    """Weights are cast in forward for forward alone, and again in backward (Transformer Engine where they are
    gathered, and torchao always).
    """
    has_quantized_weights: bool = False
    """Weights arrive quantised."""
    sums_amaxes_over: Literal["all", "tensor"] = "all"
    """The ranks that agree on delayed scales: "all" of a stage, or those of its "tensor" and context
    parallelism.
    """

    @property
    def is_transformer_engine(self) -> bool:
        """Whether it is one of Transformer Engine's."""
        return self.recipe in TRANSFORMER_ENGINE_RECIPES

    @property
    def has_one_scale(self) -> bool:
        """Whether a tensor has a single scale."""
        return self.recipe in ("delayed", "current", "torchao-tensorwise")

    @property
    def dtype(self) -> str:
        """The type of its products, with the kind of scales where the library's kernels differ by it."""
        return {
            "nvfp4": "fp4",
            "block": "fp8-block",
            "mxfp8": "fp8-mx",
            "torchao-rowwise": "fp8-rowwise",
        }.get(self.recipe, "fp8")

    @property
    def dimension_multiple(self) -> int:
        """The divisor of the dimensions of a quantised tensor."""
        return _MULTIPLES.get(self.recipe, 16)

    @property
    def gathered_multiple(self) -> int:
        """The divisor of the tokens of a part that is gathered with a scale per block. It is 1 for other
        scales.
        """
        return _GATHERED_MULTIPLES.get(self.recipe, 1)

    @property
    def gathers_quantized(self) -> bool:
        """Whether ranks that gather a product's operand gather it quantised."""
        return self.recipe != "torchao-rowwise"

    def operand_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements quantised for one direction, with their scales."""
        return int(numel * _ELEMENT.get(self.recipe, Fraction(1)))

    def weight_copy_bytes(self, numel: int) -> int:
        """Bytes of a weight's quantised copies for forward and backward."""
        has_two = not self.has_one_scale or self.transposes
        return self.operand_bytes(numel) * (2 if has_two else 1)


TORCHAO_TENSORWISE = Fp8()
