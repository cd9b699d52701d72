"""Collectives on idle links: bytes that a rank must send, and rounds that an algorithm takes.

S is the full tensor in bytes (output of an all-gather, input of a reduce-scatter, buffer of an all-reduce,
one rank's buffer of an all-to-all), n the number of ranks, k the number of NVLink domains (nodes) they are
on, g = n/k. *Bus bytes* are the bytes that every rank must at least send (nccl-tests, doc/PERFORMANCE.md, the
bus-bandwidth factors), so that bus bytes over seconds is nccl-tests' busbw whatever the algorithm:

    all_gather, reduce_scatter, all_to_all    S (n-1)/n (unequal parts: the most that a member sends)
    all_reduce                                2 S (n-1)/n
    broadcast, reduce, send, recv             S

Rounds inside domains and between them (NCCL 2.20 src/graph/tuning.cc, ncclTopoTuneModel, and newer):

    ring     all_gather, reduce_scatter    n-1 in all, of which k leave a domain (k-1 when g = 1)
             all_reduce                    2 (n-1), 2 k   (0 on one domain)
             broadcast, reduce             n, k           (0 on one domain)
    tree     all_reduce                    2 (g-1), 2 ceil(log2 k)
    nvls     all_reduce                    1 (the switches reduce and multicast)
    nvls_tree    all_reduce                1, 2 ceil(log2 k)
    pat      all_gather, reduce_scatter    n (a linear part), ceil(log2 n)
    all_to_all                             ceil((g-1)/16) (0 where k > 1), ceil((k-1)/16): all bytes to one
                                           node go in one round, those inside a node meanwhile, 16 at a time

NCCL's tuning model has k-1 for the ring's all-gather. But the longest chain of n-1 edges leaves a domain k
times when the piece starts inside one, as a simulation message by message confirms (`tests/oracles`).

# [Note: chunks of a tree]
NCCL sends a tensor up and down its trees in chunks, and to fill that pipeline takes time. Every channel is a
separate tree (half of the channels on each of the two trees) and cuts its part of the tensor into P chunks. A
chunk goes from the farthest rank to the root and back, one edge after the other, and chunks follow each
other. So, with b(e) seconds for all bytes over edge e of that path,

    seconds = rounds + max b + (sum b - max b) / P

The chunk is a slot of the channel's buffer, halved while there are too few for the tree's depth (NVIDIA/nccl
src/enqueue.cc, computeColl, 2.12 to 2.20; buffers: src/init.cc, src/include/device.h): Simple 512 KiB of 4
MiB, LL128 576,000 bytes of data, LL 32 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from zsim.errors import NotSimulatedError

_KIB = 1024
_CHUNK_BYTES = {"ll": 32 * _KIB, "ll128": 576_000, "simple": 512 * _KIB}

_HALF_RING = ("all_gather", "reduce_scatter")
_CHAIN = ("broadcast", "reduce")
_PAIR = ("send", "recv")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Latency steps of one collective, inside nodes and between them."""

    intra: int
    inter: int


class CallLimit(NamedTuple):
    """One collective on idle links."""

    latency_seconds: float
    seconds: float
    tier: str
    """The tier of links that bounds the transfer, "" where nothing is sent."""
    slowed_seconds: float = 0.0
    """Maximum of the extra time when kernels run on the collective's GPUs."""


def bus_bytes(kind: str, full_bytes: float, num_ranks: int) -> float:
    """Bus bytes of one call, which each directed edge of a ring carries. 0 for one rank or no bytes."""
    if num_ranks <= 1:
        return 0.0
    if kind in _HALF_RING or kind == "all_to_all":
        return full_bytes * (num_ranks - 1) / num_ranks
    if kind == "all_reduce":
        return 2 * full_bytes * (num_ranks - 1) / num_ranks
    if kind in _CHAIN or kind in _PAIR:
        return float(full_bytes)
    raise NotSimulatedError(f"{kind} is not simulated yet")


def unequal_bus_bytes(split_sizes: Sequence[Sequence[int]]) -> int:
    """Bus bytes of an all-to-all of unequal parts: the maximum of the bytes that a member sends to others.
    `split_sizes[i][j]` are those from member i to member j.
    """
    return max(sum(row) - row[index] for index, row in enumerate(split_sizes))


