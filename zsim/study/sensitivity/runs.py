"""How much a run of days depends on what fails, how it is saved and how it comes back.

Each number alone is halved and doubled, all others unchanged, on runs from the same seeds. Where the interval
between saves is searched for, it moves as the closed form's best one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from zsim.errors import ZsimError
from zsim.goodput.prepared import PreparedRun, prepare
from zsim.goodput.scenario import Cause, Checkpoint, Failures, Phase, Recovery, Scenario
from zsim.goodput.search import best_interval, run_comparable, starting_interval
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.result import Column, ResultTable, Section
from zsim.report.views.text.plain import paragraph, text_table
from zsim.specs.experiment.run.run import resolve_storage
from zsim.specs.experiment.tables import Experiment
from zsim.units import format_duration

DAY = 86_400.0
HALF, TWICE = 0.5, 2.0
_WORTH_SAYING = 0.0005  # of the days
_RATES = ("write_bandwidth", "read_bandwidth")
Part = TypeVar("Part", Failures, Cause, Recovery, Phase, Checkpoint)


@dataclass(frozen=True, slots=True)
class RunBar:
    """The days of a run with one number halved and doubled."""

    name: str
    value: str
    low_days: float | None
    """Days with the number halved, or None where that is no run."""
    high_days: float | None
    """Days with the number doubled, or None where that is no run."""
    error: str | None = None
    """The reason why there is no run."""

    def swing(self, days: float) -> float:
        """The largest relative change of the days."""
        valid_days = [
            varied_days for varied_days in (self.low_days, self.high_days) if varied_days is not None
        ]
        return max((abs(varied_days / days - 1) for varied_days in valid_days), default=0.0)


@dataclass(frozen=True)
class RunSensitivity:
    """The bars of a run of `days`, the largest effect first."""

    days: float
    goodput_fraction: float
    bars: tuple[RunBar, ...]
    day_price: float | None
    """The price of a day of all GPUs, or None without a price."""
    currency: str


def run_sensitivity_of(experiment: Experiment, *, jobs: int = 1) -> RunSensitivity:
    """Turn the numbers of the experiment's `[run]`. Raises InputError as `simulate_run` does."""
    study = _Study(prepare(experiment), jobs)
    base = study.goodput()
    days = study.ideal_days / base
    bars = sorted(study.bars(), key=lambda bar: -bar.swing(days))
    cost = experiment.cost
    price = None
    if cost is not None and cost.gpu_hour_price is not None:
        gpus = study.prepared.first.result.job.world_size
        spares = study.prepared.recovery.spares / study.prepared.first.nodes
        price = cost.gpu_hour_price * 24 * gpus * (1 + spares)
    return RunSensitivity(days, base, tuple(bars), price, "USD" if cost is None else cost.currency)


