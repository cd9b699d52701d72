"""A run of days as text of 80 columns and as a page: timeline, waterfall, what else could be chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from zsim.goodput.goodput import SimulatedRun
from zsim.goodput.progress import Span
from zsim.goodput.runs import HIGH, LOW, quantile
from zsim.goodput.scenario import DAY
from zsim.goodput.search import estimate_repairs
from zsim.report.fit import allocator_sentences, fit_of
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import Column, ResultTable, Section, columns_of
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.report.views.text.sentences import format_trust
from zsim.specs.experiment.job import gpus_label, strategy_label
from zsim.units import (
    format_amount,
    format_bytes,
    format_duration,
    format_energy,
    format_seconds,
    format_tokens,
)

MEANINGS = {
    "steps": "steps that were kept",
    "checkpoints": "saves",
    "evaluation": "evaluation",
    "detection": "until a failure is noticed",
    "restart": "starting and loading",
    "recomputation": "steps run again",
    "waiting": "waiting for nodes",
    "planned": "planned stops",
    "degraded": "slower steps",
}
_MAX_CAUSES = 8
_TWO_DIGITS = 0.0995  # of a unit, of two decimals
_MIN_GOODPUT_CHANGE = 0.0005  # of goodput: a tenth of a percent, rounded
_MIN_SHARE = 0.0000995  # told as 0.01 %
_UNITS = (("days", DAY), ("hours", 3600.0), ("minutes", 60.0))


def goodput_lines(run: SimulatedRun) -> Iterator[str]:
    """The answer in a sentence, then tables."""
    yield from paragraph(headline(run))
    yield from paragraph(verdict_sentence(run))
    yield from paragraph(_days_sentence(run))
    for sentence in cut_sentences(run):
        yield from paragraph(sentence)
    yield from paragraph(f"{step_trust(run)}{proportional_days(run)}")
    yield ""
    unit, seconds = time_unit(run)
    title = f"Where the {'days go' if unit == 'days' else 'time goes'}"
    yield from table(named_columns(title, unit, "share"), _waterfall(run, seconds))
    yield ""
    causes = _cause_cells(run)
    if causes:
        yield from table(named_columns("Failures", "in a run", "lost GPU-hours"), causes)
        yield ""
    for sentence in detail_sentences(run):
        yield from paragraph(sentence)
    for note in allocator_sentences(run.tightest_report):
        yield from paragraph(f"note: {note}")
    yield ""
    yield from _evidence(run)


def headline(run: SimulatedRun) -> str:
    """Model, strategy, cluster and GPUs."""
    first = run.prepared.first
    job = first.result.job
    if first.full_step is not None:
        return f"{first.full_step.headline} | {format_amount(first.step_seconds)} s per step"
    return (
        f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {gpus_label(job)} | "
        f"{format_amount(first.step_seconds)} s per step"
    )


def verdict_sentence(run: SimulatedRun) -> str:
    """Whether the steps fit, as `zsim run` says it. For several phases, whether the one least likely to fit
    does.
    """
    phases = run.prepared.phases
    if run.prepared.first.full_step is not None:
        tightest = min(range(len(phases)), key=lambda index: phases[index].verdict.probability)
        suffix = f" (part {tightest + 1})" if len(phases) > 1 and run.verdict.word != "fits" else ""
        return f"{run.verdict.word.upper()}{suffix}  {run.verdict.chance}"
    fit = fit_of(run.tightest_report)
    reports = [phase.result.report for phase in run.prepared.phases]
    number = next(n for n, report in enumerate(reports, 1) if report is run.tightest_report)
    phase_suffix = f" (phase {number})" if len(reports) > 1 and fit.verdict.word != "fits" else ""
    return f"{fit.label.upper()}{phase_suffix}  {fit.words}"


def _days_sentence(run: SimulatedRun) -> str:
    low, high = run.days_range
    horizon = run.runs.scenario.horizon_seconds
    if horizon is not None:
        low, high_goodput = run.goodput_range
        return (
            f"In {format_duration(horizon)}: {run.goodput_fraction * 100:.1f} % goodput (5 to 95 %: "
            f"{low * 100:.1f} to {high_goodput * 100:.1f}), {format_duration(run.ideal_days * DAY)} of "
            f"steps{_trained_tokens(run)}."
        )
    unit, seconds = time_unit(run)
    size = seconds / DAY
    ends = (
        f"{_short(low / size)} to {_short(high / size)}" if high is not None else f"from {_short(low / size)}"
    )
    days = "no mean" if run.expected_days is None else f"{run.expected_days / size:,.2f} {unit}"
    return (
        f"{_partial_step(run)}{_steps(run.runs.scenario.steps)} {days} (5 to 95 %: {ends}; "
        f"{len(run.runs.ledgers)} seeds{_longest_runs(run, size)}), {run.ideal_days / size:,.2f} without "
        f"stops: {run.goodput_fraction * 100:.1f} % goodput{_goodput_error(run)}."
    )


def _trained_tokens(run: SimulatedRun) -> str:
    """The mean tokens of a run that ends by the clock. Empty with phases, whose steps differ."""
    phase = run.prepared.first
    tokens = run.steps * phase.num_replicas * phase.step_tokens
    return f", {format_tokens(tokens)} tokens" if len(run.prepared.phases) == 1 else ""


def _longest_runs(run: SimulatedRun, unit_days: float) -> str:
    """The runs beyond the interval, where the mean is: a rare failure costs more than all else."""
    high, mean, days = run.days_range[1], run.expected_days, run.runs.days
    if high is None or mean is None or mean <= high:
        return ""
    longer = sum(each > high for each in days)
    return f", of which {longer} take{'s' if longer == 1 else ''} up to {_short(max(days) / unit_days)}"


def _short(value: float) -> str:
    """A duration in its unit with one decimal, or below 1 with two digits."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _steps(count: int) -> str:
    return f"{count:,} steps take" if count != 1 else "1 step takes"


