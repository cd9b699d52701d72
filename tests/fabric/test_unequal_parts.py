"""All-to-alls of unequal parts on links: bytes by hand, and laws of their seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.fabric.fabric import Fabric, idle_fabric
from zsim.plan.ops import Collective, Group, SplitSizes
from zsim.specs.cluster.files import load_cluster
from zsim.specs.model.spec import ExchangeLibrary
from zsim.specs.strategy.experts import expected_partitions
from zsim.specs.topology.topology import Topology

MIB = 2**20
FOUR = Group("ep", np.array([[0, 1, 8, 9]]))  # two GPUs on each of two nodes
TABLE = ((9, 1, 2, 3), (4, 9, 5, 0), (6, 7, 9, 8), (1, 1, 1, 9))


def fabric_of(work: Collective, group: Group, nodes: int = 2) -> Fabric:
    spec = load_cluster("dgx-h100")
    return idle_fabric(Topology(spec, nodes, spec.gpus_per_node), group, [work])


def seconds(parts: SplitSizes, group: Group) -> float:
    work = Collective.all_to_all(parts, "bf16", group.name)
    return fabric_of(work, group).transfer(work, 0).isolated_seconds


def equal(size: int, part: int) -> SplitSizes:
    return ((part,) * size,) * size


# -- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("direct", {
            "nvlink_out": [1, 4, 8, 1], "nvlink_in": [4, 1, 1, 8],
            "nic_out": [2 + 3, 5 + 0, 6 + 7, 1 + 1], "nic_in": [6 + 1, 7 + 1, 2 + 5, 3 + 0],
        }),
        # 0 hands what 9 is to get to 1, whose card is on 9's rail; 1 what 8 is to get to 0; and so back.
        ("by rail", {
            "nvlink_out": [1 + 3, 4 + 5, 8 + 7, 1 + 1], "nvlink_in": [4 + 5, 1 + 3, 1 + 1, 8 + 7],
            "nic_out": [2 + 5, 0 + 3, 6 + 1, 1 + 7], "nic_in": [6 + 1, 7 + 1, 2 + 5, 3 + 0],
        }),
    ],
)  # fmt: skip
def test_every_pair_s_bytes_are_on_its_route_by_hand(
    algorithm: str, expected: dict[str, list[float]]
) -> None:
    work = Collective.all_to_all(TABLE, "bf16", "ep")
    fabric = fabric_of(work, FOUR)
    [name] = [
        method.shape for method in fabric.communicator("ep").methods[TABLE] if method.algorithm == algorithm
    ]
    links, weights = fabric.communicator("ep").usages[name]
    usage = np.zeros(fabric.topology.num_links)
    usage[links] = weights * 21  # per byte that the third sends, the most of all
    for kind, sums in expected.items():
        own = fabric.topology.classes[kind]
        assert usage[own.first : own.first + own.count][[0, 1, 8, 9]] == pytest.approx(sums, rel=1e-12), kind
    if fabric.transfer(work, 0).algorithm == algorithm:
        assert fabric.usage([work]) == pytest.approx(usage, rel=1e-12)
        sent = sum(expected["nvlink_out"]) / 16, sum(expected["nic_out"]) / 16
        assert fabric.sent_bytes(work) == pytest.approx(sent)


def test_every_communicator_of_a_kind_has_the_table() -> None:
    """Two groups of two on a node: 3 MiB one way and 1 back in each."""
    group = Group("ep", np.array([[0, 1], [2, 3]]))
    work = Collective.all_to_all(((0, 3 * MIB), (MIB, 0)), "bf16", "ep")
    fabric = fabric_of(work, group, 1)
    links = fabric.topology.classes["nvlink_out"]
    usage = fabric.usage([work])[links.first : links.first + links.count] / MIB
    assert usage.tolist() == pytest.approx([3, 1, 3, 1, 0, 0, 0, 0])


def test_two_tables_on_a_communicator_are_two_loads() -> None:
    one = Collective.all_to_all(TABLE, "bf16", "ep")
    other = Collective.all_to_all(tuple(zip(*TABLE, strict=True)), "bf16", "ep")
    fabric = idle_fabric(fabric_of(one, FOUR).topology, FOUR, [one, other])
    both = fabric.usage([one, other, one])
    assert both == pytest.approx(2 * fabric.usage([one]) + fabric.usage([other]), rel=1e-12)
    assert fabric.usage([one]) != pytest.approx(fabric.usage([other]))


# -- seconds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [("dgx-h100", 1), ("dgx-h100", 4), ("mi300x-x8", 1), ("rtx-4090-x8", 2), ("cpu-gloo", 2)],
)
def test_equal_parts_take_what_an_all_to_all_without_a_table_does(cluster: str, nodes: int) -> None:
    topology = Topology(load_cluster(cluster), nodes, load_cluster(cluster).gpus_per_node)
    size = topology.world_size
    group = Group.regular("world", size)
    plain = Collective("all_to_all", size * MIB, "bf16", "world")
    assert Collective.all_to_all(equal(size, MIB), "bf16", "world") == plain
    told = replace(plain, split_sizes=equal(size, MIB))
    known, found = (idle_fabric(topology, group, [work]).options(work) for work in (plain, told))
    assert [one.algorithm for one in found] == [one.algorithm for one in known]
    times = [one.isolated_seconds for one in known]
    assert [one.isolated_seconds for one in found] == pytest.approx(times, rel=1e-12)


def test_the_member_that_takes_most_sets_the_time() -> None:
    """7 GPUs send 64 MiB each to the first and nothing else: its NVLink port takes 448 MiB."""
    parts = tuple((64 * MIB, *(0,) * 7) for _ in range(8))
    work = Collective.all_to_all(parts, "bf16", "world")
    fabric = fabric_of(work, Group.regular("world", 8), 1)
    transfer = fabric.transfer(work, 0)
    cluster = fabric.topology.cluster
    costs = cluster.collectives.algorithms["all_to_all_inside"][transfer.protocol]
    rate = cluster.node_link.bandwidth * cluster.node_link.efficiency * costs.intra_fraction
    assert transfer.isolated_seconds - transfer.latency_seconds == pytest.approx(448 * MIB / rate, rel=1e-9)


def test_an_all_to_all_in_one_domain_has_costs_of_its_own() -> None:
    """8 GPUs of 64 MiB each, 7/8 of them over NVLink at 0.982 of 364.5 GB/s: 8.4 + 3.4 us of start and round,
    a ramp of 5.87 us times the square root of 64. 16 GPUs are on two nodes, which have the ring's costs: 8.4
    + 16.8 us, and a ramp of 2.18 us for the network alone."""
    work = Collective("all_to_all", 64 * MIB, "bf16", "world")
    inside = fabric_of(work, Group.regular("world", 8), 1).transfer(work, 0)
    assert inside.latency_seconds == pytest.approx((8.4 + 3.4 + 5.87 * 8) * 1e-6)
    assert inside.isolated_seconds - inside.latency_seconds == pytest.approx(56 * MIB / (0.982 * 364.5e9))
    across = fabric_of(work, Group.regular("world", 16)).transfer(work, 0)
    assert across.latency_seconds == pytest.approx((8.4 + 16.8 + 2.18 * 8) * 1e-6)


@pytest.mark.parametrize(
    ("cluster", "library", "nodes", "published"),
    [
        ("hgx-h20", "deepep", 1, 337.35),
        ("hgx-b200", "deepep", 1, 389),
        ("hgx-b200", "hybridep", 1, 533),
        ("gb200-nvl72", "deepep", 2, 400),
        ("gb200-nvl72", "hybridep", 2, 544),
        ("gb200-nvl72", "hybridep", 8, 452),
    ],
)
def test_a_librarys_exchange_takes_what_it_publishes(
    cluster: str, library: str, nodes: int, published: float
) -> None:
    """GB/s of all that a GPU gets, what stays on it counted too (deepseek-ai/DeepEP, see the cluster files):
    4,096 tokens of 7,168 bf16 elements to 5 ranks each. One fraction stands for 8 to 36 GPUs of a domain of
    72, which differ by 10 %; the published figures have what a call takes before its first byte in them."""
    spec, size = load_cluster(cluster), 4096 * 7168 * 2 * 5
    group = Group.regular("world", nodes * spec.gpus_per_node)
    plain = Collective("all_to_all", size, "bf16", "world")
    taken = {}
    for work in (plain, replace(plain, library=ExchangeLibrary(library))):
        fabric = idle_fabric(Topology(spec, nodes, spec.gpus_per_node), group, [work])
        taken[work.library] = fabric.transfer(work, 0).isolated_seconds
    assert size / taken[ExchangeLibrary(library)] / 1e9 == pytest.approx(published, rel=0.09)
    assert taken[ExchangeLibrary(library)] > taken[None]


@pytest.mark.parametrize(
    ("library", "nodes", "groups", "published"),
    [
        ("deepep", 2, (1, 1), 43), ("deepep", 4, (1, 1), 58), ("deepep", 8, (8, 4), 51),
        ("hybridep", 2, (1, 1), 53.9), ("hybridep", 4, (1, 1), 49.8), ("hybridep", 8, (1, 1), 43.7),
    ],
)  # fmt: skip
def test_a_librarys_exchange_between_nodes_takes_what_it_publishes(
    library: str, nodes: int, groups: tuple[int, int], published: float
) -> None:
    """GB/s of all that goes to nodes, its own too: 4,096 tokens with 8 of 256 experts, at most 4 nodes each
    by DeepEP's test, and 64 experts a node by HybridEP's; the time is that of passing them on, too."""
    spec, token = load_cluster("dgx-h100"), 7168 * 2
    experts = 256 if library == "deepep" else 64 * nodes
    reached = expected_partitions(experts, 8, nodes, *groups)
    forwards = expected_partitions(experts, 8, 8 * nodes, *groups) * 7 / 8 / (reached * (1 - 1 / nodes))
    rails = Group("rail", np.arange(8 * nodes).reshape(nodes, 8).T)
    size = round(4096 * token * reached)
    work = Collective("all_to_all", size, "bf16", "rail", library=ExchangeLibrary(library, forwards))
    fabric = idle_fabric(Topology(spec, nodes, 8), rails, [work])
    assert size / fabric.transfer(work, 0).isolated_seconds / 1e9 == pytest.approx(published, rel=0.02)
    inside = fabric.traffic([work])["nvlink_out"].total_bytes
    assert inside == pytest.approx(8 * nodes * size * (1 - 1 / nodes) * forwards)


def test_a_library_without_figures_takes_what_the_backend_does() -> None:
    plain = Collective("all_to_all", 64 * MIB, "bf16", "world")
    named = replace(plain, library=ExchangeLibrary("hybridep"))
    group = Group.regular("world", 8)
    known, found = (fabric_of(work, group, 1).transfer(work, 0) for work in (plain, named))
    assert found.isolated_seconds == known.isolated_seconds


def test_no_bytes_take_their_latency() -> None:
    """What stays where it is passes no link."""
    stays = tuple(tuple(MIB if i == j else 0 for j in range(16)) for i in range(16))
    work = Collective.all_to_all(stays, "bf16", "world")
    fabric = fabric_of(work, Group.regular("world", 16))
    transfer = fabric.transfer(work, 0)
    assert transfer.isolated_seconds == transfer.latency_seconds > 0
    assert not fabric.usage([work]).any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 15), st.floats(0, 1), st.floats(0, 1))
def test_more_bytes_to_one_expert_are_never_faster(hot: int, one: float, other: float) -> None:
    """Every member sends as much as before, and more of it to the hot one."""
    less, more = sorted((one, other))

    def parts(share: float) -> SplitSizes:
        to_hot = int(MIB * share)
        rest = (16 * MIB - MIB - to_hot) // 15
        first = 16 * MIB - 15 * rest
        return ((*(rest,) * hot, first, *(rest,) * (15 - hot)),) * 16

    world = Group.regular("world", 16)
    assert seconds(parts(less), world) <= seconds(parts(more), world) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), min_size=8, max_size=8), min_size=8, max_size=8))
def test_unequal_parts_are_never_faster_than_the_same_bytes_in_equal_ones(rows: list[list[int]]) -> None:
    """8 GPUs of a node; a part has whole MiB, of 56 times as many in all between GPUs."""
    table = [[0 if i == j else part * 56 * MIB for j, part in enumerate(row)] for i, row in enumerate(rows)]
    mean = sum(map(sum, table)) // 56
    work = Collective.all_to_all(tuple(map(tuple, table)), "bf16", "world")
    even = Collective.all_to_all(
        tuple(tuple(0 if i == j else mean for j in range(8)) for i in range(8)), "bf16", "world"
    )
    world = Group.regular("world", 8)
    move = [one.isolated_seconds - one.latency_seconds for one in fabric_of(work, world, 1).options(work)]
    least = [one.isolated_seconds - one.latency_seconds for one in fabric_of(even, world, 1).options(even)]
    assert all(a >= b * (1 - 1e-9) for a, b in zip(move, least, strict=True))
