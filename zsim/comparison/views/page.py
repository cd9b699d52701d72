"""A comparison as one HTML page that fetches nothing: both timelines, and the differences ranked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.comparison.verdict import Metric, Verdict
from zsim.comparison.views.figures import memory_bars, op_scatter, twin_timeline
from zsim.comparison.views.text import format_error, format_figure
from zsim.files import write_atomically
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import time_scale
from zsim.report.views.html.page import Plot, plot, render

if TYPE_CHECKING:
    from zsim.comparison.comparison import ComparedRuns

_TITLES: dict[Verdict, str] = {
    "pass": "The same, within tolerance",
    "fail": "Different",
    "inconclusive": "Inconclusive",
}
MAX_ROWS = 200


def write_compare_page(comparison: ComparedRuns, path: str | Path) -> Path:
    """Write the page to `path`. The same comparison gives the same bytes."""
    return write_atomically(Path(path), compare_page(comparison))


def compare_page(comparison: ComparedRuns) -> str:
    """The complete page, plotly.js included."""
    differences = comparison.differences
    largest = {
        check: max((row.share for row in differences if row.check == check), default=0.0)
        for check in ("plan", "clock", "memory")
    }
    return render(
        "compare.html.j2",
        names=comparison.names,
        comparison=comparison,
        verdict=_TITLES[comparison.verdict],
        tiles=list(_tiles(comparison)),
        differences=[
            (row, f"{100 * row.share / (largest[row.check] or 1.0):.1f}") for row in differences[:MAX_ROWS]
        ],
        left_out=max(len(differences) - MAX_ROWS, 0),
        timeline=_plot("timeline", _TIMELINE_CAPTION, twin_timeline(comparison)),
        views=_views(comparison),
        ops=_plot("ops", "A point per op and its counterpart.", op_scatter(comparison)),
        memory=_plot("memory", "Each category at its own maximum.", memory_bars(comparison)),
        tables=list(_tables(comparison)),
    )


_TIMELINE_CAPTION = (
    "One time axis for both. Drag over a stretch to zoom into both, double-click to zoom out, hover for "
    "details; dotted lines are the ends of the steps."
)


def _tiles(comparison: ComparedRuns) -> Iterator[tuple[str, str, str]]:
    """(label, number, small print) of the most important figures."""
    wrong = sum(row.count for row in comparison.plan.differences)
    calls = len(comparison.plan.recorded)
    yield "Calls", "same" if not wrong else f"{wrong:,} differ", f"{calls:,} recorded per rank and step"
    for metric in comparison.clock.step:
        if metric.name in ("step", "exposed communication", "overlap"):
            yield metric.name.capitalize(), format_error(metric), _simulated_and_recorded(metric)
    for metric in comparison.memory.metrics:
        if metric.name == "gpu total, peak":
            yield "GPU memory peak", format_error(metric), _simulated_and_recorded(metric)


def _simulated_and_recorded(metric: Metric) -> str:
    return (
        f"{format_figure(metric, metric.simulated)} simulated, {format_figure(metric, metric.recorded)} "
        "recorded"
    )


def _views(comparison: ComparedRuns) -> list[tuple[str, float, float]]:
    longest = max(comparison.simulated.step_seconds, comparison.recorded.step_seconds)
    scale, _ = time_scale(longest)
    end = longest * scale
    return [("whole step", 0.0, end), ("start", 0.0, 0.05 * end), ("end", 0.95 * end, end)]


def _tables(comparison: ComparedRuns) -> Iterator[tuple[str, list[tuple[str, str, str, str, Verdict]]]]:
    clock = comparison.clock
    for title, metrics in (
        ("Step", clock.step),
        ("Ops by class", tuple(row.metric for row in clock.classes)),
        ("Streams, busy", clock.streams),
        ("Memory", comparison.memory.metrics),
    ):
        if metrics:
            yield title, [_row(metric) for metric in metrics]


def _row(metric: Metric) -> tuple[str, str, str, str, Verdict]:
    simulated_text, recorded_text = (
        format_figure(metric, metric.simulated),
        format_figure(metric, metric.recorded),
    )
    return metric.name, simulated_text, recorded_text, format_error(metric), metric.verdict


def _plot(name: str, caption: str, figure: Figure | None) -> Plot | None:
    return None if figure is None else plot(name, caption, figure)
