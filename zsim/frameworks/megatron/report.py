"""Megatron in reports."""

from __future__ import annotations

from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport


class MegatronReport(FrameworkReport[MegatronConfig]):
    """The forms of its optimizer."""

    title_alone = UNSHARDED
    strategy_names = ("Megatron DDP", "Megatron, distributed optimizer")


REPORT = MegatronReport()
