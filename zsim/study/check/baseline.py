"""A baseline: pinned predictions (or recordings) of a team's runs, so that any change of them is noticed.

{"format": 1, "zsim_version": "0.1.0",
     "tolerances": {"step": 0.02, "time": 0.02, "memory": 0.01, "overlap": 0.02},
     "cases": {"jobs/llama.toml": {"figures": {"step_seconds": 1.2, ...}, "ops": {...}, "calls": [...],
                                   "tolerances": {"step": 0.05}}},
     "known": [{"case": "*/deepspeed1-*", "check": "calls", "reason": "..."}]}

`tolerances` apply to all cases, and a case's own `tolerances` take precedence. Both are edited by hand, and
`--update-baseline` keeps them. `known` lists misses that are understood. They are shown with their reason and
do not fail the check. Names of cases are paths relative to the baseline's folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from zsim.comparison.op_classes import group_ops, has_phases_recorded
from zsim.comparison.plan_check import calls_of_trace, check_plan, fold, unfold
from zsim.comparison.verdict import FORMATS, PREDICTIONS, Metric, Tolerances, Verdict, judge, timing_doubt
from zsim.errors import InputError, did_you_mean, unreadable_reason
from zsim.files import write_atomically
from zsim.reading import parse_json, read_text
from zsim.report.breakdown import step_breakdown
from zsim.report.memory import memory_peaks
from zsim.report.traffic import overlap_fraction
from zsim.trace.trace import Trace
from zsim.units import round_digits
from zsim.version import __version__

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


# -- Figures of a trace that a baseline pins, and the check of a trace against them ------------------------


_DIGITS = 9  # significant digits of a pinned figure: far below any tolerance, the same on every machine


def figures_of(trace: Trace) -> dict[str, float]:
    """Step, breakdown, overlap, and the peak by device and category, of the trace's first rank."""
    figures: dict[str, float] = {"step_seconds": trace.step_seconds}
    breakdown = step_breakdown(trace)
    seconds = breakdown.seconds.items()  # no bubble: a trace does not say when another stage delivered
    figures |= {f"{name}_seconds": value for name, value in seconds if name != "bubble"}
    overlap = overlap_fraction(trace)
    if overlap is not None:
        figures["overlap_fraction"] = overlap
    for device, peak in memory_peaks(trace.memory).items():
        if peak.total:
            figures[f"{device}_total_bytes"] = peak.total
            figures |= {f"{device}_{name}_bytes": size for name, size in peak.by_category.items() if size}
    return {name: round_digits(value, _DIGITS) for name, value in figures.items()}


def seconds_by_class(trace: Trace) -> dict[str, float]:
    """Seconds of the first rank's collectives and kernels, by class. A slower link shows here first."""
    if not len(trace):
        return {}
    rank_trace = trace.select_rank(int(trace.ranks[0]))
    classes = group_ops(rank_trace, has_phases=has_phases_recorded(rank_trace))
    return {name: round_digits(ops.seconds, _DIGITS) for name, ops in classes.items()}


def pinned_content(trace: Trace) -> dict[str, Any]:
    """The content that `--update-baseline` pins for a trace."""
    rank = int(trace.ranks[0]) if len(trace) else 0
    calls = fold(calls_of_trace(trace.select_rank(rank), rank))
    return {"figures": figures_of(trace), "ops": seconds_by_class(trace), "calls": calls}


def pinned_rows(
    case: str, trace: Trace, content: Mapping[str, Any], tolerances: Tolerances, where: str
) -> Iterator[CheckRow]:
    """The checks of a trace against its pins. Raises InputError for an incomplete pin."""
    rank = int(trace.ranks[0]) if len(trace) else 0
    calls = calls_of_trace(trace.select_rank(rank), rank)
    word = "recorded" if trace.source == "recorded" else "simulated"
    pinned = unfold(content.get("calls", []), f"{where}: {case}: calls")
    check = check_plan(pinned, unfold(fold(calls), "calls"), ("pinned", word))
    text = "; ".join(row.sentence for row in check.differences[:3])
    yield CheckRow(case, "calls", check.verdict, text, len(calls), len(pinned))
    doubt = timing_doubt(trace)
    figures, ops = (_numbers(content.get(key, {}), f"{where}: {case}: {key}") for key in ("figures", "ops"))
    for pins, now in ((figures, figures_of(trace)), (ops, seconds_by_class(trace))):
        for name in dict.fromkeys([*pins, *now]):
            before, after = pins.get(name, 0.0), now.get(name, 0.0)
            metric = _judge_figure(name, after, before, figures, tolerances, doubt)
            show = FORMATS[metric.unit]
            moved = f"{show(before)} pinned, {show(after)} {word}"
            yield row_of_metric(case, metric, moved if metric.verdict == "fail" else metric.reason)


