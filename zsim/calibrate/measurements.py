"""What was measured, in one shape, whoever measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zsim.errors import InputError

GIB = float(2**30)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed thing: `seconds` is the middle of its repeats (0 where a rate was measured instead: then
    `rate_bytes_per_second`), `spread` the relative distance from the middle to the tenth and ninetieth
    percentile, 0 where unknown. `family` and `parameters` are those of `validation.microbench`; `source` is
    the file.
    """

    family: str
    parameters: Mapping[str, Any]
    seconds: float
    source: str
    flops: float = 0.0
    bytes: float = 0.0
    calls: float = 1.0
    rate_bytes_per_second: float = 0.0
    spread: float = 0.0
    foreign_cpu_fraction: float = 0.0

    def __getitem__(self, name: str) -> Any:
        return self.parameters.get(name)


@dataclass(frozen=True)
class Measurements:
    """All rows of all files; `notes` count what was read and not used, `machines` says whose they are."""

    rows: tuple[Measurement, ...]
    machines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = field(default=())

    def of(self, *families: str, **parameters: object) -> list[Measurement]:
        """The rows of these families whose parameters are these."""
        return [
            row
            for row in self.rows
            if row.family in families and all(row[name] == value for name, value in parameters.items())
        ]


def joined(parts: Sequence[Measurements]) -> Measurements:
    """The measurements of several files; raises InputError when there is nothing in them."""
    rows = tuple(row for part in parts for row in part.rows)
    if not rows:
        raise InputError(
            "no measurement in " + ", ".join(source for part in parts for source in part.sources)
        )
    return Measurements(
        rows,
        tuple(dict.fromkeys(machine for part in parts for machine in part.machines)),
        tuple(note for part in parts for note in part.notes),
        tuple(source for part in parts for source in part.sources),
    )
