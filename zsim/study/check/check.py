"""The regression check: today's predictions against everything recorded or measured, and against the pins of
a baseline, on a terminal of 80 columns with misses first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar
from xml.etree import ElementTree

from zsim.comparison.compare import compare
from zsim.comparison.verdict import Tolerances
from zsim.errors import InputError
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.specs.user_code import UserCode
from zsim.study.check.baseline import (
    OUTCOMES,
    Baseline,
    CheckRow,
    Outcome,
    counts,
    pinned_content,
    pinned_rows,
    row_of_metric,
    step_times,
)
from zsim.study.check.targets import CheckTarget, TargetSearch, case_rows, find_targets, load_trace
from zsim.study.measured.error_summary import (
    MARGIN,
    changed_rows,
    check_lines,
    error_summaries,
    overall_error_summary,
    published_rows,
    row_pins,
    summary_lines,
)
from zsim.study.measured.experiment_table import predict_run, read_experiment_runs
from zsim.study.measured.prediction import CheckResult, RowResult, iterate_predictions
from zsim.study.topologies.bench import compare_curves
from zsim.units import format_count

COUNTED = ("runs of tables", "cases")  # what `on_done` of `run_check` counts
SAMPLE_ROWS = 6  # per source, in a fast check


@dataclass(frozen=True)
class CheckReport:
    """All checks, the rows of tables with their predictions, and notes."""

    rows: tuple[CheckRow, ...]
    measured: CheckResult
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """ "fail" if a check fails, "inconclusive" if nothing could be judged, else "pass"."""
        outcomes = {row.outcome for row in self.rows}
        if "fail" in outcomes:
            return "fail"
        return "inconclusive" if outcomes and outcomes <= {"inconclusive", "skipped"} else "pass"

    @property
    def failed_rows(self) -> tuple[CheckRow, ...]:
        """The checks that exceed their tolerance."""
        return tuple(row for row in self.rows if row.outcome == "fail")

    def to_dict(self) -> dict[str, Any]:
        """The content of `zsim check --json`: the rows of tables and their summary, and every check."""
        return {
            **self.measured.to_dict(),
            "notes": [*self.measured.notes, *self.notes],
            "verdict": self.verdict,
            "step_times": dict(zip(("judged", "of"), step_times(self.rows), strict=True)),
            "checks": [asdict(row) for row in self.rows],
        }


def run_check(
    paths: Sequence[Path],
    base: Path,
    *,
    baseline: Baseline | None = None,
    is_fast: bool = False,
    tolerances: Tolerances | None = None,
    update: bool = False,
    code: UserCode | None = None,
    on_done: Callable[[str, int], None] | None = None,
) -> CheckReport:
    """Check everything that `paths` name. Names of cases are relative to `base`. `on_done` is called with the
    progress: one of `COUNTED`, and how many.

    `is_fast` takes a sample of each source of a table. `update` pins the results into `baseline` (the caller
    writes it) instead of comparing with it. `tolerances` apply to traces that are compared with the
    experiment next to them. `code` is the permission to run functions that experiments name as models.
    """
    search = find_targets(paths, base)
    tables = {
        target.name: read_experiment_runs(target.path) for target in search.targets if target.kind == "runs"
    }
    report = check_tables(
        tables, predict_run, baseline=baseline, is_fast=is_fast, update=update, on_done=on_done
    )
    rows: list[CheckRow] = []
    for number, target in enumerate((target for target in search.targets if target.kind != "runs"), 1):
        rows += _target_rows(target, baseline, tolerances, update, code)
        if on_done is not None:
            on_done(COUNTED[1], number)
    notes = []
    if search.ignored:
        shown = ", ".join(search.ignored[:3]) + (", ..." if len(search.ignored) > 3 else "")
        notes.append(f"{format_count(len(search.ignored), 'file')} no case: {shown}")
    notes += [f"{name}: python -m validation.published checks published runs" for name in search.published]
    if baseline is not None:
        rows = [_excuse_known_miss(row, baseline) for row in rows]
        notes += [] if update else _unchecked_cases_note(baseline, search)
    return replace(report, rows=(*report.rows, *rows), notes=tuple(notes))


def _excuse_known_miss(row: CheckRow, baseline: Baseline) -> CheckRow:
    """The row, except that a miss that the baseline knows becomes "known", with its reason, and no longer
    fails the check.
    """
    reason = baseline.reason_of(row.case, row.name) if row.outcome == "fail" else None
    return row if reason is None else replace(row, outcome="known", sentence=f"{reason} ({row.sentence})")


def _unchecked_cases_note(baseline: Baseline, search: TargetSearch) -> list[str]:
    names = {target.name for target in search.targets} | set(search.published)
    missing = [name for name in baseline.cases if name not in names]
    return (
        [f"{format_count(len(missing), 'case')} of the baseline not given: {', '.join(missing[:3])}"]
        if missing
        else []
    )


# -- one target -------------------------------------------------------------------------------------------


def _target_rows(
    target: CheckTarget,
    baseline: Baseline | None,
    tolerances: Tolerances | None,
    update: bool,
    code: UserCode | None,
) -> list[CheckRow]:
    if target.kind == "case":
        return case_rows(target.name, target.path, target.content)
    if target.kind == "curves":
        return list(_curve_rows(target, baseline, update))
    rows: list[CheckRow] = []
    trace = load_trace(target.path, code=code)
    if target.experiment is not None:
        comparison = compare(load_trace(target.experiment, code=code), trace, tolerances=tolerances)
        first = [row.sentence for row in comparison.differences if row.check == "plan"][:3]
        plan = comparison.plan
        calls = len(plan.simulated), len(plan.recorded)
        rows.append(CheckRow(target.name, "calls", comparison.plan_verdict, "; ".join(first), *calls))
        rows += [row_of_metric(target.name, metric) for metric in comparison.metrics]
    if baseline is None and target.experiment is None:
        reason = "a trace has nothing to be compared with" if target.kind == "trace" else "nothing is pinned"
        expected = "expected --baseline FILE"
        if target.kind == "trace":
            expected += ", or the experiment beside it (same name, .toml; or experiment.toml)"
        raise InputError(f"{target.path}: {reason}; {expected}")
    if baseline is None:
        return rows
    if update:
        baseline.pin(target.name, pinned_content(trace))
    elif target.name in baseline.cases:
        case_tolerances = baseline.tolerances_of(target.name)
        rows += pinned_rows(
            target.name, trace, baseline.cases[target.name], case_tolerances, str(baseline.path)
        )
    elif target.experiment is None:
        text = "not in the baseline; --update-baseline adds it"
        rows.append(CheckRow(target.name, "baseline", "fail", text))
    return rows


def _curve_rows(target: CheckTarget, baseline: Baseline | None, update: bool) -> Iterator[CheckRow]:
    """Measured curves of collectives: the mean error of each curve must not grow."""
    errors: dict[str, list[float]] = {}
    for point in compare_curves(target.path):
        if point.is_scored:
            errors.setdefault(point.curve, []).append(abs(point.error))
    means = {name: round(fmean(curve_errors), 5) for name, curve_errors in errors.items()}
    if update and baseline is not None:
        baseline.pin(target.name, {"curves": means})
    pinned = baseline.cases.get(target.name, {}).get("curves", {}) if baseline is not None else {}
    for name, now in means.items():
        before = pinned.get(name)
        if before is not None:
            is_worse = now > before + MARGIN
            text = f"{before:.1%} in the baseline, {now:.1%} now" if is_worse else ""
            yield CheckRow(
                target.name, name, "fail" if is_worse else "pass", text, now, before, now - before, MARGIN
            )


# -- measured runs ----------------------------------------------------------------------------------------


class MeasuredRun(Protocol):
    """A row of a table of measured runs."""

    @property
    def row_id(self) -> str: ...
    @property
    def source(self) -> str: ...


RunType = TypeVar("RunType", bound=MeasuredRun)


def check_tables(
    tables: Mapping[str, Sequence[RunType]],
    predict: Callable[[RunType], RowResult],
    *,
    baseline: Baseline | None = None,
    is_fast: bool = False,
    update: bool = False,
    on_done: Callable[[str, int], None] | None = None,
    notes: Iterable[str] = (),
) -> CheckReport:
    """Predict the rows of all tables, by their names as cases, and compare with the baseline.

    The arguments are those of `run_check`. `predict` gives the prediction of a row.
    """
    report_progress = on_done or (lambda kind, count: None)
    chosen = {name: sample(runs) if is_fast else runs for name, runs in tables.items()}
    predicted: list[RowResult] = []
    rows: list[CheckRow] = []
    for row in iterate_predictions([run for runs in chosen.values() for run in runs], predict):
        predicted.append(row)
        report_progress(COUNTED[0], len(predicted))
    start = 0
    for name, runs in chosen.items():
        table_rows = predicted[start : start + len(runs)]
        start += len(runs)
        if baseline is not None and update:
            _pin_table(name, runs, table_rows, baseline, is_fast)
        rows += published_rows(name, table_rows, baseline, "sample" if is_fast else "sources")
        rows += changed_rows(name, table_rows, baseline)
    if baseline is not None:
        rows = [_excuse_known_miss(row, baseline) for row in rows]
    if is_fast and predicted:
        all_rows = sum(map(len, tables.values()))
        notes = (*notes, f"fast: {len(predicted)} of {all_rows} published rows, some of each source")
    return CheckReport(tuple(rows), CheckResult(tuple(predicted), tuple(notes)))


def _pin_table(
    name: str, runs: Sequence[MeasuredRun], rows: Sequence[RowResult], baseline: Baseline, is_fast: bool
) -> None:
    """Pin a table's errors by source. Those of all rows stay as they are where only a sample is predicted."""
    sampled = {run.row_id for run in sample(runs)}
    sample_errors = error_summaries([row for row in rows if row.row_id in sampled])
    before = baseline.cases.get(name, {})
    source_errors = before.get("sources", {}) if is_fast else error_summaries(rows)
    pinned = before.get("rows", {}) if is_fast else row_pins(rows)
    total = before.get("all", {}) if is_fast else overall_error_summary(rows)
    baseline.pin(name, {"all": total, "sources": source_errors, "sample": sample_errors, "rows": pinned})


