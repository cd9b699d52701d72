"""The run of a job's routed experts: on how many ranks, by which library, with which loads.

`parallelism.expert_imbalance` says how uneven the loads of an expert-parallel group's ranks are. It takes
five forms. A number is the rows of the fullest rank over the mean. A list has one load per rank or one per
expert. A text is the name of a published spread (`presets/expert_spreads.toml`), "seed:N" for the loads of a
router that chooses at random, drawn once, or "padding:F" where a fraction F of the tokens is padding, [Note:
padding's experts]. Where it is left out, loads are as measured of routers with so many experts, [Note:
assumed loads].

# [Note: assumed loads]
The loads of E experts have a standard deviation s of their mean, interpolated over log E between those that
were measured (`[[deviation]]`). A rank of r has E/r of them, so its load deviates by s / sqrt(E/r), and the
fullest rank has 1 + m(r) s / sqrt(E/r) times the mean, where m(r) is the expected largest of r normal numbers
(Blom 1958: the quantile (r - 3/8) / (r + 1/4)).

Where an expert takes at most c times the mean, it has room of D = max(0, c - load) left. With z = (c - 1) /
s, and f and F the normal density and distribution, E[D] = s (f(z) + z F(z)) and E[D^2] = s^2 ((z^2 + 1) F(z)
+ z f(z)). The expert takes c - D, which is c - E[D] in the mean and deviates as D does.

In every layer a different rank is the fullest, and all wait for it. Every rank is therefore taken to have,
and to exchange, as many rows as the fullest.

# [Note: padding's experts]
Routers choose experts for padding as for other tokens (Megatron-Core adfb8ec7 core/transformer/moe/router.py
`routing`: its mask of padding leaves tokens out of the auxiliary losses and of the experts' bias alone), and
alike tokens in a row have alike choices. All padding is taken to go to the same `top_k` experts, which are
drawn from all. With m of them on a rank in the mean over draws of the fullest rank, that rank has F m r /
top_k + 1 - F times the mean rows, where r ranks share the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, gcd, log2, sqrt
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np
from pydantic import Field

from zsim.errors import InputError, did_you_mean
from zsim.files import PRESETS
from zsim.operations.grouped_linear import GroupedKernel
from zsim.specs.cluster.files import read_toml
from zsim.specs.lazy_model import StrictTable
from zsim.specs.messages import validate_table
from zsim.specs.strategy.expert_library import TRANSFORMERS, ExpertLibrary

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
    deals_in_turn: bool = False
    """Tokens have their experts in turn. Otherwise they are drawn."""

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


def partitions_in_turn(num_experts: int, top_k: int, partitions: int) -> float:
    """Mean number of `partitions` equal partitions of the experts that hold one of a token's `top_k`, where
    token t has experts t k to t k + k - 1, modulo their number."""
    size, starts = num_experts // partitions, range(0, num_experts, gcd(num_experts, top_k))
    reached = ((start + top_k - 1) // size - start // size + 1 for start in starts)
    return fmean(min(partitions, number) for number in reached)


_PRESET = PRESETS / "expert_spreads.toml"
_KEY = "parallelism.expert_imbalance"
_NUM_DRAWS = 10_000  # of padding's experts
ExpertImbalance = float | tuple[float, ...] | str
End = Literal["low", "typical", "high"]


class ExpertSpread(StrictTable):
    """A published spread: load of the fullest expert over the mean."""

    fullest_expert: float = Field(ge=1)
    source: str


class ExpertDeviation(StrictTable):
    """Standard deviation of the loads of `experts` experts over their mean, and the ends of what was seen."""

    experts: int = Field(ge=1)
    typical: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)
    source: str


class FirstSteps(StrictTable):
    """The fullest expert in the first steps of a run from random weights."""

    share_of_tokens: float = Field(gt=0, le=1)
    """Its rows over all tokens."""
    source: str


class ExpertSpreads(StrictTable):
    """All spreads, by name, and deviations by the number of experts, ascending."""

    schema_version: Literal[1] = Field(alias="schema")
    spread: dict[str, ExpertSpread]
    deviation: tuple[ExpertDeviation, ...]
    first_steps: FirstSteps

    def interpolate_deviation(self, num_experts: int, end: End = "typical") -> float:
        """The deviation of the loads of so many experts, interpolated. Beyond the measured counts it is that
        of the nearest.
        """
        counts = [measurement.experts for measurement in self.deviation]
        values = [float(getattr(measurement, end)) for measurement in self.deviation]
        return float(np.interp(log2(num_experts), [log2(count) for count in counts], values))


def load_expert_spreads() -> ExpertSpreads:
    """The shipped `presets/expert_spreads.toml`."""
    return validate_table(read_toml(_PRESET), _PRESET.name, ExpertSpreads)


def assumed_load(ranks: int, num_experts: int, deviation: float, capacity: float | None = None) -> float:
    """Rows of the fullest rank over the mean of those that are routed, where experts' loads have this
    deviation.

    Each expert takes up to `capacity` times the mean. See [Note: assumed loads].
    """
    if ranks == 1:
        return 1.0
    mean, deviation_of_rows = (1.0, deviation) if capacity is None else _capped_moments(capacity, deviation)
    fullest = mean + expected_maximum(ranks) * deviation_of_rows / sqrt(num_experts / ranks)
    return min(fullest, float(ranks), fullest if capacity is None else capacity)


def expected_maximum(count: int) -> float:
    """The expected largest of so many normal numbers, in standard deviations. It is 0 for one number."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def kept_fraction(capacity: float, deviation: float) -> float:
    """Rows that experts with so much room take, over those that are routed. See [Note: assumed loads]."""
    return min(1.0, capacity) if deviation == 0 else _capped_moments(capacity, deviation)[0]


