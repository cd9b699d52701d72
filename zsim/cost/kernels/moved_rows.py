"""Passes over memory of rows that are brought into the order of experts and back, by library.

# [Note: rows that move]
Passes over the tensors of all tokens and of all rows, in units of one tensor in the activations' type,
counted in the code of each library. A mask, an index or a score has no width and counts as launches alone.

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

torchtitan (0.2.2 models/moe/moe.py, utils.py): a gather, the scores' product through fp32 and back, a copy
with a row of zeros at its end, and a gather that pads every expert's rows to a multiple of 8. Afterwards the
same two the other way round, and a sum.

megatron (core 0.16.1 core/transformer/moe/moe_utils.py `permute`, `unpermute`, `sort_chunks_by_idxs`): a
gather by a transposed mask, and zeros and a scatter that adds. The scores are a factor of the activation.

megatron-fused: Transformer Engine's permutation kernels (pytorch/permutation.py of 2.17): each reads its
input once and writes its output once.

After DeepEP's dispatch, map: a Triton kernel and one back (core/fusions/fused_indices_converter.py), or
`_DeepepManager._indices_to_multihot` (core/transformer/moe/token_dispatcher.py): zeros and zeros, a
comparison, two tensors read by a mask, one put by indices, a number put by indices (and filled), a cast, a
range, a sum of the mask and repeat_interleave (a scan, a copy, a comparison, a reduction, a copy, its kernel,
an index_select). A mask that is read or put by becomes indices first: a sum of two kernels, a copy to the
host, a selection of two, both dimensions (ATen/native/cuda/Nonzero.cu). Backward: the gradient read by
indices, zeros, the mask's indices again, and a sum by sorted indices (five for a linear index, a division, a
range, six of a radix sort, its kernel). Numbers of a few bytes per row count as launches alone.

autoep (DeepSpeed 0.19.8 module_inject/auto_ep_layer.py, moe/ep_kernels.py): a stable argsort and a gather,
the rows by expert in one gather of a Triton kernel, and back in another, each with the indices made again,
zeros and a copy in the first order, a product with the fp32 scores, their sum, a cast.

deepspeed-moe (moe/sharded_moe.py `_sparse_encode`, `_sparse_decode`): a copy of the tokens with a row of
zeros at its end and a gather into the slots. sort: the slices of each expert copied for both of its first
products. unsort: their outputs joined. Back: the same copy and gather, a product with fp32 scores, their sum,
a cast.

kempnerforge (model/moe.py at 5666d0d1, `grouped_expert_forward_packed`, R rows of E experts, padded to p R):
a gather, zeros of p R, every expert's rows copied into them. Back: every expert's copied into zeros of R, a
product with the scores, zeros and a sum by indices. Backward of a copy into a slice clones the gradient of
the full tensor, once per expert, takes the slice of it and leaves zeros there. Backward of reading a slice
writes zeros of the full tensor, which are added up: per expert 2 R and 4 p R on the way back, 2 p R and 4 R
before.

compiled: torch.compile joins what is elementwise with the gather before or the sum after it. torchtitan's
rows move as they do without it: its `apply_compile` (0.2.2 models/llama4/infra/parallelize.py) compiles the
children of a block with experts one by one, of its MoE module the router, the shared experts and the products
of the routed ones, but neither `MoE.forward`, which moves the rows, nor the dispatch (torchtitan issue 1940).

# [Note: rows that are added up]
Rows that are added to rows picked by an index take a time for each element, not for each byte: in bf16 on one
H100 (traces/h100-80gb-hbm3/microbench.json, family rows_by_index, 16,384 and 65,536 rows of 2,048 to 7,168
elements) scatter_add_ of rows 3.75 ps, index_add_ (backward of index_select) 7.7 ps, index_put_ that
accumulates by sorted indices (backward of a gather) 2.45 ps, its sort not included, each within 6 %.
`SCATTER_ADD`, `INDEX_ADD` and `SORTED_INDEX_PUT` are these in units of the first (`seconds_per_added_element`
of a GPU's file). What torch.compile makes of them was not timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zsim.cost.kernels.shapes import WorkOptions


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


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Passes of a rearrangement, and the tensors of all rows that it keeps for backward."""

    forward: RowPasses
    backward: RowPasses
    kept_rows: float = 0.0


