"""NCCL's tuning model: the time it expects of each algorithm and protocol, by which it chooses.

These are NCCL's planning numbers, not measurements: they decide the choice, while the simulated time comes
from the links. Source of tables and equations: NVIDIA/nccl src/graph/tuning.cc, 2.20 (commit b6475625) for
ring and tree, 2.27 for NVLS, NVLSTree and PAT (ncclTunerConstantsDefaults, ncclTopoTuneModel,
ncclTopoGetAlgoTime). Latencies in microseconds, bandwidths in GB/s, as in the source.

# [Note: trees on two nodes] Each of two nodes is the root of one tree and the only child in the other, so a
card sends half of what it does on a ring. NCCL plans so: on up to two nodes it takes a graph's bandwidth
inside, which its search raises for trees to twice what they have between nodes where the links inside give it
(src/graph/search.cc, "increase bwIntra for trees (2 nodes or collnet)", the same in 2.7, 2.8, 2.20 and 2.27).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zsim.specs.cluster.cluster import Cluster

_PROTOCOLS = ("ll", "ll128", "simple")
_GENERATIONS = ("volta", "ampere", "hopper", "blackwell")
_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
_NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25), "nvls_tree": (0, 0, 25)}
_PCI = {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0, 0, 0), "nvls_tree": (0, 0, 0)}
_NET = {
    "tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 18), "nvls_tree": (0, 0, 20.9),
    "pat": (0, 0, 14.0),
}  # fmt: skip
# By generation, for 1, 2, and 4 or more nodes
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_RING_LL128 = (20.0, 20.0, 36.7, 40.0)
_TREE_LL128 = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_SIMPLE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (math.inf, 57.7, 45.5), (math.inf, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
_TREE_CORRECTION = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "ll128": (
        1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1,
    ),
    "simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7,
        0.8, 0.9, 0.9,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """NCCL's view of a machine."""

    generation: str
    intra_bytes_per_second: float
    """Bandwidth of all channels inside a domain."""
    inter_bytes_per_second: float
    """Bandwidth of all channels between domains."""
    has_nvlink: bool
    channels: int
    network_overhead: float
    """The network's overhead per round, in seconds."""


def nccl_seconds(
    machine: Machine,
    kind: str,
    algorithm: str,
    protocol: str,
    full_bytes: float,
    num_ranks: int,
    num_nodes: int,
) -> float:
    """Expected seconds. They are infinite for combinations that NCCL does not run (NVLS or PAT in LL or
    LL128, ...).

    Algorithms that NCCL does not choose between (all-to-all, point to point) cost 0.
    """
    if algorithm not in ("ring", "tree", "nvls", "nvls_tree", "pat") or protocol not in _PROTOCOLS:
        return 0.0
    if algorithm in ("nvls", "nvls_tree", "pat") and protocol != "simple":
        return math.inf
    algorithm_bandwidth = _bus_bandwidth(machine, algorithm, protocol, num_nodes)
    algorithm_bandwidth *= _ratio(kind, algorithm, num_ranks)
    size_class = max(int(full_bytes) >> 6, 1).bit_length() - 1
    if algorithm == "tree" and size_class < 23:
        algorithm_bandwidth *= _TREE_CORRECTION[protocol][size_class]
    if algorithm_bandwidth <= 0:
        return math.inf
    latency = _latency_us(machine, kind, algorithm, protocol, num_ranks, num_nodes)
    is_plain_ring = algorithm == "ring" and protocol == "simple" and num_nodes > 1
    if is_plain_ring and kind == "all_reduce" and full_bytes / (machine.channels * num_ranks) >= 64:
        latency *= 1.9 if machine.generation == "volta" else 1.4  # plateau of the ring
    return latency * 1e-6 + full_bytes / (algorithm_bandwidth * 1e9)


