"""The report as one self-contained HTML file: no network, no server, no other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.files import write_atomically
from zsim.report.fit import fit_of, format_torch_memory, moment_notes
from zsim.report.report import Report, plain
from zsim.report.trust import MEASURE, TITLE, errors_figure, near_table, trust_of
from zsim.report.views.displayable import Figures
from zsim.report.views.html import figures
from zsim.report.views.html import pipeline as pipeline_page
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import drive_timeline, range_sentence
from zsim.report.views.html.page import Plot, plot, render
from zsim.report.views.html.timeline import close_ups, report_timeline
from zsim.report.views.meanings import EVIDENCE
from zsim.report.views.tables import (
    breakdown_table,
    collective_table,
    cost_table,
    irregular_tables,
    memory_table,
    moved_table,
    offload_table,
    sent_table,
)
from zsim.report.views.text.pipeline import parallel_tables
from zsim.report.views.text.sentences import format_trust, headline
from zsim.trace.trace import Trace, drive_rates
from zsim.units import GIGABYTES, format_bytes, format_flops, format_percent, format_rate, format_seconds

DEVICES = {"gpu": "GPU memory", "host": "Host memory of a node", "nvme": "NVMe of a node"}


def write_html_report(report: Report, trace: Trace, path: str | Path) -> Path:
    """Write the page to `path`. The same report and trace give the same bytes."""
    return write_atomically(Path(path), html_report(report, trace))


def html_report(report: Report, trace: Trace) -> str:
    """The whole page, plotly.js included."""
    rank_trace = trace.rank_view(report.rank)
    return render(
        "report.html.j2",
        title=headline(report),
        report=report,
        fit=fit_of(report),
        notes=[*report.notes, *moment_notes(report)],
        gigabytes=GIGABYTES,
        trust=format_trust(report),
        tiles=list(tiles(report)),
        step=plot("step", STEP_CAPTION, figures.step_breakdown(report)),
        timeline=plot("timeline", TIMELINE_CAPTION, report_timeline(report, rank_trace)),
        views=close_ups(rank_trace, report.rank),
        memory=list(_memory(report, trace)),
        communication=list(_communication(report)),
        offload=_offload(report, trace),
        breakdown=breakdown_table(report),
        irregular=list(irregular_tables(report)),
        parallel=_parallel(report),
        sent=[table for table in (collective_table(report, "page"), sent_table(report)) if table.rows],
        believe=_trust_section(report),
        cost=cost_table(report),
        experiment=sections(report.experiment),
        grades={grade: meaning.color for grade, meaning in EVIDENCE.items()},
        wall=format_seconds(report.simulation.wall_seconds),
    )


def report_plots(report: Report, trace: Trace) -> Figures:
    """The figures of the page by name, as functions that make them."""
    rank_trace = trace.rank_view(report.rank)
    ledger = report.ledger(trace)

    def timeline_of(device: str) -> Figure:
        return figures.memory_timeline(ledger.fullest(device), report, device)

    plots: dict[str, Callable[[], Figure]] = {
        "step": lambda: figures.step_breakdown(report),
        "timeline": lambda: report_timeline(report, rank_trace),
        "memory": lambda: timeline_of("gpu"),
        "waterfall": lambda: figures.memory_waterfall(report, "gpu"),
    }
    if report.collectives:
        plots["collectives"] = lambda: figures.collectives(report)
    if report.traffic:
        plots["links"] = lambda: figures.link_traffic(report)
    if report.validation is not None:
        plots["errors"] = lambda: errors_figure(trust_of(report))
    return plots


STEP_CAPTION = "Every instant of the step belongs to one colour, seen from the compute stream of one GPU."
TIMELINE_CAPTION = (
    "Drag over a stretch to zoom in, double-click to zoom out, hover for details, "
    "click a legend entry to hide it."
)


MEMORY_CAPTION = "Levels when the compute stream gets there."


def waterfall_caption(report: Report, device: str) -> str:
    """Caption of the memory waterfall: when the peak is, and what is reserved."""
    caption = f"What is held at the peak, {format_seconds(report.peaks[device].seconds)} into the step."
    if device == "gpu" and report.allocator is not None:
        caption += " Reserved: what nvidia-smi shows; the shaded memory is the allocator's alone."
    return caption


def tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """(label, number, small print) of the most important figures."""
    tokens, flops = report.tokens_per_second_per_gpu, report.model_flops_per_second_per_gpu
    peak, capacity = report.peaks["gpu"].total, report.capacity_bytes.get("gpu")
    yield "Step time", format_seconds(report.step_seconds), _tokens(report)
    if report.allocator is not None and report.allocator.retries:
        without = format_seconds(report.allocator.step_seconds_without_retries)
        yield "Without retries", without, "while torch's allocator has room"
    if tokens is not None:
        yield "Tokens/s/GPU", f"{tokens:,.0f}", f"{report.step_tokens / report.step_seconds:,.0f} in all"
    if report.mfu_fraction is not None:
        mfu_text = format_flops(flops or 0.0)
        if report.mfu_peak:
            mfu_text += f" {report.mfu_peak}, {format_flops(report.work.peak_flops_per_second or 0.0)}"
        hfu_text = "with recomputation"
        if report.work.is_much_masked:
            mfu_text += f"; causal {format_percent(report.masked_mfu_fraction)}"
            hfu_text += f"; causal {format_percent(report.masked_hfu_fraction)}"
        yield "MFU", format_percent(report.mfu_fraction), mfu_text
        yield "HFU", format_percent(report.hfu_fraction), hfu_text
    capacity_text = f"of {format_bytes(capacity)}, {format_percent(peak / capacity)}" if capacity else "peak"
    if report.allocator is not None:
        capacity_text += f"; {format_torch_memory(report)}"
    yield "GPU memory", format_bytes(peak), capacity_text
    if report.overlap_fraction is not None:
        yield "Overlap", format_percent(report.overlap_fraction), "of communication under kernels"


def _tokens(report: Report) -> str:
    """The tokens of a replica's step, in the small print."""
    gpus = report.work.gpus_per_replica
    return f"{report.work.tokens:,.0f} tokens per {'GPU' if gpus == 1 else f'{gpus:,} GPUs'}"