def _numbers(values: object, where: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: expected an object")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{where}: {name}: found {value!r}, expected a number")
    return {str(name): float(value) for name, value in values.items()}


def _judge_figure(
    name: str, after: float, before: float, figures: Mapping[str, Any], tolerances: Tolerances, doubt: str
) -> Metric:
    device = name.split("_")[0]
    if name.endswith("_fraction"):
        return judge(
            name, after, before, unit="fraction", total=1.0, tolerance=tolerances.overlap, doubt=doubt
        )
    if name.endswith("_bytes"):
        reference = float(figures.get(f"{device}_total_bytes", before))
        return judge(name, after, before, unit="bytes", total=reference, tolerance=tolerances.memory)
    tolerance = tolerances.step if name == "step_seconds" else tolerances.time
    reference = float(figures.get("step_seconds", before))
    return judge(name, after, before, unit="seconds", total=reference, tolerance=tolerance, doubt=doubt)


FORMAT = 1
_KEYS = ("format", "zsim_version", "tolerances", "cases", "known")


@dataclass(frozen=True, slots=True)
class KnownMiss:
    """A known miss with its reason. `case` and `check` are shell patterns (`*`, `?`)."""

    case: str
    check: str
    reason: str

    def matches(self, case: str, check: str) -> bool:
        return fnmatchcase(case, self.case) and fnmatchcase(check, self.check)


@dataclass
class Baseline:
    """The content of a baseline file at `path`."""

    path: Path
    tolerances: Tolerances = PREDICTIONS
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    known_misses: tuple[KnownMiss, ...] = ()

    def tolerances_of(self, case: str) -> Tolerances:
        """The case's tolerances, completed by the file's."""
        case_tolerances = self.cases.get(case, {}).get("tolerances", {})
        return _tolerances(case_tolerances, self.tolerances, f"{self.path.name}: cases: {case}: tolerances")

    def reason_of(self, case: str, check: str) -> str | None:
        """The reason if a miss of this check is known, else None."""
        return next((miss.reason for miss in self.known_misses if miss.matches(case, check)), None)

    def pin(self, case: str, content: Mapping[str, Any]) -> None:
        """Replace the pinned content of a case. Its tolerances stay."""
        tolerances = {key: value for key, value in self.cases.get(case, {}).items() if key == "tolerances"}
        self.cases[case] = {**content, **tolerances}

    def write(self) -> Path:
        """Write the file with one line per figure and cases in order, so that diffs are readable."""
        content = {
            "format": FORMAT,
            "zsim_version": __version__,
            "tolerances": asdict(self.tolerances),
            "cases": {name: self.cases[name] for name in sorted(self.cases)},
            "known": [
                {"case": miss.case, "check": miss.check, "reason": miss.reason} for miss in self.known_misses
            ],
        }
        return write_atomically(self.path, _lines(content, 0) + "\n")


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises InputError for a file that is missing, not JSON, or of another shape."""
    try:
        content = parse_json(read_text(path), path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; --update-baseline writes one") from None
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{path}: not a baseline: not JSON, or cut short: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        actual_format = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise InputError(f"{path}: found format {actual_format!r}, expected a baseline of format {FORMAT}")
    for key in content:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS)
            raise InputError(f"{path}: unknown key '{key}', expected {', '.join(_KEYS)}{hint}")
    cases, misses = content.get("cases", {}), content.get("known", [])
    if not isinstance(cases, dict) or not all(isinstance(case, dict) for case in cases.values()):
        raise InputError(f"{path}: cases: expected an object of objects, one per case")
    try:
        known_misses = tuple(KnownMiss(row["case"], row["check"], row["reason"]) for row in misses)
    except (TypeError, KeyError):
        raise InputError(f"{path}: known: expected objects with case, check and reason") from None
    tolerances = _tolerances(content.get("tolerances", {}), PREDICTIONS, f"{path}: tolerances")
    baseline = Baseline(path, tolerances, cases, known_misses)
    for case in cases:
        baseline.tolerances_of(case)
    return baseline


def _tolerances(overrides: object, base: Tolerances, where: str) -> Tolerances:
    if not isinstance(overrides, Mapping):
        raise InputError(f'{where}: expected an object, e.g. {{"step": 0.02}}')
    try:
        return Tolerances.of({**asdict(base), **overrides})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _lines(value: Any, depth: int) -> str:
    indent, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value and depth < 5:
        if depth >= 2 and set(value) >= {"times", "calls"}:
            return json.dumps(value)
        rows = [f"{indent}{json.dumps(key)}: {_lines(inner, depth + 1)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{outer}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{indent}{json.dumps(row)}" for row in value) + f"\n{outer}]"
    return json.dumps(value)
