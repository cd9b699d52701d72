"""The ways in which ranks share an operation: its features, or the sequences that it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

ContextLibrary = Literal["te", "torch", "ulysses"]
ContextMethod = Literal["p2p", "all-gather", "all-to-all", "a2a+p2p"]


@dataclass(frozen=True, slots=True)
class ContextSharding:
    """Attention over sequences of which each of `ranks` ranks has a part."""

    ranks: int
    method: ContextMethod
    """The way in which attention sees complete sequences."""
    library: ContextLibrary
    """Transformer Engine, torch's `context_parallel`, or DeepSpeed's Ulysses."""
    inner: int = 1
    """The ranks that exchange heads for tokens, with "a2a+p2p". Rings go through every `inner`-th rank."""
    has_masks: bool = False
    """torch's context parallelism is that of FlexAttention."""


@dataclass(frozen=True, slots=True)
class FeatureCut:
    """The features of an operation that one of `ranks` tensor-parallel ranks has."""

    ranks: int
    features: Callable[[int], int]
    """The rank's part of so many features."""
    is_first_rank: bool = False
    """The rank is the first of ranks with unequal parts, and has the groups of heads that are left."""
