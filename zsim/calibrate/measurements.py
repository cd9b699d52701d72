"""Measurements in one shape, whatever program took them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zsim.errors import InputError

GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed operation. `family` and `parameters` are those of `validation.microbench`."""

    family: str
    parameters: Mapping[str, Any]
    seconds: float
    """The median of its repeats. 0 where a rate was measured instead."""
    source: str
    """The file."""
    flops: float = 0.0
    bytes: float = 0.0
    calls: float = 1.0
    rate_bytes_per_second: float = 0.0
    relative_deviation: float = 0.0
    """Relative distance from the median to the tenth or ninetieth percentile, whichever is larger. 0 if
    unknown.
    """
    foreign_cpu_fraction: float = 0.0

    def __getitem__(self, name: str) -> Any:
        return self.parameters.get(name)


@dataclass(frozen=True)
class Measurements:
    """All rows of all files."""

    rows: tuple[Measurement, ...]
    machines: tuple[str, ...] = ()
    """Names of the measured machines."""
    notes: tuple[str, ...] = ()
    """Counts of what was read and not used."""
    sources: tuple[str, ...] = field(default=())

    def select(self, *families: str, **parameters: object) -> list[Measurement]:
        """The rows of these families whose parameters have these values."""
        return [
            row
            for row in self.rows
            if row.family in families and all(row[name] == value for name, value in parameters.items())
        ]


def merge_measurements(files: Sequence[Measurements]) -> Measurements:
    """The measurements of several files. Raises InputError if there are none."""
    rows = tuple(row for part in files for row in part.rows)
    if not rows:
        raise InputError(
            "no measurement in " + ", ".join(source for part in files for source in part.sources)
        )
    return Measurements(
        rows,
        tuple(dict.fromkeys(machine for part in files for machine in part.machines)),
        tuple(note for part in files for note in part.notes),
        tuple(source for part in files for source in part.sources),
    )
