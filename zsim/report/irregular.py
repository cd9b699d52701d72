"""Ranks that differ and steps that differ: stragglers, waits for them, and the spread of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.report.breakdown import step_breakdown
from zsim.report.pipeline import Bubbles
from zsim.report.views.meanings import COMPUTE_KINDS
from zsim.specs.experiment.jitter import JitterConfig
from zsim.trace.trace import Trace
from zsim.units import format_seconds

_MAX_ROWS = 12
_PERCENTILES = (5, 50, 95)


@dataclass(frozen=True, slots=True)
class RankRow:
    """A class of ranks, by its first rank: the number of ranks, the factor by which their kernels are slower
    than usual, and the seconds of kernels and of exposed communication."""

    rank: int
    ranks: int
    kernel_slowdown: float
    kernel_seconds: float
    exposed_communication_seconds: float


@dataclass(frozen=True, slots=True)
class JobRow:
    """One of the co-located jobs on a fabric: its step alone, and the median of `steps` with all jobs."""

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
    time and of the first rank's exposed communication (a pipeline's bubbles included), and the time without
    jitter."""

    seed: int
    steps: int
    kernel_sigma: float
    rank_sigma: float
    sources: Mapping[str, str]
    step_seconds: Mapping[str, float]
    exposed_communication_seconds: Mapping[str, float]
    step_seconds_without: float


def rank_rows(
    trace: Trace, sizes: Sequence[int], slowdowns: Sequence[float], bubbles: Bubbles | None = None
) -> tuple[RankRow, ...]:
    """One row per class of ranks.

    There are none where all ranks are equal, where no two are, or where there are too many classes to list.
    `trace` has one rank of each class. `sizes` and `slowdowns` are per class. `bubbles` of a pipeline are no
    exposed communication.
    """
    ranks = list(dict.fromkeys(trace.ranks.tolist()))
    if not 1 < len(ranks) <= _MAX_ROWS or sum(sizes) == len(sizes):
        return ()
    rows = []
    for rank, size, slowdown in zip(ranks, sizes, slowdowns, strict=True):
        rank_trace = trace.rank_view(rank)
        kernels = rank_trace.is_of(COMPUTE_KINDS)
        seconds = float((rank_trace.end_seconds - rank_trace.start_seconds)[kernels].sum())
        breakdown = step_breakdown(rank_trace, rank)
        if bubbles is not None:
            breakdown = bubbles.split_breakdown(breakdown, rank)
        rows.append(RankRow(rank, size, slowdown, seconds, breakdown.seconds["exposed_communication"]))
    return tuple(rows)


def step_spread(jitter: JitterConfig, steps: Sequence[Trace], seconds_without: float) -> StepSpread:
    """The spread of `steps`, each traced on the first rank. `seconds_without` is the step without jitter."""
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
    percentiles = np.percentile(values, _PERCENTILES, method="inverted_cdf")
    return {f"p{percent}": float(value) for percent, value in zip(_PERCENTILES, percentiles, strict=True)}


# -- Types of GPUs in one job: their work, their waits, their memory, and the losses of the fast ones ------


_HOURS_PER_DAY = 24.0
_LEAST_LOSS = 0.005  # of the step: less is not worth a sentence


@dataclass(frozen=True, slots=True)
class GpuTypeRow:
    """The GPUs of one type of nodes."""

    name: str
    gpu: str
    nodes: int
    gpus: int
    micro_batch_size: int
    busy_seconds: float
    """Of its kernels in a step."""
    waiting_seconds: float
    """For other ranks and for transfers (exposed communication, and a pipeline's bubbles)."""
    peak_bytes: int
    """Of the fullest GPU."""
    capacity_bytes: int
    """The usable bytes."""
    lost_seconds: float = 0.0
    """The part of the waiting seconds beyond those of the type that waits least, which sets the pace."""
    lost_fraction: float = 0.0
    lost_gpu_hours_per_day: float = 0.0

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes


def waiting_seconds(seconds: Mapping[str, float]) -> float:
    """The seconds of a breakdown in which a rank waits for others or for transfers."""
    return seconds["exposed_communication"] + seconds["bubble"]


def add_losses(rows: Sequence[GpuTypeRow], step_seconds: float) -> tuple[GpuTypeRow, ...]:
    """The rows with the loss of each type against the one that waits least.

        hours = 24 n w / t

    Here n is the number of GPUs of the type, w the seconds that each waits more than one of the type that
    waits least, and t the step.
    """
    least = min(row.waiting_seconds for row in rows)
    rows_with_losses = []
    for row in rows:
        lost = row.waiting_seconds - least
        share = lost / step_seconds
        hours = _HOURS_PER_DAY * row.gpus * share
        rows_with_losses.append(
            replace(row, lost_seconds=lost, lost_fraction=share, lost_gpu_hours_per_day=hours)
        )
    return tuple(rows_with_losses)


def loss_note(rows: Sequence[GpuTypeRow]) -> str:
    """The type that sets the pace, and the losses of the others. Empty where none loses much."""
    pace = min(rows, key=lambda row: row.waiting_seconds)
    losers = [row for row in rows if row.lost_fraction > _LEAST_LOSS]
    if not losers:
        return ""
    losses = "; ".join(
        f"each of the {row.gpus:,} GPUs of {row.name} idles {format_seconds(row.lost_seconds)} of the step "
        f"({row.lost_fraction:.0%}) more, {row.lost_gpu_hours_per_day:,.1f} GPU-hours a day in all"
        for row in losers
    )
    return f"{pace.name} sets the pace: {losses}"
