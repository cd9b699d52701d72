"""Whole runs in a scaling study: goodput, days and GPU-hours by the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import Column, ResultTable, Section
from zsim.report.views.text.plain import paragraph, table
from zsim.study.scaling.scaling import Scaling, ScalingPoint
from zsim.units import format_duration

_COLUMNS = [Column(title) for title in ("GPUs", "days", "5 to 95 %", "goodput", "failures", "save every")]


def run_lines(scaling: Scaling) -> Iterator[str]:
    """A table of the runs, then the number of GPUs with the fewest days. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return
    yield ""
    yield "whole runs, with saves and failures"
    heading, *lines = table(_COLUMNS, [_cells(point, answer) for point, answer in answers])
    yield heading
    for (_, answer), line in zip(answers, lines, strict=True):
        error = answer["run_error"]
        yield from [line] if error is None else paragraph(f"{line} {error}", indent=8)
    mean_days = [
        (answer["expected_days"], point.gpus) for point, answer in answers if answer["expected_days"]
    ]
    if mean_days:
        days, gpus = min(mean_days)
        yield from paragraph(f"The fewest days: {days:.2f}, on {gpus:,} GPUs.")


def run_section(scaling: Scaling) -> list[Section]:
    """The page's section with its figures. Empty without `[run]`."""
    answers = _answers(scaling)
    if not answers:
        return []
    figures = [
        ("goodput", "Goodput: the steps' time over the whole run's, saves and failures included.",
         _figure(answers, "goodput_fraction", 100.0, "%", BREAKDOWN["compute"].color)),
        ("days", "Days to the last token; dashed: if nothing were saved and nothing failed.",
         _days_figure(answers)),
    ]  # fmt: skip
    rows = [[*_cells(point, answer), answer["run_error"] or ""] for point, answer in answers]
    return [Section("Whole runs", figures, ResultTable("", [*_COLUMNS, Column("", is_left=True)], rows))]


def run_dict(point: ScalingPoint) -> dict[str, Any]:
    """The run's entries in the study's JSON."""
    return {} if point.whole_run is None else {"run": dict(point.whole_run)}


def _answers(scaling: Scaling) -> list[tuple[ScalingPoint, Mapping[str, Any]]]:
    return [(point, point.whole_run) for point in scaling.runs if point.whole_run is not None]


def _cells(point: ScalingPoint, answer: Mapping[str, Any]) -> list[str]:
    if answer["run_error"] is not None:
        return [f"{point.gpus:,}", "", "", "", "", ""]
    days, low, high = answer["expected_days"], answer["days_low"], answer["days_high"]
    interval, goodput = answer["interval_seconds"], answer["goodput_fraction"]
    return [
        f"{point.gpus:,}",
        "no mean" if days is None else f"{days:.2f}",
        f"{low:.1f} to {high:.1f}" if high is not None else f"from {low:.1f}",
        "-" if goodput is None else f"{goodput * 100:.1f} %",
        f"{answer['failures']:,.1f}",
        "-" if interval is None else format_duration(interval),
    ]


def _figure(
    answers: list[tuple[ScalingPoint, Mapping[str, Any]]], name: str, factor: float, unit: str, color: str
) -> Figure:
    figure = Figure(layout(360))
    points = [
        (point.gpus, answer[name] * factor) for point, answer in answers if answer.get(name) is not None
    ]
    figure.add_scatter(
        name=name.removesuffix("_fraction").replace("_", " "),
        x=[gpus for gpus, _ in points],
        y=[value for _, value in points],
        mode="lines+markers",
        line={"color": color, "width": 3},
        hovertemplate="%{x:,} GPUs: %{y:,.1f} " + unit + "<extra></extra>",
    )
    counts = [point.gpus for point, _ in answers]
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=counts, ticktext=[f"{n:,}" for n in counts])
    figure.update_yaxes(title_text=unit, automargin=True, rangemode="tozero")
    return figure


def _days_figure(answers: list[tuple[ScalingPoint, Mapping[str, Any]]]) -> Figure:
    figure = _figure(answers, "expected_days", 1.0, "days", BREAKDOWN["compute"].color)
    figure.add_scatter(
        name="steps alone",
        x=[point.gpus for point, answer in answers if answer["ideal_days"] is not None],
        y=[answer["ideal_days"] for _, answer in answers if answer["ideal_days"] is not None],
        mode="lines",
        line={"dash": "dash", "width": 2, "color": CAPACITY.color},
        hoverinfo="skip",
    )
    figure.update_yaxes(type="log")
    return figure
