"""The step as a Gantt chart: a row per stream, with the waits of the compute stream on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zsim.report.breakdown import Breakdown, compute_stream, step_breakdown
from zsim.report.report import Report
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import BREAKDOWN, SPANS, Meaning, span_meaning
from zsim.trace.trace import SpanInfo, Trace
from zsim.units import format_bytes, format_flops, format_seconds

MAX_BARS = 10_000
_MAX_PHASES = 24
_CLOSE_UP = 0.03  # of the step
_LEAST_NAMED = 0.04  # of the step
_AT_END = 0.08  # of the step: "optimizer" would reach beyond the plot
_NAME = 0.3  # of the step: "forward" and "backward" side by side take 56 of the 200 pixels on a phone
_LEGEND = [meaning.label for meaning in (*SPANS.values(), *BREAKDOWN.values())]
_WAITS, _HOST = "compute waits", "host blocked"


_BLOCKED = Meaning("host blocked", "#B4B9C1", "white")


@dataclass
class _Bars:
    """Bars of one meaning."""

    meaning: Meaning
    rows: list[str]
    starts: list[float]
    lengths: list[float]
    texts: list[str]

    def add(self, row: str, start: float, end: float, text: str) -> None:
        self.rows.append(row)
        self.starts.append(start)
        self.lengths.append(end - start)
        self.texts.append(text)


def report_timeline(report: Report, rank_trace: Trace) -> Figure:
    """The timeline of the report's rank. A loop's report has the waits of few micro-batches, so that those of
    the drawn trace are taken, which are a pipeline's own.
    """
    breakdown = report.breakdown if report.pipeline is not None else step_breakdown(rank_trace, report.rank)
    return stream_timeline(rank_trace, breakdown, report.rank)


def stream_timeline(
    trace: Trace, breakdown: Breakdown, rank: int | None = None, most_bars: int = MAX_BARS
) -> Figure:
    """Every span of `rank` (by default the first) on its stream. Where there are more than `most_bars`, only
    the longest ones are drawn, and the title says so.
    """
    if rank is None and len(trace):
        rank = int(trace.ranks[0])
    rank_trace = trace if rank is None else trace.select_rank(rank)
    scale, unit = time_scale(rank_trace.step_seconds)
    most_waits = most_bars // 10
    drawn_spans, note = _longest(rank_trace, most_bars - 2 * most_waits)
    groups = _span_bars(rank_trace, drawn_spans)
    _add_waits(groups, rank_trace, breakdown, most_waits)
    rows = _row_order(rank_trace, groups)
    figure = Figure(layout(150 + 44 * len(rows), barmode="overlay", bargap=0.22))
    # Bars thinner than a pixel are drawn a pixel wide: copies are drawn first, the longest kinds on top.
    for bars in sorted(groups.values(), key=lambda bars: (bars.meaning != SPANS["copy"], sum(bars.lengths))):
        figure.add_bar(
            name=bars.meaning.label,
            legendrank=_LEGEND.index(bars.meaning.label) if bars.meaning.label in _LEGEND else len(_LEGEND),
            orientation="h",
            y=bars.rows,
            base=np.array(bars.starts) * scale,
            x=np.array(bars.lengths) * scale,
            marker={
                "color": bars.meaning.color,
                "opacity": np.where(np.arange(len(bars.rows)) % 2, 0.8, 1.0),  # adjacent bars stay apart
                "line": {"width": 0},
            },
            hovertext=bars.texts,
            hoverinfo="text",
        )
    figure.update_xaxes(title_text=unit, range=[0, rank_trace.step_seconds * scale], title_standoff=6)
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=rows[::-1],
        automargin=True,
        fixedrange=True,
        range=[-0.6, len(rows) - 0.4],
    )
    _shade_phases(figure, rank_trace, scale)
    if note:
        figure.add_annotation(
            text=note, xref="paper", yref="paper", x=1, y=-0.02, yshift=-34, showarrow=False, xanchor="right"
        )
    return figure


def _longest(rank_trace: Trace, max_spans: int) -> tuple[list[int], str]:
    """The spans to draw, in time order, and a sentence on the spans that are left out."""
    seconds = rank_trace.end_seconds - rank_trace.start_seconds
    drawable = [
        i
        for i in np.flatnonzero(seconds > 0).tolist()
        if rank_trace.infos[rank_trace.info_indices[i]].kind != "host"
    ]
    longest = drawable
    note = ""
    if len(drawable) > max_spans:
        longest = sorted(drawable, key=lambda i: (-seconds[i], i))[:max_spans]
        share = float(seconds[longest].sum() / seconds[drawable].sum())
        note = (
            f"the {max_spans:,} longest of {len(drawable):,} spans, {share * 100:.1f} % of all busy time; "
            "the trace file has every one"
        )
    return sorted(longest, key=lambda i: (rank_trace.start_seconds[i], i)), note


def _span_bars(rank_trace: Trace, drawn_spans: list[int]) -> dict[str, _Bars]:
    groups: dict[str, _Bars] = {}
    for span in drawn_spans:
        info = rank_trace.infos[rank_trace.info_indices[span]]
        kind = "optimizer" if info.kind == "compute" and info.phase == "optimizer" else info.kind
        kind = "recompute" if info.kind == "compute" and info.phase == "recompute" else kind
        bars = groups.setdefault(kind, _Bars(span_meaning(kind), [], [], [], []))
        start, end = float(rank_trace.start_seconds[span]), float(rank_trace.end_seconds[span])
        bars.add(info.stream, start, end, _hover(info, start, end))
    return groups


def _hover(info: SpanInfo, start: float, end: float) -> str:
    lines = [f"<b>{info.name}</b>", f"{format_seconds(end - start)} from {format_seconds(start)}"]
    if info.group:
        lines.append(f"{format_bytes(info.bytes)} {info.dtype}, group {info.group} ({info.group_size})")
    elif info.bytes:
        lines.append(format_bytes(info.bytes))
    if info.flops:
        lines.append(f"{format_flops(info.flops / (end - start))}")
    if info.module and info.module not in info.name:
        lines.append(info.module)
    return "<br>".join([*lines, info.phase] if info.phase else lines)


def _add_waits(groups: dict[str, _Bars], rank_trace: Trace, breakdown: Breakdown, max_waits: int) -> None:
    """Add rows for the waits of the compute stream and for the blocks of the host."""
    waits = sorted(breakdown.waits, key=lambda wait: -wait.seconds)[:max_waits]
    for wait in sorted(waits, key=lambda wait: wait.start_seconds):
        if wait.seconds <= 0:
            continue
        meaning = BREAKDOWN[wait.cause]
        target = f"<br>for {rank_trace.infos[wait.info].name}" if wait.info is not None else ""
        text = f"<b>{meaning.label}</b><br>{format_seconds(wait.seconds)}{target}"
        bars = groups.setdefault(f"wait {wait.cause}", _Bars(meaning, [], [], [], []))
        bars.add(_WAITS, wait.start_seconds, wait.end_seconds, text)
    for _, start, end, info in sorted(rank_trace.host_blocks, key=lambda block: block[1] - block[2])[
        :max_waits
    ]:
        bars = groups.setdefault("host", _Bars(_BLOCKED, [], [], [], []))
        bars.add(
            _HOST,
            start,
            end,
            f"<b>host blocked</b><br>{format_seconds(end - start)} on {rank_trace.infos[info].name}",
        )


def _row_order(rank_trace: Trace, groups: dict[str, _Bars]) -> list[str]:
    """Waits, the compute stream, the other streams by their first span, the host."""
    used = dict.fromkeys(row for bars in groups.values() for row in bars.rows)
    compute = compute_stream(rank_trace)
    first = {_WAITS: 0, compute: 1, _HOST: 3}
    return sorted(used, key=lambda row: first.get(row, 2))


def close_ups(trace: Trace, rank: int | None = None) -> list[tuple[str, float, float]]:
    """Intervals worth a closer look, as (name, start, end) in the units of the timeline's axis."""
    rank_trace = trace if rank is None else trace.select_rank(rank)
    scale, _ = time_scale(rank_trace.step_seconds)
    step_seconds, width = rank_trace.step_seconds, rank_trace.step_seconds * _CLOSE_UP
    intervals = [("whole step", 0.0, step_seconds), ("start", 0.0, width)]
    runs = _phase_runs(rank_trace)
    for (phase_before, _, end), (phase_after, _, _) in pairwise(runs):
        if (phase_before, phase_after) == ("forward", "backward"):
            intervals.append(("forward to backward", end - width / 2, end + width / 2))
            break
    intervals.append(("end", step_seconds - width, step_seconds))
    return [(name, start * scale, end * scale) for name, start, end in intervals]


