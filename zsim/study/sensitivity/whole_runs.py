"""How much a run of days depends on what fails, how it is saved and how it comes back.

Each number alone is halved and doubled, all others unchanged, on runs from the same seeds. Where the interval
between saves is searched for, it moves as the closed form's best one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from zsim.dataclass import dataclass
from zsim.errors import ZsimError
from zsim.goodput.checkpoint import Checkpoint
from zsim.goodput.prepared import PreparedRun, prepare
from zsim.goodput.scenario import Cause, Saves, Scenario
from zsim.goodput.search import best_interval, compared, starting_interval
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import Section
from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.text.plain import Column, paragraph, table
from zsim.specs.experiment.run.storage import resolve_storage
from zsim.specs.experiment.tables import Experiment
from zsim.units import format_duration

DAY = 86_400.0
HALF, TWICE = 0.5, 2.0
_WORTH_SAYING = 0.0005  # of the days
_RATES = ("write_bandwidth", "read_bandwidth")


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
        found = [one for one in (self.low_days, self.high_days) if one is not None]
        return max((abs(one / days - 1) for one in found), default=0.0)


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
    base = study.goodput(1.0)
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
        whole = scenario.horizon_seconds
        self.ideal_days = (scenario.ideal_seconds if whole is None else whole) / DAY

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
        place = first.saves.local or first.saves.remote
        if failures.per_second:
            yield self._bar("failures", f"every {format_duration(1 / failures.per_second)}", _failing)
            yield self._bar("detection", format_duration(recovery.detect_seconds), _detecting)
            yield self._bar("start-up", format_duration(first.startup_seconds), _starting)
            if any(cause.repair_seconds for cause in failures.causes):
                yield self._bar("repair", format_duration(_mean_repair(failures.causes)), _repairing)
            yield self._spares(recovery.spares)
        if place is not None:
            yield self._bar("blocking of a save", format_duration(place.blocking_seconds), _blocking)
            yield self._bar("loading", format_duration(place.load_seconds), _loading)
            yield self._interval()
        if place is not None and self.prepared.table.checkpoint.blocking is None:
            yield self._store()
        if failures.stragglers_per_second:
            yield self._bar("slow nodes", "", _straggling)

    def goodput(self, factor: float, turn: Callable[[Scenario, float], Scenario] | None = None) -> float:
        """The goodput of the run, with one number multiplied by `factor`."""
        scenario = self.scenario if turn is None else turn(self.scenario, factor)
        if self.is_auto and turn is not None:
            scenario = turn(self.prepared.scenario(self._moved(scenario)), factor)
        return self._compared(scenario)

    def _compared(self, scenario: Scenario) -> float:
        runs = compared([scenario], self.prepared.table.seed, jobs=self.jobs)
        return runs[0].goodput_fraction

    def _moved(self, scenario: Scenario, before: Scenario | None = None) -> float:
        """The interval between saves, scaled as the closed form's best one."""
        now, then = (_closed_form(one) for one in (scenario, before or self.scenario))
        return self.work * now / then if then else self.work

    def _bar(self, name: str, value: str, turn: Callable[[Scenario, float], Scenario]) -> RunBar:
        return self._of(name, value, *((lambda f=f: self.goodput(f, turn)) for f in (HALF, TWICE)))

    def _of(self, name: str, value: str, low: Callable[[], float], high: Callable[[], float]) -> RunBar:
        days: list[float | None] = []
        error = None
        for goodput in (low, high):
            try:
                found = goodput()
                days.append(self.ideal_days / found if found > 0 else None)
            except ZsimError as problem:
                days.append(None)
                error = str(problem)
        return RunBar(name, value, days[0], days[1], error)

    def _spares(self, spares: int) -> RunBar:
        """A bar for no spare nodes, and for twice as many, at least two."""
        most = min(max(2 * spares, 2), self.prepared.first.nodes)

        def with_spares(count: int) -> float:
            recovery = replace(self.scenario.recovery, spares=count)
            return self._compared(replace(self.scenario, recovery=recovery))

        name = f"spares: 0 and {most}"
        return self._of(name, f"{spares}", lambda: with_spares(0), lambda: with_spares(most))

    def _interval(self) -> RunBar:
        def apart(factor: float) -> float:
            return self._compared(self.prepared.scenario(self.work * factor))

        value = format_duration(self.work)
        return self._of("interval of saves", value, lambda: apart(HALF), lambda: apart(TWICE))

    def _store(self) -> RunBar:
        """A bar for all rates of the store."""
        storage = resolve_storage(self.prepared.table.storage)
        stated = {
            name: value for name, value in storage
            if name.startswith(_RATES) and isinstance(value, float | int) and value
        }  # fmt: skip

        def with_rates(factor: float) -> float:
            rates: dict[str, Any] = {name: value * factor for name, value in stated.items()}
            other = self.prepared.with_table(
                self.prepared.table.model_copy(
                    update={"storage": storage.model_copy(update={**rates, "preset": None})}
                )
            )
            work = self.work
            if self.is_auto:
                work = self._moved(other.scenario(work))
            return self._compared(other.scenario(work))

        return self._of("store's bandwidth", "", lambda: with_rates(HALF), lambda: with_rates(TWICE))


def _closed_form(scenario: Scenario) -> float:
    saves = scenario.phases[0].saves
    place = saves.local or saves.remote
    return 0.0 if place is None else starting_interval(scenario, place)


def _failing(scenario: Scenario, factor: float) -> Scenario:
    failures = scenario.failures
    return replace(scenario, failures=replace(failures, per_second=failures.per_second * factor))


