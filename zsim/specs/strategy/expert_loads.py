"""How unevenly routed rows are spread over the ranks of an expert-parallel group.

`parallelism.expert_imbalance`: rows of the fullest rank over the mean; a list of loads, one per rank or one
per expert; the name of a published spread (`presets/expert_spreads.toml`); or "seed:N", the loads of a router
that chooses at random, drawn once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from zsim.errors import InputError, did_you_mean
from zsim.resources import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.messages import validated

_PRESET = PRESETS / "expert_spreads.toml"
_KEY = "parallelism.expert_imbalance"
Asked = float | tuple[float, ...] | str


class ExpertSpread(BaseModel):
    """A published spread: load of the fullest expert over the mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    fullest_expert: float = Field(ge=1)
    source: str


class ExpertSpreads(BaseModel):
    """All of them, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = Field(alias="schema")
    spread: dict[str, ExpertSpread]


def load_expert_spreads() -> ExpertSpreads:
    """The shipped `presets/expert_spreads.toml`."""
    return validated(read_toml(_PRESET), _PRESET.name, ExpertSpreads)


def rank_loads(asked: Asked, ranks: int, num_experts: int, top_k: int, tokens: int) -> tuple[float, ...]:
    """Rows of each rank over the mean, the fullest first; (1.0,) if all have as many. `tokens`: of one rank.

    Raises InputError for a list of another length, a spread that nobody has published, and a factor beyond
    what a rank can have.
    """
    if isinstance(asked, str):
        if asked.startswith("seed:"):
            return _drawn(asked, ranks, num_experts, top_k, tokens)
        spreads = load_expert_spreads().spread
        if asked not in spreads:
            raise InputError(
                f"{_KEY}: unknown spread '{asked}'{did_you_mean(asked, spreads)}; expected a number, a list "
                f"of loads, 'seed:N', or one of {', '.join(sorted(spreads))}"
            )
        asked = spreads[asked].fullest_expert
    if isinstance(asked, tuple):
        return _listed(asked, ranks, num_experts)
    if asked > ranks:
        raise InputError(
            f"{_KEY}: found {asked:g}, but one of {ranks} ranks has at most {ranks} times the mean"
        )
    if ranks == 1 or asked == 1:
        return (1.0,)
    return (asked, *((ranks - asked) / (ranks - 1),) * (ranks - 1))


def fullest_expert(asked: Asked, ranks: int, num_experts: int, top_k: int, tokens: int) -> float:
    """Rows of the fullest expert over the mean. Raises as `rank_loads`; a list has a load per rank, whose
    experts share it evenly, or one per expert."""
    parts = ranks if isinstance(asked, tuple) and len(asked) == ranks else num_experts
    return rank_loads(asked, parts, num_experts, top_k, tokens)[0]


def _listed(asked: tuple[float, ...], ranks: int, num_experts: int) -> tuple[float, ...]:
    if len(asked) not in (ranks, num_experts) or sum(asked) <= 0:
        raise InputError(
            f"{_KEY}: found {len(asked)} loads with a sum of {sum(asked):g}; expected {ranks}, one per "
            f"expert-parallel rank, or {num_experts}, one per expert, and a sum above 0"
        )
    sums = np.array(asked, dtype=np.float64).reshape(ranks, -1).sum(axis=1)
    return _ordered(sums / sums.mean())


def _drawn(asked: str, ranks: int, num_experts: int, top_k: int, tokens: int) -> tuple[float, ...]:
    """Loads of a router that gives every token of all ranks `top_k` experts at random."""
    text = asked.removeprefix("seed:")
    if not text.isdigit():
        raise InputError(f"{_KEY}: found '{asked}', expected a whole number behind 'seed:', as in 'seed:7'")
    counts = np.random.default_rng(int(text)).multinomial(
        tokens * ranks * top_k, np.full(num_experts, 1 / num_experts)
    )
    sums = counts.reshape(ranks, -1).sum(axis=1)
    return _ordered(sums / sums.mean())


def _ordered(loads: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, ...]:
    found = tuple(sorted((float(load) for load in loads), reverse=True))
    return (1.0,) if found[0] == found[-1] else found
