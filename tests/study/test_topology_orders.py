"""Orders of the mesh on a cluster: on how many nodes a group is, and the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.study.tune.conftest import tiny
from tests.study.tune.test_degrees import with_degrees
from zsim.api import simulate
from zsim.study.topologies.text import order_lines
from zsim.study.topologies.topologies import MeshOrder, compare_orders

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