def _partial_step(run: SimulatedRun) -> str:
    """A sentence on a run whose tokens do not fill its one step. Empty for others."""
    phase = run.prepared.first
    if len(run.prepared.phases) > 1 or phase.tokens is None or phase.tokens >= phase.step_tokens:
        return ""
    return (
        f"{format_tokens(phase.tokens)} tokens are less than one step of "
        f"{format_tokens(phase.step_tokens)}, which is simulated. "
    )


def _goodput_error(run: SimulatedRun) -> str:
    """The standard error of the goodput over the seeds drawn, where a tenth of a percent shows it.

    Goodput is the steps' time over the mean of all time, and its relative error is that of the mean.
    """
    error = run.goodput_fraction * run.runs.days_error / run.runs.mean_days * 100
    return f" (standard error {error:.1f})" if error >= 0.05 else ""


def time_unit(run: SimulatedRun) -> tuple[str, float]:
    """The unit in which a run's time is shown, and its seconds: days, and less for short runs."""
    elapsed = run.runs.mean_of(lambda ledger: ledger.elapsed)
    return next((unit for unit in _UNITS if elapsed >= unit[1]), _UNITS[-1])


def step_trust(run: SimulatedRun) -> str:
    """How far to trust the step that the run is made of."""
    full_step = run.prepared.first.full_step
    if full_step is not None:
        low, high = map(format_seconds, full_step.seconds_range)
        return f"The first step lies between {low} and {high} in 80 %."
    return format_trust(run.prepared.first.result.report) or "No published run is like the step."


def proportional_days(run: SimulatedRun) -> str:
    """A sentence: the days in proportion to the step's interval, as steps are nearly all of them."""
    first, days = run.prepared.first, run.expected_days
    interval = first.step_seconds_range
    if interval is None or days is None or run.prepared.table.days is not None:
        return ""
    unit, seconds = time_unit(run)
    ends = (days * DAY / seconds * end / first.inner_seconds for end in interval)
    return f" {unit.capitalize()} in proportion: {' to '.join(map(format_amount, ends))}."


def diverging_sentence(run: SimulatedRun) -> Iterator[str]:
    """A sentence on the runs that were given up, if some were."""
    runs = run.runs
    if run.is_diverging:
        limit = format_duration(runs.scenario.limit_seconds)
        yield (
            f"The expectation diverges: {runs.num_unfinished} of {len(runs.ledgers)} runs were not done "
            f"after {limit} and were given up; means are of what was simulated."
        )


def cut_sentences(run: SimulatedRun) -> Iterator[str]:
    """Which runs were given up, and how a run of very many failures was made short."""
    yield from diverging_sentence(run)
    runs = run.runs
    if runs.num_parts > 1:
        part_duration = format_duration(run.typical.elapsed)
        yield (
            f"A run has some {runs.mean_of(lambda ledger: ledger.num_failures):,.0f} failures: one of "
            f"{runs.num_parts:,} like parts of it, of {part_duration}, was simulated per seed."
        )
    if len(runs.ledgers) < run.requested_seeds:
        yield f"{len(runs.ledgers):,} of {run.requested_seeds:,} seeds were drawn: all would take very long."


