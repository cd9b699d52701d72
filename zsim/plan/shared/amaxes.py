"""Delayed scales: at the end of every forward and every backward, the maxima of all tensors that were cast in
it are all-reduced as one tensor, and made into scales.

`FP8GlobalStateManager.reduce_and_update_fp8_tensors` of Transformer Engine 2.17 pytorch/quantization.py: a
layer has three tensors in forward (input, weight, output), two in backward.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import CONTEXT, PIPELINE, TENSOR, Mesh
from zsim.specs.strategy.training import TrainingConfig

AMAXES = "amaxes"
_FORWARD_TENSORS, _BACKWARD_TENSORS = 3, 2
_LAUNCHES = 2  # concatenate, update


def has_delayed_scales(training: TrainingConfig) -> bool:
    """Whether the scales are made of earlier maxima."""
    return training.precision == "fp8" and training.fp8.recipe == "delayed"


def amax_group(mesh: Mesh, training: TrainingConfig) -> list[Group]:
    """The ranks whose scales agree: those of a pipeline stage, or of its tensor and context parallelism. []
    without delayed scales and for one rank.
    """
    if not has_delayed_scales(training):
        return []
    axes: tuple[str, ...] = (TENSOR, CONTEXT)
    if training.fp8.sums_amaxes_over == "all":
        axes = tuple(name for name in mesh.names if name != PIPELINE)
    return [Group(AMAXES, mesh.groups(*axes))] if mesh.size(*axes) > 1 else []


def reduce_amaxes(
    builder: PlanBuilder, model: ModelSpec, training: TrainingConfig, *, is_backward: bool
) -> None:
    """Issue the all-reduce and the update of a stage's scales. Nothing is issued without delayed scales."""
    if not has_delayed_scales(training):
        return
    layers = sum(parameter.in_fp8 for _, parameter in model.named_parameters())
    size = 4 * layers * (_BACKWARD_TENSORS if is_backward else _FORWARD_TENSORS)
    if not size:
        return
    if AMAXES in builder.groups:
        builder.collective("all_reduce", size, "fp32", AMAXES, stream=COMPUTE, name="all_reduce amaxes")
    builder.kernels("scales", (Kernel("elementwise", 0.0, float(4 * size), "fp32", (), _LAUNCHES),))
