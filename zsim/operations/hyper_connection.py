"""Residuals of several streams: hyper-connections (DeepSeek-V4's mHC) and alternating updates (Gemma 3n's).

Hyper-connections mix the streams before and after each branch:

Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880), as fused kernels (Megatron-
LM d98e8a64 core/transformer/hyper_connection.py, core/fusions/fused_mhc_kernels.py). With n streams of width
h, in activations of e bytes per token:

    collapse   a product of the streams to n (n + 2) weights reads n h e, a kernel with Sinkhorn's iterations
               reads them again and writes the branch's input, (n + 1) h e
    expand     reads the streams and the branch's output and writes the streams, (2 n + 1) h e

Backward of expand reads the gradient, the streams and the branch's output and writes the gradients of both,
(3 n + 2) h e. That of collapse reads the branch's gradient and the streams and adds to the streams' gradient,
(3 n + 1) h e, beside the product's two. What is kept: the streams, by collapse, the branch's output by
expand, and weights in fp32. The iterations are run again.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel, elementwise, gemm
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes

_FP32 = 4


@dataclass(frozen=True, slots=True)
class StreamCollapse(Operation):
    """The streams as one input of a branch, or of the head, and the weights for its output."""

    width: int
    streams: int
    is_last: bool = False
    """It makes the head's input, and no weights for what follows."""

    @property
    def weights(self) -> int:
        """Weights per token."""
        return self.streams if self.is_last else self.streams * (self.streams + 2)

    @property
    def residual_streams(self) -> int:
        return self.streams

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        width = self.streams * self.width
        moved = (width + self.width) * options.activation_bytes * shape.tokens
        product = gemm(shape.tokens, self.weights, width, options.activation_bytes, options.kernel_dtype)
        return (product, _mix(moved, options))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        width = self.streams * self.width
        moved = (3 * width + self.width) * options.activation_bytes * shape.tokens
        e, dtype, tokens = options.activation_bytes, options.kernel_dtype, shape.tokens
        return (
            _mix(moved, options),
            gemm(tokens, width, self.weights, e, dtype, "nn"),
            gemm(self.weights, width, tokens, e, dtype, "tn"),
        )

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.streams * self.width * self.weights

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * (self.streams + 1) * self.width * options.activation_bytes

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        output = shape.tokens * self.width * options.activation_bytes
        return ModuleTensors(self._saved(shape, options), (output,), (output, self.streams * output))

    def _saved(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """The streams and the weights."""
        streams = shape.tokens * self.streams * self.width * options.activation_bytes
        return streams, shape.tokens * self.weights * _FP32


@dataclass(frozen=True, slots=True)
class StreamExpand(Operation):
    """The streams mixed among each other, and a branch's output added to each with its weight."""

    width: int
    streams: int

    @property
    def is_function(self) -> bool:
        return True

    @property
    def role(self) -> Role:
        return Role.RESIDUAL

    @property
    def residual_streams(self) -> int:
        return self.streams

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return (_mix((2 * self.streams + 1) * self._bytes(shape, options), options),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return (_mix((3 * self.streams + 2) * self._bytes(shape, options), options),)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The branch's output. The streams and weights are collapse's."""
        return self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self.streams * self._bytes(shape, options)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return (self.streams + 1) * self._bytes(shape, options)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        branch = self._bytes(shape, options)
        return ModuleTensors((branch,), (self.streams * branch,), (self.streams * branch, branch))

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        """Bytes of one stream."""
        return shape.tokens * self.width * options.activation_bytes


@dataclass(frozen=True, slots=True)
class AlternatingUpdate(Operation):
    """The streams before a layer, predicted from each other, or after it, corrected by the layer's output.

    Baykal et al. 2023, "Alternating Updates for Efficient Transformers" (arXiv 2301.13310), as transformers
    5.24 computes it (modeling_gemma3n.py `Gemma3nTextAltUp`), with n streams of width h. Predict: a copy of
    the streams by tokens, a product of each token's n numbers with n x n weights of its own, a sum with the
    streams and a copy back, 9 n tensors of width h in all. Backward has the product's two gradients and as
    many copies, 9 n. Correct: the difference of the output and a stream (3), repeated (n + 1), times a number
    for each stream (2 n) and added (3 n), and backward the product's two gradients (4 n), the sum of the
    repeated ones (n + 1), the difference's (2), and the sum with the streams' (3 n). Each keeps a copy of n.
    """

    width: int
    streams: int
    is_prediction: bool

    @property
    def is_function(self) -> bool:
        return True

    @property
    def residual_streams(self) -> int:
        return self.streams

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        moved = 9 * self.streams if self.is_prediction else 6 * self.streams + 4
        return (self._passes(moved, 4, shape, options),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        moved = 9 * self.streams if self.is_prediction else 8 * self.streams + 3
        return (self._passes(moved, 5, shape, options),)

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.width * self.streams**2 if self.is_prediction else 0.0

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self.streams * self._bytes(shape, options)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 2 * self.streams * self._bytes(shape, options)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 2 * self.streams * self._bytes(shape, options)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        size = self.streams * self._bytes(shape, options)
        return ModuleTensors((size,), (size, size), (size, size))

    def _bytes(self, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes

    def _passes(self, tensors: int, launches: int, shape: BatchShape, options: WorkOptions) -> Kernel:
        return elementwise(tensors * self._bytes(shape, options), options.kernel_dtype, launches)


def _mix(moved_bytes: float, options: WorkOptions) -> Kernel:
    return elementwise(moved_bytes, options.kernel_dtype)