def _waterfall(run: SimulatedRun, unit_seconds: float) -> list[list[str]]:
    rows = run.runs.seconds_by_bin()
    total_seconds = sum(rows.values())
    return [
        [MEANINGS[name], _format_in_unit(seconds, unit_seconds), _share(seconds / total_seconds)]
        for name, seconds in rows.items()
        if abs(seconds) > 1e-9 or name == "steps"
    ]


def _format_in_unit(seconds: float, unit_seconds: float) -> str:
    """The seconds in a column's unit, or in a smaller unit where that would leave one digit or none."""
    amount = seconds / unit_seconds
    return format_duration(seconds) if 0 < abs(amount) < _TWO_DIGITS else f"{amount:.2f}"


def _share(fraction: float) -> str:
    is_shown = fraction == 0 or abs(fraction) >= _MIN_SHARE
    return f"{fraction * 100:.2f} %" if is_shown else f"{format_amount(fraction * 100)} %"


def _cause_cells(run: SimulatedRun) -> list[list[str]]:
    counts, hours = run.runs.failures_by_cause(), run.lost_gpu_hours
    names = sorted({*counts, *hours}, key=lambda name: -hours.get(name, 0.0))
    rows = [[name, f"{counts.get(name, 0.0):,.1f}", format_amount(hours.get(name, 0.0))] for name in names]
    other_causes = names[_MAX_CAUSES:]
    if len(other_causes) > 1:
        count, lost_hours = (sum(table.get(name, 0.0) for name in other_causes) for table in (counts, hours))
        rows[_MAX_CAUSES:] = [[f"{len(other_causes)} others", f"{count:,.1f}", format_amount(lost_hours)]]
    return rows


def detail_sentences(run: SimulatedRun) -> Iterator[str]:
    """The save, its interval, other modes, spares, money."""
    checkpoint, runs, outer = run.checkpoint, run.runs, run.prepared.first.outer
    if outer is not None:
        yield (
            f"{outer.replicas} replicas train apart; a GPU sends {format_bytes(outer.bytes_per_gpu)} per "
            f"outer step, which adds {format_duration(outer.added_seconds)} to an inner step."
        )
    if checkpoint is None:
        yield "Nothing is saved: every failure starts the run anew."
    else:
        size = f"{format_bytes(checkpoint.bytes)}, " if checkpoint.bytes else ""
        yield (
            f"A save ({size}{run.prepared.table.checkpoint.mode}) holds training for "
            f"{format_duration(checkpoint.blocking_seconds)} and is durable after "
            f"{format_duration(checkpoint.durable_seconds)}; loading takes "
            f"{format_duration(checkpoint.load_seconds)}, "
            f"starting {format_duration(run.prepared.startup_seconds)}."
        )
    if run.stored_bytes:
        yield f"Saves that are kept fill {format_bytes(run.stored_bytes)} of the store at the end."
    curve = run.curve
    if curve is not None:
        low, high = map(format_duration, curve.flat)
        flat = f"; between {low} and {high} at most a tenth more time is lost" if low != high else ""
        yield (
            f"Saves are {format_duration(run.work_seconds)} apart. The best interval is "
            f"{format_duration(curve.best_seconds)}{flat}."
        )
    ranked = sorted(
        (choice for choice in run.modes if choice.goodput_fraction is not None),
        key=lambda choice: -(choice.goodput_fraction or 0.0),
    )
    if ranked:
        yield (
            "Goodput by save mode, each at its best interval and with its own draws: "
            + ", ".join(f"{choice.mode} {(choice.goodput_fraction or 0.0) * 100:.1f} %" for choice in ranked)
            + "."
        )
    yield from waits_sentence(run)
    if len(run.spares) > 1:
        cheapest = min(run.spares, key=lambda choice: (choice.gpu_hours_fraction, choice.spares))
        spare_texts = ", ".join(
            f"{choice.spares}: {choice.goodput_fraction * 100:.1f} %" for choice in run.spares
        )
        yield (
            f"Goodput by spare nodes, each with its own draws: {spare_texts}. {cheapest.spares} cost the "
            "fewest GPU-hours."
        )
    bill = run.bill
    money = "" if bill.money is None else f", {format_amount(bill.money)} {bill.currency}"
    energy = "" if bill.megawatt_hours is None else f", {format_energy(bill.megawatt_hours)}"
    with_spares = " with spares" if runs.scenario.recovery.spares else ""
    yield f"{format_amount(bill.gpu_hours)} GPU-hours{with_spares}{money}{energy}."
    if runs.scenario.failures_per_second:
        between = 1 / runs.scenario.failures_per_second
        yield f"A failure every {format_duration(between)} on {run.prepared.first.nodes:,} nodes."


