"""A run of days as text of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.goodput.closed_forms import repairs_by_law
from zsim.goodput.simulated_run import SimulatedRun
from zsim.report.fit import fit_of
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.report.views.text.sentences import trust_words
from zsim.specs.experiment.labels import gpus_label, strategy_label
from zsim.units import format_amount, format_bytes, format_duration, format_energy

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
_DAY = 86_400.0
_TWO_DIGITS = 0.0995  # of a unit, of two decimals
_TOLD = 0.0005  # of goodput: a tenth of a percent, rounded
_LEAST_SHARE = 0.0000995  # told as 0.01 %
_UNITS = (("days", _DAY), ("hours", 3600.0), ("minutes", 60.0))


def goodput_lines(run: SimulatedRun) -> Iterator[str]:
    """The answer in a sentence, then tables."""
    yield from paragraph(headline(run))
    yield from paragraph(verdict_sentence(run))
    yield from paragraph(_days_sentence(run))
    if run.is_diverging:
        yield from paragraph(diverging_sentence(run))
    for sentence in shortening(run):
        yield from paragraph(sentence)
    yield from paragraph(f"{step_trust(run)}{days_in_proportion(run)}")
    yield ""
    unit, seconds = unit_of(run)
    title = f"Where the {'days go' if unit == 'days' else 'time goes'}"
    yield from table(named_columns(title, unit, "share"), _waterfall(run, seconds))
    yield ""
    causes = _causes(run)
    if causes:
        yield from table(named_columns("Failures", "in a run", "lost GPU-hours"), causes)
        yield ""
    for sentence in sentences(run):
        yield from paragraph(sentence)
    yield ""
    yield from _evidence(run)


def headline(run: SimulatedRun) -> str:
    """Model, strategy, cluster and GPUs."""
    job = run.prepared.first.result.job
    return (
        f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {gpus_label(job)} | "
        f"{run.prepared.first.step_seconds:.3g} s per step"
    )


def verdict_sentence(run: SimulatedRun) -> str:
    """Whether the steps fit, as `zsim run` says it. For several phases, whether the one least likely to fit
    does.
    """
    fit = fit_of(run.tightest)
    reports = [phase.result.report for phase in run.prepared.phases]
    number = next(n for n, report in enumerate(reports, 1) if report is run.tightest)
    place = f" (phase {number})" if len(reports) > 1 and fit.verdict.word != "fits" else ""
    return f"{fit.label.upper()}{place}  {fit.words}"


def _days_sentence(run: SimulatedRun) -> str:
    low, high = run.days_range
    horizon = run.runs.scenario.horizon_seconds
    if horizon is not None:
        low, upper = run.goodput_range
        return (
            f"In {format_duration(horizon)}: {run.goodput_fraction * 100:.1f} % goodput (5 to 95 %: "
            f"{low * 100:.1f} to {upper * 100:.1f}), {format_duration(run.ideal_days * _DAY)} of steps."
        )
    unit, seconds = unit_of(run)
    size = seconds / _DAY
    ends = f"{low / size:.1f} to {high / size:.1f}" if high is not None else f"from {low / size:.1f}"
    days = "no mean" if run.expected_days is None else f"{run.expected_days / size:.2f} {unit}"
    return (
        f"{run.runs.scenario.steps:,} steps take {days} (5 to 95 %: {ends}; {len(run.runs.ledgers)} seeds), "
        f"{run.ideal_days / size:.2f} without stops: {run.goodput_fraction * 100:.1f} % goodput"
        f"{_give_or_take(run)}."
    )


def _give_or_take(run: SimulatedRun) -> str:
    """The standard error of the goodput over the seeds drawn, where a tenth of a percent shows it.

    Goodput is the steps' time over the mean of all time, and its relative error is that of the mean.
    """
    error = run.goodput_fraction * run.runs.days_error / run.runs.mean_days * 100
    return f" (standard error {error:.1f})" if error >= 0.05 else ""


def unit_of(run: SimulatedRun) -> tuple[str, float]:
    """The unit in which a run's time is shown, and its seconds: days, and less for short runs."""
    elapsed = run.runs.mean_of(lambda ledger: ledger.elapsed)
    return next((unit for unit in _UNITS if elapsed >= unit[1]), _UNITS[-1])


def step_trust(run: SimulatedRun) -> str:
    """How far to trust the step that the run is made of."""
    return trust_words(run.prepared.first.result.report) or "No published run is like the step."


def days_in_proportion(run: SimulatedRun) -> str:
    """A sentence: the days in proportion to the step's interval, as steps are nearly all of them."""
    report, days = run.prepared.first.result.report, run.expected_days
    if report.step_seconds_range is None or days is None or run.prepared.table.days is not None:
        return ""
    unit, seconds = unit_of(run)
    ends = (days * _DAY / seconds * end / report.step_seconds for end in report.step_seconds_range)
    return f" {unit.capitalize()} in proportion: {' to '.join(f'{end:.3g}' for end in ends)}."


def diverging_sentence(run: SimulatedRun) -> str:
    """Which runs were given up."""
    runs = run.runs
    return (
        f"The expectation diverges: {runs.num_unfinished} of {len(runs.ledgers)} runs were not done after "
        f"{format_duration(runs.scenario.limit_seconds)} and were given up; means are of what was simulated."
    )


def shortening(run: SimulatedRun) -> Iterator[str]:
    """How a run of very many failures was made short."""
    runs = run.runs
    if runs.parts > 1:
        each = format_duration(run.typical.elapsed)
        yield (
            f"A run has some {runs.mean_of(lambda one: one.num_failures):,.0f} failures: one of "
            f"{runs.parts:,} like parts of it, of {each}, was simulated per seed."
        )
    if len(runs.ledgers) < run.asked_seeds:
        yield f"{len(runs.ledgers):,} of {run.asked_seeds:,} seeds were drawn: all would take very long."


