"""Faults by name: which links, cards and ranks a name means, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.link_names import find_links
from zsim.specs.experiment.faults import FaultsTable, apply_faults, kernel_slowdowns
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.topology.topology import Topology


def topology(cluster: str = "dgx-superpod-h100", nodes: int = 64) -> Topology:
    return Topology(load_cluster(cluster), nodes, 8)


def named(name: str, where: Topology | None = None) -> list[str]:
    """The links of a name, as class and place: nic_out 26."""
    there = where or topology()
    links = find_links(there, name, "test").tolist()
    return [f"{there.class_of(link).name} {link - there.class_of(link).first}" for link in links]


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("node3.nic2", ["nic_out 26", "nic_in 26"]),
        ("node3.gpu5.nvlink", ["nvlink_out 29", "nvlink_in 29"]),
        ("node3.gpu5.pcie", ["pcie_up 29", "pcie_down 29"]),
        ("node3.pcie1", ["uplink_up 13", "uplink_down 13"]),
        ("leaf1-spine3", ["leaf_up 35", "leaf_down 35"]),
        ("spine3-leaf1", ["leaf_up 35", "leaf_down 35"]),
    ],
)
def test_a_name_means_a_link_both_ways(name: str, links: list[str]) -> None:
    """Node 3 has slots and cards 24 to 31, and PCIe switches 12 to 15; a leaf has 32 uplinks."""
    assert named(name) == links


def test_a_name_may_mean_many_links() -> None:
    """A node's 8 cards both ways; a leaf's 32 cables both ways; 16 leaves' 512 cables both ways."""
    assert [len(named(name)) for name in ("node3", "leaf2", "leaf-spine", "leaf_up")] == [16, 64, 1024, 512]


