"""DeepSpeed, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.specs.strategy.framework import Framework


class DeepSpeed(Framework[DeepSpeedTable, DeepSpeedConfig]):
    table = DeepSpeedTable
    title = "DeepSpeed"
    order = 4
    unread_keys = frozenset(
        {
            "training.lora.preparation", "training.autocast", "training.stored_dtype",
            "parallelism.async_tensor", "parallelism.gather_per_product", "parallelism.virtual_stages",
            "parallelism.expert_padding",
        }
    )  # fmt: skip


FRAMEWORK = DeepSpeed()