def waits_sentence(run: SimulatedRun) -> Iterator[str]:
    """A sentence on what the seeds drew of long repairs, where the law's mean changes the goodput shown."""
    repairs = estimate_repairs(run.runs)
    if (
        repairs is None
        or run.is_diverging
        or abs(repairs.goodput_fraction - run.goodput_fraction) < _MIN_GOODPUT_CHANGE
    ):
        return
    drawn = f"{format_duration(repairs.drawn_seconds)} of" if repairs.drawn_seconds else "no"
    yield (
        f"Half of all time in repair is in 1 of {1 / repairs.half_fraction:.0f} repairs, those of "
        f"{format_duration(repairs.half_seconds)} and more. {len(run.runs.ledgers)} seeds drew "
        f"{drawn} waiting in a run; with the law's mean of "
        f"{format_duration(repairs.mean_seconds)} for each repair it is "
        f"{format_duration(repairs.waiting_seconds)}, and goodput {repairs.goodput_fraction * 100:.1f} %."
    )


def _evidence(run: SimulatedRun) -> Iterator[str]:
    grades = ", ".join(f"{part} {grade}" for part, grade in run.prepared.first.result.report.evidence.items())
    yield from paragraph(f"evidence of the step: {grades}", indent=2)
    for name, source_table in run.sources.items():
        yield from paragraph(f"{name} ({source_table.evidence}): {source_table.source}", indent=2)


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


def goodput_sections(run: SimulatedRun) -> Iterator[Section]:
    """The sections of the page, in order."""
    yield Section("Where the days go", [
        ("waterfall", "Mean of all runs.", partial(waterfall, run)),
    ], ResultTable("", _DEFINITIONS, _definitions(run)))  # fmt: skip
    yield Section("A run with its failures", [
        ("progress", "The run of the median's days: steps done over time; dotted: without stops. Marked: "
         "failures, by cause.", partial(progress, run)),
        ("timeline", "The same run, where it does not train.", partial(timeline, run)),
    ])  # fmt: skip
    if run.curve is not None:
        caption = "Goodput by work between two saves, simulated; the same failures strike all."
        modes = ResultTable("", _MODES, _modes(run)) if run.modes else None
        yield Section("How often to save", [("interval", caption, partial(interval, run))], modes)
    if len(run.spares) > 1:
        caption = "Goodput, and GPU-hours with the idle spares over those of the steps alone."
        yield Section("How many spares pay", [("spares", caption, partial(spares, run))])
    causes_plot = "causes", "Lost GPU-hours by cause, mean of all runs.", partial(causes, run)
    columns = columns_of("cause", "in a run", "lost GPU-hours")
    yield Section("Failures", [causes_plot], ResultTable("", columns, _causes(run)))
    unit = "Days" if run.runs.scenario.horizon_seconds is None else "Goodput"
    yield Section("All runs", [("days", f"{unit} of every run.", partial(days, run))])
    yield Section("Should I believe this?", table=ResultTable("", _TRUST, [*trust_rows(run)]))