def _phase_runs(rank_trace: Trace) -> list[tuple[str, float, float]]:
    """(phase, start, end) of each run of one phase on the compute stream. Recomputation is part of
    backward.
    """
    compute = compute_stream(rank_trace)
    runs: list[tuple[str, float, float]] = []
    for span in np.argsort(rank_trace.start_seconds, kind="stable").tolist():
        info = rank_trace.infos[rank_trace.info_indices[span]]
        if info.stream != compute or not info.phase:
            continue
        phase = "backward" if info.phase == "recompute" else info.phase
        start, end = float(rank_trace.start_seconds[span]), float(rank_trace.end_seconds[span])
        if runs and runs[-1][0] == phase:
            runs[-1] = (phase, runs[-1][1], end)
        else:
            runs.append((phase, start, end))
    return runs


def _shade_phases(figure: Figure, rank_trace: Trace, scale: float) -> None:
    """Shade and name the phases of the compute stream."""
    runs = _phase_runs(rank_trace)
    if not 1 < len(runs) <= _MAX_PHASES:
        return
    named = _named_runs(runs, rank_trace.step_seconds)
    for index, (phase, start, end) in enumerate(runs):
        figure.add_vrect(
            x0=start * scale,
            x1=end * scale,
            fillcolor="#8A8F98",
            opacity=0.10 if index % 2 else 0.04,
            line_width=0,
            layer="below",
            text=phase if index in named else "",
        )


def _named_runs(runs: Sequence[tuple[str, float, float]], step_seconds: float) -> set[int]:
    """The runs that bear their phase's name, one per phase: the longest that leaves room for the adjacent
    names, also on a phone.
    """
    run_of_phase: dict[str, int] = {}
    for index in sorted(range(len(runs)), key=lambda number: runs[number][1] - runs[number][2]):
        phase, start, end = runs[index]
        is_at_end = step_seconds - (start + end) / 2 < _AT_END * step_seconds
        if phase in run_of_phase or is_at_end or end - start <= _LEAST_NAMED * step_seconds:
            continue
        distances = (
            abs(start + end - sum(runs[named_index][1:])) / 2 for named_index in run_of_phase.values()
        )
        if all(distance >= _NAME * step_seconds for distance in distances):
            run_of_phase[phase] = index
    return set(run_of_phase.values())
