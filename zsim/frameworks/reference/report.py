"""The reference engine in reports."""

from __future__ import annotations

from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport


class ReferenceReport(FrameworkReport[ReferenceConfig]):
    """The paper's stages."""

    title_alone = UNSHARDED
    strategy_names = tuple(f"ZeRO stage {stage}, the reference engine" for stage in range(4))


REPORT = ReferenceReport()
