"""DeepSpeed, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.specs.strategy.framework import Framework


class DeepSpeed(Framework[DeepSpeedTable, DeepSpeedConfig]):
    table = DeepSpeedTable
    title = "DeepSpeed"
    order = 4


FRAMEWORK = DeepSpeed()
