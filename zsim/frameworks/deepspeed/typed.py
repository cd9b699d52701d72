"""`zsim.DeepSpeed`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.notebook.settings import TypedTable


class DeepSpeedSettings(TypedTable, DeepSpeedTable):
    """DeepSpeed's ZeRO, a stage with its defaults or a configuration.

    `zsim.DeepSpeed(stage=3)` or `zsim.DeepSpeed(config="ds_config.json")`, where `config` may also be the
    file's content as a dict.
    """

    kind: Literal["deepspeed"] = Field(default="deepspeed", description="whose data parallelism")


DeepSpeed = DeepSpeedSettings
