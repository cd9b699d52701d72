"""DeepSeek-V4's attention: a window of tokens, and entries into which the sequence is compressed."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.mixers.sparse_attention import IndexerLoss
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.tensors import ModuleTensors, Sizes

_FP32, _INDEX = 4, 4


@dataclass(frozen=True, slots=True)
class CompressedAttention(Operation):
    """Attention of H heads of width D over one head that is key and value at once.

    DeepSeek-AI 2026, "DeepSeek-V4", section 2.3, and transformers 5.24 modeling_deepseek_v4.py. A token sees
    a window of W tokens and, of the entries that stand for `ratio` tokens each, all before it (heavily
    compressed attention), or the `top_k` that an indexer scores best (compressed sparse attention). Per token
    of a sequence of S tokens, with k keys:

        scores of the indexer 2 J F S / (2 ratio), J heads of F     choice: one pass over these
        attention 4 H D k

    k is W, W + S / (2 ratio), or W + `top_k`, of which the kernel computes all also for the first tokens.
    Backward forms the scores again: 10 H D k. The indexer reads a detached input, and its choice has no
    gradient. A loss that trains it is taken to be that of `SparseAttention`, over entries, since
    Megatron-Core d98e8a64 has no code of it: 2 H D for each entry forward, and twice the indexer's scores
    backward. Positions are rotated in queries, in the one key, and back in the output.
    """

    num_heads: int
    head_dim: int
    window: int
    ratio: int = 0
    """Tokens that an entry stands for. 0 for a window alone."""
    top_k: int = 0
    """Entries that the indexer chooses. 0 for all."""
    index_heads: int = 0
    index_dim: int = 0
    loss: IndexerLoss = "none"

    @property
    def role(self) -> Role:
        return Role.MIXER

    @property
    def mixer_title(self) -> str:
        return "compressed sparse attention"

    @property
    def needs_sparse_kernels(self) -> bool:
        return True

    def _keys(self, sequence_length: float) -> float:
        """Keys of a mean token."""
        if not self.ratio:
            return min(self.window, sequence_length)
        entries = sequence_length / self.ratio
        chosen = min(self.top_k, entries) if self.top_k else entries / 2
        return min(self.window, sequence_length) + chosen

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        dtype, e = options.kernel_dtype, options.activation_bytes
        rotated = shape.tokens * (2 * self.num_heads + 1) * self.head_dim * 2 * e
        attention = elementwise(rotated, dtype, 3), self._attention(1, shape, options)
        if not self.top_k:
            return attention
        pairs = self._pairs(shape)
        queries = shape.tokens * self.index_heads * self.index_dim
        return (
            elementwise(queries * 2 * e, dtype),
            Kernel("indexer", 2.0 * pairs * self.index_heads * (self.index_dim + 1), 0.0, dtype),
            Kernel("top_k", 0.0, pairs * _FP32, dtype),
            *attention,
            *self._loss(shape, options),
        )

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        dtype, e = options.kernel_dtype, options.activation_bytes
        rotated = shape.tokens * (2 * self.num_heads + 1) * self.head_dim * 2 * e
        kernels = self._attention(2, shape, options), elementwise(rotated, dtype, 3)
        if self.loss == "none" or not self.top_k:
            return kernels
        scores = 4.0 * self._loss_pairs(shape) * self.index_heads * self.index_dim
        moved = self._index_elements(shape) * 4 * e
        return (*kernels, Kernel("indexer", scores, 0.0, dtype, (), 2), elementwise(moved, dtype, 4))

    def _loss(self, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The main attention's scores of entries, and the distance of the indexer's from them."""
        if self.loss == "none":
            return ()
        pairs = self._loss_pairs(shape)
        flops = 2.0 * self.num_heads * self.head_dim * pairs
        return (Kernel("indexer", flops, 2 * pairs * _FP32, options.kernel_dtype, (), 4),)

    def _loss_pairs(self, shape: BatchShape) -> float:
        pairs = self._pairs(shape)
        return pairs if self.loss == "full" else min(pairs, float(shape.tokens * self.top_k))

    def _index_elements(self, shape: BatchShape) -> int:
        """Elements of the indexer's queries and entries."""
        return shape.tokens * self.index_heads * self.index_dim + shape.tokens // self.ratio * self.index_dim

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        """Attention over its keys, the indexer over all pairs of a token and an entry."""
        attention = 4.0 * self.num_heads * self.head_dim * self._keys(sequence_length)
        return attention + self._index_flops(sequence_length)

    def masked_fraction(self, sequence_length: int) -> float:
        """Half of the indexer's pairs."""
        total = self.forward_flops(Module("", self), sequence_length)
        return self._index_flops(sequence_length) / 2 / total

    def _index_flops(self, sequence_length: int) -> float:
        return 2.0 * self.index_heads * self.index_dim * sequence_length / self.ratio if self.top_k else 0.0

    def _pairs(self, shape: BatchShape) -> float:
        """Pairs of a token and an entry that it might see."""
        return shape.tokens * (shape.span or shape.sequence_length) / (2 * self.ratio)

    def _attention(self, passes: int, shape: BatchShape, options: WorkOptions) -> Kernel:
        products, elements = (2, 2) if passes == 1 else (5, 4)
        heads = shape.tokens * self.num_heads * self.head_dim
        keys = self._keys(shape.span or shape.sequence_length)
        moved = heads * elements * options.activation_bytes
        return Kernel(
            "sparse_attention", 2.0 * heads * keys * products, float(moved), options.kernel_dtype, (), passes
        )

    # -- memory --------------------------------------------------------------------------------------------

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(shape, options))

    def selective_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Queries, keys and entries."""
        return sum(self._saved(shape, options)[:2])

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.num_heads * self.head_dim * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Gradients of output and queries, and the key's summed in fp32."""
        heads = 2 * self.num_heads * options.activation_bytes
        return shape.tokens * self.head_dim * (heads + _FP32)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        output = shape.tokens * self.num_heads * self.head_dim * options.activation_bytes
        return output, shape.tokens * self.num_heads * _FP32

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        return ModuleTensors(self._saved(shape, options))

    def _saved(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """Queries, the key with its entries, the output, its sums, indices of what was chosen, and for
        a loss what the indexer scores.
        """
        tokens, e = shape.tokens, options.activation_bytes
        entries = tokens // self.ratio if self.ratio else 0
        is_trained = self.top_k and self.loss != "none"
        heads = tokens * self.num_heads * self.head_dim * e
        return (
            heads,
            (tokens + entries) * self.head_dim * e,
            heads,
            tokens * self.num_heads * _FP32,
            tokens * self.top_k * _INDEX,
            (self._index_elements(shape) + tokens * self.index_heads) * e if is_trained else 0,
        )


@dataclass(frozen=True, slots=True)
class KeyPooling(Operation):
    """Entries from windows of tokens: their features weighted by the softmax of a gate, as one fused kernel.

    With `overlaps` a token has features for its own window's entry and others for the next one's. Features
    and gates of `width` for each token are read, and kept, and an entry for `ratio` tokens is written.
    Backward writes the gradients of both.
    """

    width: int
    ratio: int
    overlaps: bool = False

    @property
    def inputs(self) -> int:
        """Features per token."""
        return self.width * (2 if self.overlaps else 1)

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        moved = shape.tokens * (2 * self.inputs + self.width / self.ratio) * options.activation_bytes
        return (elementwise(moved, options.kernel_dtype),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        moved = shape.tokens * (4 * self.inputs + self.width / self.ratio) * options.activation_bytes
        return (elementwise(moved, options.kernel_dtype, 2),)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * 2 * self.inputs * options.activation_bytes

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width // self.ratio * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return self.kept_bytes(module, shape, options)

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        tensor = shape.tokens * self.inputs * options.activation_bytes
        return ModuleTensors((tensor, tensor), (tensor,), (tensor, tensor))