def test_a_gpu_of_a_mesh_has_links_to_and_from_every_other() -> None:
    """MI300X: 7 peers, both ways (and the unused link to itself)."""
    mesh = topology("mi300x-x8", 2)
    links = find_links(mesh, "node1.gpu2.nvlink", "test") - mesh.classes["nvlink_direct"].first
    assert {divmod(link, 8) for link in links.tolist()} == (
        {(10, other) for other in range(8)} | {(8 + other, 2) for other in range(8)}
    )


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"links": {"nvlnk": {"bandwidth_fraction": 0.5}}}, "faults.links.nvlnk: .* did you mean 'nvlink'"),
        ({"links": {"leaf0-spne3": {"bandwidth_fraction": 0.5}}}, "did you mean 'leaf0-spine3'"),
        ({"links": {"zzz": {"bandwidth_fraction": 0.5}}}, "expected a name like 'node3.nic2'"),
        ({"links": {"node64.nic0": {"bandwidth_fraction": 0.5}}}, "the fabric has node0 to node63"),
        ({"links": {"node1.nic8": {"bandwidth_fraction": 0.5}}}, "a node has nic0 to nic7, not nic8"),
        ({"links": {"node1.gpu2": {"bandwidth_fraction": 0.5}}}, "no 'gpu2'; expected one of nic0"),
        ({"links": {"node1.nic2": {}}}, "changes nothing"),
        ({"links": {"node1.nic2": {"bandwidth_fraction": 0}}}, "expected greater than 0"),
        ({"links": {"node1.nic2": {"bandwith_fraction": 0.5}}}, "did you mean 'bandwidth_fraction'"),
        ({"links": {"node1.nic2": {"added_latency": 5}}}, "has no unit"),
        ({"dead_nics": ["nic1"]}, "expected a card's name like 'node3.nic2'"),
        ({"dead_nics": [f"node1.nic{n}" for n in range(8)]}, "all 8 network cards of node1 are dead"),
        ({"slow_gpus": {"512": 1.2}}, "faults.slow_gpus.512: the job has ranks 0 to 511"),
        ({"slow_gpus": {"gpu2": 1.2}}, "expected a rank's number, or a node"),
        ({"slow_gpus": {"node99": 1.2}}, "the fabric has node0 to node63"),
        ({"slow_gpus": {"node3.gpu8": 1.2}}, "no rank of the job is on node3.gpu8"),
        ({"slow_gpus": {"3": 0.5}}, "expected greater than or equal to 1"),
        ({"slow_gpu": {"3": 1.5}}, "unknown key 'slow_gpu'; did you mean 'slow_gpus'"),
    ],
)
def test_names_that_mean_nothing_are_refused(faults: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(Experiment(model="gpt2", cluster="dgx-superpod-h100", nodes=64, faults=faults))


def test_the_only_card_of_a_node_may_be_dead_where_the_node_is_alone() -> None:
    table = FaultsTable(dead_nics=("node0.nic0",))
    cluster = load_cluster("aws-g4dn")
    with pytest.raises(InputError, match="dead_nics: node0's only network card is dead, and nothing"):
        apply_faults(Topology(cluster, 2, 8), table)
    apply_faults(Topology(cluster, 1, 8), table)


def test_links_lose_bandwidth_and_gain_latency() -> None:
    """Two entries that name one link add up: half of a quarter."""
    table = FaultsTable.model_validate(
        {"links": {
            "network": {"bandwidth_fraction": 0.5},
            "node0.nic1": {"bandwidth_fraction": 0.25, "added_latency": "5 us"},
        }}
    )  # fmt: skip
    whole = topology()
    bad = apply_faults(whole, table)
    assert bad.condition is not None
    card = whole.classes["nic_out"].first
    np.testing.assert_allclose(bad.capacities()[card : card + 3], np.array([0.5, 0.125, 0.5]) * 47.5e9)
    assert bad.condition.delays[card + 1] == pytest.approx(5e-6)
    assert apply_faults(whole, FaultsTable()) is whole


def test_the_next_card_that_lives_carries_a_dead_ones_traffic() -> None:
    """Cards 2 and 3 of node 1 are numbers 10 and 11: both use 12; card 7 of node 0 uses card 0."""
    table = FaultsTable(dead_nics=("node1.nic2", "node1.nic3", "node0.nic7"))
    bad = apply_faults(topology(), table)
    assert bad.nic_of(np.array([7, 8, 9, 10, 11, 12])).tolist() == [0, 8, 9, 12, 12, 12]


def test_the_way_to_another_gpus_card_is_over_nvlink() -> None:
    """GPU 2 of node 0 (slot 2) to a GPU of node 1, its card dead: NVLink to slot 3, that one's PCIe, card 3;
    without NVLink over both PCIe switches' uplinks."""
    bad = apply_faults(topology(), FaultsTable(dead_nics=("node0.nic2",)))
    names = [f"{bad.class_of(n).name} {n - bad.class_of(n).first}" for n in bad.route(2, 8)]
    assert names[:4] == ["nvlink_out 2", "nvlink_in 3", "pcie_up 3", "nic_out 3"]
    back = [f"{bad.class_of(n).name} {n - bad.class_of(n).first}" for n in bad.route(8, 2)]
    assert back[-4:] == ["nic_in 3", "pcie_down 3", "nvlink_out 3", "nvlink_in 2"]


def test_slowdowns_of_one_gpu_multiply() -> None:
    table = FaultsTable.model_validate({"slow_gpus": {"9": 1.5, "node1": {"gpu1": 1.1}, "node2": 1.2}})
    slowdowns = kernel_slowdowns(topology(nodes=4), table)
    assert slowdowns[9] == pytest.approx(1.65)
    np.testing.assert_allclose(slowdowns[16:24], 1.2)
    assert slowdowns.sum() == pytest.approx(32 + 0.65 + 8 * 0.2)


def test_dotted_overrides_reach_a_fault() -> None:
    """As `--set` and sweeps write them, dots in the names included."""
    overrides = {
        "faults.links.node1.nic2.bandwidth_fraction": 0.5,
        "faults.slow_gpus.3": 1.2,
        "faults.slow_gpus.node1.gpu2": 1.1,
        "faults.dead_nics": ["node0.nic7"],
    }
    data = {"model": "gpt2", "cluster": "dgx-h100", "nodes": 2}
    faults = build_experiment(data, overrides, origin="test").faults
    assert faults.links["node1.nic2"].bandwidth_fraction == 0.5
    assert faults.slow_gpus == {"3": 1.2, "node1.gpu2": 1.1}
    assert faults.dead_nics == ("node0.nic7",)


def test_routes_read_backwards_give_what_they_add() -> None:
    """Sum over links of usage x value = sum over pairs of what they gather, on every kind of fabric."""
    generator = np.random.default_rng(5)
    for cluster, nodes in (("roce-h100", 8), ("dgx-superpod-h100", 64), ("aws-p4d", 8), ("rtx-4090-x8", 3)):
        bad = apply_faults(
            topology(cluster, nodes), FaultsTable(dead_nics=("node1.nic0",) if nodes > 3 else ())
        )
        sources, targets = generator.integers(0, nodes * 8, size=(2, 300))
        amounts, values = generator.uniform(1, 2, 300), generator.uniform(1, 2, bad.num_links)
        usage = np.zeros(bad.num_links)
        bad.add_routes(usage, sources, targets, amounts)
        gathered = bad.gather_routes(values, sources, targets)
        assert usage @ values == pytest.approx(amounts @ gathered, rel=1e-12)


def idle_note(faults: dict[str, Any], **changes: Any) -> list[str]:
    """What the job notes of faults; its nodes, spread over a fabric, are 0, 8, 16, ..., 120."""
    table: dict[str, Any] = {
        "model": "llama-3-8b",
        "cluster": "dgx-h100",
        "nodes": 16,
        "placement": {"fabric_nodes": 128, "policy": "spread"},
        "strategy": {"kind": "fsdp2"},
        "faults": faults,
    }
    job = resolve(Experiment.model_validate(table | changes))
    return [note for note in job.notes if "faults." in note]


SLOW = {"bandwidth_fraction": 0.25}


def test_faults_on_nodes_that_no_job_uses_are_named() -> None:
    faults = {"links": {"node5.nic0": SLOW}, "dead_nics": ["node3.nic2"]}
    assert idle_note(faults) == [
        "faults.links.node5.nic0, faults.dead_nics 'node3.nic2': no job is on these nodes of the fabric, so "
        "nothing changes; this job has nodes 0, 8, 16, ..., 120 of 128"
    ]
    packed = {"fabric_nodes": 128}
    assert idle_note({"links": {"node16": SLOW}}, placement=packed) == [
        "faults.links.node16: no job is on these nodes of the fabric, so nothing changes; this job has nodes "
        "0 to 15 of 128"
    ]


def test_of_many_faults_without_effect_the_first_are_named() -> None:
    (note,) = idle_note({"dead_nics": [f"node{node}.nic0" for node in (1, 8, 2, 3, 4, 5)]})
    assert note.startswith(
        "faults.dead_nics 'node1.nic0', faults.dead_nics 'node2.nic0', faults.dead_nics 'node3.nic0' "
        "and 2 more: no job"
    )


def test_faults_that_touch_a_job_need_no_note() -> None:
    """A node of the job's own, one of a job beside it (the 16 free nodes 1 to 7, 9 to 15, 17, 18), and what
    is no node's: a tier."""
    assert idle_note({"links": {"node8.nic0": SLOW, "network": SLOW}, "dead_nics": ["node120.nic2"]}) == []
    beside = {"links": {"node5.nic0": SLOW}, "dead_nics": ["node18.nic2"]}
    assert idle_note(beside, jobs={"other": {"nodes": 16}}) == []


def test_a_note_about_faults_says_where_every_job_is() -> None:
    jobs = {"other": {"nodes": 1, "placement": {"nodes": [4]}}, "third": {"nodes": 2}}
    assert idle_note({"dead_nics": ["node3.nic2"]}, jobs=jobs) == [
        "faults.dead_nics 'node3.nic2': no job is on these nodes of the fabric, so nothing changes; this job "
        "has nodes 0, 8, 16, ..., 120; 'other' has node4; 'third' has nodes 1, 2 of 128"
    ]
