"""`simulate_flows` against SimGrid and against arithmetic."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.errors import InputError, StuckError
from zsim.fluid.pool import simulate_flows

# The whole set; three of its scenarios are typed in below.
SIMGRID = Path(__file__).parent / "data" / "simgrid.json.gz"


class Scenario(NamedTuple):
    """Links in bytes per second; flows as (route, bytes, start, latency, SimGrid's finish)."""

    links: dict[str, float]
    flows: list[tuple[str, float, float, float, float]]


# SimGrid 3.32, network model CM02 without correction factors; a flow waits its latency, then sends.
SCENARIOS = {
    "three flows over three links": Scenario(
        {"l0": 5e10, "l1": 5e9, "l2": 2.5e10},
        [
            ("l1 l0", 1910352615.0, 0.0, 0.0, 0.6391648938),
            ("l1 l0 l2", 253351353.0, 0.0, 0.0, 0.1520108118),
            ("l2 l1", 1032120501.0, 0.0, 0.0, 0.463518471),
        ],
    ),
    "a fat tree with latencies": Scenario(
        {
            "n0g1.up": 5e10, "n0g2.up": 5e10, "n0g2.dn": 5e10, "n1g0.nvup": 4.5e11, "n1g1.nvdn": 4.5e11,
            "n2g0.up": 5e10, "n3g1.dn": 5e10, "leaf0.s0.up": 4e11, "leaf0.s1.dn": 1e11,
            "leaf1.s0.dn": 1e11, "leaf1.s1.up": 2e11,
        },
        [
            ("n0g2.up leaf0.s0.up leaf1.s0.dn n3g1.dn", 24044376.0, 0.0, 7e-6, 0.00095377504),
            ("n0g1.up leaf0.s0.up leaf1.s0.dn n3g1.dn", 53222148.0, 0.0, 2.2e-5, 0.00155233048),
            ("n1g0.nvup n1g1.nvdn", 496145257.0, 0.0, 1.5e-6, 0.0011040450155555554),
            ("n2g0.up leaf1.s1.up leaf0.s1.dn n0g2.dn", 86231375.0, 0.0, 0.0020205, 0.0037451274999999997),
        ],
    ),
    "a dumbbell": Scenario(
        {
            "b0": 1e10, "b1": 5e9, "acc0": 5e9, "acc1": 2.5e9, "acc2": 2.5e9, "acc3": 5e9, "acc4": 5e9,
            "acc5": 1e11,
        },
        [
            ("acc0 b0 b1", 1e9, 0.0, 0.0, 0.8),
            ("acc1 b0 b1", 1e9, 0.0, 0.0, 0.8),
            ("acc2 b0", 1e9, 0.0, 0.0, 0.4),
            ("acc3 b0", 1e9, 0.0, 0.0, 0.26666666666666666),
            ("acc4 b0 b1", 1e9, 0.0, 0.0, 0.8),
            ("acc5 b1", 1e9, 0.0, 0.0, 0.8),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_simgrids_finish_times_typed_in(name: str) -> None:
    scenario = SCENARIOS[name]
    flows = [
        {"route": route.split(), "size_bytes": size, "start_seconds": start, "latency_seconds": latency}
        for route, size, start, latency, _finish in scenario.flows
    ]
    expected = [finish for *_flow, finish in scenario.flows]
    assert simulate_flows(scenario.links, flows) == pytest.approx(expected, rel=1e-6)


def test_all_of_simgrids_scenarios_to_one_in_a_million() -> None:
    """15 scenarios of up to 180 flows: stars, rings, dumbbells, fat trees, staggered and in bursts.
    Relative to finish - start, as the file says."""
    scenarios = json.loads(gzip.decompress(SIMGRID.read_bytes()))["scenarios"]
    assert len(scenarios) == 15
    for scenario in scenarios:
        links = {link["id"]: link["bandwidth_Bps"] for link in scenario["links"]}
        latency = {link["id"]: link["latency_s"] for link in scenario["links"]}
        flows = [
            {
                "route": flow["route"],
                "size_bytes": flow["size_B"],
                "start_seconds": flow["start_s"],
                "latency_seconds": sum(latency[link] for link in flow["route"]),
            }
            for flow in scenario["flows"]
        ]
        for finish, flow in zip(simulate_flows(links, flows), scenario["flows"], strict=True):
            expected = flow["simgrid_finish_s"] - flow["start_s"]
            assert finish - flow["start_s"] == pytest.approx(expected, rel=1e-6), scenario["id"]


def test_latency_delays_without_taking_bandwidth() -> None:
    """The second flow waits 3 s, in which the first has the link alone: 30 of 40 bytes. They share from
    there: 10 left at 5 per second end at 5; the other has 30 of 40 left and ends 3 s later."""
    flows = [
        {"route": ["l"], "size_bytes": 40},
        {"route": ["l"], "size_bytes": 40, "latency_seconds": 3},
    ]
    assert simulate_flows({"l": 10.0}, flows) == [5.0, 8.0]


def test_a_link_named_twice_is_used_twice() -> None:
    assert simulate_flows({"l": 10.0}, [{"route": ["l", "l"], "size_bytes": 40}]) == [8.0]


def test_no_flows_no_times_and_no_bytes_no_time() -> None:
    assert simulate_flows({"l": 10.0}, []) == []
    flow = {"route": ["l"], "size_bytes": 0, "start_seconds": 2, "latency_seconds": 1}
    assert simulate_flows({"l": 10.0}, [flow]) == [3.0]


def test_a_flow_over_a_dead_link_is_named() -> None:
    flows = [{"route": ["l"], "size_bytes": 1}, {"route": ["l", "dead"], "size_bytes": 1}]
    with pytest.raises(StuckError, match="flow 1 never finishes: link 'dead' has no bandwidth"):
        simulate_flows({"l": 10.0, "dead": 0.0}, flows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"route": ["m"]}, "flow 0: unknown link 'm'"),
        ({"sise_bytes": 1}, "flow 0: unknown key 'sise_bytes'; did you mean 'size_bytes'"),
        ({"size_bytes": -1}, "flow 0: size_bytes must be finite and 0 or more, found -1"),
        ({"size_bytes": math.inf}, "flow 0: size_bytes must be finite"),
        ({"start_seconds": math.nan}, "flow 0: start_seconds must be finite"),
        ({"latency_seconds": -0.5}, "flow 0: latency_seconds must be finite"),
    ],
)
def test_a_wrong_flow_is_refused_by_number_and_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate_flows({"l": 10.0}, [{"route": ["l"], "size_bytes": 1, **change}])


@pytest.mark.parametrize("key", ["route", "size_bytes"])
def test_a_missing_key_is_named(key: str) -> None:
    flow = {"route": ["l"], "size_bytes": 1}
    del flow[key]
    with pytest.raises(InputError, match=f"flow 0: '{key}' is missing"):
        simulate_flows({"l": 10.0}, [flow])


@pytest.mark.parametrize("bandwidth", [-1.0, math.nan])
def test_a_wrong_bandwidth_is_refused(bandwidth: float) -> None:
    with pytest.raises(InputError, match="link 'l': bandwidth must be 0 or more"):
        simulate_flows({"l": bandwidth}, [])


flow_lists = st.lists(
    st.fixed_dictionaries(
        {
            "route": st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True),
            "size_bytes": st.floats(1.0, 1e6),
            "start_seconds": st.floats(0.0, 10.0),
        }
    ),
    min_size=1,
    max_size=10,
)
link_maps = st.fixed_dictionaries({name: st.floats(10.0, 1e5) for name in "abcd"})


