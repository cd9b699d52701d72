"""DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5): an indexer chooses the keys that a query sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role
from zsim.operations.sharding import FeatureCut
from zsim.operations.tensors import ModuleTensors, Sizes

IndexerLoss = Literal["none", "sparse", "full"]
"""What trains the indexer: the distance of its scores from those of the main attention, over the chosen keys
("sparse") or all of them ("full")."""
_FP32, _INDEX = 4, 4


@dataclass(frozen=True, slots=True)
class SparseAttention(Operation):
    """Multi-head latent attention over the `top_k` keys of a query that the indexer scores best.

    DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv 2512.02556), section 2, with Megatron-Core's kernels (d98e8a64
    core/transformer/experimental_attention_variant/dsa.py). Queries of H heads are brought to the latent's
    width of R, beside P features with positions, by the product that would make keys and values. Per token,
    with S keys that it might see and k = `top_k` that it does:

        scores of the indexer 2 J D S, J heads of D     choice: one pass over S
        attention 2 H k (R + P) + 2 H k R

    The kernel computes k keys also for the first tokens, which see fewer. Backward forms the scores again
    and has 2 H k (3 (R + P) + 2 R). The indexer reads a detached input. Its loss computes the main
    attention's scores of all keys or of the chosen ones, and backward twice the indexer's products. Layers
    without an indexer take the choice of the one before them that has one.
    """

    num_heads: int
    latent: int
    rotary_width: int
    top_k: int
    index_heads: int
    index_dim: int
    has_indexer: bool = True
    loss: IndexerLoss = "none"

    @property
    def role(self) -> Role:
        return Role.MIXER

    @property
    def mixer_title(self) -> str:
        return "DeepSeek's sparse attention"

    @property
    def split_counts(self) -> tuple[tuple[str, int], ...]:
        return (("heads of sparse attention", self.num_heads),)

    @property
    def is_latent(self) -> bool:
        return True

    @property
    def needs_sparse_kernels(self) -> bool:
        return True

    def cut_features(self, cut: FeatureCut) -> SparseAttention:
        """The rank's heads. Every rank has the complete indexer."""
        return replace(self, num_heads=cut.features(self.num_heads))

    @property
    def _scores_per_pair(self) -> float:
        """Scores of the indexer that the choice reads for each pair of a token and a key."""
        return 1.0

    @property
    def _key_elements(self) -> int:
        """Elements per token of what the attention reads as keys and values."""
        return self.latent + self.rotary_width

    @property
    def _indices(self) -> int:
        """Indices per token of what is chosen."""
        return self.top_k

    # -- work ----------------------------------------------------------------------------------------------

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        dtype = options.kernel_dtype
        attention = self._attention(1, shape, options)
        if not self.has_indexer:
            return (attention,)
        pairs = _pairs(shape)
        scores = Kernel("indexer", self._index_flops(pairs), 0.0, dtype)
        choice = Kernel("top_k", 0.0, float(pairs * self._scores_per_pair * _FP32), dtype)
        positions = elementwise(self._index_elements(shape) * 2 * options.activation_bytes, dtype, 3)
        return (positions, scores, choice, attention, *self._loss(pairs, shape, options))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        kernels: Kernels = (self._attention(2, shape, options),)
        if not self.has_indexer or self.loss == "none":
            return kernels
        pairs = self._loss_pairs(_pairs(shape), shape)
        products = Kernel("indexer", 2 * self._index_flops(pairs), 0.0, options.kernel_dtype, (), 2)
        moved = self._index_elements(shape) * 4 * options.activation_bytes
        return (*kernels, products, elementwise(moved, options.kernel_dtype, 4))

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        """Attention over `top_k` keys, the indexer over all pairs."""
        keys = min(self.top_k, sequence_length)
        index = 2.0 * self.index_heads * self.index_dim * sequence_length if self.has_indexer else 0.0
        return 2.0 * self.num_heads * keys * (2 * self.latent + self.rotary_width) + index

    def masked_fraction(self, sequence_length: int) -> float:
        """Half of the indexer's pairs."""
        total = self.forward_flops(Module("", self), sequence_length)
        return self.index_heads * self.index_dim * sequence_length / total if self.has_indexer else 0.0

    def _attention(self, passes: int, shape: BatchShape, options: WorkOptions) -> Kernel:
        """The kernel over the chosen keys. Backward adds the gradients of keys to where they are from."""
        scores, values = self.latent + self.rotary_width, self.latent
        products = scores + values if passes == 1 else 3 * scores + 2 * values
        flops = 2.0 * shape.tokens * self.num_heads * self.top_k * products
        moved = shape.tokens * self.num_heads * (scores + values) * passes * options.activation_bytes
        return Kernel("sparse_attention", flops, float(moved), options.kernel_dtype, (), passes)

    def _loss(self, pairs: float, shape: BatchShape, options: WorkOptions) -> Kernels:
        if self.loss == "none":
            return ()
        pairs = self._loss_pairs(pairs, shape)
        flops = 2.0 * self.num_heads * (self.latent + self.rotary_width) * pairs
        return (Kernel("indexer", flops, float(2 * pairs * _FP32), options.kernel_dtype, (), 4),)

    def _loss_pairs(self, pairs: float, shape: BatchShape) -> float:
        return pairs if self.loss == "full" else min(pairs, float(shape.tokens * self.top_k))

    def _index_flops(self, pairs: float) -> float:
        return 2.0 * self.index_heads * self.index_dim * pairs

    def _index_elements(self, shape: BatchShape) -> int:
        """Elements of the indexer's queries and keys."""
        return shape.tokens * (self.index_heads + 1) * self.index_dim

    # -- memory --------------------------------------------------------------------------------------------

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(shape, options))

    def selective_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """Queries and latents."""
        return sum(self._saved(shape, options)[:2])

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.num_heads * self.latent * options.activation_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        width = self.num_heads * (2 * self.latent + self.rotary_width)
        latents = self._key_elements * _FP32
        return shape.tokens * (width * options.activation_bytes + latents)

    def kept_outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        output = shape.tokens * self.num_heads * self.latent * options.activation_bytes
        return output, shape.tokens * self.num_heads * _FP32

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        return ModuleTensors(self._saved(shape, options))

    def _saved(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """Queries at the latent's width, latents, the output, its sums, indices, and with a loss what the
        indexer scores.
        """
        tokens, e = shape.tokens, options.activation_bytes
        width = self.latent + self.rotary_width
        is_trained = self.has_indexer and self.loss != "none"
        indexer = self._index_elements(shape) * e + tokens * self.index_heads * e if is_trained else 0
        return (
            tokens * self.num_heads * width * e,
            tokens * self._key_elements * e,
            tokens * self.num_heads * self.latent * e,
            tokens * self.num_heads * _FP32,
            tokens * self._indices * _INDEX,
            indexer,
        )


@dataclass(frozen=True, slots=True)
class BlockSparseAttention(SparseAttention):
    """Attention of grouped heads of width `latent`, over the blocks of keys that an indexer scores best.

    MiniMax M3 (transformers 5.24 modeling_minimax_m3_vl.py `MiniMaxM3VLIndexer`): each of the indexer's heads
    chooses, for its group of heads, `top_k / block` blocks by their best key. The choice has no gradient.
    """

    num_kv_heads: int = 1
    block: int = 128
    """Keys of a block."""

    @property
    def is_latent(self) -> bool:
        return False

    @property
    def mixer_title(self) -> str:
        return "attention over blocks of keys"

    def cut_features(self, cut: FeatureCut) -> BlockSparseAttention:
        groups = max(1, self.num_kv_heads // cut.ranks)
        return replace(self, num_heads=cut.features(self.num_heads), num_kv_heads=groups)

    @property
    def _scores_per_pair(self) -> float:
        return self.index_heads / self.block

    @property
    def _key_elements(self) -> int:
        return 2 * self.num_kv_heads * self.latent

    @property
    def _indices(self) -> int:
        return self.index_heads * self.top_k // self.block


def _pairs(shape: BatchShape) -> float:
    """Pairs of a token and one that it might see."""
    return shape.tokens * (shape.span or shape.sequence_length) / 2