SCATTER_ADD, INDEX_ADD, SORTED_INDEX_PUT = 1.0, 2.05, 0.65  # see [Note: rows that are added up]
_NO_COST = MoveCost(RowPasses(0, 0, 0), RowPasses(0, 0, 0))
_SORT_COST = MoveCost(RowPasses(0, 2, 1), RowPasses(0, 2, 1))
_COSTS: Mapping[tuple[str, str], MoveCost] = {  # see [Note: rows that move]
    ("transformers", "permute"): MoveCost(RowPasses(0, 2, 20), RowPasses(1, 0, 8, SORTED_INDEX_PUT)),
    ("transformers", "unpermute"): MoveCost(
        RowPasses(5, 9, 5), RowPasses(3, 16, 14, SORTED_INDEX_PUT), kept_rows=1
    ),
    ("transformers-4", "loop"): MoveCost(RowPasses(1, 0, 8), RowPasses(0, 0, 0)),
    ("transformers-4", "select"): MoveCost(RowPasses(0, 2, 4), RowPasses(4, 0, 6, SORTED_INDEX_PUT)),
    ("transformers-4", "put"): MoveCost(RowPasses(0, 2, 3, INDEX_ADD), RowPasses(0, 8, 10), kept_rows=1),
    ("torchtitan", "permute"): MoveCost(
        RowPasses(0, 16, 24), RowPasses(1, 19, 20, SCATTER_ADD + SORTED_INDEX_PUT), kept_rows=2
    ),
    ("torchtitan", "unpermute"): MoveCost(RowPasses(1, 6, 6), RowPasses(0, 4, 4)),
    ("megatron", "permute"): MoveCost(RowPasses(0, 2, 12), RowPasses(1, 0, 6, INDEX_ADD)),
    ("megatron", "unpermute"): MoveCost(RowPasses(1, 0, 4, SCATTER_ADD), RowPasses(0, 2, 3)),
    ("megatron", "map"): MoveCost(RowPasses(0, 0, 31), RowPasses(0, 0, 22)),
    ("megatron-fused", "map"): MoveCost(RowPasses(0, 0, 1), RowPasses(0, 0, 1)),
    ("megatron-fused", "permute"): MoveCost(RowPasses(0, 2, 3), RowPasses(1, 1, 1)),
    ("megatron-fused", "unpermute"): MoveCost(RowPasses(1, 1, 1), RowPasses(0, 2, 1)),
    ("autoep", "permute"): MoveCost(RowPasses(0, 2, 15), RowPasses(1, 0, 8, SORTED_INDEX_PUT)),
    ("autoep", "sort"): MoveCost(RowPasses(0, 2, 20), RowPasses(0, 2, 1)),
    ("autoep", "unsort"): MoveCost(RowPasses(0, 2, 8), RowPasses(0, 2, 1)),
    ("autoep", "unpermute"): MoveCost(RowPasses(5, 8, 6), RowPasses(3, 16, 8), kept_rows=1),
    ("deepspeed-moe", "permute"): MoveCost(RowPasses(2, 2, 10), RowPasses(1, 3, 3)),
    ("deepspeed-moe", "sort"): MoveCost(RowPasses(0, 4, 2), RowPasses(0, 2, 1)),
    ("deepspeed-moe", "unsort"): MoveCost(RowPasses(0, 2, 1), RowPasses(0, 2, 1)),
    ("deepspeed-moe", "unpermute"): MoveCost(RowPasses(5, 9, 6), RowPasses(3, 18, 12), kept_rows=1),
    ("compiled", "permute"): MoveCost(RowPasses(0, 6, 16), RowPasses(3, 5, 10)),
    ("compiled", "unpermute"): MoveCost(RowPasses(1, 2, 2), RowPasses(0, 4, 4), kept_rows=1),
}  # fmt: skip


def move_cost(
    kind: str, library: str, options: WorkOptions, num_experts: int = 1, padding: float = 1.0
) -> MoveCost:
    """The passes of a rearrangement. Sorting the rows of several senders is a copy in each direction."""
    if kind == "add":
        return _NO_COST
    if library == "kempnerforge":
        return _padded_cost(kind, num_experts, padding)
    if kind in ("sort", "unsort"):
        return _COSTS.get((library, kind), _SORT_COST)
    return _COSTS["compiled" if is_compiled(library, options) else library, kind]


def is_compiled(library: str, options: WorkOptions) -> bool:
    """Whether torch.compile has the library's code that moves rows."""
    return library == "transformers" and options.compile


def _padded_cost(kind: str, count: int, padding: float) -> MoveCost:
    """[Note: rows that move], kempnerforge."""
    if kind == "permute":
        backward_rows = 6 + 4 * count + 2 * count * padding
        return MoveCost(
            RowPasses(0, 4 + padding, 20 + count),
            RowPasses(1, backward_rows, 8 + 8 * count, SORTED_INDEX_PUT),
        )
    backward_rows = 15 + 2 * count + 4 * count * padding
    return MoveCost(
        RowPasses(1, 5, 5 + count, SCATTER_ADD), RowPasses(0, backward_rows, 6 + 9 * count), kept_rows=1
    )
