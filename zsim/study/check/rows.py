"""One line of `zsim check`: what was looked at, in which case, and how it came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zsim.comparison.verdict import Metric, Verdict

# Beside pass, fail and inconclusive: a miss that the baseline names with its reason, and what zsim cannot do.
Outcome = Literal["pass", "fail", "inconclusive", "known", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("fail", "known", "inconclusive", "skipped", "pass")
_STEPS = ("step", "step_seconds")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """`case` is a file or folder, `name` what of it was checked. `error` is signed and relative, predicted
    over measured less one; of fractions it is the difference. `sentence` says what is not right."""

    case: str
    name: str
    outcome: Outcome
    sentence: str = ""
    predicted: float | None = None
    measured: float | None = None
    error: float | None = None
    tolerance: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_step_time(self) -> bool:
        """Whether a whole step's seconds were looked at (of published runs the sources' errors are)."""
        return ": " not in self.case and (self.name in _STEPS or self.name.endswith(", step"))

    @property
    def line(self) -> str:
        """The case, the check and the sentence, for a list of what moved."""
        return f"{self.case}: {self.name}" + (f": {self.sentence}" if self.sentence else "")


def from_metric(case: str, metric: Metric, sentence: str = "") -> CheckRow:
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
    """How many came out how."""
    found: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
    for row in rows:
        found[row.outcome] += 1
    return found


def step_times(rows: Iterable[CheckRow]) -> tuple[int, int]:
    """Of how many cases the step time was judged, passed or not, and how many have one."""
    judged: dict[str, bool] = {}
    for row in rows:
        if row.is_step_time:
            is_judged = row.outcome not in ("inconclusive", "skipped")
            judged[row.case] = judged.get(row.case, False) or is_judged
    return sum(judged.values()), len(judged)
