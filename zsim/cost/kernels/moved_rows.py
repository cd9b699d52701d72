"""The kernels that score experts and bring rows into their order and back, by library.

# [Note: rows that move]
Passes over the tensors of all tokens and of all rows, in units of one tensor in the activations' type,
counted in the code of each library. A mask, an index or a score has no width and counts as launches alone.
transformers' are below, the others in the folders of the frameworks that have them.

transformers (5.23 integrations/moe.py `grouped_mm_experts_forward`): one gather, two argsorts, a histogram
and a running sum. The scores are fp32, so their product with the experts' output is too. It is put back in
order, summed up over a token's experts and cast. Backward of a gather adds up by sorted indices into zeros.

transformers-4 (4.57.1 `Qwen2MoeSparseMoeBlock.forward`), loop: zeros for the output, one_hot (zeros, a range,
a scatter), and which experts have tokens (a sum, a comparison, their indices). select, of one expert: its
part of the mask, torch.where, a gather. Its backward: zeros of all tokens, a sum by sorted indices into them,
and their sum with those of the other experts. put: the scores read by indices, a product, index_add_. Its
backward: a gather, two products and a sum, and the scores' gradient the same way as the rows'. The host is
what this loop waits for, so operators of many small kernels count as so many launches as they take the host:
torch.where two (six kernels and a copy to the host, as of masks below), a sum by sorted indices four (its
nine: the few rows of an expert are sorted by one kernel of cub's).

After DeepEP's dispatch, map (counted in Megatron-Core 0.16.1): a Triton kernel and one back
(core/fusions/fused_indices_converter.py), or `_DeepepManager._indices_to_multihot`
(core/transformer/moe/token_dispatcher.py): zeros and zeros, a comparison, two tensors read by a mask, one put
by indices, a number put by indices (and filled), a cast, a range, a sum of the mask and repeat_interleave (a
scan, a copy, a comparison, a reduction, a copy, its kernel, an index_select). A mask that is read or put by
becomes indices first: a sum of two kernels, a copy to the host, a selection of two, both dimensions
(ATen/native/cuda/Nonzero.cu). Backward: the gradient read by indices, zeros, the mask's indices again, and a
sum by sorted indices (five for a linear index, a division, a range, six of a radix sort, its kernel). Numbers
of a few bytes per row count as launches alone.

Transformer Engine's permutation kernels (pytorch/permutation.py of 2.17) read their input once and write
their output once. Megatron has them with `--moe-permute-fusion`, NeMo AutoModel by default (0.2.0 and 0.5.0
components/moe/layers.py and experts.py, `moe_permute_fusion`).

compiled: torch.compile joins what is elementwise with the gather before or the sum after it.

# [Note: rows that are added up]
Rows that are added to rows picked by an index take a time for each element, not for each byte: in bf16 on one
H100 (traces/h100-80gb-hbm3/microbench.json, family rows_by_index, 16,384 and 65,536 rows of 2,048 to 7,168
elements) scatter_add_ of rows 3.75 ps, index_add_ (backward of index_select) 7.7 ps, index_put_ that
accumulates by sorted indices (backward of a gather) 2.45 ps, its sort not included, each within 6 %.
`SCATTER_ADD`, `INDEX_ADD` and `SORTED_INDEX_PUT` are these in units of the first (`seconds_per_added_element`
of a GPU's file). What torch.compile makes of them was not timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MoveKind = Literal["permute", "sort", "unsort", "unpermute", "add", "map", "loop", "select", "put"]


@dataclass(frozen=True, slots=True)
class RowPasses:
    """Passes of one direction of a rearrangement."""

    tokens: float
    """Tensors of all tokens that are read or written."""
    rows: float
    """Tensors of all rows that are read or written."""
    launches: int
    added: float = 0.0
    """Tensors of all rows that are added up: see [Note: rows that are added up]."""
    padded_rows: float = 0.0
    """Tensors of all rows with their padding, where every expert has those of the fullest."""
    rows_per_expert: float = 0.0
    """Further tensors of all rows for each of the rank's experts."""
    padded_rows_per_expert: float = 0.0
    """Further tensors of all rows with their padding for each of the rank's experts."""
    launches_per_expert: int = 0

    def sum_experts(self, num_experts: int, padding: float) -> RowPasses:
        """The passes over the rows of `num_experts` experts, which are `padding` times as many padded."""
        rows = self.rows + self.rows_per_expert * num_experts
        rows += self.padded_rows * padding
        rows += self.padded_rows_per_expert * num_experts * padding
        launches = self.launches + self.launches_per_expert * num_experts
        return RowPasses(self.tokens, rows, launches, self.added)


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Passes of a rearrangement, and the tensors of all rows that it keeps for backward."""

    forward: RowPasses
    backward: RowPasses
    kept_rows: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreCost:
    """Bytes per score (one per token and expert, fp32) and launches, forward and backward."""

    forward_bytes: int
    forward_launches: int
    backward_bytes: int
    backward_launches: int


SCATTER_ADD, INDEX_ADD, SORTED_INDEX_PUT = 1.0, 2.05, 0.65  # see [Note: rows that are added up]
_NOTHING = MoveCost(RowPasses(0, 0, 0), RowPasses(0, 0, 0))
_COPY = MoveCost(RowPasses(0, 2, 1), RowPasses(0, 2, 1))
# What torch.compile makes of a permutation and of its inverse.
_COMPILED_PERMUTE = MoveCost(RowPasses(0, 6, 16), RowPasses(3, 5, 10))
_COMPILED_UNPERMUTE = MoveCost(RowPasses(1, 2, 2), RowPasses(0, 4, 4), kept_rows=1)


@dataclass(frozen=True, slots=True)
class ExpertKernelSet:
    """A library's kernels around routed experts: their scores, and the rearrangements of rows."""

    name: str
    permute: MoveCost = _NOTHING
    unpermute: MoveCost = _NOTHING
    sort: MoveCost = _COPY
    """The rows of several senders brought into the order of experts. A copy in each direction."""
    unsort: MoveCost = _COPY
    map: MoveCost = _NOTHING
    loop: MoveCost = _NOTHING
    select: MoveCost = _NOTHING
    put: MoveCost = _NOTHING
    is_compiled: bool = False
    """With `compile`, torch.compile joins what the kernels of "permute" and "unpermute" do."""
    unordered_rows: Literal["none", "activations", "fp32"] = "none"
    """The type of the rows in their first order, where they are written before they are summed up."""
    scores: ScoreCost = ScoreCost(12, 5, 18, 6)
    """The scores and the choice. By default scores are read, softmax or sigmoid is written, and topk reads
    it. Backward fills the gradient of the scores with zeros and passes through the function (reads gradient
    and output, writes).
    """
    gates: tuple[ScoreCost, ...] = ()
    """A gate of the library's own by the experts of a token: of one, two, and so on, the last of all further
    counts. It replaces `scores` and what a router has besides.
    """

    def move(self, kind: MoveKind, *, is_compiled: bool) -> MoveCost:
        """The passes of a rearrangement, with torch.compile or without."""
        if is_compiled and self.is_compiled and kind in ("permute", "unpermute"):
            return _COMPILED_PERMUTE if kind == "permute" else _COMPILED_UNPERMUTE
        cost: MoveCost = _NOTHING if kind == "add" else getattr(self, kind)
        return cost


