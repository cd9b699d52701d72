"""Clusters described and compared, and their page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.browser import as_plotly
from tests.study.tune.conftest import tiny
from tests.study.tune.test_degrees import with_degrees
from zsim.api import simulate
from zsim.specs.cluster.files import load_cluster
from zsim.specs.presets import topology_preset_names
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import draw_fabric
from zsim.study.topologies.figures import drawing_figure, fabric_figure, heat_color
from zsim.study.topologies.result import compare_topologies, comparison_page, topology_page
from zsim.study.topologies.topologies import (
    MeshOrder,
    compare_orders,
    describe_topology,
    order_lines,
    tie_sentences,
)


@pytest.mark.parametrize("name", topology_preset_names())
def test_every_preset_is_described_and_drawn(name: str) -> None:
    facts = describe_topology(name, 4)
    assert facts["bisection_bytes_per_second"] > 0
    assert facts["num_cables"] > 0
    figure = as_plotly(fabric_figure(name, 4))
    assert all("<b>" in text for text in figure.data[-1].hovertext)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("dgx-superpod-h100", 16), ("aws-p5", 16), ("aws-p5", 24), ("roce-h100", 8), ("dgx-superpod-a100", 24)],
)
def test_a_fabric_is_drawn_with_the_switches_it_is_built_of(name: str, nodes: int) -> None:
    """As counted: 8 leaves and 4 spines; one leaf, with nothing above it; three levels."""
    drawn = [text.split("<br>")[0] for text in as_plotly(fabric_figure(name, nodes)).data[-1].hovertext]
    switches = [text for text in drawn if not text.startswith("<b>node")]
    assert len(switches) == describe_topology(name, nodes)["num_switches"]


@pytest.mark.parametrize(
    "network",
    [
        'kind = "torus"\nshape = [2, 2, 2]',
        'kind = "dragonfly"\nnodes_per_router = 1\nrouters_per_group = 2',
        'kind = "fat-tree"\nnodes_per_leaf = 2\nplanes = 2',
    ],
)
def test_other_fabrics_are_drawn_too(tmp_path: Path, network: str) -> None:
    path = tmp_path / "mine.toml"
    origin = 'source = "made up for a test"\nevidence = "assumed"'
    path.write_text(f'schema = 1\nextends = "dgx-h100"\n[network]\n{origin}\n{network}\n')
    page = topology_page([(str(path), 6)], "mine")
    assert "plot-d0" in page


def test_one_cluster_alone_is_shown_too() -> None:
    (row,) = compare_topologies(["dgx-h100"], model="llama-3.2-1b", gpus=8, scales=(1.0,))
    assert (row.cluster, row.gpus) == ("dgx-h100", 8)


def test_an_oversubscribed_fabric_is_slower_and_cheaper(tmp_path: Path) -> None:
    """Eight to one above leaves of two nodes: sharding over 4 nodes crosses the spine; fewer switches."""
    origin = 'source = "made up for a test"\nevidence = "assumed"'
    paths = []
    for ratio in (1, 8):
        path = tmp_path / f"tree-{ratio}.toml"
        path.write_text(
            f'schema = 1\nextends = "dgx-h100"\n[network]\n{origin}\nkind = "fat-tree"\nnodes_per_leaf = 2\n'
            f"oversubscription = {ratio}.0\n"
        )
        paths.append(str(path))
    full, thin = compare_topologies(paths, model="llama-3-8b", gpus=32, scales=(1.0, 2.0))
    assert thin.facts["num_switches"] < full.facts["num_switches"]
    use = {tier.tier: tier.utilisation_fraction for tier in thin.tiers}
    assert use["leaf-spine"] > 4 * {tier.tier: tier.utilisation_fraction for tier in full.tiers}["leaf-spine"]
    assert sorted(full.scaling) == [32, 64]
    page = comparison_page([full, thin])
    assert "tree-8" in page
    assert "plot-heat" in page


def step_of(cluster: str, seconds: float, gpu: str = "h100") -> Any:
    """What is asked of a TopologyComparison: its cluster, the seconds of a step and the GPU."""
    experiment = {"cluster": {"gpu": {"name": gpu}}}
    report = SimpleNamespace(step_seconds=seconds, experiment=experiment, is_shared=False)
    return SimpleNamespace(cluster=cluster, report=report)


def test_clusters_are_undecided_only_if_no_two_of_them_can_be_told_apart() -> None:
    """Of neighbours 1.15 and 1.13 apart zsim cannot tell which is faster, of those 1.46 apart it can."""
    rows = [step_of("a", 1.0), step_of("b", 1.15), step_of("c", 1.3), step_of("d", 1.9)]
    assert tie_sentences(rows) == [
        "a, b: no difference that zsim can tell.",
        "b, c: no difference that zsim can tell.",
    ]
    assert tie_sentences([rows[3], rows[0]]) == []


def test_clusters_of_two_gpus_are_told_apart_no_better_than_two_networks() -> None:
    same = [step_of("a", 1.0), step_of("b", 1.18)]
    other = [step_of("a", 1.0), step_of("b", 1.18, "b200")]
    assert tie_sentences(same) == tie_sentences(other) != []


def test_a_comparisons_drawing_has_the_load_of_every_line_not_of_its_tier() -> None:
    """Four nodes, each a pipeline stage: activations go one way and gradients the other between neighbours,
    so that the two nodes in the middle send and receive twice what those at the ends do."""
    (row,) = compare_topologies(
        ["dgx-h100"],
        model="llama-3-8b",
        gpus=32,
        scales=(1.0,),
        overrides={
            "model.num_hidden_layers": 8,
            "strategy.kind": "megatron",
            "parallelism.tensor": 8,
            "parallelism.pipeline": 4,
            "parallelism.sequence_parallel": True,
            "training.sequence_length": 2048,
            "training.gradient_accumulation_steps": 4,
        },
    )
    loads = {
        name: load
        for line, load in zip(row.drawing.lines, row.line_loads, strict=True)
        for name in line.ends
        if name.startswith("node")
    }
    assert list(loads) == ["node0", "node1", "node2", "node3"]
    assert loads["node1"] == pytest.approx(loads["node2"], rel=1e-3)
    assert loads["node0"] == pytest.approx(loads["node3"], rel=1e-3)
    assert loads["node1"] == pytest.approx(2 * loads["node0"], rel=0.02)
    assert [line["busiest_link_fraction"] for line in row.to_dict()["lines"]] == [*row.line_loads]
    page = comparison_page([row])
    assert f"network {loads['node0'] * 100:.1f} to {loads['node1'] * 100:.1f} %" in page


def test_lines_of_one_tier_may_differ_and_are_drawn_so() -> None:
    cluster = load_cluster("dgx-h100")
    drawn = draw_fabric(Topology(cluster, 4, cluster.gpus_per_node))
    figure = as_plotly(drawing_figure(drawn, cluster, [0.0, 1.0, *[0.5] * (len(drawn.lines) - 2)]))
    colours = [trace.line.color for trace in figure.data[:-1]]
    assert set(colours) == {heat_color(0.0), heat_color(0.5), heat_color(1.0)}


# -- Orders of the mesh on a cluster: on how many nodes a group is, and the step ---------------------------


MEGATRON = {"kind": "megatron", "distributed_optimizer": True}


def orders(**degrees: Any) -> tuple[MeshOrder, ...]:
    """Of 4 layers on two nodes of 8."""
    made = tiny(MEGATRON, nodes=2, num_layers=4, gradient_accumulation_steps=8)
    experiment = with_degrees(made, **degrees)
    result = simulate(experiment)
    return compare_orders(experiment, result.job, result.report.step_seconds)


def test_every_order_says_which_groups_leave_the_node() -> None:
    """4 tensor ranks and 4 replicas: either is in a node, and the other on both; the step is that of
    an experiment with this order."""
    found = orders(tensor=4)
    assert [(one.order, dict(one.nodes)) for one in found] == [
        ("tp-dp", {"tensor": 1, "data": 2}),
        ("dp-tp", {"tensor": 2, "data": 1}),
    ]
    assert [one.is_given for one in found] == [True, False]
    made = tiny(MEGATRON, nodes=2, num_layers=4, gradient_accumulation_steps=8)
    other = simulate(with_degrees(made, tensor=4, order="dp-tp-cp-pp"))
    assert found[1].step_seconds == other.report.step_seconds != found[0].step_seconds


def test_orders_on_as_many_nodes_are_one() -> None:
    """2 tensor, 2 pipeline ranks and 4 replicas fill two nodes: whichever axis is the slowest leaves the node
    with its groups, and the order of the other two makes no difference."""
    found = orders(tensor=2, pipeline=2)
    assert len(found) == 3
    assert sorted(max(one.nodes, key=lambda axis: one.nodes[axis]) for one in found) == [
        "data", "pipeline", "tensor",
    ]  # fmt: skip


def test_data_parallelism_alone_has_no_order() -> None:
    assert orders() == ()


def test_lines_name_the_given_order_and_what_others_cost() -> None:
    row: Any = SimpleNamespace(
        cluster="dgx",
        orders=(
            MeshOrder("tp-dp", {"tensor": 1, "data": 16}, 2.0, is_given=True),
            MeshOrder("dp-tp", {"tensor": 2, "data": 1}, 3.0, is_given=False),
        ),
    )
    text = "\n".join(order_lines([row]))
    assert "tp-dp (given)" in text
    assert "16 nodes" in text
    assert "+50.0 %" in text
    assert list(order_lines([SimpleNamespace(cluster="dgx", orders=())])) == []  # type: ignore[list-item]