class _Study:
    def __init__(self, prepared: PreparedRun, jobs: int) -> None:
        self.prepared, self.jobs = prepared, jobs
        self.mode = prepared.table.checkpoint.mode
        self.is_auto = prepared.table.checkpoint.every == "auto" and self.mode != "none"
        self.work = self._work()
        scenario = prepared.scenario(self.work)
        self.scenario = scenario
        horizon = scenario.horizon_seconds
        self.ideal_days = (scenario.ideal_seconds if horizon is None else horizon) / DAY

    def _work(self) -> float:
        prepared, cost = self.prepared, self.prepared.reported_cost()
        if cost is None:
            return math.inf
        if not self.is_auto:
            table = prepared.table.checkpoint
            return table.seconds_of(table.every, prepared.first.step_seconds)
        return best_interval(prepared.scenario, cost, prepared.table.seed, jobs=self.jobs).best_seconds

    def bars(self) -> Iterator[RunBar]:
        """A bar for each number that the run has."""
        first, failures, recovery = self.scenario.phases[0], self.scenario.failures, self.scenario.recovery
        checkpoint = first.saves.local or first.saves.remote
        if failures.per_second:
            yield self._bar("failures", f"every {format_duration(1 / failures.per_second)}")
            yield self._bar("detection", format_duration(recovery.detect_seconds))
            yield self._bar("start-up", format_duration(first.startup_seconds))
            if any(cause.repair_seconds for cause in failures.causes):
                yield self._bar("repair", format_duration(_mean_repair(failures.causes)))
            yield self._spares(recovery.spares)
        if checkpoint is not None:
            yield self._bar("blocking of a save", format_duration(checkpoint.blocking_seconds))
            yield self._bar("loading", format_duration(checkpoint.load_seconds))
            yield self._interval()
        if checkpoint is not None and self.prepared.table.checkpoint.blocking is None:
            yield self._store()
        if failures.stragglers_per_second:
            yield self._bar("slow nodes", "")

    def goodput(self, name: str = "", factor: float = 1.0) -> float:
        """The goodput of the run, with the number of that name multiplied by `factor`."""
        scenario = scale_scenario(self.scenario, name, factor)
        if self.is_auto and name:
            work = self._scaled_interval(scenario)
            scenario = scale_scenario(self.prepared.scenario(work), name, factor)
        return self._simulate_goodput(scenario)

    def _simulate_goodput(self, scenario: Scenario) -> float:
        runs = run_comparable([scenario], self.prepared.table.seed, jobs=self.jobs)
        return runs[0].goodput_fraction

    def _scaled_interval(self, scenario: Scenario) -> float:
        """The interval between saves, scaled as the closed form's best one."""
        new_interval, old_interval = _closed_form(scenario), _closed_form(self.scenario)
        return self.work * new_interval / old_interval if old_interval else self.work

    def _bar(self, name: str, value: str) -> RunBar:
        return self._make_bar(name, value, partial(self.goodput, name))

    def _make_bar(
        self,
        name: str,
        value: str,
        goodput: Callable[[float], float],
        ends: tuple[float, float] = (HALF, TWICE),
    ) -> RunBar:
        """The bar of a number, given the run's goodput with the number at either end."""
        days: list[float | None] = []
        error = None
        for end in ends:
            try:
                goodput_fraction = goodput(end)
                days.append(self.ideal_days / goodput_fraction if goodput_fraction > 0 else None)
            except ZsimError as problem:
                days.append(None)
                error = str(problem)
        return RunBar(name, value, days[0], days[1], error)

    def _spares(self, spares: int) -> RunBar:
        """A bar for no spare nodes, and for twice as many, at least two."""
        max_spares = min(max(2 * spares, 2), self.prepared.first.nodes)

        def set_spares(count: float) -> float:
            recovery = replace(self.scenario.recovery, spares=int(count))
            return self._simulate_goodput(replace(self.scenario, recovery=recovery))

        return self._make_bar(f"spares: 0 and {max_spares}", f"{spares}", set_spares, (0, max_spares))

    def _interval(self) -> RunBar:
        def scale_interval(factor: float) -> float:
            return self._simulate_goodput(self.prepared.scenario(self.work * factor))

        return self._make_bar("interval of saves", format_duration(self.work), scale_interval)

    def _store(self) -> RunBar:
        """A bar for all rates of the store."""
        storage = resolve_storage(self.prepared.table.storage)
        stated = {
            name: value for name, value in storage
            if name.startswith(_RATES) and isinstance(value, float | int) and value
        }  # fmt: skip

        def scale_rates(factor: float) -> float:
            rates: dict[str, Any] = {name: value * factor for name, value in stated.items()}
            varied = self.prepared.replace_table(
                self.prepared.table.model_copy(
                    update={"storage": storage.model_copy(update={**rates, "preset": None})}
                )
            )
            work = self.work
            if self.is_auto:
                work = self._scaled_interval(varied.scenario(work))
            return self._simulate_goodput(varied.scenario(work))

        return self._make_bar("store's bandwidth", "", scale_rates)


def _closed_form(scenario: Scenario) -> float:
    saves = scenario.phases[0].saves
    checkpoint = saves.local or saves.remote
    return 0.0 if checkpoint is None else starting_interval(scenario, checkpoint)


# The numbers of each bar, by the part of a scenario that has them.
_NUMBERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "failures": {"failures": ("per_second",)},
    "detection": {
        "recovery": ("detect_seconds", "hang_seconds", "stall_seconds"), "cause": ("detect_seconds",),
    },
    "start-up": {"phase": ("startup_seconds", "in_process_seconds")},
    "repair": {"cause": ("repair_seconds", "repair_median")},
    "blocking of a save": {"checkpoint": ("blocking_seconds",)},
    "loading": {"checkpoint": ("load_seconds",)},
    "slow nodes": {"failures": ("stragglers_per_second",)},
}  # fmt: skip


