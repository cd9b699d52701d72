"""A measured run and zsim's prediction of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zsim.study.measured.statistics import summarise
from zsim.validated.validation import Validation
from zsim.validated.verdict import Verdict


@dataclass(frozen=True)
class RowResult:
    """A row of a table, measured and predicted, or the reason why it was skipped. Errors are predicted over
    measured, less one.
    """

    row_id: str
    source: str
    status: str
    reason: str | None = None
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    relative_error: float | None = None
    measured_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    memory_relative_error: float | None = None
    memory_kind: str | None = None
    """The figure of memory that `measured_memory_bytes` and `predicted_memory_bytes` compare."""
    measured_fits: bool | None = None
    predicted_fits: bool | None = None
    predicted_retries: float | None = None
    """How often the allocator is predicted to run short, per micro-batch. None if the tensors alone exceed
    the GPU's memory.
    """
    predicted_failures: float | None = None
    """How often the allocator is predicted to find no room even then, per micro-batch. None if the tensors
    alone exceed the GPU's memory.
    """
    predicted_load: float | None = None
    """The peak over the usable bytes."""
    verdict: Verdict | None = None
    """The verdict on the load, by the errors of other sources."""
    role: str = ""
    tier: str = ""
    assumptions: tuple[str, ...] = ()
    measured_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind that is published (allocated, active, reserved, device)."""
    predicted_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of every kind."""
    predicted_range_seconds: tuple[float, float] | None = None
    """Contains the step with probability 80 %, according to runs of other sources (`validation`)."""
    validation: Validation | None = None
    framework: str = ""
    """The name of the program that was measured."""
    parallelism: str = ""
    """"TP", "PP", "CP", "mixed" or "data parallel"."""

    @property
    def is_within_range(self) -> bool | None:
        """Whether the measured step lies inside the predicted range, or None if either is missing."""
        if self.measured_seconds is None or self.predicted_range_seconds is None:
            return None
        low, high = self.predicted_range_seconds
        return low <= self.measured_seconds <= high

    @property
    def memory_errors(self) -> dict[str, float]:
        """Relative error of every memory figure that the row publishes, by kind."""
        predicted = self.predicted_memory
        return {kind: predicted[kind] / size - 1 for kind, size in self.measured_memory.items() if predicted}


@dataclass(frozen=True)
class CheckResult:
    """The results of all rows, in the order of the files."""

    rows: tuple[RowResult, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The rows and their summary, as `--json` has them."""
        rows = [_row_dict(row) for row in self.rows]
        return {"rows": rows, "summary": summarise(self.rows), "notes": list(self.notes)}


def _row_dict(row: RowResult) -> dict[str, Any]:
    validation = None if row.validation is None else row.validation.to_dict()
    bare = asdict(replace(row, validation=None, verdict=None))
    word, probability = (None, None) if row.verdict is None else (row.verdict.word, row.verdict.probability)
    return bare | {
        "assumptions": list(row.assumptions),
        "validation": validation,
        "verdict": word,
        "fits_probability": probability,
    }
