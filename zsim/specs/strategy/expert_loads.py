"""The uneven loads of the ranks of an expert-parallel group.

`parallelism.expert_imbalance` takes four forms. A number is the rows of the fullest rank over the mean. A
list has one load per rank or one per expert. A text is the name of a published spread
(`presets/expert_spreads.toml`), or "seed:N" for the loads of a router that chooses at random, drawn once.
Where it is left out, loads are as measured of routers with so many experts, [Note: assumed loads].

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
"""

from __future__ import annotations

from math import log2, sqrt
from statistics import NormalDist
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from zsim.errors import InputError, did_you_mean
from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.messages import validate_table

_PRESET = PRESETS / "expert_spreads.toml"
_KEY = "parallelism.expert_imbalance"
ExpertImbalance = float | tuple[float, ...] | str
End = Literal["low", "typical", "high"]


class ExpertSpread(BaseModel):
    """A published spread: load of the fullest expert over the mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    fullest_expert: float = Field(ge=1)
    source: str


class ExpertDeviation(BaseModel):
    """Standard deviation of the loads of `experts` experts over their mean, and the ends of what was seen."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    experts: int = Field(ge=1)
    typical: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)
    source: str


class ExpertSpreads(BaseModel):
    """All spreads, by name, and deviations by the number of experts, ascending."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = Field(alias="schema")
    spread: dict[str, ExpertSpread]
    deviation: tuple[ExpertDeviation, ...]

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
        spreads = load_expert_spreads().spread
        if imbalance not in spreads:
            raise InputError(
                f"{_KEY}: unknown spread '{imbalance}'{did_you_mean(imbalance, spreads)}; expected a "
                "number, a list "
                f"of loads, 'seed:N', or one of {', '.join(sorted(spreads))}"
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


def _sort_loads(loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, ...]:
    descending = tuple(sorted((float(load) for load in loads), reverse=True))
    return (1.0,) if descending[0] == descending[-1] else descending
