"""Ranks that differ, steps that differ: who is slow, who waits, how far steps spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zsim.report.breakdown import step_breakdown
from zsim.report.views.meanings import COMPUTE_KINDS
from zsim.specs.experiment.jitter import Jitter
from zsim.trace.trace import Trace

_MOST_ROWS = 12
_PERCENTILES = (5, 50, 95)


@dataclass(frozen=True, slots=True)
class RankRow:
    """Ranks that do the same, by the first of them: how many they are, how many times as long as usual their
    kernels take, how long those took and how long they waited for communication."""

    rank: int
    ranks: int
    kernel_slowdown: float
    kernel_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """One of the jobs on a fabric: its step alone there, and the median of `steps` beside the others."""

    name: str
    model: str
    strategy: str
    nodes: int
    gpus: int
    steps: int
    step_seconds_alone: float
    step_seconds_together: float

    @property
    def slowdown(self) -> float:
        return self.step_seconds_together / self.step_seconds_alone


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Steps drawn with jitter: percentiles (by nearest rank, so that each is a step that was drawn) of their
    length and of the first rank's wait for communication, and the length without jitter."""

    seed: int
    steps: int
    kernel_sigma: float
    rank_sigma: float
    sources: Mapping[str, str]
    step_seconds: Mapping[str, float]
    exposed_communication_seconds: Mapping[str, float]
    step_seconds_without: float


def rank_rows(trace: Trace, sizes: Sequence[int], slowdowns: Sequence[float]) -> tuple[RankRow, ...]:
    """One row per class of a trace with one rank of each; none where all ranks are alike, or too many
    classes to list. `sizes` and `slowdowns` are per class."""
    ranks = list(dict.fromkeys(trace.ranks.tolist()))
    if not 1 < len(ranks) <= _MOST_ROWS or sum(sizes) == len(sizes):
        return ()
    is_kernel = np.array([info.kind in COMPUTE_KINDS for info in trace.infos], dtype=bool)
    rows = []
    for rank, size, slowdown in zip(ranks, sizes, slowdowns, strict=True):
        own = trace.on_clock_of(rank)
        kernels = is_kernel[own.info_indices]
        seconds = float((own.end_seconds - own.start_seconds)[kernels].sum())
        waits = step_breakdown(own, rank).seconds["exposed_communication"]
        rows.append(RankRow(rank, size, slowdown, seconds, waits))
    return tuple(rows)


def spread_of(jitter: Jitter, steps: Sequence[Trace], seconds_without: float) -> StepSpread:
    """What steps as the first rank saw them come to."""
    exposed = [step_breakdown(step).seconds["exposed_communication"] for step in steps]
    return StepSpread(
        jitter.seed,
        len(steps),
        jitter.kernel_sigma,
        jitter.rank_sigma,
        dict(jitter.sources),
        _percentiles([step.step_seconds for step in steps]),
        _percentiles(exposed),
        seconds_without,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, _PERCENTILES, method="inverted_cdf")
    return {f"p{place}": float(value) for place, value in zip(_PERCENTILES, found, strict=True)}
