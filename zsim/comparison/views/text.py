"""A comparison on a terminal of 80 columns: the verdict, the figures, the differences ranked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zsim.comparison.verdict import Metric
from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zsim.comparison.comparison import ComparedRuns

MAX_DIFFERENCES = 12
_VERDICTS = {"pass": "SAME", "fail": "DIFFERENT", "inconclusive": "INCONCLUSIVE"}
_COLUMNS = [
    Column("", is_left=True, min_width=36),
    Column("simulated", min_width=11),
    Column("recorded", min_width=11),
    Column("error", min_width=8),
    Column("", is_left=True),
]
_MARKS = {"pass": "", "fail": "miss", "inconclusive": "?"}


def comparison_lines(comparison: ComparedRuns) -> Iterator[str]:
    """Lines of the verdict, then of the compared figures, then of the differences."""
    yield f"{_VERDICTS[comparison.verdict]}  {comparison.names[0]} | {comparison.names[1]}"
    yield ""
    yield from paragraph(_plan_sentence(comparison), first="calls  ")
    if comparison.doubt:
        yield from paragraph(f"inconclusive: {comparison.doubt}", first="times  ")
    if comparison.range_sentence:
        yield from paragraph(comparison.range_sentence, first="range  ")
    yield ""
    yield from _table(
        {
            "Step": comparison.clock.step,
            "Ops": [row.metric for row in comparison.clock.classes],
            "Streams": comparison.clock.streams,
            "Memory": comparison.memory.metrics,
        }
    )
    differences = comparison.differences
    if differences:
        yield ""
        yield "What differs, most important first"
        for number, row in enumerate(differences[:MAX_DIFFERENCES], start=1):
            mark = "" if row.verdict == "fail" else "(inconclusive) "
            yield from paragraph(mark + row.sentence, first=f"{number:>3}  ")
        if len(differences) > MAX_DIFFERENCES:
            yield f"     and {len(differences) - MAX_DIFFERENCES} more (--json, --out)"
    if comparison.not_checked:
        yield ""
        yield from paragraph("; ".join(comparison.not_checked), first="not checked  ")
    for note in comparison.notes:
        yield from paragraph(note, first="note  ")


def _plan_sentence(comparison: ComparedRuns) -> str:
    plans = comparison.plans
    ranks = f"on {len(plans)} rank{'s' * (len(plans) > 1)}"
    if comparison.plan_verdict == "pass":
        return f"the same {len(comparison.plan.recorded):,} per rank, in the same order, {ranks}"
    wrong = [rank for rank, plan in plans.items() if plan.differences]
    count = sum(row.count for row in plans[wrong[0]].differences)
    return (
        f"{count} of {len(comparison.plan.recorded):,} differ on {len(wrong)} of {len(plans)} "
        f"rank{'s' * (len(plans) > 1)}"
    )


def _table(groups: Mapping[str, Sequence[Metric]]) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for title, metrics in groups.items():
        rows += [(title,)] if metrics else []
        rows += [
            (
                f"  {metric.name}",
                format_figure(metric, metric.simulated),
                format_figure(metric, metric.recorded),
                format_error(metric),
                _MARKS[metric.verdict],
            )
            for metric in metrics
        ]
    return table(_COLUMNS, rows)


def format_figure(metric: Metric, value: float) -> str:
    """A figure of the metric as text with its unit."""
    if metric.unit == "fraction":
        return f"{value * 100:.1f} %"
    return format_seconds(value) if metric.unit == "seconds" else format_bytes(value)


def format_error(metric: Metric) -> str:
    """The signed error in percent, or in percentage points, or "new" where the recorded figure is 0."""
    if metric.error is None:
        return "new"
    return f"{metric.error * 100:+.1f}{'p' if metric.unit == 'fraction' else '%'}"
