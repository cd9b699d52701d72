"""Laws of routes and algorithms on clusters drawn at random: what arrives was sent, paths are the routes,
groups are counted alike together and apart, and no domain sends less than the collective needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zsim.arrays import Floats
from zsim.errors import InputError
from zsim.fabric.algorithms.link_usage import link_usage
from zsim.fabric.algorithms.rings import domains_of, partition_by_pattern
from zsim.plan.ops import Group
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.experiment.faults import FaultsTable, apply_faults
from zsim.specs.topology.graph import link_ends
from zsim.specs.topology.topology import Topology

SWITCHED = ("dgx-h100", "dgx-1", "gb200-nvl72")
BASES = (*SWITCHED, "a100-pcie-x8", "mi300x-x8", "jean-zay-v100")
BY_SWITCH = ("nvls", "all_to_all_by_rail")
SOME = settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
ON_DOMAINS = {"tree": 2, "hierarchical": 2, "all_to_all_by_rail": 2}


@st.composite
def networks(draw: st.DrawFn) -> Network:
    kind = draw(st.sampled_from(["single-switch", "fat-tree", "rail-optimized", "dragonfly", "torus"]))
    found: dict[str, Any] = {"kind": kind, "source": "drawn", "evidence": "assumed"}
    if kind in ("fat-tree", "rail-optimized"):
        found |= {"nodes_per_leaf": draw(st.integers(1, 3)), "planes": draw(st.sampled_from([1, 2]))}
        if draw(st.booleans()):
            found |= {"levels": 3, "leaves_per_pod": draw(st.integers(1, 2))}
        if draw(st.booleans()):
            found |= {"routing": "hash", "flows_per_pair": draw(st.sampled_from([1, 4]))}
    elif kind == "dragonfly":
        found |= {"nodes_per_router": draw(st.integers(1, 2)), "routers_per_group": draw(st.integers(1, 3))}
        found["global_links_per_router"] = draw(st.sampled_from([2, 4]))
    elif kind == "torus":
        found["shape"] = draw(st.sampled_from([(2, 2, 2), (3, 3), (2, 4), (1, 8)]))
    return Network.model_validate(found)


@st.composite
def topologies(draw: st.DrawFn, bases: tuple[str, ...] = BASES) -> Topology:
    cluster = load_cluster(draw(st.sampled_from(bases)))
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8]))
    cards = draw(st.sampled_from([1, 2, gpus, 2 * gpus]))
    attached = draw(st.sampled_from(["host", "switch"]))
    nic = {"per_node": cards, "gpudirect": draw(st.booleans()), "attached": attached}
    pcie = {"gpus_per_switch": draw(st.sampled_from([1, 2, 4])), "peer_to_peer": draw(st.booleans())}
    link = {"nodes_per_domain": 2 if cluster.name == "gb200-nvl72" else 1}
    changed = cluster.model_copy(
        update={
            "gpus_per_node": gpus,
            "nic": cluster.nic.model_copy(update=nic),
            "pcie": cluster.pcie.model_copy(update=pcie),
            "node_link": cluster.node_link.model_copy(update=link),
            "network": draw(networks()),
        }
    )
    used = gpus if cluster.node_link.kind == "mesh" else draw(st.integers(max(gpus - 1, 1), gpus))
    try:
        topology = Topology(changed, draw(st.integers(2, 6)), used)
    except InputError:
        assume(False)
    if cards > 1 and draw(st.booleans()):
        dead = f"node{draw(st.integers(0, topology.num_nodes - 1))}.nic{draw(st.integers(0, cards - 1))}"
        topology = apply_faults(topology, FaultsTable(dead_nics=(dead,)))
    return topology


def balances(topology: Topology, usage: Floats, *, gpus_together: bool = False) -> Counter[str]:
    """Bytes into every device less those out of it; what a node has besides its GPUs counts as one, with
    `gpus_together` these too."""
    found: Counter[str] = Counter()
    for name, links in topology.classes.items():
        for place in np.flatnonzero(usage[links.first : links.first + links.count]).tolist():
            ends = link_ends(topology, name, place)
            assert ends is not None, f"{name} {place} leads nowhere"
            for device, sign in zip(ends, (-1, 1), strict=True):
                found[_whole(topology, device, gpus_together)] += sign * usage[links.first + place]
    return found


def _whole(topology: Topology, device: str, gpus_together: bool) -> str:
    for part, per_node in (
        ("gpu", topology.gpus_per_node if gpus_together else 0),
        ("nic", topology.cluster.nic.per_node),
        ("pcie", topology.switches_per_node),
        ("host", 1),
    ):
        if per_node and device.startswith(part):
            return f"inside node {int(device.removeprefix(part)) // per_node}"
    return device


@SOME
@given(topologies(), st.data())
def test_a_route_takes_all_that_its_sender_sends_to_its_receiver(
    topology: Topology, data: st.DataObject
) -> None:
    source, target = data.draw(
        st.lists(st.integers(0, topology.num_slots - 1), min_size=2, max_size=2, unique=True)
    )
    usage, by_path = np.zeros(topology.num_links), np.zeros(topology.num_links)
    topology.add_routes(usage, np.array([source]), np.array([target]), 1.0)
    for share, links in topology.paths(source, target):
        by_path[links] += share
    np.testing.assert_allclose(usage, by_path, atol=1e-12)
    left = {device: round(amount, 9) for device, amount in balances(topology, usage).items()}
    assert {device: amount for device, amount in left.items() if amount} == {
        f"gpu{source}": -1.0,
        f"gpu{target}": 1.0,
    }


@pytest.mark.parametrize(
    "shape", ["ring", "tree", "nvls", "hierarchical", "all_to_all", "all_to_all_by_rail", "pair"]
)
@SOME
@given(st.data())
def test_groups_count_alike_together_and_apart_and_send_what_they_must(
    shape: str, data: st.DataObject
) -> None:
    """Bytes that enter and leave a domain, per bus byte: a ring's once; an all-reduce's at least half of what
    a rank holds; an all-to-all's what its ranks have for others. Rings of a mesh are spread over its links,
    though not all its GPUs may be at a channel's ends."""
    topology = data.draw(topologies(SWITCHED if shape in BY_SWITCH else BASES))
    world = topology.num_slots
    size = data.draw(st.sampled_from([n for n in range(2, world + 1) if world % n == 0]))
    stride = data.draw(st.sampled_from([n for n in range(1, world // size + 1) if world // size % n == 0]))
    rows = Group.regular("g", world, size, stride).members
    patterns = partition_by_pattern(topology, rows)
    domains, most = np.array([domains_of(topology, alike[0]) for alike in patterns]).max(axis=0)
    assume(domains >= ON_DOMAINS.get(shape, 1))
    assume(shape not in BY_SWITCH or domains * most == size > domains)
    each = [link_usage(shape, topology, row[None]) for row in rows]
    total = np.sum([link_usage(shape, topology, alike) for alike in patterns], axis=0)
    np.testing.assert_allclose(total, np.sum(each, axis=0), atol=1e-9)
    is_spread = shape == "ring" and topology.cluster.node_link.kind == "mesh"
    for device, amount in balances(topology, total, gpus_together=is_spread).items():
        assert shape == "pair" or amount == pytest.approx(0, abs=1e-9), device
    for row, usage in zip(rows, each, strict=True):
        of_member = topology.domain_of(row)
        for domain, local in zip(*np.unique(of_member, return_counts=True), strict=True):
            if local == size:
                continue
            need = {
                "ring": 1.0,
                "tree": size / (2 * (size - 1)),
                "nvls": size / (2 * (size - 1)),
                "all_to_all": local * (size - local) / (size - 1),
                "all_to_all_by_rail": local * (size - local) / (size - 1),
            }.get(shape, 0.0)
            for name in ("nic_out", "nic_in"):
                links = topology.classes[name]
                ports = usage[links.first : links.first + links.count].reshape(topology.num_nodes, -1)
                nodes = topology.cluster.node_link.nodes_per_domain
                assert ports[domain * nodes : (domain + 1) * nodes].sum() >= need - 1e-9