def _bus_bandwidth(machine: Machine, algorithm: str, protocol: str, num_nodes: int) -> float:
    """GB/s of all channels together."""
    generation = _GENERATIONS.index(machine.generation)
    scale = min(num_nodes, 3) - 1
    channels = machine.channels
    intra, inter = machine.intra_bytes_per_second / 1e9, machine.inter_bytes_per_second / 1e9
    if algorithm in ("nvls", "nvls_tree"):
        inside = intra * _NVLS_EFFICIENCY[generation] * 2 * (channels - 1) / channels
        if num_nodes == 1:
            return inside
        across = inter * (2 if num_nodes == 2 else 1)
        return min(inside, across, channels * _NVLS_TREE[generation][scale])
    bus = intra if num_nodes == 1 else min(intra, inter)
    if algorithm == "pat":
        return bus * 0.75
    if algorithm == "ring":
        if protocol == "ll":
            return min(_LL_MAX[generation][scale], bus * 0.25)
        return min(bus * 0.92, channels * _RING_LL128[generation]) if protocol == "ll128" else bus
    if num_nodes == 2:  # [Note: trees on two nodes]
        bus = min(intra, 2 * inter)
    bus = min(bus * 0.92, channels * _TREE_SIMPLE[generation][scale])
    if protocol == "ll":
        return min(bus / 3.8, _LL_MAX[generation][scale])
    if protocol == "ll128":
        part = 7 / 9 if num_nodes == 1 else 120 / 128
        return min(bus * part, channels * _TREE_LL128[generation][scale])
    return bus


def _ratio(kind: str, algorithm: str, num_ranks: int) -> float:
    """Algorithm bandwidth over bus bandwidth."""
    steps = {"all_reduce": 2 * (num_ranks - 1), "broadcast": num_ranks, "reduce": num_ranks}
    if algorithm == "tree":
        return 0.5
    return num_ranks / steps.get(kind, num_ranks - 1)


def _latency_us(
    machine: Machine, kind: str, algorithm: str, protocol: str, num_ranks: int, num_nodes: int
) -> float:
    p = _PROTOCOLS.index(protocol)
    base = _BASE.get(algorithm, (0.0, 0.0, 0.0))[p]
    inside = float((_NVLINK if machine.has_nvlink else _PCI).get(algorithm, (0, 0, 4.0))[p])
    across = float(_NET[algorithm][p])
    levels = math.log2(num_nodes)
    if algorithm == "nvls":
        return inside + (across if num_nodes > 1 else 0.0)
    if algorithm == "nvls_tree":
        return base + inside + 2 * int(levels) * across
    if algorithm == "pat":
        return base + int(levels) * across / 3.5 + num_ranks * 2.8
    if algorithm == "tree":
        return base + 2 * ((num_ranks // num_nodes - 1) * inside + int(levels) * across)
    laps = 2 if kind == "all_reduce" else 1
    if kind in ("broadcast", "reduce"):
        return base + num_ranks * (across if num_nodes > 1 else inside)
    steps, inter_steps = laps * (num_ranks - 1), laps * (num_nodes - 1)
    if num_nodes > 1:
        inside = max(inside, machine.network_overhead * 1e6 * (3 if protocol == "simple" else 1))
    return base + (steps - inter_steps) * inside + inter_steps * across


def planned_seconds(
    cluster: Cluster,
    kind: str,
    algorithm: str,
    protocol: str,
    full_bytes: float,
    num_ranks: int,
    num_domains: int,
) -> float:
    """Seconds that NCCL's tuning model expects on a cluster, from the bandwidths that it assumes for the
    links. Infinite where NCCL never runs the algorithm with the protocol.
    """
    generation = cluster.collectives.generation
    assert generation is not None
    link, nic = cluster.node_link, cluster.nic
    local = max(num_ranks // num_domains, 1)
    cards = min(local * nic.per_node / cluster.gpus_per_node, nic.per_node * link.nodes_per_domain)
    machine = Machine(
        generation=generation,
        intra_bytes_per_second=(link.bandwidth or cluster.pcie.bandwidth) * link.efficiency,
        inter_bytes_per_second=max(cards, 1.0) * nic.bandwidth,
        has_nvlink=link.kind != "none",
        channels=cluster.collectives.channels,
        network_overhead=max(costs.network_overhead for costs in cluster.collectives.protocols.values()) / 3,
    )
    return nccl_seconds(machine, kind, algorithm, protocol, full_bytes, num_ranks, num_domains)
