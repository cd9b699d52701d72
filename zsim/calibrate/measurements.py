"""Measurements in one shape, whatever program took them, and the logs that frameworks write of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from zsim.errors import InputError, did_you_mean
from zsim.reading import read_user_text
from zsim.specs.strategy.registry import kinds, role_of

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


_MAX_BYTES = 64_000_000
COLLECTIVE_KINDS = {
    "all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter", "all_reduce": "all_reduce", "allreduce": "all_reduce",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "sendrecv": "send",
}  # fmt: skip


class FrameworkLogs:
    """The logs of measurements that a framework's programs write.

    `LOGS` in the module `logs` of the framework's folder. The answers here are those of a framework without
    any.
    """

    noun: str = ""
    """What they are called, with an article."""
    has_folders = False
    """Whether some are folders."""

    def recognises(self, text: str) -> bool:
        """Whether a text is one of them."""
        return False

    def read(self, path: Path, text: str, ranks: int | None, nodes: int | None) -> Measurements:
        """The measurements of a recognised text, of so many ranks and nodes where it does not state them."""
        raise NotImplementedError

    def read_folder(self, path: Path) -> Measurements:
        """The measurements of a folder. Raises InputError where there are none in it."""
        raise NotImplementedError


def framework_logs() -> tuple[FrameworkLogs, ...]:
    """The logs of all frameworks that write any."""
    logs = (cast(FrameworkLogs, role_of(kind, "logs", "LOGS", FrameworkLogs())) for kind in kinds())
    return tuple(log for log in logs if log.noun)


def log_text(path: Path) -> str:
    """The text of a log. Raises InputError where it cannot be read, or is empty."""
    text = read_user_text(path, max_bytes=_MAX_BYTES, errors="replace")
    if not text.strip():
        raise InputError(f"{path.name}: the file is empty")
    return text


def collective_row(path: Path, kind: str, size: int, seconds: float, ranks: int, nodes: int) -> Measurement:
    """A row of a timed collective on so many bytes of its full tensor."""
    parameters = {"kind": kind, "bytes": size, "ranks": ranks, "nodes": nodes}
    return Measurement("collective", parameters, seconds, path.name, bytes=float(size))


def drive_row(path: Path, op: str, block: int, depth: int, rate: float) -> Measurement:
    """A row of a drive's rate."""
    parameters = {"op": op, "block_bytes": block, "depth": depth, "direct": True}
    return Measurement("file", parameters, 0.0, path.name, rate_bytes_per_second=rate)


def log_number(path: Path, text: str) -> float:
    """A number from a log, where there may also be other text."""
    try:
        number_value = float(text)
    except ValueError:
        number_value = MAXIMUM
    if not number_value < MAXIMUM:
        raise InputError(f"{path.name}: found {text[:40]!r}, expected a number below {MAXIMUM:g}")
    return number_value


def block_bytes(text: str, where: str) -> int:
    """Bytes of a block size as a log has it."""
    match = re.fullmatch(r"(\d{1,12})\s*([kKmMgG]?)(?:i?[bB])?", text.split(",")[0].strip())
    if match is None:
        raise InputError(f"{where}: found {excerpt(text)}, expected a block size, a number with k, m or g")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[match[2].lower()]
