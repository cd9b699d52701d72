"""Types of GPUs in one job: their work, their waits, their memory, and the losses of the fast ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.units import format_seconds

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
