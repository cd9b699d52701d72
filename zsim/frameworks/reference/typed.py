"""`zsim.ReferenceZero`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.reference.settings import ReferenceTable
from zsim.notebook.settings import TypedTable


class ReferenceZeroSettings(TypedTable, ReferenceTable):
    """ZeRO as in its paper, without a framework's additions: `zsim.ReferenceZero(stage=2)`."""

    kind: Literal["reference"] = Field(default="reference", description="whose data parallelism")


ReferenceZero = ReferenceZeroSettings
