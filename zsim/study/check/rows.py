"""One row of `zsim check`: the case, the check and its outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zsim.comparison.verdict import Metric, Verdict

# In addition to pass, fail and inconclusive: a known miss (named in the baseline), and what zsim cannot
# simulate.
Outcome = Literal["pass", "fail", "inconclusive", "known", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("fail", "known", "inconclusive", "skipped", "pass")
_STEPS = ("step", "step_seconds")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check of one case, with its outcome."""

    case: str
    """A file or folder."""
    name: str
    """The check."""
    outcome: Outcome
    sentence: str = ""
    """What is wrong."""
    predicted: float | None = None
    measured: float | None = None
    error: float | None = None
    """Relative and signed, predicted over measured less one. For fractions it is the difference."""
    tolerance: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_step_time(self) -> bool:
        """Whether the check judges the time of a whole step (errors of published sources do not count)."""
        return ": " not in self.case and (self.name in _STEPS or self.name.endswith(", step"))

    @property
    def line(self) -> str:
        """The case, the check and the sentence, for the list of misses."""
        return f"{self.case}: {self.name}" + (f": {self.sentence}" if self.sentence else "")


def row_of_metric(case: str, metric: Metric, sentence: str = "") -> CheckRow:
    """A judged figure as a row."""
    outcome: Verdict = metric.verdict
    return CheckRow(
        case,
        metric.name,
        outcome,
        sentence or metric.reason,
        metric.simulated,
        metric.recorded,
        metric.error,
        metric.tolerance,
    )


def counts(rows: Iterable[CheckRow]) -> dict[Outcome, int]:
    """The number of rows by outcome."""
    totals: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
    for row in rows:
        totals[row.outcome] += 1
    return totals


def step_times(rows: Iterable[CheckRow]) -> tuple[int, int]:
    """(number of cases whose step time was judged, passed or not, number of cases that have a step time)."""
    judged: dict[str, bool] = {}
    for row in rows:
        if row.is_step_time:
            is_judged = row.outcome not in ("inconclusive", "skipped")
            judged[row.case] = judged.get(row.case, False) or is_judged
    return sum(judged.values()), len(judged)
