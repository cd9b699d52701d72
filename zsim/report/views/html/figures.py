"""Figures of a report, as pure functions from values to figures.

They set only the colours of meanings. The page sets the colours of text and lines, so that one figure serves
a light page and a dark one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zsim.arrays import Ints
from zsim.report.fit import ReservedMemory, reserved_memory
from zsim.report.memory import MemoryLevels
from zsim.report.offload import OffloadSection
from zsim.report.report import Report
from zsim.report.views.html.figure import Figure
from zsim.report.views.meanings import (
    CAPACITY,
    COMMUNICATION,
    MEMORY,
    RESERVED,
    SPANS,
    TOTAL,
    WHOLE_STEP,
    Meaning,
    span_meaning,
    text_on,
)
from zsim.trace.trace import DIRECTIONS, DriveRates
from zsim.units import format_bytes, format_rate, format_seconds

_MAX_POINTS = 1500
_MAX_ROWS = 14
_CAPACITY_LINE = {"dash": "dash", "width": 2, "color": CAPACITY.color}
_ALLOCATORS = "rgba(138,143,152,0.25)"  # memory that the verdict leaves to torch's allocator
_PHASES = {"": "step", "recompute": "recomputation"}


def time_scale(step_seconds: float) -> tuple[float, str]:
    """Units per second and their name, for an axis as long as the step."""
    for seconds, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if step_seconds >= seconds:
            return scale, unit
    return 1e6, "us"


def layout(height: int, **changes: Any) -> dict[str, Any]:
    """The layout that all figures have in common, with `changes`."""
    return {
        "height": height,
        "margin": _margin(62 if changes.get("showlegend", True) else 36),
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 13},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"font": {"family": "ui-monospace, monospace", "size": 12}, "align": "left"},
        "xaxis": {"title": {"font": {"size": 13}}},
        "yaxis": {"title": {"font": {"size": 13}}},
        "bargap": 0.25,
    } | changes


def _margin(top: int) -> dict[str, int]:
    return {"l": 10, "r": 16, "t": top, "b": 44}


def step_breakdown(report: Report) -> Figure:
    """One bar for the step, one for each phase of the program, stacked by cause."""
    scale, unit = time_scale(report.step_seconds)
    phases = {phase: row for phase, row in report.breakdown.by_phase.items() if sum(row.values()) > 0}
    rows: dict[str, Mapping[str, float]] = {"whole step": report.breakdown.seconds}
    if len(phases) > 1:
        rows |= {_PHASES.get(phase, phase): row for phase, row in phases.items()}
    figure = Figure(layout(110 + 46 * len(rows), barmode="stack"))
    for name, meaning in WHOLE_STEP.items():
        seconds = [row.get(name, 0.0) for row in rows.values()]
        if not any(seconds):
            continue
        shares = [value / report.step_seconds for value in seconds]
        figure.add_bar(
            name=meaning.label,
            orientation="h",
            y=list(rows),
            x=[value * scale for value in seconds],
            marker_color=meaning.color,
            text=[f"{share * 100:.0f} %" if share >= 0.04 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[
                f"<b>{meaning.label}</b><br>{phase}: {format_seconds(value)}, {share * 100:.1f} % of the step"
                for phase, value, share in zip(rows, seconds, shares, strict=True)
            ],
            hoverinfo="text",
        )
    figure.update_xaxes(title_text=unit, rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure


def memory_waterfall(report: Report, device: str) -> Figure:
    """Bytes at the peak, stacked by category, against the capacity."""
    peak, capacity = report.peaks[device], report.capacity_bytes.get(device)
    bytes_of_category = {category: count for category, count in peak.at_total.items() if count}
    bases = np.cumsum([0, *bytes_of_category.values()])[:-1]
    names = [_category(category).label for category in bytes_of_category]
    wholes = {"peak": (peak.total, _peak_color(peak.total, capacity))}
    reserved = reserved_memory(report) if device == "gpu" else None
    if reserved is not None:
        wholes["reserved"] = reserved.held_bytes, RESERVED.color
    top = max(peak.total, capacity or 0, reserved.memory_bytes if reserved is not None else 0) / 1e9
    figure = Figure(layout(420, showlegend=False, bargap=0.2, margin=_margin(62)))
    ends = bases + np.array(list(bytes_of_category.values()))
    figure.add_bar(
        orientation="h",
        y=[*names, *wholes],
        x=[
            *(count / 1e9 for count in bytes_of_category.values()),
            *(size / 1e9 for size, _ in wholes.values()),
        ],
        base=[*(bases / 1e9).tolist(), *(0.0 for _ in wholes)],
        marker_color=[
            *(_category(category).color for category in bytes_of_category),
            *(color for _, color in wholes.values()),
        ],
        hovertext=[
            *(
                f"<b>{_category(category).label}</b><br>{format_bytes(count)} at the peak<br>"
                f"{format_bytes(peak.by_category[category])} at its own maximum"
                for category, count in bytes_of_category.items()
            ),
            f"<b>peak</b><br>{format_bytes(peak.total)} at {format_seconds(peak.seconds)}",
            *(() if reserved is None else (f"<b>reserved</b><br>{_reserved_words(reserved)}",)),
        ],
        hoverinfo="text",
    )
    # A label is to the right of its bar; without room there, inside a long bar or to the left of a short one.
    for (category, count), base, end in zip(bytes_of_category.items(), bases / 1e9, ends / 1e9, strict=True):
        has_room, is_long = end < 0.72 * top, end - base > 0.3 * top
        meaning, x = _category(category), end if has_room or is_long else base
        inside = meaning.color if is_long and not has_room else None
        _label(figure, meaning.label, x, count, is_behind=has_room, inside=inside)
    for name, (size, color) in wholes.items():
        is_long = size / 1e9 > 0.3 * top
        _label(figure, name, size / 1e9, size, is_behind=not is_long, inside=color if is_long else None)
    figure.update_xaxes(title_text="GB", range=[0, top * 1.06], fixedrange=True)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    if capacity:
        figure.add_vline(x=capacity / 1e9, line=_CAPACITY_LINE)
        if reserved is not None and reserved.memory_bytes > capacity:
            margin: dict[str, Any] = {"fillcolor": _ALLOCATORS, "line": {"width": 0}, "layer": "below"}
            figure.add_vrect(x0=capacity / 1e9, x1=reserved.memory_bytes / 1e9, **margin)
        figure.add_annotation(
            text=f"capacity {format_bytes(capacity)}",
            x=capacity / 1e9,
            xanchor="right",
            y=1,
            yref="paper",
            yanchor="bottom",
            showarrow=False,
        )
    return figure


def memory_timeline(usage: MemoryLevels, report: Report, device: str) -> Figure:
    """Levels over the step, stacked by category, against the capacity."""
    scale, unit = time_scale(report.step_seconds)
    chosen = thin_out(usage.totals, _MAX_POINTS)
    levels = np.concatenate([usage.levels[chosen], usage.levels[-1:]]) / 1e9
    seconds = np.concatenate([usage.stream_seconds[chosen], [report.step_seconds]]) * scale
    figure = Figure(layout(420, hovermode="x unified", margin=_margin(86)))
    for index, category in enumerate(usage.categories):
        if not levels[:, index].any():
            continue
        meaning = _category(category)
        figure.add_scatter(
            name=meaning.label,
            x=seconds,
            y=levels[:, index],
            stackgroup="memory",
            mode="lines",
            line={"shape": "hv", "width": 0.5, "color": meaning.color},
            fillcolor=_translucent(meaning.color),
            hovertemplate="%{y:.2f} GB",
        )
    capacity = report.capacity_bytes.get(device)
    reserved = reserved_memory(report) if device == "gpu" else None
    top = max(float(usage.totals.max(initial=0)), capacity or 0, reserved.held_bytes if reserved else 0) / 1e9
    figure.update_yaxes(title_text="GB", range=[0, top * 1.08], automargin=True)
    figure.update_xaxes(title_text=unit, range=[0, report.step_seconds * scale], title_standoff=6)
    if capacity:
        figure.add_hline(y=capacity / 1e9, line=_CAPACITY_LINE, text=f"capacity {format_bytes(capacity)}")
    if reserved is not None:
        figure.add_hline(
            y=reserved.held_bytes / 1e9, line={"dash": "dot", "width": 2, "color": RESERVED.color}
        )
        figure.add_annotation(
            text=f"reserved {format_bytes(reserved.held_bytes)}",
            x=1,
            xref="x domain",
            xanchor="right",
            y=reserved.held_bytes / 1e9,
            yanchor="bottom",
            showarrow=False,
        )
    return figure


def _reserved_words(reserved: ReservedMemory) -> str:
    return (
        f"{format_bytes(reserved.torch_bytes)} by torch; with the CUDA context and communicators' buffers<br>"
        f"{format_bytes(reserved.held_bytes)} of the GPU's {format_bytes(reserved.memory_bytes)}"
    )


def collectives(report: Report) -> Figure:
    """Busy time of each kind of call, split into hidden and exposed."""
    scale, unit = time_scale(max((row.busy_seconds for row in report.collectives), default=0.0))
    rows = sorted(report.collectives, key=lambda row: -row.busy_seconds)[:_MAX_ROWS]
    names = [
        f"{row.count:,} × {span_meaning(row.kind).label} {format_bytes(row.bytes)}"
        f"<br>{row.group or 'world'} ({row.group_size}), {row.dtype}"
        for row in rows
    ]
    figure = Figure(layout(100 + 44 * len(rows), barmode="stack", showlegend=False))
    exposed = [min(row.exposed_seconds, row.busy_seconds) for row in rows]
    hidden = [row.busy_seconds - part for row, part in zip(rows, exposed, strict=True)]
    for label, seconds, opacity in (("exposed", exposed, 1.0), ("hidden under computing", hidden, 0.45)):
        figure.add_bar(
            name=label,
            orientation="h",
            y=names,
            x=[value * scale for value in seconds],
            marker={"color": [span_meaning(row.kind).color for row in rows], "opacity": opacity},
            hovertext=[
                f"<b>{span_meaning(row.kind).label}</b> {row.dtype}, {format_bytes(row.bytes)} each<br>"
                f"{row.count:,} calls, busy {format_seconds(row.busy_seconds)}<br>"
                f"waited for: {format_seconds(row.exposed_seconds)}<br>"
                f"bus bandwidth {format_rate(row.bus_bytes_per_second or 0.0)}"
                for row in rows
            ],
            hoverinfo="text",
        )
    figure.update_xaxes(title_text=f"busy {unit} per step", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure


def link_traffic(report: Report) -> Figure:
    """Bytes that one GPU puts on each class of links, and the maximum utilisation of a link."""
    rows = report.traffic
    names = [row.link_class for row in rows]
    utilised = [row.utilisation_fraction for row in rows]
    figure = Figure(layout(130 + 40 * len(rows), showlegend=False))
    figure.add_bar(
        orientation="h",
        y=names,
        x=[row.bytes_per_gpu / 1e9 for row in rows],
        marker_color=COMMUNICATION.color,
        text=["" if utilisation is None else f"{utilisation * 100:.0f} % used" for utilisation in utilised],
        textposition="auto",
        hovertext=[
            f"<b>{row.link_class}</b><br>{format_bytes(row.bytes_per_gpu)} per GPU and step" for row in rows
        ],
        hoverinfo="text",
    )
    figure.update_xaxes(title_text="GB per GPU and step", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure


def thin_out(totals: Ints, max_points: int) -> Ints:
    """Indices of at most about `max_points` events that keep the highest and the last level of every
    segment.
    """
    count = len(totals)
    if count <= max_points:
        return np.arange(count)
    edges = np.linspace(0, count, max_points // 2 + 1).astype(np.int64)
    indices = {int(edge) - 1 for edge in edges[1:]} | {0}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        indices.add(start + int(totals[start:end].argmax()))
    return np.array(sorted(indices), dtype=np.int64)


def _category(category: str) -> Meaning:
    return MEMORY.get(category) or Meaning(category, "#8A8F98", "white")


def _peak_color(peak: int, capacity: int | None) -> str:
    return CAPACITY.color if capacity is not None and peak > capacity else TOTAL.color


def _translucent(color: str) -> str:
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.82)"


def _label(figure: Figure, row: str, x: float, count: int, *, is_behind: bool, inside: str | None) -> None:
    """The bytes of a bar: to the right of it, to the left of it, or `inside` a bar of that colour."""
    colour = {} if inside is None else {"font": {"color": text_on(inside)}}
    figure.add_annotation(
        text=format_bytes(count),
        x=x,
        y=row,
        xanchor="left" if is_behind else "right",
        showarrow=False,
        **colour,
    )


# -- Offloading on the page: the stall by cause, every tier, the drives of a node over time ----------------


def range_sentence(report: Report, section: OffloadSection) -> str:
    """The error bar of the step, with its evidence grade, and how it differs from the range by validated
    runs."""
    if section.range_seconds is None:
        return ""
    fast, slow = map(format_seconds, section.range_seconds)
    grade = report.evidence.get("offload", "assumed")
    sentence = (
        f"With PCIe, host memory, CPU and drives at the ends of what their evidence allows ({grade} at the "
        f"weakest), the step takes {fast} to {slow}"
    )
    if report.validation is None:
        return f"{sentence}."
    return f"{sentence}; the step range (80 %) counts that."


def drive_timeline(rates: DriveRates, report: Report) -> Figure:
    """Reads and writes of a node's drives over the step, summed over all ranks of the node."""
    scale, unit = time_scale(report.step_seconds)
    figure = Figure(layout(260))
    last = max(float(rates.seconds[-1]), report.step_seconds)
    times = np.concatenate([[0.0], rates.seconds, [last]]) * scale
    for direction in DIRECTIONS:
        meaning = SPANS[f"nvme_{direction}"]
        level = np.concatenate([[0.0], getattr(rates, direction), [0.0]]) / 1e9
        figure.add_scatter(
            name=meaning.label, x=times, y=level, mode="lines", fill="tozeroy",
            line={"shape": "hv", "width": 1, "color": meaning.color},
            hovertemplate="%{y:.2f} GB/s<extra>" + meaning.label + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text=unit, range=[0, report.step_seconds * scale], title_standoff=6)
    figure.update_yaxes(title_text="GB/s", rangemode="tozero", automargin=True)
    return figure
