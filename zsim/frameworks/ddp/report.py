"""DDP in reports."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport


class DdpReport(FrameworkReport[DdpConfig]):
    """Nothing is sharded."""

    title_alone = UNSHARDED
    strategy_names = ("DDP",)


REPORT = DdpReport()
