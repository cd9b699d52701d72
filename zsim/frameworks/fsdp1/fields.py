"""The settings of FSDP1 on the page."""

from __future__ import annotations

from zsim.frameworks.torch.fields import FSDP_FIELDS
from zsim.ui.field import Field, identity_choices
from zsim.ui.framework import FrameworkFields

_SHARDING = Field(
    "strategy.sharding_strategy",
    "Sharding",
    choices=identity_choices(
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ),
)


class Fsdp1Fields(FrameworkFields):
    """The sharding strategy besides what both FSDPs have."""

    label = "FSDP1"
    position = 3
    fields = (_SHARDING, *FSDP_FIELDS)


FIELDS = Fsdp1Fields()