def sample(runs: Sequence[RunType]) -> list[RunType]:
    """Up to `SAMPLE_ROWS` runs of each source, spread evenly over its rows."""
    by_source: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        by_source.setdefault(run.source, []).append(index)
    chosen: set[int] = set()
    for indices in by_source.values():
        count = min(SAMPLE_ROWS, len(indices))
        chosen |= {indices[k * len(indices) // count] for k in range(count)}
    return [runs[index] for index in sorted(chosen)]


_MAXIMUM = 20
_TITLES: dict[Outcome, str] = {
    "fail": "Moved past its tolerance",
    "known": "Known differences (they fail nothing)",
    "inconclusive": "Inconclusive (neither failed nor passed)",
    "skipped": "Not simulated",
}


def report_lines(report: CheckReport, *, is_long: bool) -> Iterator[str]:
    """The lines of the report. `is_long` shows every row of a table, as when a table is named, instead of one
    line per source.
    """
    if report.measured.rows:
        yield from check_lines(report.measured) if is_long else summary_lines(report.measured)
        yield ""
    if report.rows:
        yield from _groups(report.rows)
    for outcome in ("fail", "known", "inconclusive", "skipped"):
        yield from _outcome_lines(outcome, [row for row in report.rows if row.outcome == outcome])
    for note in report.notes:
        yield from paragraph(note, first="note: ")
    if report.rows:
        totals = counts(report.rows)
        summary = ", ".join(f"{totals[outcome]} {_WORDS[outcome]}" for outcome in OUTCOMES if totals[outcome])
        text = f"{report.verdict.upper()}  {summary}{_judged_steps_note(report.rows)}"
        yield from paragraph(text, indent=2)


def _judged_steps_note(rows: Sequence[CheckRow]) -> str:
    """How many step times were judged. A pass without any says nothing about speed."""
    judged, count = step_times(rows)
    if not count:
        return ""
    steps = "step time" if count == 1 else "step times"
    return f"; {judged} of {count} {steps} judged" if judged else f"; no step time judged of {count}"


_WORDS: dict[Outcome, str] = {
    "fail": "moved",
    "known": "known",
    "inconclusive": "inconclusive",
    "skipped": "not simulated",
    "pass": "passed",
}


def _groups(rows: Sequence[CheckRow]) -> Iterator[str]:
    """The outcomes of the checks by folder or table."""
    groups: dict[str, list[CheckRow]] = {}
    for row in rows:
        groups.setdefault(_group(row.case), []).append(row)
    cells = []
    for name, judged in groups.items():
        totals = counts(judged)
        outcomes = (totals[outcome] for outcome in ("pass", "fail", "known", "inconclusive", "skipped"))
        cells.append(
            (name, f"{len({row.case for row in judged})}", *(f"{count or ''}" for count in outcomes))
        )
    columns = named_columns("", "cases", "pass", "moved", "known", "incon.", "skip", min_width=30)
    yield from table(columns, cells)
    yield ""


def _group(case: str) -> str:
    """The group of a case: `traces/gloo/ddp-even-2ranks` -> `traces/gloo`. The sources of a table belong to
    the table.
    """
    table, colon, _ = case.partition(": ")
    return table if colon else case.rpartition("/")[0] or case


def _outcome_lines(outcome: Outcome, rows: Sequence[CheckRow]) -> Iterator[str]:
    if not rows:
        return
    yield _TITLES[outcome]
    if outcome == "fail":
        for row in rows[:_MAXIMUM]:
            yield from paragraph(row.line, first=2, indent=4)
        if len(rows) > _MAXIMUM:
            yield f"  and {len(rows) - _MAXIMUM} more (--json, --junit)"
    else:
        for text, count in Counter(_reason(row) for row in rows).most_common(_MAXIMUM // 2):
            yield from paragraph(f"{count} x {text}", first=2, indent=4)
    yield ""


def _reason(row: CheckRow) -> str:
    """The reason, without the figures that differ between cases."""
    why = row.sentence.partition(" (")[0] if row.outcome == "known" else row.sentence.rpartition("; ")[2]
    return f"{row.name}: {re.sub(r'[0-9.]+%', 'part', why)}"


_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(rows: Sequence[CheckRow]) -> str:
    """One test case per check. A miss is a failure. Inconclusive, known and not simulated checks are skipped
    with their reason.
    """
    outcomes = counts(rows)
    totals = {
        "tests": str(len(rows)),
        "failures": str(outcomes["fail"]),
        "errors": "0",
        "skipped": str(outcomes["inconclusive"] + outcomes["known"] + outcomes["skipped"]),
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "zsim check", **totals})
    for row in rows:
        names = {"classname": _clean(row.case), "name": _clean(row.name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        if row.outcome == "fail":
            message = _clean(row.sentence or "past its tolerance")
            ElementTree.SubElement(case, "failure", {"message": message}).text = _clean(row.line)
        elif row.outcome != "pass":
            message = _clean(f"{row.outcome}: {row.sentence}")
            ElementTree.SubElement(case, "skipped", {"message": message})
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
