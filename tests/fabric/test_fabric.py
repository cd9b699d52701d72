"""Collectives on the links of real clusters: closed forms, conservation, fairness, laws of bandwidth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cost.collectives.rounds import bus_bytes
from zsim.fabric.communicators import Transfer
from zsim.fabric.fabric import Fabric
from zsim.fabric.messages import Pairs
from zsim.fluid.pool import max_min_fair_rates
from zsim.plan.ops import Collective, CollectiveKind, Group
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology

KINDS: list[CollectiveKind] = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]
CLUSTERS = ["dgx-h100", "dgx-a100-80gb", "dgx-2", "rtx-4090-x8", "cpu-gloo"]


def fabric_of(
    cluster: str | Cluster = "dgx-h100",
    nodes: int = 2,
    groups: list[Group] | None = None,
    *,
    folded: bool = True,
) -> Fabric:
    """All GPUs of the nodes; one group of everybody unless told otherwise."""
    spec = load_cluster(cluster) if isinstance(cluster, str) else cluster
    topology = Topology(spec, nodes, spec.gpus_per_node)
    groups = groups or [Group.regular("world", topology.world_size)]
    named = {group.name: group for group in groups}
    return Fabric(simpy.Environment(), topology, named, is_folded=folded)


def collective(kind: CollectiveKind = "all_gather", size: int = 10**9, group: str = "world") -> Collective:
    return Collective(kind, size, "bf16", group)


def run_at_once(fabric: Fabric, works: list[tuple[Collective, int]]) -> list[float]:
    """Seconds until each of the transfers, all started at 0, has ended."""
    ended = [float("nan")] * len(works)

    def note(number: int) -> Any:
        def end() -> None:
            ended[number] = fabric.env.now

        return end

    for number, (work, communicator) in enumerate(works):
        fabric.run(fabric.transfer(work, communicator), note(number))
    fabric.env.run()
    return ended


# -- closed forms ----------------------------------------------------------------------------------------


def test_an_all_gather_in_a_node_takes_its_rounds_and_its_bytes_over_nvlink() -> None:
    """8 H100: the protocol's start, 7 rounds, S 7/8 bytes at NVLink's effective rate."""
    fabric = fabric_of(nodes=1)
    cluster = fabric.topology.cluster
    simple = cluster.collectives.protocols["simple"]
    transfer = fabric.transfer(collective(), 0)
    assert (transfer.algorithm, transfer.protocol) == ("ring", "simple")
    bandwidth = cluster.node_link.bandwidth * cluster.node_link.efficiency
    latency = simple.base + 7 * simple.intra_round + simple.ramp * (1e9 / 2**20) ** 0.5
    assert transfer.isolated_seconds == pytest.approx(latency + 1e9 * 7 / 8 / bandwidth, rel=1e-9)


def test_across_nodes_all_cards_carry_the_ring_together() -> None:
    """16 ranks on two nodes: eight rings, one per card. A card carries an eighth of S 15/16; NVLink the
    whole: the slower of the two counts (8 cards of 50 GB/s against 450 GB/s)."""
    fabric = fabric_of(nodes=2)
    cluster = fabric.topology.cluster
    cards = cluster.nic.per_node * cluster.nic.bandwidth * cluster.nic.efficiency
    nvlink = cluster.node_link.bandwidth * cluster.node_link.efficiency
    transfer = fabric.transfer(collective(), 0)
    seconds = transfer.isolated_seconds - transfer.latency_seconds
    assert seconds == pytest.approx(1e9 * 15 / 16 / min(cards, nvlink), rel=1e-9)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_alone_takes_the_time_it_was_chosen_by(cluster: str, kind: CollectiveKind) -> None:
    fabric = fabric_of(cluster)
    work = collective(kind)
    (seconds,) = run_at_once(fabric, [(work, 0)])
    assert seconds == pytest.approx(fabric.transfer(work, 0).isolated_seconds, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_takes_no_time(kind: CollectiveKind) -> None:
    fabric = fabric_of(groups=[Group.regular("alone", 16, 1)])
    assert fabric.transfer(collective(kind, group="alone"), 0).isolated_seconds == 0
    assert run_at_once(fabric, [(collective(kind, group="alone"), 0)]) == [0.0]


def test_a_message_between_nodes_takes_its_delay_besides() -> None:
    """A message inside a node, and a collective of the same pair, take none of it."""
    plain = load_cluster("dgx-h100")
    slow = plain.model_copy(
        update={"collectives": plain.collectives.model_copy(update={"message_delay": 0.25})}
    )
    members = {"near": np.array([[0, 1]]), "far": np.array([[0, 8]])}
    for name, delay in (("near", 0.0), ("far", 0.25)):
        groups: list[Group] = [Pairs(name, members[name])]
        without, with_delay = (
            run_at_once(fabric_of(one, groups=groups), [(collective("send", 2**20, name), 0)])[0]
            for one in (plain, slow)
        )
        assert with_delay - without == pytest.approx(delay, rel=1e-9, abs=1e-12)
    both = [Group("far", members["far"])]
    times = [
        run_at_once(fabric_of(one, groups=both), [(collective(group="far"), 0)]) for one in (plain, slow)
    ]
    assert times[0] == times[1]


def test_gloos_reduce_scatter_sends_a_whole_all_reduce() -> None:
    fabric = fabric_of("cpu-gloo")
    sizes = [fabric.transfer(collective(kind), 0).size for kind in ("reduce_scatter", "all_reduce")]
    assert sizes[0] == sizes[1]


# -- conservation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_out_comes_in(cluster: str, kind: CollectiveKind) -> None:
    """Over all links of a kind, both directions carry the same bytes; and between nodes each card does."""
    fabric = fabric_of(cluster, nodes=3)
    total, classes = fabric.usage([collective(kind)]), fabric.topology.classes
    for out, into in (("nvlink_out", "nvlink_in"), ("pcie_up", "pcie_down"), ("nic_out", "nic_in")):
        if out in classes:
            sums = [total[classes[c].first : classes[c].first + classes[c].count].sum() for c in (out, into)]
            assert sums[0] == pytest.approx(sums[1], rel=1e-12)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_leaves_each_node_once(kind: CollectiveKind) -> None:
    """The cards of a node send S (n-1)/n together, whatever the number of rings."""
    fabric = fabric_of(nodes=4)
    total, out = fabric.usage([collective(kind)]), fabric.topology.classes["nic_out"]
    per_node = total[out.first : out.first + out.count].reshape(4, -1).sum(axis=1)
    assert per_node == pytest.approx([bus_bytes(kind, 1e9, 32)] * 4, rel=1e-12)


def test_shards_in_a_node_leave_the_network_alone() -> None:
    """HSDP: the shard group's collectives stay on NVLink, the replicas' go over the cards."""
    groups = [Group.regular("shard", 16, 8), Group.regular("replicate", 16, 2, 8)]
    fabric = fabric_of(nodes=2, groups=groups)
    inside = fabric.traffic([collective("all_gather", group="shard")])
    across = fabric.traffic([collective("all_reduce", group="replicate")])
    assert inside["nic_out"].total_bytes == inside["nic_in"].total_bytes == 0
    assert across["nic_out"].total_bytes > 0


def test_traffic_is_all_links_and_the_fullest_and_adds_up_over_calls() -> None:
    fabric = fabric_of(nodes=2)
    one, three = fabric.traffic([collective()]), fabric.traffic([collective()] * 3)
    for name, load in one.items():
        assert three[name] == pytest.approx((3 * load.total_bytes, 3 * load.fullest_bytes))
    sent = bus_bytes("all_gather", 1e9, 16)
    assert one["nvlink_out"] == pytest.approx((16 * sent, sent))


# -- sharing ---------------------------------------------------------------------------------------------


def test_equal_groups_do_not_disturb_each_other_where_links_are_their_own() -> None:
    """Both nodes gather at once, each on its own NVLink: as fast as one alone."""
    fabric = fabric_of(nodes=2, groups=[Group.regular("node", 16, 8)], folded=False)
    work = collective(group="node")
    alone = fabric.transfer(work, 0).isolated_seconds
    assert run_at_once(fabric, [(work, 0), (work, 1)]) == pytest.approx([alone, alone], rel=1e-9)


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-2", "rtx-4090-x8"])
def test_folded_replicas_load_the_links_of_all_of_them(cluster: str) -> None:
    """A pair of nodes, one group per local rank, all at once: eight cards for eight pairs, for sixteen, or a
    single card. A folded activity and all unfolded ones take the same."""
    local = load_cluster(cluster).gpus_per_node
    groups = [Group.regular("pairs", 2 * local, 2, local)]
    work = collective("all_reduce", group="pairs")
    (folded,) = run_at_once(fabric_of(cluster, groups=groups), [(work, 0)])
    unfolded = fabric_of(cluster, groups=groups, folded=False)
    every = run_at_once(unfolded, [(work, number) for number in range(local)])
    assert every == pytest.approx([folded] * local, rel=1e-9)


def full_weights(fabric: Fabric, work: Collective, transfer: Transfer) -> dict[str, float]:
    """What each link carries per byte of the transfer, before lumping."""
    size = bus_bytes(work.kind, work.bytes, fabric.groups[work.group].size)
    costs = fabric.costs.protocols[transfer.protocol]
    fraction = np.where(fabric.topology.leaves_node(), costs.inter_fraction, costs.intra_fraction)
    weights = fabric.usage([work]) / size / fraction
    return {str(link): float(weights[link]) for link in np.flatnonzero(weights)}


@pytest.mark.parametrize("cluster", ["dgx-h100", "dgx-2", "rtx-4090-x8"])
def test_lumped_links_give_the_rates_of_all_links(cluster: str) -> None:
    """Gathering in nodes, across nodes in two halves, and everywhere, all at once: the pool's few resources
    against the solver on every single link. Rates show in the time until the first of them ends."""
    nodes, per_node = 4, load_cluster(cluster).gpus_per_node
    world = nodes * per_node
    groups = [
        Group.regular("node", world, per_node),
        Group.regular("halves", world, 2 * per_node),
        Group.regular("rails", world, nodes, per_node),
    ]
    fabric = fabric_of(cluster, nodes, groups)
    assert len(fabric.pool.capacity) < fabric.topology.num_links / 4
    works = [collective(size=4 * 10**9, group=group.name) for group in groups]
    transfers = [fabric.transfer(work, 0) for work in works]
    usage = {
        work.group: full_weights(fabric, work, transfer)
        for work, transfer in zip(works, transfers, strict=True)
    }
    capacities = fabric.topology.capacities()
    rates = max_min_fair_rates(usage, {str(link): float(c) for link, c in enumerate(capacities)})
    activities = [fabric.pool.start(transfer.profile, transfer.size, lambda: None) for transfer in transfers]
    while not all(activity.rate for activity in activities):
        fabric.env.step()
    assert [activity.rate for activity in activities] == pytest.approx(
        [rates[w.group] for w in works], rel=1e-9
    )


# -- laws ------------------------------------------------------------------------------------------------


def widened(cluster: Cluster, link: float, pcie: float, nic: float) -> Cluster:
    """The same cluster with so many times the bandwidth."""
    update = {
        name: getattr(cluster, name).model_copy(
            update={"bandwidth": getattr(cluster, name).bandwidth * factor}
        )
        for name, factor in (("node_link", link), ("pcie", pcie), ("nic", nic))
    }
    return cluster.model_copy(update=update)


factors = st.floats(1.0, 8.0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["dgx-h100", "dgx-a100-80gb", "dgx-2", "rtx-4090-x8"]),
    st.sampled_from(KINDS),
    st.integers(1, 10**10),
    st.integers(1, 4),
    factors,
    factors,
    factors,
)
def test_more_bandwidth_never_slows_a_single_collective(
    cluster: str, kind: CollectiveKind, size: int, nodes: int, link: float, pcie: float, nic: float
) -> None:
    spec = load_cluster(cluster)
    work = collective(kind, size)
    before = fabric_of(spec, nodes).transfer(work, 0).isolated_seconds
    after = fabric_of(widened(spec, link, pcie, nic), nodes).transfer(work, 0).isolated_seconds
    assert after <= before * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CLUSTERS), st.sampled_from(KINDS), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time(cluster: str, kind: CollectiveKind, size: int, more: int) -> None:
    fabric = fabric_of(cluster)
    small, large = (fabric.transfer(collective(kind, s), 0).isolated_seconds for s in (size, size + more))
    assert small <= large * (1 + 1e-9)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_bus_bandwidth_of_a_huge_ring_collective_is_that_of_its_bottleneck(cluster: str) -> None:
    """nccl-tests' busbw; without latency to speak of, the narrowest link on the way, its protocol's share."""
    fabric = fabric_of(cluster)
    work = collective(size=10**13)
    transfer = fabric.transfer(work, 0)
    weights = full_weights(fabric, work, transfer)
    capacities = fabric.topology.capacities()
    narrowest = min(capacities[int(link)] / weight for link, weight in weights.items())
    bus = bus_bytes("all_gather", 1e13, fabric.topology.world_size) / transfer.isolated_seconds
    assert bus == pytest.approx(narrowest, rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "per_node", "inside"),
    [("dgx-h100", 8, 8), ("rtx-4090-x8", 8, 7), ("mi300x-x8", 8, 7)],
)
def test_what_a_gpu_sends_is_split_into_inside_and_between(cluster: str, per_node: int, inside: int) -> None:
    """A ring over two nodes has 16 edges of 15/16 S, two of which leave a node: 2/16 per GPU. Over NVLink
    switches these pass the eighth GPU's NVLink too (PXN): 16/16; elsewhere 14/16."""
    fabric = fabric_of(cluster, 2)
    work = collective("all_gather", 16 * 10**8)
    sent = bus_bytes("all_gather", work.bytes, 2 * per_node)
    assert fabric.sent_bytes(work) == pytest.approx((sent * inside / 8, sent / 8))


@pytest.mark.parametrize(("cluster", "nodes", "expected"), [("dgx-h100", 1, 0.5), ("aws-p4d", 2, 0.0)])
def test_what_kernels_can_add_to_a_collective_is_told_where_links_inside_nodes_bound_it(
    cluster: str, nodes: int, expected: float
) -> None:
    """By a factor of 1.5: half of the time on NVLink, none of that on the cards."""
    spec = load_cluster(cluster)
    interference = spec.gpu.interference.model_copy(update={"communication_slowdown": 1.5})
    spec = spec.model_copy(update={"gpu": spec.gpu.model_copy(update={"interference": interference})})
    limit = fabric_of(spec, nodes).limit(collective())
    assert limit.slowed_seconds == pytest.approx(expected * (limit.seconds - limit.latency_seconds))


def test_without_a_slowdown_a_collective_has_one_profile() -> None:
    spec = load_cluster("dgx-h100")
    interference = spec.gpu.interference.model_copy(update={"communication_slowdown": 1.0})
    spec = spec.model_copy(update={"gpu": spec.gpu.model_copy(update={"interference": interference})})
    transfer = fabric_of(spec).transfer(collective(), 0)
    assert transfer.slow_profile is transfer.profile
