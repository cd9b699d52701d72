"""A tuned configuration as one HTML page: step time over memory, the best few, the changes to make."""

from __future__ import annotations

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.html.page import Section, page
from zsim.report.views.meanings import CAPACITY, COMMUNICATION, TOTAL
from zsim.study.differences import row_words
from zsim.study.tune.evaluate import Measured
from zsim.study.tune.tellings import script_changes
from zsim.study.tune.text import (
    NEEDS_SCRIPT,
    change_words,
    doubts,
    label_of,
    limits_of,
    percent,
    step_words,
    subject,
    verdict,
)
from zsim.study.tune.tune import Tuned
from zsim.units import format_bytes, format_seconds

_BEST = "#1B9E77"


def tuned_page(tuned: Tuned) -> str:
    """The page as text. The same result gives the same bytes."""
    best = Section(
        "The best that fit",
        head=["", "configuration", "step", "80 %", "tokens/s/GPU", "MFU", "GPU memory", "GPUs", "limited by"],
        rows=[_cells(str(place), measured, tuned.best[0]) for place, measured in enumerate(tuned.best, 1)]
        + ([_cells("given", tuned.given, tuned.best[0])] if tuned.given else []),
    )
    caption = (
        "Every simulated configuration. Down and to the left is better; the line joins those that no other "
        "beats in both."
    )
    sections = [best, Section("Time against memory", [("pareto", caption, pareto_figure(tuned))])]
    if tuned.steps:
        rows = [
            [str(number), "; ".join(change_words(change) for change in step.changes), step_words(step)]
            for number, step in enumerate(tuned.steps, 1)
        ]
        sections.append(
            Section(
                "What to change",
                [("steps", "Each change on top of those above it, each simulated.", steps_figure(tuned))],
                ["", "change", "step time"],
                rows,
            )
        )
    summary = ". ".join(part for part in (verdict(tuned), tuned.settled) if part)
    return page(subject(tuned), "tune", sections, summary)


def _cells(place: str, measured: Measured, best: Measured) -> list[str]:
    row = measured.row
    mfu = "-" if row["mfu_fraction"] is None else percent(row["mfu_fraction"])
    asked = [f"{NEEDS_SCRIPT}: {change}" for change in script_changes(measured.candidate)]
    limits = [limits_of(measured), *doubts(measured), *asked]
    return [
        place, label_of(measured), format_seconds(measured.seconds), row_words(row, best.row),
        f"{row['tokens_per_second_per_gpu'] or 0:,.0f}", mfu, format_bytes(measured.gpu_bytes),
        f"{measured.gpus:,}", "; ".join(limits),
    ]  # fmt: skip


def pareto_front(measured: list[Measured]) -> list[Measured]:
    """The results that no other beats in both time and memory, fastest first."""
    front: list[Measured] = []
    for each in sorted(measured, key=lambda m: (m.seconds, m.gpu_bytes)):
        if not front or each.gpu_bytes < front[-1].gpu_bytes:
            front.append(each)
    return front


def pareto_figure(tuned: Tuned) -> Figure:
    """Step time over the fullest GPU's memory, one mark per simulated configuration."""
    points = [*tuned.measured, *(m for m in tuned.best if m not in tuned.measured)]
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
        ("best", list(tuned.best[:1]), {"color": _BEST, "size": 14, "symbol": "star"}),
    ]
    if tuned.given is not None:
        groups.append(("as given", [tuned.given], {"color": CAPACITY.color, "size": 12, "symbol": "diamond"}))
    for name, members, marker in groups:
        figure.add_scatter(
            name=name, mode="markers", marker=marker,
            x=[p.gpu_bytes / 1e9 for p in members], y=[p.seconds * scale for p in members],
            hovertext=[_hover(p) for p in members], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(title_text=f"{unit} per step", rangemode="tozero", automargin=True)
    limit = tuned.best[0].row.get("gpu_capacity_bytes")
    if limit:
        figure.add_vline(
            x=limit / 1e9, line={"dash": "dash", "width": 2, "color": CAPACITY.color},
            text=f"capacity {format_bytes(limit)}",
        )  # fmt: skip
    return figure


def _hover(measured: Measured) -> str:
    lines = label_of(measured).replace(", ", "<br>")
    return f"<b>{format_seconds(measured.seconds)}</b>, {format_bytes(measured.gpu_bytes)}<br>{lines}"


def steps_figure(tuned: Tuned) -> Figure:
    """Step time after each change."""
    first = tuned.steps[0].before_seconds
    names = ["as given"] if first is not None else []
    seconds = [first] if first is not None else []
    for number, step in enumerate(tuned.steps, 1):
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
