"""A table of numbers with their origin: the base of the tables in a hardware file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Evidence = Literal["measured", "calibrated", "data sheet", "assumed"]
EVIDENCE_ORDER: tuple[Evidence, ...] = ("measured", "calibrated", "data sheet", "assumed")
Fraction = Annotated[float, Field(gt=0, le=1)]


UNSAID = "the file does not say"


class Table(BaseModel):
    """A table of numbers with their origin. `evidence` is "assumed" unless stated."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    source: str = Field(default=UNSAID, min_length=1, description="where the numbers come from")
    evidence: Evidence = Field(default="assumed", description="how far to trust them")
    measured_range: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="what the measurements behind the numbers cover, by what varies (bytes, flops, ranks); "
        "left out: not known",
    )
    spread: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="what a number without a unit may be, from lowest to highest; the source says whence; "
        "left out: the number alone",
    )
