"""Non-linearities."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.elementwise import ActivationCost, activation_cost_of
from zsim.cost.kernels.layer_kernels import Passes
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Parameter, Role
from zsim.operations.sharding import FeatureCut
from zsim.operations.tensors import ModuleTensors


@dataclass(frozen=True, slots=True)
class Activation(Operation):
    """Elementwise non-linearity over `width`. `gated` multiplies it with a second input."""

    width: int
    gated: bool
    name: str = "silu"
    is_scored: bool = False
    """A kernel behind it multiplies each row by its score (Megatron's routed experts)."""

    @property
    def role(self) -> Role:
        return Role.ACTIVATION

    @property
    def keeps_input_type(self) -> bool:
        return True

    def cut_features(self, cut: FeatureCut) -> Activation:
        return replace(self, width=cut.features(self.width))

    def is_replicated(self, parameter: Parameter) -> bool:
        return True

    def overwrites_input(self, options: WorkOptions) -> bool:
        """The kernel that torch.compile generates does (torch 2.13's `inplace_buffers`,
        _inductor/config.py). Liger's gated kernel does not.
        """
        return options.compile and not (options.liger and self.gated)

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self._kernels(self._cost(options).forward, shape, options)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return self._kernels(self._cost(options).backward, shape, options)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return int(shape.tokens * self.width * self._cost(options).saved * options.activation_bytes)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes * (2 if self.is_scored else 1)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Liger's gated kernel writes the gradients of gate and up over gate and up (linkedin/Liger-Kernel
        0.8, `ops/swiglu.py`).
        """
        width_bytes = shape.tokens * self.width * options.activation_bytes
        if options.layers.splits_gates and self.gated:  # both halves' gradients, and the two joined
            return width_bytes * 4
        in_place = options.liger and self.gated
        return width_bytes * (1 if in_place else 3 if self.gated else 2)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        tensor_bytes = shape.tokens * self.width * options.activation_bytes
        return ModuleTensors((tensor_bytes,) * 8, (tensor_bytes,), (tensor_bytes,) * 3)

    def _kernels(self, passes: Passes, shape: BatchShape, options: WorkOptions) -> Kernels:
        e, dtype = options.activation_bytes, options.kernel_dtype
        return passes.kernels(shape.tokens * self.width, e, dtype)

    def _cost(self, options: WorkOptions) -> ActivationCost:
        return activation_cost_of(self.name, is_gated=self.gated, options=options, is_scored=self.is_scored)
