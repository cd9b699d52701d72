"""Attention of frames in chunks, in fp32 and written out, as towers of sounds compute it in Python.

Operators and kept tensors as dispatch and saved-tensor hooks show them under torch 2.13 for transformers
5.24's `Gemma4AudioAttention`. Letters: h features of all heads, a heads, k keys of a chunk's queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.attention.attention import Attention
from zsim.operations.operation import Kernels, Module
from zsim.operations.tensors import ModuleTensors, Sizes

_FP32 = 4
_FEATURE_BYTES, _FEATURE_LAUNCHES = 152, 18
"""Of a feature: three casts (18), three scalings (24), padding (24), keys and values twice as often (32) and
in the order of products (40), the output in the order of frames and its cast (14).
"""
_SCORE_BYTES, _SCORE_LAUNCHES = 61, 7
"""Of a score: positions shifted (8), added (12), divided (8), tanh (8), multiplied (8), masked (9), softmax
(8).
"""


@dataclass(frozen=True, slots=True)
class ChunkedAttention(Attention):
    """The core of attention of `queries` frames to `keys`, with products of each query and `positions`."""

    queries: int = 12
    keys: int = 24
    positions: int = 13

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        scores = shape.tokens * self.num_heads * self.keys
        return (
            *self._products(shape),
            elementwise(shape.tokens * self.query_elements * _FEATURE_BYTES, "fp32", _FEATURE_LAUNCHES),
            elementwise(scores * _SCORE_BYTES, "fp32", _SCORE_LAUNCHES),
        )

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Twice the forward's: two products for each, and each step reads what it keeps and a gradient."""
        kernels = self.forward_kernels(module, shape, options)
        return (*kernels, *kernels)

    def recomputed_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return ()

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        return 2.0 * self.query_elements * (2 * self.keys + self.positions)

    def masked_fraction(self, sequence_length: int) -> float:
        return 0.0

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Queries before each scaling and in the order of products (12 h), keys and values for every chunk
        that reads them (2 x 4 k/q h), tanh and softmax (8 a k), and the mask.
        """
        return sum(self._kept(shape))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Keys before they are put in the order of products."""
        return self._kept(shape)[1]

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The gradients of keys and values."""
        return 2 * self._kept(shape)[1]

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        return (shape.tokens * self.output_elements * options.activation_bytes,)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        queries, keys, *others = self._kept(shape)
        return ModuleTensors((queries, keys, keys, *others[1:]), (keys,), (keys, keys))

    def _kept(self, shape: BatchShape) -> Sizes:
        """Bytes of queries, keys, values, scores and mask."""
        elements = shape.tokens * self.query_elements * _FP32
        context = elements * self.keys // self.queries
        scores = shape.tokens * self.keys
        return 3 * elements, context, context, 2 * _FP32 * self.num_heads * scores, scores

    def _products(self, shape: BatchShape) -> Kernels:
        """Products of queries with keys, of queries with positions, and of scores with values."""
        chunks = -(-shape.tokens // self.queries) * self.num_heads
        sizes = (
            (chunks, self.queries, self.keys, self.qk_head_dim),
            (self.num_heads, shape.tokens, self.positions, self.qk_head_dim),
            (chunks, self.queries, self.v_head_dim, self.keys),
        )
        return tuple(
            Kernel(
                "gemm", 2.0 * count * m * n * k, float(_FP32 * count * (m * n + m * k + n * k)), "fp32",
                (m, n, k), is_batched=True,
            )
            for count, m, n, k in sizes
        )  # fmt: skip
