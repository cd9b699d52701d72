"""One line of `zsim check`: what was looked at, in which case, and how it came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from zsim.report.verdict import Metric, Verdict

# Beside pass, fail and inconclusive: a miss that the baseline names with its reason, and what zsim cannot do.
Outcome = Literal["pass", "fail", "inconclusive", "known", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("fail", "known", "inconclusive", "skipped", "pass")


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