def waterfall(run: SimulatedRun) -> Figure:
    """Days by bin, each beginning where the last one ends."""
    figure, start_seconds = Figure(layout(380, showlegend=False)), 0.0
    for name, seconds in run.runs.seconds_by_bin().items():
        if not seconds:
            continue
        figure.add_bar(
            name=MEANINGS[name],
            orientation="h",
            y=[f"{MEANINGS[name]}<br>{_length(seconds)}"],
            x=[seconds / DAY],
            base=[start_seconds / DAY],
            marker_color=COLORS[name],
            hovertemplate=f"{MEANINGS[name]}: {_length(seconds)}<extra></extra>",
        )
        start_seconds += seconds
    figure.update_xaxes(title_text="days", range=[0, start_seconds / DAY])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _length(seconds: float) -> str:
    """Seconds in the largest unit that makes them more than one."""
    for size, unit in ((DAY, "days"), (_HOUR, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def _spans(run: SimulatedRun) -> list[Span]:
    return (run.typical.spans or [])[:_MAX_SPANS]


def progress(run: SimulatedRun) -> Figure:
    """Steps over days, with every failure."""
    spans = _spans(run)
    figure = Figure(layout(420))
    scenario = run.runs.scenario
    figure.add_scatter(
        name="without stops", mode="lines", line={"dash": "dot", "width": 1, "color": "#8A8F98"},
        x=[0, scenario.ideal_seconds / run.runs.num_parts / DAY], y=[0, scenario.steps / run.runs.num_parts],
        hoverinfo="skip",
    )  # fmt: skip
    x, y = [0.0], [0.0]
    for span in spans:
        x.append(span.end_seconds / DAY)
        y.append(span.steps)
    figure.add_scatter(
        name="steps", mode="lines", line={"color": COLORS["steps"], "width": 2}, x=x, y=y,
        hovertemplate="day %{x:.2f}: %{y:,.0f} steps<extra></extra>",
    )  # fmt: skip
    struck = [span for span in spans if span.bin == "detection"]
    figure.add_scatter(
        name="failures", mode="markers", marker={"symbol": "x", "size": 7, "color": CAPACITY.color},
        x=[span.start_seconds / DAY for span in struck], y=[span.steps for span in struck],
        hovertext=[span.cause for span in struck], hoverinfo="text",
    )  # fmt: skip
    figure.update_xaxes(title_text="days")
    figure.update_yaxes(title_text="steps", automargin=True, rangemode="tozero")
    return figure


def timeline(run: SimulatedRun) -> Figure:
    """One bar per stop, at its day."""
    figure = Figure(layout(320, barmode="overlay"))
    for name in MEANINGS:
        bin_spans = [span for span in _spans(run) if span.bin == name]
        if not bin_spans or name == "steps":
            continue
        figure.add_bar(
            name=MEANINGS[name],
            x=[(span.start_seconds + span.end_seconds) / 2 / DAY for span in bin_spans],
            y=[(span.end_seconds - span.start_seconds) / 60 for span in bin_spans],
            width=[max((span.end_seconds - span.start_seconds) / DAY, 0.01) for span in bin_spans],
            marker_color=COLORS[name],
            hovertext=[f"{span.cause or MEANINGS[name]}: {MEANINGS[name]}, "
                       f"{(span.end_seconds - span.start_seconds) / 60:.1f} min" for span in bin_spans],
            hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="days")
    figure.update_yaxes(title_text="minutes", automargin=True)
    return figure


def interval(run: SimulatedRun) -> Figure:
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


def spares(run: SimulatedRun) -> Figure:
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


def causes(run: SimulatedRun) -> Figure:
    hours = run.lost_gpu_hours
    figure = Figure(layout(max(160, 60 + 26 * len(hours)), showlegend=False))
    figure.add_bar(
        name="GPU-hours", orientation="h", x=list(hours.values()), y=list(hours),
        marker_color=COLORS["recomputation"], hovertemplate="%{y}: %{x:,.0f} GPU-hours<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="GPU-hours")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def days(run: SimulatedRun) -> Figure:
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


def _definitions(run: SimulatedRun) -> Sequence[Sequence[str]]:
    return [
        [name.replace("_", " "), "-" if value is None else f"{value * 100:.2f} %", DEFINITIONS[name]]
        for name, value in run.definitions.items()
    ]


def _modes(run: SimulatedRun) -> Sequence[Sequence[str]]:
    return [
        [choice.mode, "", "", choice.error]
        if choice.error is not None
        else [choice.mode, f"{choice.interval_seconds / 60:.1f} min", f"{choice.blocking_seconds:.2f} s",
              f"{(choice.goodput_fraction or 0.0) * 100:.2f} %"]
        for choice in run.modes
    ]  # fmt: skip


def _causes(run: SimulatedRun) -> Sequence[Sequence[str]]:
    counts, hours = run.runs.failures_by_cause(), run.lost_gpu_hours
    return [
        [name, f"{counts.get(name, 0.0):,.2f}", f"{hours.get(name, 0.0):,.1f}"]
        for name in sorted({*counts, *hours}, key=lambda name: -hours.get(name, 0.0))
    ]


def trust_rows(run: SimulatedRun) -> Iterator[tuple[str, str, str, str]]:
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
    for name, source_table in run.sources.items():
        yield name, source_table.evidence, source_table.source, _NARROWED_BY[name]
    if len(run.prepared.table.phases) > 1:
        yield "phases", "", "the first phase's step is the one judged above", ""
