"""Megatron, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.strategy.framework import Framework


class Megatron(Framework[MegatronTable, MegatronConfig]):
    table = MegatronTable
    title = "Megatron"
    order = 5
    unread_keys = frozenset(
        {
            "training.lora.preparation", "training.autocast", "training.stored_dtype",
            "parallelism.gather_per_product", "parallelism.first_stage_less_layers",
            "parallelism.last_stage_less_layers", "parallelism.expert_padding",
        }
    )  # fmt: skip


FRAMEWORK = Megatron()
