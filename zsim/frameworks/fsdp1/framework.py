"""Fsdp1, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.specs.strategy.framework import MODEL_PARALLEL_KEYS, PIPELINE_KEYS, Framework


class Fsdp1(Framework[Fsdp1Table, Fsdp1Config]):
    table = Fsdp1Table
    title = "FSDP"
    order = 2
    unread_keys = MODEL_PARALLEL_KEYS | PIPELINE_KEYS | {"training.lora.preparation"}


FRAMEWORK = Fsdp1()