def _waterfall(run: SimulatedRun, unit_seconds: float) -> list[list[str]]:
    runs = run.runs
    useful = runs.mean_of(lambda ledger: ledger.useful)
    rows = {"steps": useful, **runs.lost_seconds()}
    whole = sum(rows.values())
    return [
        [MEANINGS[name], _told(seconds, unit_seconds), _share(seconds / whole)]
        for name, seconds in rows.items()
        if abs(seconds) > 1e-9 or name == "steps"
    ]


def _told(seconds: float, unit_seconds: float) -> str:
    """The seconds in a column's unit, or in a smaller unit where that would leave one digit or none."""
    told = seconds / unit_seconds
    return format_duration(seconds) if 0 < abs(told) < _TWO_DIGITS else f"{told:.2f}"


def _share(fraction: float) -> str:
    is_told = fraction == 0 or abs(fraction) >= _LEAST_SHARE
    return f"{fraction * 100:.2f} %" if is_told else f"{format_amount(fraction * 100)} %"


def _causes(run: SimulatedRun) -> list[list[str]]:
    counts, hours = run.runs.failures_by_cause(), run.lost_gpu_hours
    names = sorted({*counts, *hours}, key=lambda name: -hours.get(name, 0.0))
    rows = [[name, f"{counts.get(name, 0.0):,.1f}", format_amount(hours.get(name, 0.0))] for name in names]
    rest = names[_MAX_CAUSES:]
    if len(rest) > 1:
        count, lost = (sum(table.get(name, 0.0) for name in rest) for table in (counts, hours))
        rows[_MAX_CAUSES:] = [[f"{len(rest)} others", f"{count:,.1f}", format_amount(lost)]]
    return rows


def sentences(run: SimulatedRun) -> Iterator[str]:
    """The save, its interval, other modes, spares, money."""
    place, runs, outer = run.checkpoint, run.runs, run.prepared.first.outer
    if outer is not None:
        yield (
            f"{outer.replicas} replicas train apart; a GPU sends {format_bytes(outer.bytes_per_gpu)} per "
            f"outer step, which adds {format_duration(outer.added_seconds)} to an inner step."
        )
    if place is None:
        yield "Nothing is saved: every failure starts the run anew."
    else:
        size = f"{format_bytes(place.bytes)}, " if place.bytes else ""
        yield (
            f"A save ({size}{run.prepared.table.checkpoint.mode}) holds training for "
            f"{format_duration(place.blocking_seconds)} and is durable after "
            f"{format_duration(place.durable_seconds)}; loading takes {format_duration(place.load_seconds)}, "
            f"starting {format_duration(run.prepared.startup_seconds)}."
        )
    if run.stored_bytes:
        yield f"Saves that are kept fill {format_bytes(run.stored_bytes)} of the store at the end."
    curve = run.curve
    if curve is not None:
        low, high = curve.flat
        yield (
            f"Saves are {format_duration(run.work_seconds)} apart; best is "
            f"{format_duration(curve.best_seconds)}, and from {format_duration(low)} to "
            f"{format_duration(high)} at most a tenth more is lost."
        )
    ranked = sorted(
        (one for one in run.modes if one.goodput_fraction is not None),
        key=lambda one: -(one.goodput_fraction or 0.0),
    )
    if ranked:
        yield (
            "By mode, at its best interval, from draws of their own: "
            + ", ".join(f"{one.mode} {(one.goodput_fraction or 0.0) * 100:.1f} %" for one in ranked)
            + "."
        )
    yield from waits_sentence(run)
    if len(run.spares) > 1:
        cheapest = min(run.spares, key=lambda one: (one.gpu_hours_fraction, one.spares))
        shown = ", ".join(f"{one.spares}: {one.goodput_fraction * 100:.1f} %" for one in run.spares)
        yield f"Goodput by spare nodes, likewise: {shown}. {cheapest.spares} cost the fewest GPU-hours."
    bill = run.bill
    money = "" if bill.money is None else f", {format_amount(bill.money)} {bill.currency}"
    energy = "" if bill.megawatt_hours is None else f", {format_energy(bill.megawatt_hours)}"
    yield f"{format_amount(bill.gpu_hours)} GPU-hours with spares{money}{energy}."
    if runs.scenario.failures_per_second:
        between = 1 / runs.scenario.failures_per_second
        yield f"A failure every {format_duration(between)} on {run.prepared.first.nodes:,} nodes."


def waits_sentence(run: SimulatedRun) -> Iterator[str]:
    """A sentence on what the seeds drew of long repairs, where the law's mean changes the goodput shown."""
    found = repairs_by_law(run.runs)
    if found is None or run.is_diverging or abs(found.goodput_fraction - run.goodput_fraction) < _TOLD:
        return
    yield (
        f"Half of all time in repair is in 1 of {1 / found.half_fraction:.0f} repairs, those of "
        f"{format_duration(found.half_seconds)} and more. {len(run.runs.ledgers)} seeds drew "
        f"{format_duration(found.drawn_seconds)} of waiting in a run; with the law's mean of "
        f"{format_duration(found.mean_seconds)} for each repair it is "
        f"{format_duration(found.waiting_seconds)}, and goodput {found.goodput_fraction * 100:.1f} %."
    )


def _evidence(run: SimulatedRun) -> Iterator[str]:
    grades = ", ".join(f"{part} {grade}" for part, grade in run.prepared.first.result.report.evidence.items())
    yield from paragraph(f"evidence of the step: {grades}", indent=2)
    for name, found in run.sources.items():
        yield from paragraph(f"{name} ({found.evidence}): {found.source}", indent=2)
