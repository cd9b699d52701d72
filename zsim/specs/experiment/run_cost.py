"""`[cost]` of an experiment: prices and power that turn a step into money and energy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from zsim.units import Tokens, Watts


class CostTable(BaseModel):
    """`[cost]`: prices and power."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="money per GPU and hour; left out: no bill"
    )
    currency: str = Field(default="USD", description="the money's name")
    tokens: Annotated[Tokens, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description='tokens to train on in all, as 1e12 or "15T"; left out: the bill is of one step',
    )
    pue: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="the data centre's power usage effectiveness: energy at its meter over energy "
        "at its servers",
    )
    node_power: Watts = Field(default=0.0, description="what a node draws besides its GPUs")
