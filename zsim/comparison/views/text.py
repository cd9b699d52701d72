"""A comparison on a terminal of 80 columns: the verdict, the figures, the differences ranked."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zsim.comparison.verdict import Metric
from zsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zsim.comparison.comparison import ComparedRuns

MOST_DIFFERENCES = 12
_WIDTH = 80
_VERDICTS = {"pass": "SAME", "fail": "DIFFERENT", "inconclusive": "INCONCLUSIVE"}
_MARKS = {"pass": "", "fail": "miss", "inconclusive": "?"}


def comparison_lines(comparison: ComparedRuns) -> Iterator[str]:
    """The verdict first; then what was compared, and what is not the same."""
    yield f"{_VERDICTS[comparison.verdict]}  {comparison.names[0]} | {comparison.names[1]}"
    yield ""
    yield from _wrapped("calls", _plan_sentence(comparison))
    if comparison.doubt:
        yield from _wrapped("times", f"inconclusive: {comparison.doubt}")
    if comparison.range_sentence:
        yield from _wrapped("range", comparison.range_sentence)
    yield ""
    yield f"{'':<36} {'simulated':>11} {'recorded':>11} {'error':>8}"
    yield from _table("Step", comparison.clock.step)
    yield from _table("Ops", [row.metric for row in comparison.clock.classes])
    yield from _table("Streams", comparison.clock.streams)
    yield from _table("Memory", comparison.memory.metrics)
    differences = comparison.differences
    if differences:
        yield ""
        yield "What differs, most important first"
        for number, row in enumerate(differences[:MOST_DIFFERENCES], start=1):
            mark = "" if row.verdict == "fail" else "(inconclusive) "
            yield from _wrapped(f"{number:>3}", mark + row.sentence)
        if len(differences) > MOST_DIFFERENCES:
            yield f"     and {len(differences) - MOST_DIFFERENCES} more (--json, --out)"
    if comparison.not_checked:
        yield ""
        yield from _wrapped("not checked", "; ".join(comparison.not_checked))
    for note in comparison.notes:
        yield from _wrapped("note", note)


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


def _table(title: str, metrics: Sequence[Metric]) -> Iterator[str]:
    if metrics:
        yield title
    for metric in metrics:
        yield (
            f"  {metric.name[:34]:<34} {show(metric, metric.simulated):>11} "
            f"{show(metric, metric.recorded):>11} {show_error(metric):>8} {_MARKS[metric.verdict]}".rstrip()
        )


def show(metric: Metric, value: float) -> str:
    """A figure of the metric, for people."""
    if metric.unit == "fraction":
        return f"{value * 100:.1f} %"
    return format_seconds(value) if metric.unit == "seconds" else format_bytes(value)


def show_error(metric: Metric) -> str:
    """The signed error in percent, or in points of percent; "new" where there is nothing to divide by."""
    if metric.error is None:
        return "new"
    return f"{metric.error * 100:+.1f}{'p' if metric.unit == 'fraction' else '%'}"


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * (max(len(label), 3) + 2)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{label:<3}  ", subsequent_indent=indent, break_on_hyphens=False
    )