def _straggling(scenario: Scenario, factor: float) -> Scenario:
    failures = scenario.failures
    rate = failures.stragglers_per_second * factor
    return replace(scenario, failures=replace(failures, stragglers_per_second=rate))


def _detecting(scenario: Scenario, factor: float) -> Scenario:
    recovery = scenario.recovery
    causes = tuple(
        cause
        if cause.detect_seconds is None
        else replace(cause, detect_seconds=cause.detect_seconds * factor)
        for cause in scenario.failures.causes
    )
    slower = replace(
        recovery,
        detect_seconds=recovery.detect_seconds * factor,
        hang_seconds=recovery.hang_seconds * factor,
        stall_seconds=recovery.stall_seconds * factor,
    )
    return replace(scenario, recovery=slower, failures=replace(scenario.failures, causes=causes))


def _starting(scenario: Scenario, factor: float) -> Scenario:
    phases = tuple(
        replace(
            phase,
            startup_seconds=phase.startup_seconds * factor,
            in_process_seconds=phase.in_process_seconds * factor,
        )
        for phase in scenario.phases
    )
    return replace(scenario, phases=phases)


def _repairing(scenario: Scenario, factor: float) -> Scenario:
    def slower(cause: Cause) -> Cause:
        median = cause.repair_median
        return replace(
            cause,
            repair_seconds=cause.repair_seconds * factor,
            repair_median=None if median is None else median * factor,
        )

    causes = tuple(map(slower, scenario.failures.causes))
    return replace(scenario, failures=replace(scenario.failures, causes=causes))


def _mean_repair(causes: tuple[Cause, ...]) -> float:
    lost = [cause for cause in causes if cause.repair_seconds]
    weight = sum(cause.weight for cause in lost)
    return sum(cause.weight * cause.repair_seconds for cause in lost) / weight if weight else 0.0


def _blocking(scenario: Scenario, factor: float) -> Scenario:
    def longer(place: Checkpoint) -> Checkpoint:
        more = place.blocking_seconds * (factor - 1)
        return replace(
            place,
            blocking_seconds=place.blocking_seconds + more,
            durable_seconds=place.durable_seconds + more,
        )

    return _with_saves(scenario, longer)


def _loading(scenario: Scenario, factor: float) -> Scenario:
    return _with_saves(scenario, lambda place: replace(place, load_seconds=place.load_seconds * factor))


def _with_saves(scenario: Scenario, change: Callable[[Checkpoint], Checkpoint]) -> Scenario:
    def changed_saves(saves: Saves) -> Saves:
        return replace(
            saves,
            remote=None if saves.remote is None else change(saves.remote),
            local=None if saves.local is None else change(saves.local),
        )

    phases = tuple(replace(phase, saves=changed_saves(phase.saves)) for phase in scenario.phases)
    return replace(scenario, phases=phases)


# -- views ---------------------------------------------------------------------------------------------

_COLUMNS = [Column("", is_left=True), Column("value"), Column("halved, days"), Column("doubled, days")]


def run_bar_lines(found: RunSensitivity) -> Iterator[str]:
    """A table of what moves the days, then what does not."""
    yield ""
    yield from paragraph(
        f"The run takes {found.days:.2f} days at {found.goodput_fraction * 100:.1f} % goodput"
    )
    moving = [bar for bar in found.bars if bar.swing(found.days) >= _WORTH_SAYING or bar.error]
    yield from table(
        _COLUMNS,
        [[b.name, b.value, _change(b.low_days, found), _change(b.high_days, found)] for b in moving],
    )
    best = max(
        ((found.days - days, bar.name, word) for bar in found.bars
         for word, days in (("halved", bar.low_days), ("doubled", bar.high_days)) if days is not None),
        default=None,
    )  # fmt: skip
    if best is not None and best[0] > _WORTH_SAYING * found.days:
        price = "" if found.day_price is None else f", {best[0] * found.day_price:,.0f} {found.currency}"
        yield from paragraph(f"Most is won with {best[1]} {best[2]}: {best[0]:.2f} days{price}.")
    rest = [bar.name for bar in found.bars if bar not in moving]
    if rest:
        yield from paragraph(f"without effect: {', '.join(rest)}")
    for bar in moving:
        if bar.error is not None:
            yield from paragraph(f"{bar.name}: {bar.error}", indent=2)


def _change(days: float | None, found: RunSensitivity) -> str:
    return "-" if days is None else f"{days - found.days:+.3f}"


def run_bar_section(found: RunSensitivity) -> Section:
    """The page's section, with a tornado of days."""
    bars = found.bars[::-1]
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
            x=[None if end is None else end - found.days for end in ends],
            marker_color=color,
        )
    figure.update_xaxes(title_text=f"days more or less than {found.days:.2f}")
    figure.update_yaxes(automargin=True)
    caption = "Days of the whole run with each number halved and doubled, the others as they are."
    rows = [[b.name, b.value, _change(b.low_days, found), _change(b.high_days, found)] for b in found.bars]
    return Section(
        "What the run depends on", [("run-tornado", caption, figure)],
        ["number", "value", "halved, days", "doubled, days"], rows,
    )  # fmt: skip


def run_bar_dict(found: RunSensitivity) -> dict[str, Any]:
    """The study as plain data."""
    return {
        "days": found.days,
        "goodput_fraction": found.goodput_fraction,
        "day_price": found.day_price,
        "bars": [
            {"name": bar.name, "value": bar.value, "halved_days": bar.low_days, "doubled_days": bar.high_days,
             "error": bar.error}
            for bar in found.bars
        ],
    }  # fmt: skip
