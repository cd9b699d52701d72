"""DeepSpeed in reports."""

from __future__ import annotations

import re
from typing import Any

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.effects import describe_settings
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.labels import strategy_label


class DeepSpeedReport(FrameworkReport[DeepSpeedConfig]):
    """ZeRO's stages and their additions."""

    title_alone = UNSHARDED
    strategy_names = (
        "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 + hpZ", "ZeRO-3 + qwZ", "ZeRO-3 + qgZ",
        "ZeRO-3 + hpZ + qwZ + qgZ", "MiCS",
    )  # fmt: skip
    offloading_names = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
    sharded_builder = "deepspeed.zero.Init"
    sharded_builder_key = "zero_init"
    allocator_warning = 'DeepSpeed warns of "allocator cache flushes"'

    def strategy_name(self, job: Job, config: DeepSpeedConfig) -> str:
        return "MiCS" if config.zero.is_mics else re.sub(r" \+ hpZ \d+", " + hpZ", strategy_label(job))

    def resolved_strategy(self, job: Job, config: DeepSpeedConfig) -> dict[str, Any]:
        """The settings of the JSON with their origins and effects."""
        settings = {
            row.key: f"{row.value} ({row.origin})" + (f": {row.effect}" if row.effect else "")
            for row in describe_settings(config, job.num_nodes)
        }
        return {"stage": config.stage, "version": config.version, "file": config.name, "settings": settings}

    def file_settings(self, job: Job, config: DeepSpeedConfig) -> dict[str, str] | None:
        return {setting.key: setting.value for setting in describe_settings(config, job.num_nodes)}

    def doubts_overlap(self, job: Job, config: DeepSpeedConfig) -> bool:
        return job.num_nodes > 1


REPORT = DeepSpeedReport()
