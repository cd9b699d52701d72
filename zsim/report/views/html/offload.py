"""Offloading on the page: the stall by cause, every tier, the drives of a node over time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from zsim.report.offload import OffloadSection
from zsim.report.report import Report
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import SPANS
from zsim.trace.drives import DIRECTIONS, DriveRates
from zsim.units import format_bytes, format_seconds

_MOVED = {
    "h2d": "host to GPU", "d2h": "GPU to host", "cpu": "CPU work on memory", "nvme_read": "read from NVMe",
    "nvme_write": "written to NVMe",
}  # fmt: skip


def stall_rows(report: Report, section: OffloadSection) -> Iterator[tuple[str, str, str]]:
    """(cause, time, share of the step) of every cause."""
    for cause, seconds in section.stall_seconds.items():
        yield cause, format_seconds(seconds), f"{seconds / report.step_seconds * 100:.1f} %"


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
    return f"{sentence}; the step range (80 %) takes the file's numbers to be the machine's."


def tier_rows(section: OffloadSection) -> Iterator[tuple[str, str, str]]:
    """(tier, bytes of one rank and step, utilisation)."""
    for row in section.tiers:
        moved = "" if row.bytes_per_rank is None else format_bytes(row.bytes_per_rank)
        yield row.tier, moved, f"{row.utilisation_fraction * 100:.1f} %"


def moved_rows(section: OffloadSection) -> Iterator[tuple[str, str]]:
    """(kind of work, bytes of one rank and step) of each kind, then page-locked bytes of a node."""
    for kind, size in section.moved_bytes.items():
        yield _MOVED[kind], format_bytes(size)
    if section.pinned_bytes:
        yield "page-locked on each node", format_bytes(section.pinned_bytes)


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
