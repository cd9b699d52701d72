"""`[jitter]` of an experiment: random variation of kernels and GPUs, and its default spread.

[jitter]
seed = 1                    # without a seed there is no jitter
steps = 20                  # how many steps are drawn
kernel_sigma = 0.0084       # one kernel from step to step
rank_sigma = 0.015          # one GPU against another, constant over the run
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Annotated, Self

from pydantic import Field, model_validator

from zsim.files import PRESETS
from zsim.specs.cluster.files import read_toml
from zsim.specs.lazy_model import Evidence, StrictTable, Table, resolve_table
from zsim.specs.messages import validate_table
from zsim.specs.strategy.experts import expected_maximum

_FILE = PRESETS / "jitter.toml"
_MAX_STEPS = 1000
_CALIBRATED_GPUS = 8  # GPUs
Sigma = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class JitterTable(StrictTable):
    """`[jitter]`. Factors are log-normal with mean 1. One is drawn for every kernel, rank and step, and
    another once per rank.

    Published values: `zsim/presets/jitter.toml`.
    """

    seed: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        default=None, description="draws are made from this seed; left out: no jitter"
    )
    steps: Annotated[int, Field(gt=0, le=_MAX_STEPS, strict=True)] = Field(
        default=20, description="how many steps are drawn"
    )
    kernel_sigma: Sigma | None = Field(
        default=None,
        description="standard deviation of the logarithm of a kernel's duration, between ranks and "
        "steps; left out: as published",
    )
    rank_sigma: Sigma | None = Field(
        default=None, description="the same between GPUs of one type; left out: as published"
    )

    @model_validator(mode="after")
    def _needs_a_seed(self) -> Self:
        if self.seed is None and self.model_fields_set - {"seed"}:
            raise ValueError(f"{min(self.model_fields_set)} has no effect without a seed")
        return self


class _Sigma(Table):
    sigma: Sigma


class _Spreads(StrictTable):
    kernel: _Sigma
    rank: _Sigma


@dataclass(frozen=True, slots=True)
class JitterConfig:
    """The jitter to simulate."""

    seed: int
    steps: int
    kernel_sigma: float
    rank_sigma: float
    sources: dict[str, str]
    """The sources of both sigmas by name, "kernel" and "rank"."""
    evidence: Evidence
    """"measured" if both sigmas are published measurements, else "assumed"."""


@cache
def _published_spreads() -> _Spreads:
    return validate_table(read_toml(_FILE), _FILE.name, _Spreads)


def slowest_gpu_factor(num_gpus: int) -> float:
    """Kernel duration on the slowest of `num_gpus` equal GPUs, relative to the slowest of a node of eight.

    GPUs are calibrated on such a node, so it is 1 for up to eight GPUs. Ranks wait for each other, so a step
    takes as long as on its slowest GPU. The expected maximum of n standard normal numbers is at the quantile
    (n - 3/8) / (n + 1/4) (G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958), and the
    spread of GPUs is lognormal.
    """
    if num_gpus <= _CALIBRATED_GPUS:
        return 1.0
    return exp(
        _published_spreads().rank.sigma * (expected_maximum(num_gpus) - expected_maximum(_CALIBRATED_GPUS))
    )


def resolve_jitter(table: JitterTable) -> JitterConfig | None:
    """`table` with its defaults filled in. None without a seed."""
    if table.seed is None:
        return None
    spreads = _published_spreads()
    requested = {"kernel": table.kernel_sigma, "rank": table.rank_sigma}
    defaults = {"kernel": spreads.kernel, "rank": spreads.rank}
    sigmas = {name: defaults[name].sigma if sigma is None else sigma for name, sigma in requested.items()}
    is_all_measured = all(
        sigma is None and defaults[name].evidence == "measured" for name, sigma in requested.items()
    )
    return resolve_table(
        JitterConfig,
        table,
        kernel_sigma=sigmas["kernel"],
        rank_sigma=sigmas["rank"],
        sources={
            name: defaults[name].source if sigma is None else "set by the user"
            for name, sigma in requested.items()
        },
        evidence="measured" if is_all_measured else "assumed",
    )
