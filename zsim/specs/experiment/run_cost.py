"""`[cost]` of an experiment: prices and power that turn a step into money and energy."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from zsim.specs.lazy_model import StrictTable
from zsim.units import Tokens, Watts


def _whole(value: float) -> float:
    """Raises ValueError for a part of a sequence."""
    if value != int(value):
        raise ValueError(f"found {value:g}, expected a whole number")
    return value


class CostTable(StrictTable):
    """`[cost]`: prices and power."""

    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="money per GPU and hour; left out: no bill"
    )
    currency: str = Field(default="USD", description="the money's name")
    tokens: Annotated[Tokens, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="tokens to train on; left out: the bill is of one step",
    )
    samples: Annotated[Tokens, Field(ge=1, allow_inf_nan=False), AfterValidator(_whole)] | None = Field(
        default=None,
        description="sequences of the data set; left out: `tokens`",
    )
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="how often `tokens` or `samples` are trained on"
    )
    pue: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="the data centre's power usage effectiveness: energy at its meter over energy "
        "at its servers",
    )
    node_power: Watts = Field(default=0.0, description="what a node draws besides its GPUs")

    @model_validator(mode="after")
    def _check_length(self) -> CostTable:
        """Raises ValueError for two lengths of one run, and for epochs without a length."""
        if self.tokens is not None and self.samples is not None:
            raise ValueError("found both tokens and samples; expected one of them")
        if "epochs" in self.model_fields_set and self.tokens is None and self.samples is None:
            raise ValueError("found epochs of no data set; expected tokens or samples beside them")
        return self

    @property
    def given_tokens(self) -> float | None:
        """Tokens of all epochs. None where `tokens` are not given."""
        return None if self.tokens is None else self.tokens * self.epochs

    def run_tokens(self, tokens_per_sample: float) -> float | None:
        """Tokens of all epochs, of samples of so many tokens. None where neither tokens nor samples are
        given.
        """
        return self.given_tokens if self.samples is None else self.samples * self.epochs * tokens_per_sample
