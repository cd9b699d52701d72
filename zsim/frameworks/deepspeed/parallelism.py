"""Tensor, pipeline and context parallelism beside DeepSpeed: Megatron-DeepSpeed's layers, or AutoTP's.

Pipelines are PipelineEngine's and context parallelism is Ulysses, under both (`deepspeed/sequence/layer.py`
of 0.19.8).
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.frameworks.deepspeed.settings.autotp import first_rank_features
from zsim.specs.strategy.style import ModelParallelStyle

SPLIT_LAYERS = ModelParallelStyle(
    name="deepspeed",
    title="DeepSpeed",
    schedule_title="DeepSpeed",
    fused_projections="with tensor ranks",
    tensor_overlap="always",
    schedules=("1f1b",),
    balances_stages=True,
    registers_tied_head_first=True,
    context_library="ulysses",
    context_methods=("all-to-all",),
    repeats_kv_heads_in_context=True,
    dispatchers=("all-to-all", "deepep"),
)


@dataclass(frozen=True, slots=True)
class AutoTpStyle(ModelParallelStyle):
    """AutoTP, whose first rank has the most of everything."""

    def features_of_rank(self, total: int, ranks: int, name: str, num_kv_heads: int, grain: int) -> int:
        return first_rank_features(total, ranks, name, num_kv_heads, grain)


AUTOTP = AutoTpStyle(
    name="autotp",
    title="DeepSpeed's AutoTP",
    schedule_title="DeepSpeed",
    cuts_unevenly=True,
    has_sequence_parallelism=False,
    tensor_overlap="async_tensor",
    reduces_per_product=True,
    cuts_vocabulary=False,
    schedules=("1f1b",),
    context_library="ulysses",
    context_methods=("all-to-all",),
    repeats_kv_heads_in_context=True,
)
