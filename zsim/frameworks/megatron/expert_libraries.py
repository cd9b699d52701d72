"""Megatron's layers of routed experts, which permute rows by torch's kernels or by Transformer Engine's.

Source: Megatron-Core 0.16.1 `core/transformer/moe/`. Passes are counted as [Note: rows that move] of
`zsim.cost.kernels.moved_rows` says.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.moved_rows import (
    INDEX_ADD,
    SCATTER_ADD,
    ExpertKernelSet,
    MoveCost,
    RowPasses,
    ScoreCost,
)
from zsim.specs.strategy.expert_library import ExpertLibrary

# moe_utils.py `permute`, `unpermute`, `sort_chunks_by_idxs`: a gather by a transposed mask, and zeros and a
# scatter that adds. The scores are a factor of the activation. The map of tokens to experts is two tensors
# filled with zeros and scattered into (`topk_routing_with_score_function`), beside torch's kernels of scores.
_KERNELS = ExpertKernelSet(
    "megatron",
    permute=MoveCost(RowPasses(0, 2, 12), RowPasses(1, 0, 6, INDEX_ADD)),
    unpermute=MoveCost(RowPasses(1, 0, 4, SCATTER_ADD), RowPasses(0, 2, 3)),
    scores=ScoreCost(12 + 10, 5 + 6, 18 + 4, 6 + 1),
)
# Transformer Engine's permutation kernels (pytorch/permutation.py of 2.17): each reads its input once and
# writes its output once.
_FUSED_KERNELS = replace(
    _KERNELS,
    name="megatron-fused",
    permute=MoveCost(RowPasses(0, 2, 3), RowPasses(1, 1, 1)),
    unpermute=MoveCost(RowPasses(1, 1, 1), RowPasses(0, 2, 1)),
)

MEGATRON = ExpertLibrary(
    name="megatron",
    title="Megatron",
    owner="Megatron",
    kernels=_KERNELS,
    dispatch="rows and scores",
    splits_like_products=True,
    needs_sequence_parallelism=True,
    drops_tokens=True,
    waits_for_counts=True,
    runs_shared_first=True,
    casts_gate_output=True,
    clamps_quick_gelu=True,
    scales_biases=True,
)
# --moe-permute-fusion
MEGATRON_FUSED = replace(MEGATRON, name="megatron-fused", kernels=_FUSED_KERNELS)
