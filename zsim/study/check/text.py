"""The regression check on a terminal of 80 columns, with misses first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.study.check.check import CheckReport
from zsim.study.check.rows import OUTCOMES, CheckRow, Outcome, counts, step_times
from zsim.study.measured.error_summary import check_lines, summary_lines

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
