"""The run of a job's routed experts: on how many ranks, by which library, with which loads."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from zsim.operations.grouped_linear import GroupedKernel
from zsim.specs.strategy.expert_library import TRANSFORMERS, ExpertLibrary
from zsim.specs.strategy.expert_loads import kept_fraction

Dispatcher = Literal["all-gather", "all-to-all", "deepep", "hybridep"]
DEDUPLICATING_DISPATCHERS: tuple[Dispatcher, ...] = ("deepep", "hybridep")
"""A token that goes to several experts of one rank is sent to it once."""


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """The routed experts of every layer, on `ranks` ranks, with each expert's products on `tensor` of
    them.
    """

    ranks: int = 1
    tensor: int = 1
    dispatcher: Dispatcher = "all-to-all"
    """The exchange that brings rows to the experts' ranks."""
    capacity_factor: float | None = None
    """Rows that an expert takes, over the mean. None if it takes all that are routed to it."""
    pads_to_capacity: bool = False
    """Every expert has as many rows as its capacity, so that the host reads no counts."""
    loads: tuple[float, ...] = (1.0,)
    """Rows of each rank of a group over the mean, the fullest first. One number if all have as many."""
    library: ExpertLibrary = TRANSFORMERS
    """The library whose code runs them."""
    kernel: GroupedKernel = "grouped"
    """The way in which grouped products run."""
    gate_in_fp32: bool | None = None
    """Whether the gate's product is in fp32. None for the model's own choice."""
    has_auxiliary_loss: bool = False
    token_ranks: int = 1
    """Tensor-parallel ranks that each send a part of a layer's tokens, which all of them have."""
    nodes: int = 1
    """Nodes that the ranks of a group are on. A dispatcher that merges sends a token to each of them once."""
    overlaps_shared: bool = False
    """Shared experts run while rows are exchanged."""
    agrees_on_capacity: bool = False
    """The ranks take the rows of their fullest expert for the capacity, which the host reads."""
    padding: float = 1.0
    """Rows of the fullest expert over the mean, where every expert is padded to them."""
    quantised_padding: Literal["", "map", "copies"] = ""
    """The place where rows of quantised products come up to a multiple. Empty where they need not."""
    builds_map_with_masks: bool = False
    """Behind DeepEP's dispatch, masks make the map of rows to local experts, and the host reads their
    lengths. Otherwise a fused kernel makes it.
    """
    deviation: float = 0.0
    """The deviation of the experts' loads over their mean, where `loads` are assumed by it."""

    @property
    def members(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.ranks * self.tensor

    @property
    def has_expert_groups(self) -> bool:
        """Whether experts are reduced and sharded over a group of their own."""
        return self.ranks > 1 or self.library.has_expert_groups

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean, as far as the capacity takes them."""
        if self.capacity_factor is None:
            return max(self.loads)
        return self.capacity_factor if self.pads_to_capacity else min(max(self.loads), self.capacity_factor)

    @property
    def sent_fraction(self) -> float:
        """Rows that a rank sends, over those that its tokens choose."""
        if self.capacity_factor is None:
            return 1.0
        return (
            self.capacity_factor
            if self.pads_to_capacity
            else kept_fraction(self.capacity_factor, self.deviation)
        )

    @property
    def exchanged_fraction(self) -> float:
        """Rows of an exchange, over those that a rank's tokens choose.

        Of assumed loads these are the rows of the fullest rank, which all wait for.
        """
        return max(self.sent_fraction, self.imbalance) if self.deviation else self.sent_fraction

    @property
    def host_waits(self) -> bool:
        """Whether the host reads the rows of each expert before it goes on."""
        if self.pads_to_capacity:
            return self.agrees_on_capacity
        return self.members > 1 or self.library.waits_for_counts


def expected_partitions(
    num_experts: int, top_k: int, partitions: int, num_groups: int = 1, top_groups: int = 1
) -> float:
    """Expected number of `partitions` equal partitions of the experts that hold at least one of a token's
    `top_k`.

    All choices are equally likely. With P experts in p partitions to choose from it is p (1 - C(P - P/p, k) /
    C(P, k)). Of `num_groups` groups only `top_groups` are left, and of the partitions as many as are in them.
    A partition of q of the g groups has j of the t chosen ones with probability C(q, j) C(g - q, t - j) /
    C(g, t).
    """
    candidates = num_experts * top_groups // num_groups
    if partitions > num_groups:
        candidate_partitions = partitions * top_groups / num_groups
        return candidate_partitions * (
            1.0 - comb(candidates - round(candidates / candidate_partitions), top_k) / comb(candidates, top_k)
        )
    groups_per_partition, experts_per_group = num_groups // partitions, num_experts // num_groups
    missed = 0.0
    for chosen in range(min(groups_per_partition, top_groups) + 1):
        ways = comb(groups_per_partition, chosen) * comb(
            num_groups - groups_per_partition, top_groups - chosen
        )
        missed += ways / comb(num_groups, top_groups) * comb(candidates - chosen * experts_per_group, top_k)
    return partitions * (1.0 - missed / comb(candidates, top_k))