def _memory(report: Report, trace: Trace) -> Iterator[dict[str, Any]]:
    ledger = report.ledger(trace)
    for device, peak in report.peaks.items():
        if not peak.total:
            continue
        usage = ledger.fullest(device)
        yield {
            "title": DEVICES[device],
            "waterfall": plot(
                f"waterfall-{device}",
                waterfall_caption(report, device),
                figures.memory_waterfall(report, device),
            ),
            "timeline": plot(
                f"memory-{device}", MEMORY_CAPTION, figures.memory_timeline(usage, report, device)
            ),
            "table": memory_table(report, device),
            "total": format_bytes(peak.total),
            "by_torch": format_torch_memory(report) if device == "gpu" else "",
        }


def _communication(report: Report) -> Iterator[Plot]:
    if report.collectives:
        caption = "Full colour: the compute stream waited. Pale: hidden under computing."
        yield plot("collectives", caption, figures.collectives(report))
    if report.traffic:
        caption = "What one GPU sends over each class of links in a step."
        yield plot("links", caption, figures.link_traffic(report))


def _parallel(report: Report) -> dict[str, Any] | None:
    """The pipeline's schedule and the mesh with their tables. None where there is only data parallelism."""
    tables = list(parallel_tables(report))
    if not tables:
        return None
    section, mesh_ranks = report.pipeline, report.rank_map
    schedule, mesh = None, None
    if section is not None:
        caption = pipeline_page.schedule_caption(section)
        schedule = plot("schedule", caption, pipeline_page.schedule_figure(section))
    if mesh_ranks is not None:
        mesh = plot("mesh", pipeline_page.mesh_caption(mesh_ranks), pipeline_page.mesh_figure(mesh_ranks))
    return {"schedule": schedule, "mesh": mesh, "tables": tables}


def _offload(report: Report, trace: Trace) -> dict[str, Any] | None:
    section = report.offload
    if section is None:
        return None
    rates = drive_rates(trace, report.rank)
    drives = None
    if rates is not None:
        caption = "All ranks of the node together; over each request its mean rate."
        drives = plot("drives", caption, drive_timeline(rates, report))
    return {
        "table": offload_table(report, section),
        "moved": moved_table(section),
        "drives": drives,
        "range": range_sentence(report, section),
    }


def _trust_section(report: Report) -> dict[str, Any] | None:
    """The section "Should I believe this?" of this run. None for a step that is not judged."""
    if report.validation is None:
        return None
    trust = trust_of(report)
    caption = "Marks: the nearest validated runs. Lines: the interval, a reason at a time."
    return {
        "title": TITLE,
        "found": trust,
        "ratio": MEASURE,
        "errors": plot("errors", caption, errors_figure(trust)),
        "near": near_table(trust.nearest),
        "measure": [
            (trust.format_measurement(measurement), measurement.command, measurement.calibrate)
            for measurement in trust.measure
        ],
    }


# -- The resolved experiment as readable sections: values with their units, sources and evidence grades ----


_LONG = 40  # letters; tables with longer values get a line for each


@dataclass
class SettingsTable:
    """A table of the experiment: `rows` are (label, value), without the file's `source` and `evidence`."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    source: str = ""
    evidence: str = ""
    children: list[SettingsTable] = field(default_factory=list)

    @property
    def has_long_values(self) -> bool:
        return any(len(value) > _LONG for _, value in self.rows)


# The unit of a number by the end of its key, the longest first; hardware files have the unit in the value.
_BY_KEY_END: dict[str, Callable[[float], str]] = {
    "bytes_per_second": format_rate,
    "flops_per_second": format_flops,
    "_bytes": format_bytes,
    "bytes_half": format_bytes,
    "bandwidth": format_rate,
    "capacity": format_bytes,
    "memory": format_bytes,
    "context": format_bytes,
    "communicator": format_bytes,
    "exchange_peer": format_bytes,
    "latency": format_seconds,
    "_round": format_seconds,
    "overhead": format_seconds,
    "base": format_seconds,
}
_BY_TABLE: dict[str, Callable[[float], str]] = {"peak": format_flops, "power": lambda watts: f"{watts:g} W"}


def sections(experiment: Mapping[str, Any], title: str = "experiment") -> SettingsTable:
    """`experiment` as nested sections. Unset values are left out."""
    section = SettingsTable(title.replace("_", " "))
    for key, value in plain(experiment).items():
        if value is None or value == {} or value == []:
            continue
        if key in ("source", "evidence") and isinstance(value, str):
            setattr(section, key, value)
        elif isinstance(value, Mapping):
            section.children.append(sections(value, key))
        elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
            tables = (entry if isinstance(entry, Mapping) else {"value": entry} for entry in value)
            section.children += [sections(entry, f"{key} {number}") for number, entry in enumerate(tables, 1)]
        else:
            label = key if "." in key else key.replace("_", " ")  # a dotted key was written by the user
            section.rows.append((label, _value(title, key, value)))
    return section


def _value(table: str, key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(table, key, entry) for entry in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if table in _BY_TABLE:
        return _BY_TABLE[table](value)
    if key.endswith("_fraction") or key == "efficiency":
        return f"{value * 100:.3g} %"
    if "seconds" in key:
        return format_seconds(value)
    for end, format_value in _BY_KEY_END.items():
        if key.endswith(end):
            return format_value(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
