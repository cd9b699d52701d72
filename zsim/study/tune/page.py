"""A tuned configuration as one HTML page: step time over memory, the best few, the changes to make."""

from __future__ import annotations

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.html.page import page
from zsim.report.views.meanings import CAPACITY, COMMUNICATION, TOTAL
from zsim.report.views.result import Column, ResultTable, Section, columns_of
from zsim.study.tune.evaluate import CandidateResult
from zsim.study.tune.text import (
    best_table,
    format_change,
    format_doubtful,
    format_step,
    label_of,
    subject,
    verdict,
)
from zsim.study.tune.tune import Tuning
from zsim.units import format_bytes, format_seconds

_BEST = "#1B9E77"


def tuning_page(tuning: Tuning) -> str:
    """The page as text. The same result gives the same bytes."""
    best = Section("The best that fit", table=best_table(tuning, "page"))
    caption = (
        "Every simulated configuration. Down and to the left is better; the line joins those that no other "
        "beats in both."
    )
    sections = [best, Section("Time against memory", [("pareto", caption, pareto_figure(tuning))])]
    if tuning.steps:
        rows = [
            [
                str(number),
                "; ".join(format_change(change) for change in step.changes),
                format_step(step, tuning.given_verdict),
            ]
            for number, step in enumerate(tuning.steps, 1)
        ]
        sections.append(
            Section(
                "What to change",
                [("steps", "Each change on top of those above it, each simulated.", steps_figure(tuning))],
                ResultTable("", columns_of("", Column("change", is_left=True), "step time"), rows),
            )
        )
    doubtful = format_doubtful(tuning) if tuning.doubtful else ""
    summary = ". ".join(part for part in (verdict(tuning), tuning.settled, doubtful) if part)
    return page(subject(tuning), "tune", sections, summary)


def pareto_front(measured: list[CandidateResult]) -> list[CandidateResult]:
    """The results that no other beats in both time and memory, fastest first."""
    front: list[CandidateResult] = []
    for result in sorted(measured, key=lambda m: (m.seconds, m.gpu_bytes)):
        if not front or result.gpu_bytes < front[-1].gpu_bytes:
            front.append(result)
    return front


def pareto_figure(tuning: Tuning) -> Figure:
    """Step time over the fullest GPU's memory, one mark per simulated configuration."""
    points = [*tuning.measured, *(m for m in tuning.best if m not in tuning.measured)]
    scale, unit = time_scale(max(point.seconds for point in points))
    figure = Figure(layout(460, hovermode="closest"))
    front = pareto_front(points)
    figure.add_scatter(
        name="not beaten in both", mode="lines", x=[p.gpu_bytes / 1e9 for p in front],
        y=[p.seconds * scale for p in front], line={"color": TOTAL.color, "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )  # fmt: skip
    groups = [
        ("simulated", points, {"color": COMMUNICATION.color, "size": 8, "opacity": 0.7}),
        ("best", list(tuning.best[:1]), {"color": _BEST, "size": 14, "symbol": "star"}),
    ]
    if tuning.given is not None:
        groups.append(
            ("as given", [tuning.given], {"color": CAPACITY.color, "size": 12, "symbol": "diamond"})
        )
    for name, members, marker in groups:
        figure.add_scatter(
            name=name, mode="markers", marker=marker,
            x=[p.gpu_bytes / 1e9 for p in members], y=[p.seconds * scale for p in members],
            hovertext=[_hover(p) for p in members], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(title_text=f"{unit} per step", rangemode="tozero", automargin=True)
    limit = tuning.best[0].row.get("gpu_capacity_bytes")
    if limit:
        figure.add_vline(
            x=limit / 1e9, line={"dash": "dash", "width": 2, "color": CAPACITY.color},
            text=f"capacity {format_bytes(limit)}",
        )  # fmt: skip
    return figure


def _hover(measured: CandidateResult) -> str:
    lines = label_of(measured).replace(", ", "<br>")
    return f"<b>{format_seconds(measured.seconds)}</b>, {format_bytes(measured.gpu_bytes)}<br>{lines}"


def steps_figure(tuning: Tuning) -> Figure:
    """Step time after each change."""
    first = tuning.steps[0].seconds_before
    names = ["as given"] if first is not None else []
    seconds = [first] if first is not None else []
    for number, step in enumerate(tuning.steps, 1):
        names.append(f"{number}. " + ", ".join(change.key.rpartition(".")[2] for change in step.changes))
        seconds.append(step.after.seconds)
    scale, unit = time_scale(max(seconds))
    figure = Figure(layout(110 + 40 * len(names), showlegend=False))
    figure.add_bar(
        orientation="h", y=names, x=[value * scale for value in seconds],
        marker_color=[COMMUNICATION.color] * (len(names) - 1) + [_BEST],
        text=[format_seconds(value) for value in seconds], textposition="auto",
    )  # fmt: skip
    figure.update_xaxes(title_text=f"{unit} per step", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure
