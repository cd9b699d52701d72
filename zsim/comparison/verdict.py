"""Verdicts (pass, fail, inconclusive), and the tolerances between two figures.

# [Note: inconclusive]
A time that was measured while other processes used the machine proves nothing: these may have caused a miss,
or a match. Such a figure is `inconclusive`: it neither fails a check nor passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from zsim.errors import InputError, check_choice
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_percent, format_seconds

Verdict = Literal["pass", "fail", "inconclusive"]
Unit = Literal["seconds", "bytes", "fraction"]
# How the figures of a unit are shown.
FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "seconds": format_seconds, "bytes": format_bytes, "fraction": format_percent,
}  # fmt: skip

MAX_FOREIGN_FRACTION = 0.10  # of the machine; above it, a wall time is not judged
NEGLIGIBLE_FRACTION = (
    0.02  # a difference up to this part of the tolerance times the whole step or peak is no miss
)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Maximum errors between two figures."""

    step: float = 0.05
    """Relative, of the step."""
    time: float = 0.10
    """Relative, of times of its parts."""
    memory: float = 0.03
    """Relative, of bytes."""
    overlap: float = 0.05
    """Maximum difference of fractions."""

    @staticmethod
    def of(tolerances: Tolerances | Mapping[str, float] | float | None) -> Tolerances:
        """Tolerances from an argument of a caller: one number for all, some by name, or None (defaults)."""
        if tolerances is None:
            return Tolerances()
        if isinstance(tolerances, Tolerances):
            return tolerances
        if isinstance(tolerances, Mapping):
            return Tolerances.parse(f"{name}={value}" for name, value in tolerances.items())
        return Tolerances.parse([str(tolerances)])

    @staticmethod
    def parse(texts: Iterable[str]) -> Tolerances:
        """Tolerances from texts such as `["0.02", "memory=0.01"]`.

        A bare number sets all, a named one the tolerance that it names. Later texts override earlier ones.
        """
        names = [field.name for field in fields(Tolerances)]
        values: dict[str, float] = {}
        for text in texts:
            name, equals, number = text.rpartition("=")
            if equals:
                check_choice(f"tolerance '{text}': found '{name}', ", name.strip(), names)
            value = _fraction(text, number)
            values |= {name.strip(): value} if equals else dict.fromkeys(names, value)
        return Tolerances(**values)


def _fraction(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InputError(
            f"tolerance '{text}': found '{number}', expected a fraction of at least 0, e.g. 0.05 for 5 %"
        )
    return value


PREDICTIONS = Tolerances(step=0.02, time=0.02, memory=0.01, overlap=0.02)  # between simulations: no jitter


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of both sides."""

    name: str
    unit: Unit
    simulated: float
    recorded: float
    total: float
    """The step or peak that the figure is a part of."""
    tolerance: float
    verdict: Verdict
    reason: str = ""

    @property
    def error(self) -> float | None:
        if self.unit == "fraction":
            return self.simulated - self.recorded
        difference = self.simulated - self.recorded
        if difference == 0:
            return 0.0
        return difference / self.recorded if self.recorded else None

    @property
    def share(self) -> float:
        """The difference as a fraction of `total`, by which metrics of one unit are ranked."""
        return abs(self.simulated - self.recorded) / self.total if self.total else 0.0


def judge(
    name: str,
    simulated: float,
    recorded: float,
    *,
    unit: Unit,
    total: float,
    tolerance: float,
    doubt: str = "",
    reason: str = "",
) -> Metric:
    """A metric with its verdict. With a `doubt` it is inconclusive, whatever its figures."""
    verdict: Verdict = (
        "inconclusive"
        if doubt
        else "pass"
        if _is_near(unit, simulated, recorded, total, tolerance)
        else "fail"
    )
    return Metric(name, unit, simulated, recorded, total, tolerance, verdict, doubt or reason)


def _is_near(unit: str, simulated: float, recorded: float, total: float, tolerance: float) -> bool:
    difference = abs(simulated - recorded)
    if unit == "fraction":
        return difference <= tolerance
    return difference <= tolerance * abs(recorded) or difference <= NEGLIGIBLE_FRACTION * tolerance * total


def overall_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Fail where a verdict is fail, else inconclusive where one is, else pass."""
    unique_verdicts = set(verdicts)
    return (
        "fail"
        if "fail" in unique_verdicts
        else "inconclusive"
        if "inconclusive" in unique_verdicts
        else "pass"
    )


def timing_doubt(trace: Trace) -> str:
    """The reason why the wall times of a recording prove nothing, or "", [Note: inconclusive].

    `metadata["foreign_cpu_fraction"]` is the fraction of the machine that other processes used meanwhile. On
    GPUs it may be missing. Where CPU cores compute (gloo) a recording without it is in doubt too.
    """
    if trace.source != "recorded":
        return ""
    if trace.metadata.get("is_timed") is False:
        return "the recording says when calls were made, not how long they took"
    foreign = trace.metadata.get("foreign_cpu_fraction")
    if foreign is None:
        is_on_cpu = trace.metadata.get("backend") == "gloo"
        return "the recording does not say how busy the machine was with others" if is_on_cpu else ""
    if float(foreign) > MAX_FOREIGN_FRACTION:
        return f"others used {float(foreign):.0%} of the machine during the recording"
    return ""
