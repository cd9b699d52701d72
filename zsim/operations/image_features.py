"""Image features among the tokens of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation

_PREFIX_SUM_BYTES = 8  # of an element of the mask, ATen/native/cuda/IndexKernel.cpp `masked_scatter_cuda`


@dataclass(frozen=True, slots=True)
class ImageFeatures(Operation):
    """Features of images that replace the embeddings of their placeholders, or are added to the stream there.

    transformers 5.24 modeling_qwen3_vl.py: `masked_scatter` by a mask of all elements, and in deep layers
    (`_deepstack_process`) a copy of the stream, rows read and put by a mask. The rows of images are counted
    as none beside those of all tokens.
    """

    width: int
    is_added: bool = False

    @property
    def is_function(self) -> bool:
        return True

    @property
    def saves_nothing(self) -> bool:
        return True

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """A copy of the tokens. A scatter also writes the mask, sums it up and reads the sums."""
        elements, e = shape.tokens * self.width, options.stream_bytes
        if self.is_added:
            return (elementwise(elements * 2 * e, options.kernel_dtype, 4),)
        return (elementwise(elements * (4 * e + 3 + 2 * _PREFIX_SUM_BYTES), options.kernel_dtype, 5),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The gradient of images is selected by the mask, and is zero in that of the tokens."""
        elements, e = shape.tokens * self.width, options.stream_bytes
        if self.is_added:
            return (elementwise(0.0, options.kernel_dtype, 2),)
        return (elementwise(elements * (3 * e + 2), options.kernel_dtype, 4),)

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        per_element = 0 if self.is_added else _PREFIX_SUM_BYTES + 1
        return shape.tokens * self.width * (options.stream_bytes + per_element)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return 0 if self.is_added else shape.tokens * self.width * options.stream_bytes
