"""The settings of FSDP2 on the page."""

from __future__ import annotations

from zsim.frameworks.torch.fields import FSDP_FIELDS
from zsim.ui.field import DEFAULT, Field
from zsim.ui.framework import FrameworkFields

_RESHARD = Field(
    "strategy.reshard_after_forward",
    "Reshard",
    "after forward",
    is_half=True,
    choices={DEFAULT: None, "yes": True, "no": False, "to groups of 4": 4, "to groups of 8": 8},
)


class Fsdp2Fields(FrameworkFields):
    """Resharding besides what both FSDPs have."""

    label = "FSDP2"
    position = 2
    fields = (*FSDP_FIELDS, _RESHARD)
    has_degrees = True


FIELDS = Fsdp2Fields()
