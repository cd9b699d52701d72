"""Where a job sits: node lists, policies, uneven nodes, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.job import job_topology
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.placement import Placement, parse_node_numbers, resolve_placement
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def experiment(**data: Any) -> Experiment:
    return Experiment(**{"model": "gpt2", "cluster": "dgx-h100", **data})


def placed(cluster: str = "dgx-h100", **data: Any) -> Placement:
    job = experiment(cluster=cluster, **data)
    return resolve_placement(job.placement, load_cluster(cluster), job.nodes, job.gpus)


def test_a_list_of_nodes_may_have_ranges() -> None:
    assert parse_node_numbers("0-2, 7") == (0, 1, 2, 7)
    assert placed(placement={"nodes": "4,1-2"}) == Placement(5, (4, 1, 2), (8, 8, 8))


@pytest.mark.parametrize("text", ["", "a", "3-1", "1--2", "0-9999999999"])
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected node numbers"):
        parse_node_numbers(text)


def test_without_a_placement_the_job_fills_its_fabric() -> None:
    whole = placed(nodes=3)
    assert whole == Placement(3, (0, 1, 2), (8, 8, 8))
    assert whole.is_plain
    assert not placed(nodes=3, placement={"fabric_nodes": 4}).is_plain


def test_ranks_sit_node_by_node_on_the_gpus_that_are_used() -> None:
    """Nodes 4 and 1 of a fabric with 8 GPUs used per node: 32, 33, then 8, 9, 10."""
    np.testing.assert_array_equal(Placement(5, (4, 1), (2, 3)).slots(8), [32, 33, 8, 9, 10])


def test_spreading_takes_as_many_nodes_of_every_leaf() -> None:
    """A SuperPOD has 32 nodes per leaf: 3 leaves, 6 nodes. dgx-h100 is one switch: every fourth of 16."""
    spread = {"policy": "spread", "fabric_nodes": 96}
    assert placed("dgx-superpod-h100", nodes=6, placement=spread).nodes == (0, 1, 32, 33, 64, 65)
    assert placed(nodes=4, placement={"policy": "spread", "fabric_nodes": 16}).nodes == (0, 4, 8, 12)


def test_spreading_on_three_levels_takes_pods() -> None:
    """Leaves of 2 nodes, 2 leaves per pod: pods begin at nodes 0, 4 and 8."""
    cluster = {
        "extends": "dgx-h100",
        "network": {
            "source": "made up for a test", "evidence": "assumed", "kind": "fat-tree", "levels": 3,
            "nodes_per_leaf": 2, "leaves_per_pod": 2,
        },
    }  # fmt: skip
    job = resolve(experiment(cluster=cluster, nodes=4, placement={"policy": "spread", "fabric_nodes": 12}))
    assert job.placement.nodes == (0, 1, 4, 8)


def test_random_nodes_are_the_seeds_own_and_in_order() -> None:
    one, same, other = (
        placed(nodes=8, placement={"policy": "random", "fabric_nodes": 64, "seed": seed})
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert list(one.nodes) == sorted(set(one.nodes))


def test_a_job_counts_the_gpus_of_uneven_nodes() -> None:
    job = resolve(experiment(placement={"gpus_per_node": [8, 4, 2]}))
    assert (job.num_nodes, job.world_size, job.gpus_per_node) == (3, 14, 8)
    topology = job_topology(job)
    assert topology.world_size == 14
    np.testing.assert_array_equal(topology.node_of(topology.slots), [0] * 8 + [1] * 4 + [2] * 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": 2, "placement": {"nodes": "0-3"}}, "placement.nodes: found 4 nodes, but the job has 2"),
        ({"placement": {"nodes": [0, 5, 0]}}, "node 0 is named twice"),
        ({"placement": {"nodes": "0-1", "policy": "spread"}}, "nodes and policy both"),
        ({"nodes": 2, "placement": {"policy": "random"}}, "policy 'random' needs a seed"),
        ({"nodes": 2, "placement": {"seed": 1}}, "seed has no effect"),
        ({"nodes": 2, "placement": {"fabric_nodes": 1}}, "too few for a job of 2 nodes"),
        ({"placement": {"nodes": [0, 5], "fabric_nodes": 5}}, "found 5, too few for node 5"),
        ({"placement": {"gpus_per_node": [8, 9]}}, "found 9, but a 'dgx-h100' node has 8 GPUs"),
        ({"nodes": 2, "placement": {"gpus_per_node": [8]}}, "found 1 nodes, but the job has 2"),
        ({"gpus": 16, "placement": {"gpus_per_node": [8, 4]}}, "found 12 GPUs in all, but gpus is 16"),
        ({"gpus": 12}, "for uneven nodes, list the GPUs of each in placement.gpus_per_node"),
        ({"nodes": 10**15}, "gpus: found 8,000,000,000,000,000, expected at most 1,048,576"),
        ({"gpus": 8 * 10**15}, "gpus: found 8,000,000,000,000,000, expected at most 1,048,576"),
        ({"placement": {"fabric_nodes": 10**15}}, "fabric_nodes: found 1000000000000000, expected at most"),
        ({"placement": {"nodes": [10**15]}}, "nodes: found node 1000000000000000, expected at most"),
        ({"placement": {"fabric_node": 5}}, "unknown key 'fabric_node'; did you mean 'fabric_nodes'"),
    ],
)
def test_contradictions_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(experiment(**data))


def test_dotted_overrides_reach_the_placement() -> None:
    data = {"model": "gpt2", "cluster": "dgx-h100"}
    changed = build_experiment(data, {"placement.nodes": "2-3", "placement.fabric_nodes": 8}, origin="test")
    assert resolve(changed).placement == Placement(8, (2, 3), (8, 8))
