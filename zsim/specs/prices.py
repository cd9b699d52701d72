"""The prices of an hour on a GPU of a cluster: those that ship with zsim, and the user's own."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zsim.errors import InputError, did_you_mean
from zsim.files import PRESETS, preset_table
from zsim.reading import parse_toml, read_user_file
from zsim.specs.lazy_model import StrictTable
from zsim.specs.messages import validate_table
from zsim.specs.presets import topology_preset_names

PRICES = PRESETS / "prices.toml"
_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(StrictTable):
    """The price of a GPU of one cluster."""

    gpu_hour_price: _Price = Field(description="money per GPU and hour")
    instance_gpus: int = Field(
        default=1, ge=1, strict=True, description="the smallest number of GPUs that is rented"
    )
    most_gpus: int | None = Field(
        default=None,
        ge=1,
        strict=True,
        description="the largest number that is rented together; left out: as many as the fabric takes",
    )
    date: str = Field(default="", description="when the price was valid, as 2026-10-10")
    source: str = Field(default="yours", description="who says so")


class PriceList(StrictTable):
    """A file of prices, by preset or path of a cluster."""

    schema_: int = Field(default=1, alias="schema", ge=1, le=1, description="version of the file's form")
    currency: str = Field(default="USD", description="the money's name")
    cluster: dict[str, Price] = Field(default={}, description="the price of each cluster")


def shipped_prices() -> PriceList:
    """The prices that ship with zsim (`presets/prices.toml`)."""
    return PriceList.model_validate(preset_table("prices"))


def read_prices(path: Path | None, assignments: Iterable[str] = ()) -> PriceList:
    """The shipped prices, replaced by those of a file of the same form, then by assignments
    `CLUSTER=PRICE`. A price without a cluster is that of every cluster.

    Raises InputError for a file of another form or currency, and for a price that is no number of at least 0.
    """
    prices = shipped_prices()
    if path is not None:
        file_prices = _file_prices(path)
        if file_prices.currency != prices.currency:  # of which the shipped prices tell nothing
            prices = file_prices
        else:
            prices = prices.model_copy(update={"cluster": {**prices.cluster, **file_prices.cluster}})
    assigned: dict[str, Price] = {}
    for text in assignments:
        name, _, amount = text.rpartition("=")
        name = name.strip()
        price = _parse_price(text, amount)
        names = [name] if name else [*topology_preset_names(), *prices.cluster]
        if name and name not in names_of(prices) and not Path(name).suffix:
            raise InputError(
                f"--price {text}: found no cluster '{name}'{did_you_mean(name, names_of(prices))}; expected "
                "CLUSTER=PRICE with a preset or a topology file"
            )
        for cluster in names:
            shipped = prices.cluster.get(cluster)
            gpus = 1 if shipped is None else shipped.instance_gpus
            assigned[cluster] = Price(gpu_hour_price=price, instance_gpus=gpus)
    return prices.model_copy(update={"cluster": {**prices.cluster, **assigned}})


def names_of(prices: PriceList) -> list[str]:
    """The clusters that may have a price: all presets, and what the list names."""
    return list(dict.fromkeys([*topology_preset_names(), *prices.cluster]))


def _file_prices(path: Path) -> PriceList:
    try:
        content: Mapping[str, object] = parse_toml(read_user_file(path).decode(), path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {error}") from None
    return validate_table(content, str(path), PriceList)


def _parse_price(text: str, amount: str) -> float:
    try:
        price = float(amount)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise InputError(
            f"--price {text}: expected CLUSTER=PRICE, money per GPU and hour, e.g. --price dgx-h100=2.5"
        )
    return price
