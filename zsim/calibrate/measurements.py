"""Measurements in one shape, whatever program took them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zsim.errors import InputError, did_you_mean

# No measured value is outside this range; products of a few such numbers are still finite, and not 0.
MINIMUM, MAXIMUM = 1e-15, 1e24
COUNT, FLAG, TEXT = f"a number above 0, below {MAXIMUM:g}", "true or false", "a text"


class CheckedTable:
    """A table of the file. `path_text` names its position in error messages."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise InputError(f"{where}: found {excerpt(content)}, expected a table")
        self.content: dict[str, Any] = content
        self.path_text = where

    def subtable(self, key: str) -> CheckedTable:
        return CheckedTable(self._value(key), f"{self.path_text}: {key}")

    def optional_subtable(self, key: str) -> CheckedTable:
        return CheckedTable(self.content.get(key) or {}, f"{self.path_text}: {key}")

    def _value(self, key: str) -> Any:
        if key not in self.content:
            raise InputError(f"{self.path_text}: '{key}' is missing{did_you_mean(key, self.content)}")
        return self.content[key]

    def required(self, key: str, kind: str | tuple[str, ...]) -> Any:
        """The value of a required key. `kind` is the kind of value, or the words to choose from."""
        value = self._value(key)
        if isinstance(kind, tuple):
            if value not in kind:
                nearest = did_you_mean(value, kind) if isinstance(value, str) else ""
                expected = f"one of {', '.join(kind)}{nearest}"
                raise InputError(f"{self.path_text}: {key}: found {excerpt(value)}, expected {expected}")
            return value
        is_right = {
            COUNT: _is_number(value) and value >= MINIMUM,
            FLAG: isinstance(value, bool),
            TEXT: isinstance(value, str),
        }
        if not is_right[kind]:
            raise InputError(f"{self.path_text}: {key}: found {excerpt(value)}, expected {kind}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number that is not negative, or `default` if the file has none."""
        value = self.content.get(key)
        if value is None:
            return default
        if not _is_number(value) or value < 0:
            raise InputError(
                f"{self.path_text}: {key}: found {excerpt(value)}, expected a number, 0 or more, below "
                f"{MAXIMUM:g}"
            )
        return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAXIMUM


def excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


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