def ring_rounds(kind: str, num_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps of the ring algorithm."""
    if num_ranks <= 1:
        return Rounds(0, 0)
    spans = num_nodes > 1
    if kind in _HALF_RING:
        total, inter = num_ranks - 1, num_nodes if spans else 0
    elif kind == "all_reduce":
        total, inter = 2 * (num_ranks - 1), 2 * num_nodes if spans else 0
    elif kind in _CHAIN:
        total, inter = num_ranks, num_nodes if spans else 0
    else:
        raise NotSimulatedError(f"{kind} is not simulated on a ring yet")
    inter = min(inter, total)
    return Rounds(total - inter, inter)


def tree_rounds(most_local_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps of an all-reduce on NCCL's double binary tree: up and down the longest chain inside a
    node and a binary tree across nodes, 2 (g - 1) and 2 ceil(log2 k) (NCCL 2.21 src/graph/tuning.cc)."""
    return Rounds(2 * (most_local_ranks - 1), 2 * ceil(log2(num_nodes)))


def nvls_rounds(num_nodes: int) -> Rounds:
    """Latency steps of NVLS in one domain (one round), or of NVLSTree across domains (in addition up and down
    a binary tree).
    """
    return Rounds(1, 2 * ceil(log2(num_nodes)))


def pat_rounds(num_ranks: int) -> Rounds:
    """PAT on one rank per node: log2 n rounds between nodes, and a part linear in n, counted as n rounds
    inside (NCCL 2.23 src/graph/tuning.cc: log2(nNodes) interLat/3.5 + nRanks 2.8 us)."""
    return Rounds(num_ranks, ceil(log2(num_ranks)))


# NCCL puts the rounds of a group of sends and receives on different channels (2.20 src/include/comm.h,
# `ncclP2pChannelBaseForRound`), which run concurrently; it has up to 32, as many as the fabric has rings and
# trees for: 16 on nodes with 8 network cards.
CONCURRENT_ROUNDS = 16


def all_to_all_rounds(num_ranks: int, num_nodes: int) -> Rounds:
    """One round per other node, or per peer in a single node, `CONCURRENT_ROUNDS` of them at a time. The cost
    of a round is assumed: NCCL's tuning model has no all-to-alls.
    """
    if num_nodes > 1:
        return Rounds(0, ceil((num_nodes - 1) / CONCURRENT_ROUNDS))
    return Rounds(ceil((num_ranks - 1) / CONCURRENT_ROUNDS), 0)


def binomial_rounds(num_ranks: int, num_nodes: int) -> Rounds:
    """gloo's broadcast: a binomial tree of ceil(log2 n) rounds, ceil(log2 k) of them between nodes."""
    inter = ceil(log2(num_nodes))
    return Rounds(max(ceil(log2(num_ranks)) - inter, 0), inter)


def hierarchical_rounds(kind: str, num_ranks: int, num_nodes: int) -> Rounds:
    """Latency steps of a ring inside each node followed by a ring across nodes."""
    local = num_ranks // num_nodes
    factor = 2 if kind == "all_reduce" else 1
    return Rounds(factor * (local - 1), factor * (num_nodes - 1))


def tree_pieces(protocol: str, full_bytes: float, num_channels: int, num_ranks: int, num_domains: int) -> int:
    """Chunks that every channel sends one after the other, at least 1. Protocols other than NCCL's three use
    Simple's chunks.
    """
    per_channel = full_bytes / num_channels
    chunk = _CHUNK_BYTES.get(protocol, _CHUNK_BYTES["simple"])
    local = num_ranks / num_domains
    levels = num_domains.bit_length() - 1
    if protocol == "ll128":
        steps = (1 + levels + 0.1 * local) / local
        chunk = _halve_chunk(per_channel, chunk, ((64 * steps, 128 * _KIB), (16 * steps, 32 * _KIB)))
    elif protocol != "ll":
        depth = local - 1 + levels
        limits = ((8 * depth, 128 * _KIB), (4 * depth, 64 * _KIB), (depth, 32 * _KIB))
        chunk = _halve_chunk(per_channel, chunk, limits)
    return max(1, ceil(per_channel / chunk))


def _halve_chunk(per_channel: float, chunk: int, limits: tuple[tuple[float, int], ...]) -> int:
    """Chunk size in bytes, halved while there are fewer than `count` chunks and it is above `floor` bytes."""
    for count, floor in limits:
        while per_channel // chunk < count and chunk > floor:
            chunk //= 2
    return chunk


def fill_seconds(rounds: Rounds, inside_seconds: float, across_seconds: float, num_pieces: int) -> float:
    """Seconds to fill the pipeline of a tree, up and down: one chunk over every edge but the slowest, whose
    seconds are in the time of the transfer. `inside_seconds` and `across_seconds` are those of all bytes over
    the busiest link inside a node and between nodes.
    """
    edges = rounds.intra * inside_seconds + rounds.inter * across_seconds
    return max(edges - max(inside_seconds, across_seconds), 0.0) / num_pieces
