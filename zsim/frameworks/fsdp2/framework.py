"""Fsdp2, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.specs.strategy.framework import Framework


class Fsdp2(Framework[Fsdp2Table, Fsdp2Config]):
    table = Fsdp2Table
    title = "FSDP"
    order = 3
    unread_keys = frozenset({"training.lora.preparation", "training.autocast", "parallelism.capacity_factor"})


FRAMEWORK = Fsdp2()
