"""The settings of the reference engine on the page, and its typed table in notebooks."""

from __future__ import annotations

from typing import Literal

import pydantic

from zsim.frameworks.reference.settings import ReferenceTable
from zsim.frameworks.torch.fields import ZERO_STAGE
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import FrameworkFields

FIELDS = FrameworkFields(fields=(ZERO_STAGE,))


class ReferenceZero(TypedTable, ReferenceTable):
    """ZeRO as in its paper, without a framework's additions: `zsim.ReferenceZero(stage=2)`."""

    kind: Literal["reference"] = pydantic.Field(default="reference", description="whose data parallelism")
