"""A run of days as one HTML page: its timeline, its waterfall, and what else could be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from zsim.goodput.progress import Span
from zsim.goodput.runs import HIGH, LOW, quantile
from zsim.goodput.text import MEANINGS, proportional_days, step_trust
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import Column, ResultTable, Section, columns_of
from zsim.units import format_seconds

if TYPE_CHECKING:
    from zsim.goodput.result import RunResult

# Names and meanings of `definitions`, by whom they are from.
DEFINITIONS = {
    "goodput": "time of all steps, one after the other, over the clock from the first step on",
    "ettr_rsc": "Meta RSC (arXiv 2410.21680), effective training time ratio: productive over all wall time, "
    "the first start-up included",
    "effective_training_time_llama_3": "Llama 3 (arXiv 2407.21783): useful training time over elapsed time, "
    "from the first step on; slower steps are useful",
    "runtime_goodput_google": "Google: productive step time over the time in which all nodes are there",
    "goodput_dlrover": "DLRover: time on new steps over elapsed time, the first start-up included",
    "mfu_of_the_run": "the step's model FLOP utilisation times goodput",
}

_DAY = 86_400.0
_HOUR = 3600.0
COLORS = {
    "steps": BREAKDOWN["compute"].color,
    "checkpoints": BREAKDOWN["optimizer"].color,
    "evaluation": "#A1D9FD",
    "detection": "#F5CE25",
    "restart": "#F0841F",
    "recomputation": "#D55E00",
    "waiting": "#9F2802",
    "planned": "#8A8F98",
    "degraded": "#7B3F6F",
}
_MAX_SPANS = 6_000
_TRUST = [Column(title, is_left=True) for title in ("rests on", "evidence", "source", "what would narrow it")]
_DEFINITIONS = columns_of("definition", "of this run", Column("meaning", is_left=True))
_MODES = columns_of("mode", "work between saves", "holds training", "goodput")
_NARROWED_BY = {
    "failures": "[run.failures] with the rate of your own fleet",
    "storage": "[run.storage] with your store's rates, or a measured [run.checkpoint] blocking",
}


def goodput_sections(run: RunResult) -> Iterator[Section]:
    """What the page shows, in order."""
    drawn = partial(partial, run=run)
    yield Section("Where the days go", [
        ("waterfall", "Mean of all runs.", drawn(waterfall)),
    ], ResultTable("", _DEFINITIONS, _definitions(run)))  # fmt: skip
    yield Section("A run with its failures", [
        ("progress", "The run of the median's days: steps done over time; dotted: without stops. Marked: "
         "failures, by cause.", drawn(progress)),
        ("timeline", "The same run, where it does not train.", drawn(timeline)),
    ])  # fmt: skip
    if run.curve is not None:
        caption = "Goodput by work between two saves, simulated; the same failures strike all."
        modes = ResultTable("", _MODES, _modes(run)) if run.modes else None
        yield Section("How often to save", [("interval", caption, drawn(interval))], modes)
    if len(run.spares) > 1:
        caption = "Goodput, and GPU-hours with the idle spares over those of the steps alone."
        yield Section("How many spares pay", [("spares", caption, drawn(spares))])
    causes_plot = "causes", "Lost GPU-hours by cause, mean of all runs.", drawn(causes)
    columns = columns_of("cause", "in a run", "lost GPU-hours")
    yield Section("Failures", [causes_plot], ResultTable("", columns, _causes(run)))
    unit = "Days" if run.runs.scenario.horizon_seconds is None else "Goodput"
    yield Section("All runs", [("days", f"{unit} of every run.", drawn(days))])
    yield Section("Should I believe this?", table=ResultTable("", _TRUST, [*trust_rows(run)]))


def waterfall(run: RunResult) -> Figure:
    """Days by bin, each beginning where the last one ends."""
    figure, start_seconds = Figure(layout(380, showlegend=False)), 0.0
    for name, seconds in run.runs.seconds_by_bin().items():
        if not seconds:
            continue
        figure.add_bar(
            name=MEANINGS[name],
            orientation="h",
            y=[f"{MEANINGS[name]}<br>{_length(seconds)}"],
            x=[seconds / _DAY],
            base=[start_seconds / _DAY],
            marker_color=COLORS[name],
            hovertemplate=f"{MEANINGS[name]}: {_length(seconds)}<extra></extra>",
        )
        start_seconds += seconds
    figure.update_xaxes(title_text="days", range=[0, start_seconds / _DAY])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _length(seconds: float) -> str:
    """Seconds in the largest unit that makes them more than one."""
    for size, unit in ((_DAY, "days"), (_HOUR, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def _spans(run: RunResult) -> list[Span]:
    return (run.typical.spans or [])[:_MAX_SPANS]


def progress(run: RunResult) -> Figure:
    """Steps over days, with every failure."""
    spans = _spans(run)
    figure = Figure(layout(420))
    scenario = run.runs.scenario
    figure.add_scatter(
        name="without stops", mode="lines", line={"dash": "dot", "width": 1, "color": "#8A8F98"},
        x=[0, scenario.ideal_seconds / run.runs.num_parts / _DAY], y=[0, scenario.steps / run.runs.num_parts],
        hoverinfo="skip",
    )  # fmt: skip
    x, y = [0.0], [0.0]
    for span in spans:
        x.append(span.end_seconds / _DAY)
        y.append(span.steps)
    figure.add_scatter(
        name="steps", mode="lines", line={"color": COLORS["steps"], "width": 2}, x=x, y=y,
        hovertemplate="day %{x:.2f}: %{y:,.0f} steps<extra></extra>",
    )  # fmt: skip
    struck = [span for span in spans if span.bin == "detection"]
    figure.add_scatter(
        name="failures", mode="markers", marker={"symbol": "x", "size": 7, "color": CAPACITY.color},
        x=[span.start_seconds / _DAY for span in struck], y=[span.steps for span in struck],
        hovertext=[span.cause for span in struck], hoverinfo="text",
    )  # fmt: skip
    figure.update_xaxes(title_text="days")
    figure.update_yaxes(title_text="steps", automargin=True, rangemode="tozero")
    return figure


def timeline(run: RunResult) -> Figure:
    """One bar per stop, at its day."""
    figure = Figure(layout(320, barmode="overlay"))
    for name in MEANINGS:
        bin_spans = [span for span in _spans(run) if span.bin == name]
        if not bin_spans or name == "steps":
            continue
        figure.add_bar(
            name=MEANINGS[name],
            x=[(span.start_seconds + span.end_seconds) / 2 / _DAY for span in bin_spans],
            y=[(span.end_seconds - span.start_seconds) / 60 for span in bin_spans],
            width=[max((span.end_seconds - span.start_seconds) / _DAY, 0.01) for span in bin_spans],
            marker_color=COLORS[name],
            hovertext=[f"{span.cause or MEANINGS[name]}: {MEANINGS[name]}, "
                       f"{(span.end_seconds - span.start_seconds) / 60:.1f} min" for span in bin_spans],
            hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="days")
    figure.update_yaxes(title_text="minutes", automargin=True)
    return figure


def interval(run: RunResult) -> Figure:
    curve = run.curve
    assert curve is not None
    figure = Figure(layout(380))
    figure.add_scatter(
        name="goodput", mode="lines+markers", line={"color": COLORS["steps"], "width": 3},
        x=[point.interval_seconds / 60 for point in curve.points],
        y=[point.goodput_fraction * 100 for point in curve.points],
        hovertemplate="%{x:.1f} min: %{y:.2f} %<extra></extra>",
    )  # fmt: skip
    best = curve.best_seconds / 60
    figure.add_vline(best, {"dash": "dash", "width": 1, "color": CAPACITY.color})
    figure.add_annotation(  # on a logarithmic axis plotly.js places lines by value, notes by exponent
        text="best", showarrow=False, x=math.log10(best), xref="x", xanchor="left",
        y=0, yref="y domain", yanchor="bottom",
    )  # fmt: skip
    figure.update_xaxes(title_text="minutes of work between saves", type="log", dtick="D1")
    figure.update_yaxes(title_text="goodput, %", automargin=True)
    return figure


def spares(run: RunResult) -> Figure:
    figure = Figure(layout(340))
    for name, values, color in (
        ("goodput, %", [choice.goodput_fraction * 100 for choice in run.spares], COLORS["steps"]),
        ("GPU-hours, %", [choice.gpu_hours_fraction * 100 for choice in run.spares], COLORS["recomputation"]),
    ):
        figure.add_scatter(
            name=name, mode="lines+markers", x=[choice.spares for choice in run.spares], y=values,
            line={"color": color, "width": 2}, hovertemplate="%{x} spares: %{y:.2f} %<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(
        title_text="spare nodes", dtick=max(1, max(choice.spares for choice in run.spares) // 8)
    )
    figure.update_yaxes(title_text="%", automargin=True)
    return figure


def causes(run: RunResult) -> Figure:
    hours = run.lost_gpu_hours
    figure = Figure(layout(max(160, 60 + 26 * len(hours)), showlegend=False))
    figure.add_bar(
        name="GPU-hours", orientation="h", x=list(hours.values()), y=list(hours),
        marker_color=COLORS["recomputation"], hovertemplate="%{y}: %{x:,.0f} GPU-hours<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="GPU-hours")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def days(run: RunResult) -> Figure:
    """Runs in the order of their days, or of the goodput that they have in as many days."""
    if run.runs.scenario.horizon_seconds is None:
        ordered, title, hover_text = sorted(run.runs.days), "days", "take at most %{y:.2f} days"
    else:
        fractions = run.runs.goodput_fractions
        ordered, title, hover_text = (
            sorted(100 * fraction for fraction in fractions),
            "goodput, %",
            "keep at most %{y:.2f} %",
        )
    figure = Figure(layout(300, showlegend=False))
    figure.add_scatter(
        name="runs", mode="lines+markers", x=[n / len(ordered) * 100 for n in range(1, len(ordered) + 1)],
        y=ordered, line={"color": COLORS["steps"]},
        hovertemplate=f"%{{x:.0f}} % of runs {hover_text}<extra></extra>",
    )  # fmt: skip
    for part in (LOW, HIGH):
        figure.add_hline(y=quantile(ordered, part), line={"dash": "dash", "width": 1, "color": "#8A8F98"})
    figure.update_xaxes(title_text="% of runs")
    figure.update_yaxes(title_text=title, automargin=True)
    return figure


def _definitions(run: RunResult) -> Sequence[Sequence[str]]:
    return [
        [name.replace("_", " "), "-" if value is None else f"{value * 100:.2f} %", DEFINITIONS[name]]
        for name, value in run.definitions.items()
    ]


def _modes(run: RunResult) -> Sequence[Sequence[str]]:
    return [
        [choice.mode, "", "", choice.error]
        if choice.error is not None
        else [choice.mode, f"{choice.interval_seconds / 60:.1f} min", f"{choice.blocking_seconds:.2f} s",
              f"{(choice.goodput_fraction or 0.0) * 100:.2f} %"]
        for choice in run.modes
    ]  # fmt: skip


def _causes(run: RunResult) -> Sequence[Sequence[str]]:
    counts, hours = run.runs.failures_by_cause(), run.lost_gpu_hours
    return [
        [name, f"{counts.get(name, 0.0):,.2f}", f"{hours.get(name, 0.0):,.1f}"]
        for name in sorted({*counts, *hours}, key=lambda name: -hours.get(name, 0.0))
    ]


def trust_rows(run: RunResult) -> Iterator[tuple[str, str, str, str]]:
    """Rows of what the days rest on: its name, its evidence, where it is from, what would narrow it."""
    first = run.prepared.first
    weakest = ", ".join(f"{part} {grade}" for part, grade in first.result.report.evidence.items())
    yield (
        f"a step of {format_seconds(first.inner_seconds)}",
        weakest,
        f"{step_trust(run)}{proportional_days(run)}",
        "a measured step: zsim calibrate, zsim compare",
    )
    checkpoint = run.prepared.table.checkpoint
    if checkpoint.blocking is not None:
        yield "saves", "measured", "given by the experiment", ""
    for name, table in run.sources.items():
        yield name, table.evidence, table.source, _NARROWED_BY[name]
    if len(run.prepared.table.phases) > 1:
        yield "phases", "", "the first phase's step is the one judged above", ""
