"""Samples dealt out to the trainer's replicas, and packed into micro-batches.

Frameworks that pack give a micro-batch samples up to a number of tokens, each of which sees its own tokens
alone. The samples of an update are dealt out so that all replicas have about as many tokens (verl
`balance_batch`, Karmarkar and Karp), and replicas run as many micro-batches as the one with most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zsim.arrays import Ints


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The micro-batches of one update, or of one pass over a rollout."""

    micro_batches: int
    """Micro-batches of every replica."""
    tokens: float
    """Mean tokens of a micro-batch, over replicas."""
    total_tokens: int
    """Tokens of all replicas."""
    sample_tokens: float
    """Length of samples alike that attend to as many tokens as these do: sum of squares over sum."""


def pack(lengths: Ints, replicas: int, max_tokens: int) -> PackedBatch:
    """Samples of `lengths` tokens on `replicas`, in micro-batches of at most `max_tokens`.

    The longest samples come first, each to the replica with the fewest tokens (Graham 1969) and there into
    the first micro-batch with room.
    """
    order = np.sort(lengths)[::-1]
    loads = np.zeros(replicas, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(replicas)]
    for length in order:
        replica = int(loads.argmin())
        loads[replica] += length
        _put(bins[replica], int(length), max_tokens)
    count = max(1, max(len(fills) for fills in bins))
    total = int(lengths.sum())
    squares = float((lengths.astype(np.float64) ** 2).sum())
    return PackedBatch(count, total / replicas / count, total, squares / total)


def _put(fills: list[int], length: int, max_tokens: int) -> None:
    for index, fill in enumerate(fills):
        if fill + length <= max_tokens:
            fills[index] = fill + length
            return
    fills.append(length)