def _capped_moments(capacity: float, deviation: float) -> tuple[float, float]:
    """Mean and standard deviation of what experts take of normal loads."""
    if deviation == 0:
        return min(1.0, capacity), 0.0
    z, normal = (capacity - 1.0) / deviation, NormalDist()
    below, density = normal.cdf(z), normal.pdf(z)
    room = deviation * (density + z * below)
    squared = deviation**2 * ((z * z + 1.0) * below + z * density)
    return capacity - room, sqrt(max(0.0, squared - room**2))


def rank_loads(
    imbalance: ExpertImbalance, ranks: int, num_experts: int, top_k: int, tokens: int
) -> tuple[float, ...]:
    """Rows of each rank over the mean, the fullest first, or (1.0,) if all have as many. `tokens` are of one
    rank.

    Raises InputError for a list of another length, a spread that nobody has published, and a factor beyond
    what a rank can have.
    """
    if isinstance(imbalance, str):
        if imbalance.startswith("seed:"):
            return _draw_loads(imbalance, ranks, num_experts, top_k, tokens)
        if imbalance.startswith("padding:"):
            return _padding_loads(imbalance, ranks, num_experts, top_k)
        spreads = load_expert_spreads().spread
        if imbalance not in spreads:
            raise InputError(
                f"{_KEY}: unknown spread '{imbalance}'{did_you_mean(imbalance, spreads)}; expected a number, "
                f"a list of loads, 'seed:N', 'padding:F', or one of {', '.join(sorted(spreads))}"
            )
        imbalance = spreads[imbalance].fullest_expert
    if isinstance(imbalance, tuple):
        return _normalize_loads(imbalance, ranks, num_experts)
    if imbalance > ranks:
        raise InputError(
            f"{_KEY}: found {imbalance:g}, but one of {ranks} ranks has at most {ranks} times the mean"
        )
    if ranks == 1 or imbalance == 1:
        return (1.0,)
    return (imbalance, *((ranks - imbalance) / (ranks - 1),) * (ranks - 1))


def fullest_expert(
    imbalance: ExpertImbalance, ranks: int, num_experts: int, top_k: int, tokens: int
) -> float:
    """Rows of the fullest expert over the mean.

    A list has either one load per rank, which its experts share evenly, or one per expert. Raises as
    `rank_loads`.
    """
    num_bins = ranks if isinstance(imbalance, tuple) and len(imbalance) == ranks else num_experts
    return rank_loads(imbalance, num_bins, num_experts, top_k, tokens)[0]


def _normalize_loads(loads: tuple[float, ...], ranks: int, num_experts: int) -> tuple[float, ...]:
    if len(loads) not in (ranks, num_experts) or sum(loads) <= 0:
        raise InputError(
            f"{_KEY}: found {len(loads)} loads with a sum of {sum(loads):g}; expected {ranks}, one per "
            f"expert-parallel rank, or {num_experts}, one per expert, and a sum above 0"
        )
    sums = np.array(loads, dtype=np.float64).reshape(ranks, -1).sum(axis=1)
    return _sort_loads(sums / sums.mean())


def _draw_loads(seed: str, ranks: int, num_experts: int, top_k: int, tokens: int) -> tuple[float, ...]:
    """Loads of a router that gives every token of all ranks `top_k` experts at random."""
    text = seed.removeprefix("seed:")
    if not text.isdigit():
        raise InputError(f"{_KEY}: found '{seed}', expected a whole number behind 'seed:', as in 'seed:7'")
    counts = np.random.default_rng(int(text)).multinomial(
        tokens * ranks * top_k, np.full(num_experts, 1 / num_experts)
    )
    sums = counts.reshape(ranks, -1).sum(axis=1)
    return _sort_loads(sums / sums.mean())


def _padding_loads(padding: str, ranks: int, num_experts: int, top_k: int) -> tuple[float, ...]:
    """Loads where a fraction of the tokens is padding. See [Note: padding's experts]."""
    try:
        fraction = float(padding.removeprefix("padding:"))
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise InputError(
            f"{_KEY}: found '{padding}', expected a number from 0 to 1 behind 'padding:', as in 'padding:0.9'"
        )
    draws = np.random.default_rng(0).multivariate_hypergeometric(
        [num_experts // ranks] * ranks, top_k, size=_NUM_DRAWS
    )
    sums = np.sort(draws, axis=1)[:, ::-1].mean(axis=0)
    return _sort_loads(fraction * ranks / top_k * sums + 1 - fraction)


def _sort_loads(loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, ...]:
    descending = tuple(sorted((float(load) for load in loads), reverse=True))
    return (1.0,) if descending[0] == descending[-1] else descending
