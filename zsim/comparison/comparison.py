"""A simulated step compared with a recorded one: the three checks, the differences ranked, and their page.

The page is one HTML file that fetches nothing, with both timelines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log10
from pathlib import Path
from typing import Any

from zsim.comparison.clock_check import ClockCheck
from zsim.comparison.memory_check import MemoryCheck
from zsim.comparison.plan_check import PlanCheck
from zsim.comparison.verdict import FORMATS, Metric, Tolerances, Verdict, overall_verdict
from zsim.files import write_atomically
from zsim.report.breakdown import step_breakdown
from zsim.report.views.html.figure import Attributes, Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.html.page import Plot, plot, render
from zsim.report.views.html.timeline import MAX_BARS, stream_timeline
from zsim.report.views.meanings import BREAKDOWN, CAPACITY, span_meaning
from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.trace.trace import Trace
from zsim.units import format_seconds
from zsim.validated.validation import format_range
from zsim.version import __version__

STEP_RANGE = "step_seconds_range"  # key in a simulated trace's metadata: the 80 % interval of its step
SIMULATED = "zsim, simulated"  # source in the metadata of a trace that was read, but simulated by zsim
_DIGITS = 6  # of a share: smaller differences do not change the order


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference."""

    check: str
    """plan, clock or memory."""
    sentence: str
    share: float
    """Its fraction of the step's time, of the peak's bytes, or of the calls."""
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Both traces, the three checks and their results: `print` shows the table, `write_html` writes the page.

    Times are of `rank`, `plans` of every rank.
    """

    simulated: Trace
    recorded: Trace
    rank: int
    tolerances: Tolerances
    plans: Mapping[int, PlanCheck]
    clock: ClockCheck
    memory: MemoryCheck
    doubt: str
    notes: tuple[str, ...]
    names: tuple[str, str] = ("simulated", "recorded")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (*self.clock.metrics, *self.memory.metrics)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """The 80 % interval in which the recorded step was expected.

        None where the simulation has none, and between two simulations.
        """
        if self.recorded.source == "simulated":
            return None
        interval: tuple[float, float] | None = self.simulated.metadata.get(STEP_RANGE)
        return interval

    @property
    def is_within_range(self) -> bool | None:
        """Whether the recorded step lies inside the interval of the simulated one."""
        interval = self.step_seconds_range
        return None if interval is None else interval[0] <= self.recorded.step_seconds <= interval[1]

    @property
    def range_sentence(self) -> str:
        """Whether the recorded step lies inside the interval, in words, or "" where there is no interval."""
        interval = self.step_seconds_range
        if interval is None:
            return ""
        where = "inside" if self.is_within_range else "outside"
        recorded = format_seconds(self.recorded.step_seconds)
        whose = "other trace's" if self.recorded.metadata.get("source") == SIMULATED else "recorded"
        return f"the {whose} step, {recorded}, lies {where} {format_range(interval)} (80 %)"

    @property
    def verdict(self) -> Verdict:
        """Fail where the plan or a figure fails, else inconclusive where a figure is, else pass."""
        return overall_verdict([self.plan_verdict, *(metric.verdict for metric in self.metrics)])

    @property
    def plan_verdict(self) -> Verdict:
        return overall_verdict(plan.verdict for plan in self.plans.values())

    @property
    def plan(self) -> PlanCheck:
        """The plan check of the rank whose times are compared."""
        return self.plans[self.rank]

    @property
    def not_checked(self) -> tuple[str, ...]:
        plan_texts = [text for plan in self.plans.values() for text in plan.not_checked]
        return tuple(dict.fromkeys([*plan_texts, *self.clock.not_checked, *self.memory.not_checked]))

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, the most important first: wrong calls, then misses, then inconclusive figures."""
        differences = [*_plan_differences(self.plans), *_metric_differences(self)]
        differences.sort(
            key=lambda row: (row.verdict != "fail", row.check != "plan", -round(row.share, _DIGITS))
        )
        return tuple(differences)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim compare --json` writes."""
        return {
            "zsim_version": __version__,
            "verdict": self.verdict,
            "rank": self.rank,
            "step_seconds_range": None if self.step_seconds_range is None else [*self.step_seconds_range],
            "is_within_range": self.is_within_range,
            "plan": {str(rank): plan.to_dict() for rank, plan in self.plans.items()},
            "metrics": [_metric_content(metric) for metric in self.metrics],
            "classes": [row.to_dict() for row in self.clock.classes],
            "differences": [asdict(difference) for difference in self.differences],
            "inconclusive_because": self.doubt or None,
            "not_checked": list(self.not_checked),
            "notes": list(self.notes),
        }

    def write_html(self, path: str | Path) -> Path:
        """Write one page with both timelines and the differences, which fetches nothing."""
        return write_atomically(Path(path), compare_page(self))

    def __str__(self) -> str:
        return "\n".join(comparison_lines(self))


# -- what differs -----------------------------------------------------------------------------------------


def _plan_differences(plans: Mapping[int, PlanCheck]) -> Iterator[Difference]:
    """Each wrong call once, with the ranks that have it."""
    seen: dict[str, list[int]] = {}
    shares: dict[str, float] = {}
    for rank, plan in plans.items():
        for row in plan.differences:
            seen.setdefault(row.sentence, []).append(rank)
            shares[row.sentence] = row.count / max(len(plan.recorded), len(plan.simulated), 1)
    for sentence, ranks in seen.items():
        where = "" if len(ranks) == len(plans) else f" (rank{'s' * (len(ranks) > 1)} {_format_ranks(ranks)})"
        yield Difference("plan", sentence + where, min(shares[sentence], 1.0), "fail")


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def _metric_differences(comparison: Comparison) -> Iterator[Difference]:
    """Differences of metrics that did not pass, first those with a reason."""
    for check, metrics in (("clock", comparison.clock.metrics), ("memory", comparison.memory.metrics)):
        for metric in sorted(metrics, key=lambda metric: not metric.reason):
            if metric.verdict != "pass" and metric.simulated != metric.recorded:
                yield Difference(
                    check, metric_sentence(metric, comparison.doubt), metric.share, metric.verdict
                )


def metric_sentence(metric: Metric, doubt: str = "") -> str:
    """`all-gather, 64 ranks: 1.10 s simulated, 1.21 s recorded (-9.1 %): every call 1.10 times as long`."""
    show = FORMATS[metric.unit]
    text = f"{metric.name}: {show(metric.simulated)} simulated, {show(metric.recorded)} recorded"
    if metric.error is not None:
        points = " points" if metric.unit == "fraction" else " %"
        text += f" ({metric.error * 100:+.1f}{points})"
    return text + (f": {metric.reason}" if metric.reason and metric.reason != doubt else "")


def _metric_content(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "unit": metric.unit,
        "simulated": metric.simulated,
        "recorded": metric.recorded,
        "error": metric.error,
        "tolerance": metric.tolerance,
        "verdict": metric.verdict,
        "reason": metric.reason or None,
    }


# -- views --------------------------------------------------------------------------------------------------

MAX_DIFFERENCES = 12
_VERDICTS = {"pass": "SAME", "fail": "DIFFERENT", "inconclusive": "INCONCLUSIVE"}
_COLUMNS = [
    Column("", is_left=True, min_width=36),
    Column("simulated", min_width=11),
    Column("recorded", min_width=11),
    Column("error", min_width=8),
    Column("", is_left=True),
]
_MARKS = {"pass": "", "fail": "miss", "inconclusive": "?"}


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Lines of the verdict, then of the compared figures, then of the differences."""
    yield f"{_VERDICTS[comparison.verdict]}  {comparison.names[0]} | {comparison.names[1]}"
    yield ""
    yield from paragraph(_plan_sentence(comparison), first="calls  ")
    if comparison.doubt:
        yield from paragraph(f"inconclusive: {comparison.doubt}", first="times  ")
    if comparison.range_sentence:
        yield from paragraph(comparison.range_sentence, first="range  ")
    yield ""
    yield from _table(comparison)
    differences = comparison.differences
    if differences:
        yield ""
        yield "What differs, most important first"
        for number, row in enumerate(differences[:MAX_DIFFERENCES], start=1):
            mark = "" if row.verdict == "fail" else "(inconclusive) "
            yield from paragraph(mark + row.sentence, first=f"{number:>3}  ")
        if len(differences) > MAX_DIFFERENCES:
            yield f"     and {len(differences) - MAX_DIFFERENCES} more (--json, --out)"
    if comparison.not_checked:
        yield ""
        yield from paragraph("; ".join(comparison.not_checked), first="not checked  ")
    for note in comparison.notes:
        yield from paragraph(note, first="note  ")


def _plan_sentence(comparison: Comparison) -> str:
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


def _table(comparison: Comparison) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for title, metrics in _tables(comparison):
        rows.append((title,))
        rows += [(f"  {name}", *cells, _MARKS[verdict]) for name, *cells, verdict in metrics]
    return table(_COLUMNS, rows)


def format_error(metric: Metric) -> str:
    """The signed error in percent, or in percentage points, or "new" where the recorded figure is 0."""
    if metric.error is None:
        return "new"
    return f"{metric.error * 100:+.1f}{'p' if metric.unit == 'fraction' else '%'}"


_TITLES: dict[Verdict, str] = {
    "pass": "The same, within tolerance",
    "fail": "Different",
    "inconclusive": "Inconclusive",
}
MAX_ROWS = 200


def compare_page(comparison: Comparison) -> str:
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


def _tiles(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
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
    show = FORMATS[metric.unit]
    return f"{show(metric.simulated)} simulated, {show(metric.recorded)} recorded"


def _views(comparison: Comparison) -> list[tuple[str, float, float]]:
    longest = max(comparison.simulated.step_seconds, comparison.recorded.step_seconds)
    scale, _ = time_scale(longest)
    end = longest * scale
    return [("whole step", 0.0, end), ("start", 0.0, 0.05 * end), ("end", 0.95 * end, end)]


def _tables(comparison: Comparison) -> Iterator[tuple[str, list[tuple[str, str, str, str, Verdict]]]]:
    """The figures of the comparison by their title: name, simulated, recorded, error, verdict."""
    clock = comparison.clock
    for title, metrics in (
        ("Step", clock.step),
        ("Ops by class", tuple(row.metric for row in clock.classes)),
        ("Streams, busy", clock.streams),
        ("Memory", comparison.memory.metrics),
    ):
        if metrics:
            rows = []
            for metric in metrics:
                show = FORMATS[metric.unit]
                figures = show(metric.simulated), show(metric.recorded), format_error(metric)
                rows.append((metric.name, *figures, metric.verdict))
            yield title, rows


def _plot(name: str, caption: str, figure: Figure | None) -> Plot | None:
    return None if figure is None else plot(name, caption, figure)


# -- Figures of a comparison: both timelines on one axis, ops against their counterparts, memory peaks -----


_GAP = 0.09  # of the height, between the two timelines
_COLOURS = ("#2F7FBF", "#E0873A")  # simulated, recorded
_MAX_POINTS = 4_000


def twin_timeline(comparison: Comparison) -> Figure:
    """Both steps, one below the other, on one time axis. A diamond marks each call that differs."""
    sides = (comparison.simulated, comparison.recorded)
    longest = max(trace.step_seconds for trace in sides)
    timelines = [
        stream_timeline(replace(trace, step_seconds=longest), step_breakdown(trace), most_bars=MAX_BARS // 2)
        for trace in sides
    ]
    counts = [len(figure.layout["yaxis"]["categoryarray"]) for figure in timelines]
    upper_bottom = 1 - (1 - _GAP) * counts[0] / sum(counts)
    height = 240 + 44 * sum(counts)
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yref": "container", "yanchor": "top"}
    margin = {"l": 10, "r": 16, "t": 130, "b": 44}
    figure = Figure(layout(height, barmode="overlay", bargap=0.22, legend=legend, margin=margin))
    seen: set[str] = set()
    for axis, timeline in zip(("y", "y2"), timelines, strict=True):
        for bars in timeline.data:
            name = bars["name"]
            figure.add_bar(**{**bars, "yaxis": axis, "legendgroup": name, "showlegend": name not in seen})
            seen.add(name)
    _stack_timelines(figure, timelines, (upper_bottom, upper_bottom - _GAP))
    scale, unit = time_scale(longest)
    figure.update_xaxes(
        title_text=unit, range=[0, longest * scale], title_standoff=6, anchor="y2", domain=[0, 1]
    )
    for index, (trace, name) in enumerate(zip(sides, comparison.names, strict=True)):
        axis = "y2" if index else "y"
        _title(figure, name, 1.0 if index == 0 else upper_bottom - _GAP, trace)
        end = {"x0": trace.step_seconds * scale, "x1": trace.step_seconds * scale, "y0": 0, "y1": 1}
        figure.add_shape(type="line", **end, xref="x", yref=f"{axis} domain", line=_END)
    _mark_differences(figure, comparison, scale)
    return figure


_END = {"dash": "dot", "width": 1.5, "color": CAPACITY.color}


def _stack_timelines(figure: Figure, drawn: Sequence[Figure], split: tuple[float, float]) -> None:
    """Put rows, shaded phases and notes of each timeline on a separate part of the height."""
    domains = ([split[0], 1.0], [0.0, split[1]])
    for index, part in enumerate(drawn):
        axis = part.layout["yaxis"]
        rows: Attributes = {
            "categoryorder": "array",
            "categoryarray": axis["categoryarray"],
            "range": axis["range"],
            "automargin": True,
            "fixedrange": True,
            "domain": domains[index],
            "anchor": "x",
        }
        figure.update_yaxes("yaxis2" if index else "yaxis", **rows)
        for shape in part.layout.get("shapes", ()):
            figure.add_shape(**{**shape, "yref": f"{'y2' if index else 'y'} domain"})
        for note in part.layout.get("annotations", ()):
            note_attributes = dict(note)
            if str(note_attributes.get("yref", "")).endswith("domain"):
                note_attributes["yref"] = f"{'y2' if index else 'y'} domain"
            else:
                note_attributes |= {"y": domains[index][0], "yshift": -34 if index else -10}
            figure.add_annotation(**note_attributes)


def _title(figure: Figure, name: str, y: float, trace: Trace) -> None:
    figure.add_annotation(
        text=f"<b>{name}</b>  {format_seconds(trace.step_seconds)}",
        xref="paper",
        yref="paper",
        x=0,
        y=y,
        xanchor="left",
        yanchor="bottom",
        yshift=12,
        showarrow=False,
        font={"size": 14},
    )


def _mark_differences(figure: Figure, comparison: Comparison, scale: float) -> None:
    for axis, trace, side in (
        ("y", comparison.simulated, "simulated"),
        ("y2", comparison.recorded, "recorded"),
    ):
        calls = getattr(comparison.plan, side)
        points: list[tuple[float, str, str]] = []
        for difference in comparison.plan.differences:
            for call_index in getattr(difference, side):
                span = calls[call_index].span
                info = trace.infos[trace.info_indices[span]]
                points.append((float(trace.start_seconds[span]) * scale, info.stream, difference.sentence))
        if points:
            figure.add_scatter(
                name="not the same call",
                legendgroup="not the same call",
                showlegend=axis == "y"
                or not any(trace["name"] == "not the same call" for trace in figure.data),
                x=[x for x, _, _ in points],
                y=[row for _, row, _ in points],
                yaxis=axis,
                mode="markers",
                marker={
                    "symbol": "diamond",
                    "size": 12,
                    "color": CAPACITY.color,
                    "line": {"width": 1.5, "color": "#FFFFFF"},
                },
                hovertext=["<br>".join(textwrap.wrap(text, 70)) for _, _, text in points],
                hoverinfo="text",
                cliponaxis=False,
            )


def op_scatter(comparison: Comparison) -> Figure | None:
    """Each matched op: simulated seconds on the x axis, recorded on the y axis. They are equal on the
    diagonal.
    """
    rows = [
        (row.name, [pair for pair in row.pairs if min(pair.simulated_seconds, pair.recorded_seconds) > 0])
        for row in comparison.clock.classes
    ]
    rows = [(name, pairs) for name, pairs in rows if pairs]
    if not rows:
        return None
    all_seconds = [t for _, pairs in rows for p in pairs for t in (p.simulated_seconds, p.recorded_seconds)]
    scale, unit = time_scale(max(all_seconds))
    low, high = min(all_seconds) * scale / 1.3, max(all_seconds) * scale * 1.3
    figure = Figure(layout(460))
    line = {"dash": "dot", "width": 1.5, "color": "#8A8F98"}
    ends = [low, high]
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, name="the same", hoverinfo="skip")
    for name, pairs in rows:
        drawn_pairs = pairs[:: -(-len(pairs) * len(rows) // _MAX_POINTS)]
        figure.add_scatter(
            name=name,
            x=[pair.simulated_seconds * scale for pair in drawn_pairs],
            y=[pair.recorded_seconds * scale for pair in drawn_pairs],
            mode="markers",
            marker={"size": 8, "color": _class_colour(name), "opacity": 0.75},
            hovertext=[
                f"<b>{pair.title}</b><br>{format_seconds(pair.simulated_seconds)} simulated, "
                f"{format_seconds(pair.recorded_seconds)} recorded"
                for pair in drawn_pairs
            ],
            hoverinfo="text",
        )
    axis: Attributes = {"type": "log", "range": [log10(low), log10(high)], "dtick": 1}
    figure.update_xaxes(**axis, title_text=f"simulated, {unit}")
    figure.update_yaxes(**axis, title_text=f"recorded, {unit}", automargin=True)
    return figure


def _class_colour(name: str) -> str:
    """The colour of the class's kind on the timelines."""
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "h2d", "d2h"):
        if name.startswith(span_meaning(kind).label):
            return span_meaning(kind).color
    if name == "optimizer":
        return BREAKDOWN["optimizer"].color
    return span_meaning("recompute" if name.startswith("recompute") else "compute").color


def memory_bars(comparison: Comparison) -> Figure | None:
    """The peak of each category of the GPU's memory, side by side."""
    prefix, suffix = "gpu ", ", peak"
    rows = [
        metric
        for metric in comparison.memory.metrics
        if metric.name.startswith(prefix) and metric.name.endswith(suffix)
    ]
    if not rows:
        return None
    names = [metric.name[len(prefix) : -len(suffix)] for metric in rows]
    figure = Figure(layout(120 + 52 * len(rows), barmode="group", bargap=0.3))
    for name, colour, values in zip(
        comparison.names,
        _COLOURS,
        ([metric.simulated for metric in rows], [metric.recorded for metric in rows]),
        strict=True,
    ):
        figure.add_bar(
            name=name,
            orientation="h",
            y=names,
            x=[value / 1e9 for value in values],
            marker_color=colour,
            hovertemplate="%{y}: %{x:.3f} GB<extra></extra>",
        )
    figure.update_xaxes(title_text="GB", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure
