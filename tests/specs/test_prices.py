"""Prices of clusters: the shipped ones, files of the user, and single prices on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.specs.presets import topology_preset_names
from zsim.specs.prices import read_prices, shipped_prices


def test_every_shipped_price_is_of_a_preset_and_says_when_and_where_it_was_read() -> None:
    prices = shipped_prices()
    assert set(prices.cluster) <= set(topology_preset_names())
    for price in prices.cluster.values():
        assert price.gpu_hour_price > 0
        assert price.date.startswith("2026-")
        assert "@" in price.source


def test_a_file_replaces_the_prices_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[cluster.dgx-h100]\ngpu_hour_price = 2.0\n")
    prices = read_prices(path)
    assert prices.cluster["dgx-h100"].gpu_hour_price == 2.0
    assert prices.cluster["hgx-h200"] == shipped_prices().cluster["hgx-h200"]


def test_a_file_in_another_currency_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\n[cluster.dgx-h100]\ngpu_hour_price = 2.0\n')
    prices = read_prices(path)
    assert prices.currency == "EUR"
    assert list(prices.cluster) == ["dgx-h100"]


def test_an_assignment_wins_and_keeps_the_size_of_an_instance() -> None:
    prices = read_prices(None, ["aws-p5=4", "dgx-superpod-h100=2.2"])
    assert prices.cluster["aws-p5"].gpu_hour_price == 4.0
    assert prices.cluster["aws-p5"].instance_gpus == 8
    assert prices.cluster["dgx-superpod-h100"].source == "yours"


def test_a_price_without_a_cluster_is_that_of_all() -> None:
    prices = read_prices(None, ["=1"])
    assert {price.gpu_hour_price for price in prices.cluster.values()} == {1.0}
    assert set(prices.cluster) == set(topology_preset_names())


@pytest.mark.parametrize("text", ["dgx-h100", "dgx-h100=cheap", "dgx-h100=-1", "dgx-h100=nan"])
def test_a_price_is_a_number(text: str) -> None:
    with pytest.raises(InputError, match="expected CLUSTER=PRICE"):
        read_prices(None, [text])


def test_an_unknown_cluster_has_no_price() -> None:
    with pytest.raises(InputError, match="did you mean 'dgx-h100'"):
        read_prices(None, ["dgx-h10=2"])


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[cluster.dgx-h100]\nprice = 2.0\n")
    with pytest.raises(InputError, match="price"):
        read_prices(path)
    with pytest.raises(InputError, match="no such file"):
        read_prices(tmp_path / "none.toml")
