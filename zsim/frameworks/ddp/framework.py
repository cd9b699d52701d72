"""Ddp, as resolving asks for it."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.specs.strategy.framework import MODEL_PARALLEL_KEYS, Framework


class Ddp(Framework[DdpTable, DdpConfig]):
    table = DdpTable
    title = "DDP"
    order = 1
    unread_keys = MODEL_PARALLEL_KEYS | {"training.autocast"}


FRAMEWORK = Ddp()
