"""Megatron's layers of routed experts, which permute rows by torch's kernels or by Transformer Engine's.

Source: Megatron-Core 0.16.1 `core/transformer/moe/`.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.strategy.expert_library import ExpertLibrary

MEGATRON = ExpertLibrary(
    name="megatron",
    title="Megatron",
    owner="Megatron",
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
MEGATRON_FUSED = replace(MEGATRON, name="megatron-fused")  # --moe-permute-fusion
