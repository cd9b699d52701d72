"""A table of numbers with their origin: the base of the tables in a hardware file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zsim.specs.lazy_model import FiniteTable

Evidence = Literal["measured", "calibrated", "data sheet", "assumed"]
EVIDENCE_ORDER: tuple[Evidence, ...] = ("measured", "calibrated", "data sheet", "assumed")
Fraction = Annotated[float, Field(gt=0, le=1)]


UNSAID = "the file does not say"


class Table(FiniteTable):
    """A table of numbers with their origin. `evidence` is "assumed" unless stated."""

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
