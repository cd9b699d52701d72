"""`[cost]` of an experiment: prices and power that turn a step into money and energy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from zsim.units import Watts

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class CostTable(BaseModel):
    """`[cost]`. `gpu_hour_price`: money per GPU and hour. `currency`: any word. `tokens`: to train on in all.
    `pue`: the data centre's power usage effectiveness, energy at its meter over energy at the servers (1: the
    servers alone). `node_power`: what a node draws besides its GPUs (0: the GPUs alone)."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    currency: str = "USD"
    tokens: Amount | None = None
    pue: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    node_power: Watts = 0.0
