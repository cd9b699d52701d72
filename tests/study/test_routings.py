"""Ideal and hashed routing side by side: what collisions cost, and why rings hide oversubscription."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from zsim.commands.topology import app
from zsim.engine.simulate import simulate_job
from zsim.plan.make import make_plan
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.network import Network
from zsim.specs.experiment.job import Job, job_topology
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.result import compare_topologies
from zsim.study.topologies.routings import (
    collective_seconds,
    compare_routings,
    explain_routing,
    flows_per_pair,
    set_routing,
    uplink_use,
)

ORIGIN = {"source": "made up for a test", "evidence": "assumed"}
FSDP = {"kind": "fsdp2"}
HSDP = {"kind": "fsdp2", "replicate": 2}


def cluster_with(**keys: Any) -> Cluster:
    network = Network.model_validate({"kind": "fat-tree", **ORIGIN, **keys})
    return load_cluster("dgx-h100").model_copy(update={"network": network})


def job_on(cluster: Cluster, nodes: int, strategy: dict[str, Any] = FSDP) -> Job:
    experiment = Experiment.model_validate(
        {
            "model": "llama-3.2-1b", "cluster": "dgx-h100", "nodes": nodes, "strategy": strategy,
            "training": {"sequence_length": 2048},
        }
    )  # fmt: skip
    return replace(resolve(experiment), cluster=cluster)


TREES: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    nodes_per_leaf=st.sampled_from([1, 2, 4]),
    oversubscription=st.sampled_from([1.0, 2.0, 4.0]),
    planes=st.sampled_from([1, 2]),
)


@settings(max_examples=30, deadline=None)
@given(keys=TREES, seed=st.integers(0, 2**32 - 1), flows=st.integers(1, 4))
def test_hashed_flows_move_the_same_bytes_up_and_down(keys: dict[str, Any], seed: int, flows: int) -> None:
    """Over all uplinks together as much as where flows are spread, from every leaf and to every leaf."""
    hashed = cluster_with(**keys, routing="hash", flows_per_pair=flows, hash_seed=seed)
    totals = []
    for cluster in (set_routing(hashed), hashed):
        topology = Topology(cluster, 8, 8)
        usage = sum_of_pairs(topology)
        own = [topology.classes[name] for name in ("nic_out", "leaf_up", "leaf_down", "nic_in")]
        parts = [usage[c.first : c.first + c.count] for c in own]
        leaves = topology.wiring.num_leaves  # type: ignore[attr-defined]
        totals.append([parts[0].sum(), *parts[1].reshape(leaves, -1).sum(axis=1).tolist(),
                       *parts[2].reshape(leaves, -1).sum(axis=1).tolist(), parts[3].sum()])  # fmt: skip
    assert totals[1] == pytest.approx(totals[0])


def sum_of_pairs(topology: Topology) -> Any:
    """Seven bytes from every GPU to the GPU of the same number three nodes on."""
    import numpy as np

    usage = np.zeros(topology.num_links)
    slots = np.arange(topology.num_slots)
    topology.add_routes(usage, slots, np.roll(slots, -24), 7.0)
    return usage


@settings(max_examples=25, deadline=None)
@given(keys=TREES, seed=st.integers(0, 2**32 - 1), strategy=st.sampled_from([FSDP, HSDP]))
def test_hashed_is_never_faster_than_ideal(keys: dict[str, Any], seed: int, strategy: dict[str, Any]) -> None:
    job = job_on(cluster_with(**keys), 8, strategy)
    plan = make_plan(job)
    ideal, hashed = (
        collective_seconds(job_topology(replace(job, cluster=set_routing(job.cluster, one))), plan)
        for one in (None, seed)
    )
    assert hashed >= ideal * (1 - 1e-12)


def test_with_one_path_there_is_nothing_to_hash() -> None:
    """Leaves of two nodes, 16 cards below and one uplink: every flow takes it."""
    job = job_on(cluster_with(nodes_per_leaf=2, oversubscription=16.0), 4)
    found = compare_routings(job, 1.0)
    assert found.num_paths == 1
    assert found.ideal_seconds == found.hashed_seconds == found.hashed_p95_seconds == 1.0
    assert found.slowdowns == (1.0, 1.0)
    hashed = replace(job, cluster=set_routing(job.cluster, 3))
    plan = make_plan(job)
    assert collective_seconds(job_topology(hashed), plan) == collective_seconds(job_topology(job), plan)


def test_draws_differ_and_the_same_draw_is_the_same() -> None:
    job = job_on(cluster_with(nodes_per_leaf=1), 8)
    plan = make_plan(job)
    drawn = [
        collective_seconds(job_topology(replace(job, cluster=set_routing(job.cluster, seed))), plan)
        for seed in (0, 1, 2, 3, 4, 5, 0)
    ]
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) > 1


def test_one_flow_for_two_paths_collides_as_dice_do() -> None:
    """Two nodes of one card under a leaf of two uplinks, every node sending to the one two further on: both
    flows of a leaf go up, and half of the draws put them on one uplink, which then has twice the bytes."""
    import numpy as np

    worst = []
    for seed in range(200):
        cluster = cluster_with(nodes_per_leaf=2, routing="hash", hash_seed=seed)
        nic = cluster.nic.model_copy(update={"per_node": 1})
        topology = Topology(cluster.model_copy(update={"nic": nic}), 4, 1)
        usage = np.zeros(topology.num_links)
        slots = np.arange(4)
        topology.add_routes(usage, slots, np.roll(slots, -2), 1.0)
        ups = topology.classes["leaf_up"]
        worst.append(usage[ups.first : ups.first + 2].max())
    assert set(worst) == {1.0, 2.0}
    assert worst.count(2.0) == pytest.approx(100, abs=25)


@pytest.mark.parametrize(("strategy", "is_exact"), [(FSDP, True), (HSDP, False)])
def test_the_short_way_is_as_slow_as_every_rank_by_itself_or_slower(
    strategy: dict[str, Any], is_exact: bool
) -> None:
    """Every rank simulated is the oracle: one group is met exactly; of several groups of a kind the slowest
    stands for all, which costs less than 5 % of the step here."""
    cluster = set_routing(cluster_with(nodes_per_leaf=1, oversubscription=4.0), 1)
    job = job_on(cluster, 4, strategy)
    short = simulate_job(job, is_for_network=True).trace.step_seconds
    every = simulate_job(job, unfold=True).trace.step_seconds
    if is_exact:
        assert short == pytest.approx(every, rel=1e-9)
    else:
        assert every * (1 - 1e-9) <= short < 1.05 * every


def test_flows_are_the_channels_of_a_card_unless_the_file_says() -> None:
    """16 channels on 8 cards; Llama's fabric says 16 flows; A100's 24 channels on 4 cards of P4d."""
    assert flows_per_pair(load_cluster("dgx-h100")) == 2
    assert flows_per_pair(load_cluster("roce-h100")) == 16
    assert flows_per_pair(load_cluster("aws-p4d")) == 6


def test_rings_hide_oversubscription_up_to_the_nodes_of_a_leaf() -> None:
    """Four nodes to a leaf: one hop in four goes up, so four to one costs a ring nothing, and eight to one
    makes uplinks twice as slow as cards (each at 95 % of its rate, uplinks at 100 %: 1.9)."""
    for ratio, fraction in ((1.0, 0.2375), (4.0, 0.95), (8.0, 1.9)):
        cluster = cluster_with(nodes_per_leaf=4, oversubscription=ratio)
        job = job_on(cluster, 16)
        use = uplink_use(job_topology(job), make_plan(job).groups)
        assert (use.hops, use.leaving) == (16, 4)
        assert use.fraction == pytest.approx(fraction, rel=1e-6)
        assert use.oversubscription == ratio


def test_a_leaf_that_holds_all_nodes_makes_routing_and_oversubscription_moot() -> None:
    rails = job_on(cluster_with(kind="rail-optimized", nodes_per_leaf=32, oversubscription=4.0), 16)
    found = compare_routings(rails, 1.0)
    assert found.slowdowns == (1.0, 1.0)
    assert "none of a ring's 16 hops between nodes leaves its switch" in explain_routing(found)
    alone = compare_routings(job_on(cluster_with(nodes_per_leaf=4), 1), 1.0)
    assert explain_routing(alone) == "every group stays inside a node: no link between switches is used"


def test_compare_shows_both_routings_and_says_why_they_differ(tmp_path: Path) -> None:
    """One to one and four to one agree where routing is ideal (all that was shown once), and not where it is
    hashed."""
    paths = []
    for ratio in (1, 4):
        path = tmp_path / f"tree-{ratio}.toml"
        path.write_text(
            'schema = 1\nextends = "dgx-h100"\n[network]\nsource = "made up for a test"\n'
            f'evidence = "assumed"\nkind = "fat-tree"\nnodes_per_leaf = 4\noversubscription = {ratio}.0\n'
        )
        paths.append(str(path))
    arguments = [*paths, "--model", "llama-3.2-1b", "--gpus", "128", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    assert "hashed p95" in result.output
    lines = result.output.replace(str(tmp_path), "").splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(result.output.split())
    assert "of a ring's 16 hops between nodes 4 leave a leaf switch, neighbours being under one" in words
    assert "rings hide oversubscription up to 4.21:1 (here 4:1)" in words
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "hashed p95" in page
    assert "neighbours being under one" in page
    full, thin = compare_topologies(paths, model="llama-3.2-1b", gpus=128, scales=(1.0,))
    assert thin.routing.ideal_seconds == pytest.approx(full.routing.ideal_seconds, rel=1e-4)
    assert thin.routing.slowdowns[0] > 1.15 * full.routing.slowdowns[0]
    assert thin.to_dict()["routing"]["hashed_collectives_slowdown"]["p95"] > 1.5


def test_clusters_for_which_the_same_is_true_share_a_sentence() -> None:
    names = ["dgx-a100-40gb", "dgx-superpod-h100-3-level", "dgx-h100"]
    result = CliRunner().invoke(app, ["compare", *names, "--model", "llama-3.2-1b", "--gpus", "16"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    words = " ".join(result.output.split())
    assert words.count("hops between nodes") == 1
    assert f"{', '.join(names)}: none of a ring's" in words


def test_a_fabric_that_hashes_is_shown_ideal_too(tmp_path: Path) -> None:
    path = tmp_path / "hashed.toml"
    path.write_text(
        'schema = 1\nextends = "dgx-h100"\n[network]\nsource = "made up for a test"\nevidence = "assumed"\n'
        'kind = "fat-tree"\nnodes_per_leaf = 1\nrouting = "hash"\n'
    )
    (row,) = compare_topologies([str(path)], model="llama-3.2-1b", gpus=64, scales=(1.0,))
    assert row.routing.configured == "hash"
    assert row.routing.ideal_seconds < row.report.step_seconds
    assert row.routing.ideal_seconds < row.routing.hashed_p95_seconds
