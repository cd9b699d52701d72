"""Norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels import fp8
from zsim.cost.kernels.elementwise import (
    autocast_cast,
    freeze_norm_weight,
    native_kind,
    norm_cost,
    norm_cost_of,
)
from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors

_UPCAST_BACKWARD_BYTES = 24  # an element, at the most: six fp32 tensors


@dataclass(frozen=True, slots=True)
class Norm(Operation):
    """Normalisation over `width`."""

    width: int
    kind: str = "rms"
    """`layer`, `rms`, `gemma_rms` (multiplies by its weight in fp32), or another of
    `zsim.cost.kernels.elementwise`.
    """
    writes_fp8: bool = False
    """The output is quantised as it is written (Transformer Engine's fused layers)."""
    is_duplicated: bool = False
    """All tensor-parallel ranks have it whole, for all tokens."""

    @property
    def role(self) -> Role:
        return Role.NORM

    def unmark_fp8(self) -> Norm:
        return replace(self, writes_fp8=False)

    def saves_only_its_input(self, options: WorkOptions) -> bool:
        return native_kind(self.kind, options) == "layer" or options.fuses_kernels

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        cost = norm_cost_of(self.kind, options)
        elements = shape.tokens * self.width
        moved_bytes = cost.forward_bytes * elements
        if self.writes_fp8:
            moved_bytes -= fp8.norm_saving(elements, options)
        kernel = elementwise(moved_bytes, options.kernel_dtype, cost.forward_launches)
        return (kernel, *autocast_cast(elements, options))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        cost = norm_cost_of(self.kind, options)
        elements = shape.tokens * self.width
        if not module.trains_weight:
            cost = freeze_norm_weight(cost, self.kind, options)
        kernel = elementwise(cost.backward_bytes * elements, options.kernel_dtype, cost.backward_launches)
        return (*autocast_cast(elements, options), kernel)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        if module.shares_input and self.saves_only_its_input(options):
            return 0
        kind = native_kind(self.kind, options)
        cost = norm_cost(kind, options.stream_bytes, is_fused=options.fuses_kernels)
        if not module.trains_weight:
            cost = freeze_norm_weight(cost, self.kind, options)
        return shape.tokens * self.width * cost.saved_bytes

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        is_upcast = not self.saves_only_its_input(options)
        return shape.tokens * self.width * (options.stream_bytes + (4 if is_upcast else 0))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Liger's kernel writes the gradient of its input over that of its output (linkedin/Liger-Kernel 0.8,
        `ops/rms_norm.py` with `in_place`). Python code in fp32 holds most in the gradient of the square: its
        input and five fp32 tensors, two of them gradients, when what it keeps otherwise is free again
        (counted with a dispatch mode over LlamaRMSNorm and Gemma3RMSNorm of transformers 5, torch 2.13).
        """
        elements = shape.tokens * self.width
        if not self.saves_only_its_input(options):
            return _UPCAST_BACKWARD_BYTES * elements - self.kept_bytes(module, shape, options)
        return elements * options.stream_bytes * (1 if options.liger else 2)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        low, high = shape.tokens * self.width * options.stream_bytes, shape.tokens * self.width * 4
        if self.saves_only_its_input(options):
            return ModuleTensors(backward=(low, low))
        return ModuleTensors((high,), (low,), (low, *(high,) * 4))
