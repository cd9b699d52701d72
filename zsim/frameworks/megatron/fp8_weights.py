"""The weights of fp8 products under Megatron: quantised copies next to 16-bit parameters, or parameters that
are quantised themselves (`--fp8-param-gather`).

Read in Megatron-Core 0.16.1 (core/fp8_utils.py, core/distributed/param_and_grad_buffer.py) and Transformer
Engine 2.17 (pytorch/module/base.py `quantize_weight`, pytorch/tensor/utils.py `cast_master_weights_to_fp8`).
Copies are made in the first micro-batch of a step and live from then on. Parameters in mxfp8 are gathered in
16 bits, in the buffer of the gradients, and cast afterwards. Others are gathered in 8 bits, and transposed
afterwards. A bucket of both types counts as one call: Megatron puts 16-bit parameters into a buffer of their
own, whose buckets it gathers with the last of the others (`partition_buckets`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import norm_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.training import TrainingConfig


class Fp8Weights:
    """The weights of one stage's fp8 products, none without fp8. If `is_primary`, they are the parameters."""

    def __init__(self, model: ModelSpec, training: TrainingConfig, *, is_primary: bool) -> None:
        self.recipe = training.fp8
        self.is_primary = is_primary
        is_fp8 = training.precision == "fp8" and training.fp8.is_transformer_engine
        named = [*model.named_parameters()] if is_fp8 else []
        quantised = [(name, parameter) for name, parameter in named if parameter.in_fp8]
        self.numels = {name: parameter.numel for name, parameter in quantised}
        self.updated_numels = [parameter.numel for _, parameter in quantised if parameter.trainable]
        """Elements of those that have masters: a frozen weight is quantised once, before the first step."""

    @cached_property
    def numel(self) -> int:
        return sum(self.numels.values())

    @property
    def _is_gathered(self) -> bool:
        """Whether they are gathered in 8 bits."""
        return (self.is_primary and self.recipe.has_one_scale) or (
            self.is_primary and self.recipe.recipe == "block"
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the parameters are smaller: those in 8 bits replace 16 bits. mxfp8's are counted as
        copies.
        """
        if not self.is_primary:
            return 0
        return self.numel if self._is_gathered else 2 * self.numel

    @property
    def copy_bytes(self) -> int:
        """Bytes of quantised copies in addition to the parameters."""
        copies = self.recipe.weight_copy_bytes(self.numel)
        return copies - self.numel if self._is_gathered else copies

    def ungathered_bytes(self, names: Iterable[str]) -> int:
        """Bytes less than in 16 bits that an all-gather of the named parameters moves."""
        return sum(self.numels.get(name, 0) for name in names) if self._is_gathered else 0

    def gathered_dtype(self, dtype: str) -> str:
        return "fp8" if self._is_gathered and self.numels else dtype


def quantize_masters(
    builder: PlanBuilder, training: TrainingConfig, stages: Sequence[Fp8Weights], ranks: int, group: str
) -> None:
    """Compute the scales of the fp32 masters of which a rank has its part: each weight's maximum (with blocks
    each block's), all-reduced. The cast is part of the update. Delayed scales are known.
    """
    recipe, count = training.fp8.recipe, sum(len(stage.updated_numels) for stage in stages)
    numel = sum(sum(stage.updated_numels) for stage in stages)
    if not count or recipe not in ("current", "block"):
        return
    scales = count if recipe == "current" else numel // 128**2
    builder.kernels("maxima of fp8 weights", norm_kernels(numel // ranks, "fp32", count))
    if ranks > 1:
        builder.collective(
            "all_reduce", 4 * scales, "fp32", group, stream=COMPUTE, name="all_reduce maxima of fp8 weights"
        )
    builder.kernels("scales of fp8 weights", (Kernel("elementwise", 0.0, float(8 * scales), "fp32"),))