def scale_scenario(scenario: Scenario, name: str, factor: float) -> Scenario:
    """The scenario with the numbers of a bar multiplied. A save that blocks longer is durable later."""
    numbers = _NUMBERS.get(name, {})

    def scale(part: str, value: Part) -> Part:
        """The part with its numbers multiplied. None stays None."""
        values = {field: getattr(value, field) for field in numbers.get(part, ())}
        changes = {field: number * factor for field, number in values.items() if number is not None}
        return replace(value, **changes)

    def scale_save(save: Checkpoint | None) -> Checkpoint | None:
        if save is None:
            return None
        scaled = scale("checkpoint", save)
        extra_seconds = scaled.blocking_seconds - save.blocking_seconds
        return replace(scaled, durable_seconds=save.durable_seconds + extra_seconds)

    def scale_phase(phase: Phase) -> Phase:
        saves = phase.saves
        saves = replace(saves, remote=scale_save(saves.remote), local=scale_save(saves.local))
        return replace(scale("phase", phase), saves=saves)

    causes = tuple(scale("cause", cause) for cause in scenario.failures.causes)
    return replace(
        scenario,
        failures=replace(scale("failures", scenario.failures), causes=causes),
        recovery=scale("recovery", scenario.recovery),
        phases=tuple(map(scale_phase, scenario.phases)),
    )


def _mean_repair(causes: tuple[Cause, ...]) -> float:
    repaired = [cause for cause in causes if cause.repair_seconds]
    weight = sum(cause.weight for cause in repaired)
    return sum(cause.weight * cause.repair_seconds for cause in repaired) / weight if weight else 0.0


# -- views ---------------------------------------------------------------------------------------------

_COLUMNS = [Column("", is_left=True), Column("value"), Column("halved, days"), Column("doubled, days")]


def run_bar_lines(study: RunSensitivity) -> Iterator[str]:
    """A table of what moves the days, then what does not."""
    yield ""
    yield from paragraph(
        f"The run takes {study.days:.2f} days at {study.goodput_fraction * 100:.1f} % goodput"
    )
    moving = [bar for bar in study.bars if bar.swing(study.days) >= _WORTH_SAYING or bar.error]
    yield from text_table(_table(moving, study))
    best = max(
        ((study.days - days, bar.name, word) for bar in study.bars
         for word, days in (("halved", bar.low_days), ("doubled", bar.high_days)) if days is not None),
        default=None,
    )  # fmt: skip
    if best is not None and best[0] > _WORTH_SAYING * study.days:
        price = "" if study.day_price is None else f", {best[0] * study.day_price:,.0f} {study.currency}"
        yield from paragraph(f"Most is won with {best[1]} {best[2]}: {best[0]:.2f} days{price}.")
    idle_names = [bar.name for bar in study.bars if bar not in moving]
    if idle_names:
        yield from paragraph(f"without effect: {', '.join(idle_names)}")
    for bar in moving:
        if bar.error is not None:
            yield from paragraph(f"{bar.name}: {bar.error}", indent=2)


def _table(bars: Sequence[RunBar], study: RunSensitivity) -> ResultTable:
    rows = [(b.name, b.value, _change(b.low_days, study), _change(b.high_days, study)) for b in bars]
    return ResultTable("", _COLUMNS, rows)


def _change(days: float | None, study: RunSensitivity) -> str:
    return "-" if days is None else f"{days - study.days:+.3f}"


def run_bar_section(study: RunSensitivity) -> Section:
    """The page's section, with a tornado of days."""
    caption = "Days of the whole run with each number halved and doubled, the others as they are."
    figure = "run-tornado", caption, partial(_tornado, study)
    return Section("What the run depends on", [figure], _table(study.bars, study))


def _tornado(study: RunSensitivity) -> Figure:
    bars = study.bars[::-1]
    figure = Figure(layout(150 + 30 * max(len(bars), 1), barmode="overlay"))
    for name, color, is_low in (
        ("halved", BREAKDOWN["exposed_communication"].color, True),
        ("doubled", BREAKDOWN["compute"].color, False),
    ):
        ends = [bar.low_days if is_low else bar.high_days for bar in bars]
        figure.add_bar(
            name=name,
            orientation="h",
            y=[bar.name for bar in bars],
            x=[None if end is None else end - study.days for end in ends],
            marker_color=color,
        )
    figure.update_xaxes(title_text=f"days more or less than {study.days:.2f}")
    figure.update_yaxes(automargin=True)
    return figure


def run_bar_dict(study: RunSensitivity) -> dict[str, Any]:
    """The study as plain data."""
    return {
        "days": study.days,
        "goodput_fraction": study.goodput_fraction,
        "day_price": study.day_price,
        "bars": [
            {"name": bar.name, "value": bar.value, "halved_days": bar.low_days, "doubled_days": bar.high_days,
             "error": bar.error}
            for bar in study.bars
        ],
    }  # fmt: skip
