"""The settings of FSDP2 on the page, and its typed table in notebooks."""

from __future__ import annotations

from typing import Literal

import pydantic

from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.torch.fields import FSDP_FIELDS
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import DEFAULT, Field, FrameworkFields

_RESHARD = Field(
    "strategy.reshard_after_forward",
    "Reshard",
    "after forward",
    is_half=True,
    choices={DEFAULT: None, "yes": True, "no": False, "to groups of 4": 4, "to groups of 8": 8},
)


FIELDS = FrameworkFields("FSDP2", position=2, fields=(*FSDP_FIELDS, _RESHARD), has_degrees=True)


class Fsdp2(TypedTable, Fsdp2Table):
    """Torch's `fully_shard`. `zsim.Fsdp2(replicate=8)` is hybrid sharding (HSDP) with 8 replicas."""

    kind: Literal["fsdp2"] = pydantic.Field(default="fsdp2", description="whose data parallelism")
