"""Short convolutions over the last few tokens, a filter for each channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.sharding import FeatureCut
from zsim.operations.tensors import ModuleTensors, Sizes


@dataclass(frozen=True, slots=True)
class Convolution(Operation):
    """A causal convolution of `channels` with filters of `taps` tokens, and SiLU, in one kernel.

    Dao-AILab/causal-conv1d 1.5 (csrc/causal_conv1d_fwd.cu, causal_conv1d_bwd.cu), also fla's Triton kernel
    (modules/convolution.py at bc3b101d): forward reads its input and writes its output, backward reads the
    input and the output's gradient and writes the input's. The gradients of the slices of its output
    (queries, keys, values) are brought together before.
    """

    channels: int
    taps: int = 4
    is_recomputed: bool = False
    """The kernel after it convolves by itself, keeps this one's input, and convolves again in backward
    (state-spaces/mamba e9594ce1 ops/triton/ssd_combined.py `MambaSplitConv1dScanCombinedFn`).
    """

    @property
    def is_inner(self) -> bool:
        return True

    def cut_features(self, cut: FeatureCut) -> Convolution:
        return replace(self, channels=cut.features(self.channels))

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return (self._kernel(2, 1, shape, options),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        if self.is_recomputed:
            return (self._kernel(2, 1, shape, options), self._kernel(3, 1, shape, options))
        return (self._kernel(2, 1, shape, options), self._kernel(3, 2, shape, options))

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.channels * self.taps

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 2 * self._bytes(shape, options)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        size = self._bytes(shape, options)
        return ModuleTensors((size,), (size,), (size, size))

    def _kernel(self, passes: int, launches: int, shape: BatchShape, options: WorkOptions) -> Kernel:
        """A kernel that reads and writes `passes` tensors of all channels."""
        moved = float(passes * self._bytes(shape, options))
        return Kernel("convolution", 0.0, moved, options.kernel_dtype, (), launches)

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.channels * options.activation_bytes


@dataclass(frozen=True, slots=True)
class GatedConvolution(Operation):
    """LFM2's mixer: `C * conv(B * x)` of `width` channels, B, C and x slices of one product's output.

    transformers 5.24 models/lfm2/modeling_lfm2.py `Lfm2ShortConv`: a product, the convolution, a product.
    Backward multiplies twice for each, and brings the three gradients together. It keeps B, C and x, B x, and
    the convolution's output.
    """

    width: int
    taps: int = 3

    @property
    def role(self) -> Role:
        return Role.MIXER

    @property
    def mixer_title(self) -> str:
        return "short convolutions"

    @property
    def is_run_again(self) -> bool:
        return False

    @property
    def is_inner(self) -> bool:
        return True

    @property
    def exchanged_inputs(self) -> tuple[int, ...]:
        return (3 * self.width,)

    @property
    def exchanged_outputs(self) -> tuple[int, ...]:
        return (self.width,)

    def cut_features(self, cut: FeatureCut) -> GatedConvolution:
        return replace(self, width=cut.features(self.width))

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        size = self._bytes(shape, options)
        products = elementwise(6 * size, options.kernel_dtype, 2)
        return (products, Kernel("convolution", 0.0, 2.0 * size, options.kernel_dtype))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        size = self._bytes(shape, options)
        products = elementwise((12 + 6) * size, options.kernel_dtype, 5)
        return (products, Kernel("convolution", 0.0, 3.0 * size, options.kernel_dtype, (), 2))

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.width * self.taps

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 5 * self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self._bytes(shape, options)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 5 * self._bytes(shape, options)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return (self._bytes(shape, options),)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        size = self._bytes(shape, options)
        return ModuleTensors((3 * size, size, size), (size,), (size,) * 5)

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes
