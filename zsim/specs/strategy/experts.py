"""How a job's routed experts run: among how many ranks, by whose code, with which loads."""

from __future__ import annotations

from math import comb
from typing import Literal

from zsim.dataclass import dataclass
from zsim.specs.model.experts import ExpertsLibrary, GroupedKernel
from zsim.specs.strategy.expert_loads import kept_fraction

Dispatcher = Literal["all-gather", "all-to-all", "deepep", "hybridep"]
MERGING: tuple[Dispatcher, ...] = ("deepep", "hybridep")
"""A token that goes to several experts of one rank is sent to it once."""


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """The routed experts of every layer on `ranks` ranks, each expert's products on `tensor` of them.

    `dispatcher`: what brings rows to the experts' ranks. `capacity_factor`: rows that an expert takes, over
    the mean; None: all that are routed to it. `pads_to_capacity`: every expert has as many, so that the host
    reads no counts. `loads`: rows of each rank of a group over the mean, the fullest first; one number if
    all have as many. `library`: whose code rearranges rows. `kernel`: how grouped products run.
    `gate_in_fp32`: None for the model's own. `token_ranks`: tensor-parallel ranks that each send a part of
    a layer's tokens which all of them have. `nodes`: on which the ranks of a group are; a dispatcher that
    merges sends a token to each of them once. `overlaps_shared`: shared experts run beside the exchanges.
    `agrees_on_capacity`: the ranks take the rows of their fullest expert for the capacity, which the host
    reads. `padding`: rows of the fullest expert over the mean, where every expert is padded to them.
    `quantised_padding`: where rows of quantised products come up to a multiple, "" where they need not.
    `masks_map`: behind DeepEP's dispatch the map of rows to local experts is made by masks, whose lengths
    the host reads, not by a fused kernel.
    `deviation`: of the experts' loads over their mean, where `loads` are assumed by it.
    """

    ranks: int = 1
    tensor: int = 1
    dispatcher: Dispatcher = "all-to-all"
    capacity_factor: float | None = None
    pads_to_capacity: bool = False
    loads: tuple[float, ...] = (1.0,)
    library: ExpertsLibrary = "transformers"
    kernel: GroupedKernel = "grouped"
    gate_in_fp32: bool | None = None
    has_auxiliary_loss: bool = False
    token_ranks: int = 1
    nodes: int = 1
    overlaps_shared: bool = False
    agrees_on_capacity: bool = False
    padding: float = 1.0
    quantised_padding: Literal["", "map", "copies"] = ""
    masks_map: bool = False
    deviation: float = 0.0

    @property
    def members(self) -> int:
        """Ranks that share the experts of a layer."""
        return self.ranks * self.tensor

    @property
    def is_megatron(self) -> bool:
        return self.library.startswith("megatron")

    @property
    def is_deepspeed(self) -> bool:
        """Whether the experts are in a layer of DeepSpeed's."""
        return self.library in ("autoep", "deepspeed-moe")

    @property
    def has_own_ranks(self) -> bool:
        """Whether experts are reduced and sharded over a group of their own: DeepSpeed's layers have one also
        where all ranks have all experts."""
        return self.ranks > 1 or self.is_deepspeed

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean, as far as the capacity takes them."""
        if self.capacity_factor is None:
            return max(self.loads)
        return self.capacity_factor if self.pads_to_capacity else min(max(self.loads), self.capacity_factor)

    @property
    def sent(self) -> float:
        """Rows that a rank sends, over those that its tokens choose."""
        if self.capacity_factor is None:
            return 1.0
        return (
            self.capacity_factor
            if self.pads_to_capacity
            else kept_fraction(self.capacity_factor, self.deviation)
        )

    @property
    def exchanged(self) -> float:
        """Rows of an exchange, over those that a rank's tokens choose: of assumed loads those of the fullest
        rank, which all wait for."""
        return max(self.sent, self.imbalance) if self.deviation else self.sent

    @property
    def host_waits(self) -> bool:
        """Whether the host reads the rows of each expert before it goes on."""
        if self.pads_to_capacity:
            return self.agrees_on_capacity
        return self.is_megatron or self.members > 1 or self.library == "kempnerforge"


def parts_reached(
    num_experts: int, top_k: int, parts: int, num_groups: int = 1, top_groups: int = 1
) -> float:
    """Expected number of `parts` equal parts of the experts that hold at least one of a token's `top_k`, all
    choices being as likely: p (1 - C(P - P/p, k) / C(P, k)) with P experts in p parts to choose from. Of
    `num_groups` groups only `top_groups` are left, and of the parts as many as are in them; a part of several
    groups, q of g, has j of the t chosen ones with C(q, j) C(g - q, t - j) / C(g, t)."""
    left = num_experts * top_groups // num_groups
    if parts > num_groups:
        among = parts * top_groups / num_groups
        return among * (1.0 - comb(left - round(left / among), top_k) / comb(left, top_k))
    held, group = num_groups // parts, num_experts // num_groups
    missed = 0.0
    for chosen in range(min(held, top_groups) + 1):
        ways = comb(held, chosen) * comb(num_groups - held, top_groups - chosen)
        missed += ways / comb(num_groups, top_groups) * comb(left - chosen * group, top_k)
    return parts * (1.0 - missed / comb(left, top_k))
