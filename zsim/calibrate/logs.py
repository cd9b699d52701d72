"""Logs of measurements: what all of them have, and those that frameworks write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from zsim.calibrate.measurements import MAXIMUM, Measurement, Measurements, excerpt
from zsim.errors import InputError
from zsim.reading import read_text
from zsim.specs.strategy.registry import kinds, role_of

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
    short_noun: str = ""
    """What help calls them."""
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
    try:
        text = read_text(path, _MAX_BYTES, errors="replace")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
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
