"""DDP's part in a search."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.study.tune.axes import CHECKPOINTINGS, LOSSES, MICRO_BATCHES
from zsim.study.tune.axis import key_axis
from zsim.study.tune.framework import FrameworkTuning


class DdpTuning(FrameworkTuning[DdpTable]):
    """Only the batch, checkpointing and buckets are DDP's to decide."""

    label = "DDP"
    structure = (CHECKPOINTINGS, LOSSES, MICRO_BATCHES)
    details = (
        key_axis("buckets", "strategy.bucket_cap_mb", 25.0, 100.0, 400.0),
        key_axis("bucket view", "strategy.gradient_as_bucket_view", True, False),
    )

    def sizes(self, table: DdpTable, config: DdpConfig) -> dict[str, tuple[str, float, bool]]:
        return {"bucket_cap_mb": ("strategy.bucket_cap_mb", table.bucket_cap_mb, False)}


TUNING = DdpTuning()
