"""The settings of the reference engine on the page."""

from __future__ import annotations

from zsim.frameworks.torch.stage_field import ZERO_STAGE
from zsim.ui.framework import FrameworkFields


class ReferenceFields(FrameworkFields):
    """The stage."""

    fields = (ZERO_STAGE,)


FIELDS = ReferenceFields()