@settings(max_examples=60)
@given(link_maps, flow_lists)
def test_no_flow_is_faster_than_its_narrowest_link(
    links: dict[str, float], flows: list[dict[str, Any]]
) -> None:
    for finish, flow in zip(simulate_flows(links, flows), flows, strict=True):
        alone = flow["size_bytes"] / min(links[link] for link in flow["route"])
        assert finish - flow["start_seconds"] >= alone * (1 - 1e-6)


@settings(max_examples=60)
@given(link_maps, flow_lists)
def test_a_link_is_never_done_before_all_its_bytes_could_have_passed(
    links: dict[str, float], flows: list[dict[str, Any]]
) -> None:
    """Bytes are conserved: capacity covers, from the first start to the last finish, what a link carried."""
    finishes = simulate_flows(links, flows)
    for link, bandwidth in links.items():
        users = [
            (flow, finish) for flow, finish in zip(flows, finishes, strict=True) if link in flow["route"]
        ]
        if users:
            carried = sum(flow["size_bytes"] for flow, _finish in users)
            window = max(finish for _flow, finish in users) - min(flow["start_seconds"] for flow, _ in users)
            assert carried <= bandwidth * window * (1 + 1e-6)


@settings(max_examples=60)
@given(link_maps, flow_lists, st.floats(1.0, 100.0))
def test_twice_the_bandwidth_everywhere_is_half_the_time(
    links: dict[str, float], flows: list[dict[str, Any]], factor: float
) -> None:
    """Time scales where all flows start together."""
    flows = [{**flow, "start_seconds": 0.0} for flow in flows]
    slow = simulate_flows(links, flows)
    fast = simulate_flows({name: rate * factor for name, rate in links.items()}, flows)
    assert [finish * factor for finish in fast] == pytest.approx(slow, rel=1e-6)
