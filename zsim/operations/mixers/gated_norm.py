"""The norm of a recurrence's output, times a gate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Parameter
from zsim.operations.sharding import FeatureCut
from zsim.operations.tensors import ModuleTensors


@dataclass(frozen=True, slots=True)
class GatedNorm(Operation):
    """RMSNorm over `width` channels, in parts (heads or groups), in one kernel with its gate.

    fla's `FusedRMSNormGated` (bc3b101d modules/fused_norm_gate.py) and mamba_ssm's (e9594ce1
    ops/triton/layernorm_gated.py) keep input and gate. Backward writes both gradients, and sums the
    weight's up.
    """

    width: int
    is_gated: bool = True
    """Otherwise the gate was in the kernel before it."""
    is_in_scan: bool = False
    """The function of the scan before it norms too, and makes its input again in backward (mamba_ssm's).
    Megatron has a norm of its own there (Megatron-LM d98e8a64 core/ssm/mamba_mixer.py).
    """

    @property
    def is_inner(self) -> bool:
        return True

    def is_replicated(self, parameter: Parameter) -> bool:
        """Whether it is the weight of one head, which all ranks have."""
        return parameter.numel < self.width

    def cut_features(self, cut: FeatureCut) -> GatedNorm:
        return replace(self, width=cut.features(self.width))

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return (elementwise((2 + self.is_gated) * self._bytes(shape, options), options.kernel_dtype),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return (elementwise((3 + 2 * self.is_gated) * self._bytes(shape, options), options.kernel_dtype, 2),)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        is_made_again = self.is_in_scan and not options.layers.norms_after_scans
        return (self.is_gated + (not is_made_again)) * self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return (2 + self.is_gated) * self._bytes(shape, options)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        size = self._bytes(shape, options)
        return ModuleTensors((size, size), (size,), (size, size, size))

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes
