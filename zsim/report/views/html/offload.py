"""Offloading on the page: the stall by cause, every tier, the drives of a node over time."""

from __future__ import annotations

import numpy as np

from zsim.report.offload import OffloadSection
from zsim.report.report import Report
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import SPANS
from zsim.trace.drives import DIRECTIONS, DriveRates
from zsim.units import format_seconds


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
