"""Weighted max-min fair sharing: worked examples, and the laws that define it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.errors import InputError
from zsim.fluid.pool import max_min_fair_rates

Usage = dict[str, dict[str, float]]


def test_equal_activities_share_a_link_equally() -> None:
    """100 B/s over four."""
    usage: Usage = {name: {"link": 1.0} for name in "abcd"}
    assert max_min_fair_rates(usage, {"link": 100.0}) == dict.fromkeys("abcd", 25.0)


def test_what_one_cannot_use_the_others_get() -> None:
    """Bertsekas & Gallager, figure 6.17's kind: a is held to 10 by its own link; b takes the 90 left."""
    usage: Usage = {"a": {"shared": 1.0, "narrow": 1.0}, "b": {"shared": 1.0}}
    assert max_min_fair_rates(usage, {"shared": 100.0, "narrow": 10.0}) == {"a": 10.0, "b": 90.0}


def test_the_parking_lot() -> None:
    """One flow over three links of 1, 2 and 3, one more on each: the long one gets half of the first, 0.5,
    and leaves 0.5, 1.5 and 2.5."""
    usage: Usage = {
        "long": {"x": 1.0, "y": 1.0, "z": 1.0},
        "x": {"x": 1.0},
        "y": {"y": 1.0},
        "z": {"z": 1.0},
    }
    rates = max_min_fair_rates(usage, {"x": 1.0, "y": 2.0, "z": 3.0})
    assert rates == pytest.approx({"long": 0.5, "x": 0.5, "y": 1.5, "z": 2.5})


def test_a_heavier_activity_gets_the_same_rate_and_takes_more() -> None:
    """Weights 1 and 3 on 100: both run at 25, one puts 75 on the link."""
    usage: Usage = {"light": {"link": 1.0}, "heavy": {"link": 3.0}}
    assert max_min_fair_rates(usage, {"link": 100.0}) == {"light": 25.0, "heavy": 25.0}


def test_an_activity_that_uses_nothing_is_infinitely_fast() -> None:
    assert max_min_fair_rates({"free": {}, "zero": {"link": 0.0}}, {"link": 1.0}) == {
        "free": math.inf,
        "zero": math.inf,
    }


def test_a_dead_link_stops_its_activities_only() -> None:
    usage: Usage = {"stopped": {"dead": 1.0, "link": 1.0}, "runs": {"link": 1.0}}
    assert max_min_fair_rates(usage, {"dead": 0.0, "link": 8.0}) == {"stopped": 0.0, "runs": 8.0}


def test_an_unlimited_resource_limits_nobody() -> None:
    assert max_min_fair_rates({"a": {"link": 1.0}}, {"link": math.inf}) == {"a": math.inf}


def test_no_activities_no_rates() -> None:
    assert max_min_fair_rates({}, {"link": 1.0}) == {}


@pytest.mark.parametrize(
    ("usage", "capacity", "words"),
    [
        ({"a": {"lnk": 1.0}}, {"link": 1.0}, "activity 'a' uses unknown resource 'lnk'"),
        ({"a": {"link": -1.0}}, {"link": 1.0}, "weight of 'a' on 'link'"),
        ({"a": {"link": math.nan}}, {"link": 1.0}, "weight of 'a' on 'link'"),
        ({"a": {"link": math.inf}}, {"link": 1.0}, "weight of 'a' on 'link'"),
        ({"a": {"link": 1.0}}, {"link": -1.0}, "capacity of 'link'"),
        ({"a": {"link": 1.0}}, {"link": math.nan}, "capacity of 'link'"),
    ],
)
def test_wrong_numbers_are_refused_by_name(usage: Usage, capacity: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        max_min_fair_rates(usage, capacity)


# -- laws ------------------------------------------------------------------------------------------------

names = st.sampled_from("pqrstu")
weights = st.floats(0.01, 100.0)
capacities = st.fixed_dictionaries({name: st.floats(0.1, 1e6) for name in "pqrstu"})
usages = st.lists(st.dictionaries(names, weights, min_size=1), min_size=1, max_size=8).map(
    lambda rows: {f"a{number}": row for number, row in enumerate(rows)}
)
TIGHT = 1e-9


def load(usage: Usage, rates: dict[str, float], resource: str) -> float:
    return sum(row.get(resource, 0.0) * rates[name] for name, row in usage.items())


@given(usages, capacities)
def test_no_resource_is_oversubscribed(usage: Usage, capacity: dict[str, float]) -> None:
    rates = max_min_fair_rates(usage, capacity)
    for resource, limit in capacity.items():
        assert load(usage, rates, resource) <= limit * (1 + TIGHT)


@given(usages, capacities)
def test_every_activity_has_a_bottleneck(usage: Usage, capacity: dict[str, float]) -> None:
    """A full resource of its own on which nobody is faster: that is what max-min fair means."""
    rates = max_min_fair_rates(usage, capacity)

    def holds_back(resource: str, name: str) -> bool:
        is_full = load(usage, rates, resource) >= capacity[resource] * (1 - TIGHT)
        others = [rates[other] for other, theirs in usage.items() if resource in theirs]
        return is_full and max(others) <= rates[name] * (1 + TIGHT)

    for name, row in usage.items():
        assert any(holds_back(resource, name) for resource in row)


@given(usages, capacities, st.floats(0.001, 1000.0))
def test_rates_scale_with_all_capacities(usage: Usage, capacity: dict[str, float], factor: float) -> None:
    rates = max_min_fair_rates(usage, capacity)
    scaled = max_min_fair_rates(usage, {name: limit * factor for name, limit in capacity.items()})
    assert scaled == pytest.approx({name: rate * factor for name, rate in rates.items()}, rel=1e-9)


@given(usages, capacities, st.randoms(use_true_random=False))
def test_the_order_of_activities_does_not_matter(
    usage: Usage, capacity: dict[str, float], random: object
) -> None:
    shuffled = list(usage.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert max_min_fair_rates(dict(shuffled), capacity) == pytest.approx(max_min_fair_rates(usage, capacity))


@given(usages, capacities, names, st.floats(1.0, 10.0))
def test_the_slowest_never_gets_slower_from_more_capacity(
    usage: Usage, capacity: dict[str, float], widened: str, factor: float
) -> None:
    """Single activities may (they share with others that now want more), the minimum may not."""
    before = min(max_min_fair_rates(usage, capacity).values())
    wider = {**capacity, widened: capacity[widened] * factor}
    assert min(max_min_fair_rates(usage, wider).values()) >= before * (1 - TIGHT)
