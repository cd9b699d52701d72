"""Collectives on an idle ring: what every edge carries, how many rounds it takes.

S is the full tensor in bytes (output of an all-gather, input of a reduce-scatter, buffer of an all-reduce),
n the number of ranks, k the number of nodes they are on. Bytes per ring edge (nccl-tests,
doc/PERFORMANCE.md, the bus-bandwidth factors):

    all_gather, reduce_scatter    S (n-1)/n
    all_reduce                    2 S (n-1)/n
    broadcast, reduce             S

Rounds, and how many of them leave a node (NCCL 2.21 src/graph/tuning.cc, ncclTopoTuneModel: nsteps and
nInterSteps of the ring algorithm):

    all_gather, reduce_scatter    n-1,       k-1
    all_reduce                    2 (n-1),   2 k   (0 on one node)
    broadcast, reduce             n,         k     (0 on one node)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from zsim.errors import NotSimulatedError

_HALF_RING = ("all_gather", "reduce_scatter")
_CHAIN = ("broadcast", "reduce")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Latency steps of one collective, inside nodes and between them."""

    intra: int
    inter: int


def edge_bytes(kind: str, full_bytes: float, num_ranks: int) -> float:
    """Bytes that each directed edge of the ring carries for one call; 0 for one rank or no bytes."""
    if num_ranks <= 1:
        return 0.0
    if kind in _HALF_RING:
        return full_bytes * (num_ranks - 1) / num_ranks
    if kind == "all_reduce":
        return 2 * full_bytes * (num_ranks - 1) / num_ranks
    if kind in _CHAIN:
        return float(full_bytes)
    raise NotSimulatedError(f"{kind} is not simulated on a ring yet")


def ring_rounds(kind: str, num_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps of the ring algorithm."""
    if num_ranks <= 1:
        return Rounds(0, 0)
    if kind in _HALF_RING:
        total, inter = num_ranks - 1, num_nodes - 1
    elif kind == "all_reduce":
        total, inter = 2 * (num_ranks - 1), 2 * num_nodes if num_nodes > 1 else 0
    elif kind in _CHAIN:
        total, inter = num_ranks, num_nodes if num_nodes > 1 else 0
    else:
        raise NotSimulatedError(f"{kind} is not simulated on a ring yet")
    inter = min(inter, total)
    return Rounds(total - inter, inter)


def tree_rounds(num_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps of an all-reduce on NCCL's double binary tree: up and down a chain inside each node and a
    binary tree across nodes, 2 (n/k - 1) and 2 ceil(log2 k) (NCCL 2.21 src/graph/tuning.cc)."""
    return Rounds(2 * (num_ranks // num_nodes - 1), 2 * ceil(log2(num_nodes)))


def hierarchical_rounds(kind: str, num_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps when a ring inside each node and a ring across nodes follow each other."""
    local = num_ranks // num_nodes
    factor = 2 if kind == "all_reduce" else 1
    return Rounds(factor * (local - 1), factor * (num_nodes - 1))


def bus_bandwidth_factor(kind: str, num_ranks: int) -> float:
    """busbw / algbw as nccl-tests defines it."""
    return edge_bytes(kind, 1.0, num_ranks)
