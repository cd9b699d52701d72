"""Chunks in which NCCL sends a tensor up and down its trees, and the seconds to fill the pipeline of a tree.

Every channel is a separate tree (half of the channels on each of the two trees) and cuts its part of the
tensor into P chunks. A chunk goes from the farthest rank to the root and back, one edge after the other, and
chunks follow each other. So, with b(e) seconds for all bytes over edge e of that path,

    seconds = rounds + max b + (sum b - max b) / P

The chunk is a slot of the channel's buffer, halved while there are too few for the tree's depth (NVIDIA/nccl
src/enqueue.cc, computeColl, 2.12 to 2.20; buffers: src/init.cc, src/include/device.h): Simple 512 KiB of 4
MiB, LL128 576,000 bytes of data, LL 32 KiB.
"""

from __future__ import annotations

from math import ceil

from zsim.cost.collectives.rounds import Rounds

_KIB = 1024
_CHUNK_BYTES = {"ll": 32 * _KIB, "ll128": 576_000, "simple": 512 * _KIB}


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