# See [Note: rows that move] for all of these.
TRANSFORMERS_KERNELS = ExpertKernelSet(
    "transformers",
    permute=MoveCost(RowPasses(0, 2, 20), RowPasses(1, 0, 8, SORTED_INDEX_PUT)),
    unpermute=MoveCost(RowPasses(5, 9, 5), RowPasses(3, 16, 14, SORTED_INDEX_PUT), kept_rows=1),
    is_compiled=True,
    unordered_rows="fp32",
)
TRANSFORMERS_4_KERNELS = ExpertKernelSet(
    "transformers-4",
    loop=MoveCost(RowPasses(1, 0, 8), RowPasses(0, 0, 0)),
    select=MoveCost(RowPasses(0, 2, 4), RowPasses(4, 0, 6, SORTED_INDEX_PUT)),
    put=MoveCost(RowPasses(0, 2, 3, INDEX_ADD), RowPasses(0, 8, 10), kept_rows=1),
)
TRANSFORMER_ENGINE_KERNELS = ExpertKernelSet(
    "Transformer Engine",
    permute=MoveCost(RowPasses(0, 2, 3), RowPasses(1, 1, 1)),
    unpermute=MoveCost(RowPasses(1, 1, 1), RowPasses(0, 2, 1)),
)
MASKED_MAP = ExpertKernelSet("map by masks", map=MoveCost(RowPasses(0, 0, 31), RowPasses(0, 0, 22)))
FUSED_MAP = ExpertKernelSet("map by one kernel", map=MoveCost(RowPasses(0, 0, 1), RowPasses(0, 0, 1)))
