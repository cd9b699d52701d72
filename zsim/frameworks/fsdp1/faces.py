"""The settings of FSDP1 on the page, and its typed table in notebooks."""

from __future__ import annotations

from typing import Literal

import pydantic

from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.torch.fields import FSDP_FIELDS
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import Field, FrameworkFields, identity_choices

_SHARDING = Field(
    "strategy.sharding_strategy",
    "Sharding",
    choices=identity_choices(
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ),
)


FIELDS = FrameworkFields("FSDP1", position=3, fields=(_SHARDING, *FSDP_FIELDS))


class Fsdp1(TypedTable, Fsdp1Table):
    """Torch's FullyShardedDataParallel: `zsim.Fsdp1(sharding_strategy="SHARD_GRAD_OP")`."""

    kind: Literal["fsdp1"] = pydantic.Field(default="fsdp1", description="whose data parallelism")
