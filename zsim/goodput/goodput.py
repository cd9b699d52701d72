"""An experiment's run of days, simulated from many seeds: days, money, energy, goodput by each definition."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.goodput.checkpoints.cost import STATED_KEYS
from zsim.goodput.prepared import PreparedRun
from zsim.goodput.progress import RunLedger
from zsim.goodput.runs import (
    HIGH,
    LOW,
    Draw,
    Pilot,
    Runs,
    num_parts,
    num_seeds,
    pilot_of,
    quantile,
    shorten_scenario,
    start_draws,
    wake_processes,
)
from zsim.goodput.scenario import DAY, Checkpoint, Scenario
from zsim.goodput.search import (
    IntervalCurve,
    best_interval,
    estimate_repairs,
    long_run_goodput,
    run_comparable,
    starting_interval,
)
from zsim.goodput.training_run import TrainingRun
from zsim.report.report import Report
from zsim.specs.experiment.run.checkpoint import CheckpointMode
from zsim.specs.experiment.run.failures import resolve_failures
from zsim.specs.experiment.run.run import resolve_storage
from zsim.specs.lazy_model import UNSAID, Table
from zsim.units import format_duration
from zsim.validated.verdict import Verdict, verdict_content
from zsim.version import __version__

_MODES: tuple[CheckpointMode, ...] = ("sync", "async", "in-memory", "local-then-remote")
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode of saving at about its best interval."""

    mode: CheckpointMode
    interval_seconds: float = 0.0
    blocking_seconds: float = 0.0
    goodput_fraction: float | None = None
    error: str | None = None
    """Why it cannot be had."""


@dataclass(frozen=True, slots=True)
class SpareChoice:
    """A number of spare nodes, and what it costs."""

    spares: int
    goodput_fraction: float
    waiting_fraction: float
    gpu_hours_fraction: float
    """GPU-hours of training and idle nodes, over those of the steps alone."""


def mode_choices(prepared: PreparedRun, *, jobs: int = 1) -> list[ModeChoice]:
    """Every mode. None where the experiment states the cost of a save, which is of one mode."""
    table = prepared.table.checkpoint
    if table.mode == "none" or any(getattr(table, name) is not None for name in STATED_KEYS):
        return []
    costs: dict[CheckpointMode, tuple[float, Checkpoint]] = {}
    errors: dict[CheckpointMode, str] = {}
    for mode in _MODES:
        try:
            cost = prepared.cost(mode)
            work = starting_interval(prepared.scenario(math.inf, mode=mode), cost)
        except ZsimError as error:
            errors[mode] = str(error)
        else:
            costs[mode] = max(work, cost.durable_seconds - cost.blocking_seconds), cost
    scenarios = [prepared.scenario(work, mode=mode) for mode, (work, _) in costs.items()]
    runs = dict(zip(costs, run_comparable(scenarios, prepared.table.seed, jobs=jobs), strict=True))
    return [
        ModeChoice(mode, error=errors[mode])
        if mode in errors
        else ModeChoice(mode, costs[mode][0], costs[mode][1].blocking_seconds, runs[mode].goodput_fraction)
        for mode in _MODES
    ]


def spare_choices(prepared: PreparedRun, work_seconds: float, *, jobs: int = 1) -> list[SpareChoice]:
    """Numbers of spares around the nodes that are in repair at a time: a Poisson number, of mean the rate
    of losses times the mean repair (Little's law)."""
    failures, nodes = prepared.failures, prepared.first.nodes
    total = sum(cause.weight for cause in failures.causes)
    node_losses = [cause for cause in failures.causes if not cause.keeps_node]
    if not failures.per_second or not node_losses or not total:
        return []
    mean = failures.per_second * sum(c.weight / total * c.repair_seconds * c.nodes for c in node_losses)
    counts = {0, prepared.recovery.spares, *(poisson_quantile(mean, quantile) for quantile in _QUANTILES)}
    spare_counts = sorted(count for count in counts if count <= nodes)
    scenarios = [prepared.scenario(work_seconds, spares=spares) for spares in spare_counts]
    choices = []
    for spares, runs in zip(
        spare_counts, run_comparable(scenarios, prepared.table.seed, jobs=jobs), strict=True
    ):
        goodput = runs.goodput_fraction
        waiting = runs.mean_of(lambda ledger: ledger.seconds["waiting"])
        elapsed = runs.mean_of(lambda ledger: ledger.elapsed)
        hours = (nodes + spares) / nodes / goodput if goodput else math.inf
        choices.append(SpareChoice(spares, goodput, waiting / elapsed, hours))
    return choices


def poisson_quantile(mean: float, part: float) -> int:
    """The smallest number that a Poisson number of this mean exceeds with at most 1 - `part`."""
    if mean > 500:  # where exp(-mean) is no help: the normal law, with continuity
        from statistics import NormalDist

        return math.ceil(mean + NormalDist().inv_cdf(part) * math.sqrt(mean) - 0.5)
    number, term = 0, math.exp(-mean)
    total = term
    while total < part:
        number += 1
        term *= mean / number
        total += term
    return number


_HOUR = 3600.0
_MEGAWATT_HOUR = 3.6e9


@dataclass(frozen=True, slots=True)
class RunBill:
    """Mean costs of the run with its spares and first start-up."""

    gpu_hours: float
    money: float | None
    """None without a price."""
    currency: str
    megawatt_hours: float | None
    """None where the GPU's power is not known."""


@dataclass(frozen=True, repr=False)
class SimulatedRun:
    """An experiment's run."""

    prepared: PreparedRun
    runs: Runs
    work_seconds: float
    curve: IntervalCurve | None
    """None where no interval was searched."""
    modes: tuple[ModeChoice, ...]
    spares: tuple[SpareChoice, ...]
    typical: RunLedger
    """The ledger, with its timeline, of the run that takes the median's days, or of the part of it that was
    simulated.
    """
    requested_seeds: int
    """Runs that were to be drawn."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The cost of the most frequent kind of save. None where nothing is saved."""
        return self.prepared.reported_cost()

    @property
    def gpus(self) -> int:
        return self.prepared.first.gpus

    @property
    def tightest_report(self) -> Report:
        """The step of the phase that is least likely to fit, the first of several."""
        reports = [phase.result.report for phase in self.prepared.phases]
        return min(reports, key=lambda report: (report.fits, report.verdict.probability))

    @property
    def verdict(self) -> Verdict:
        """The verdict on the phase that is least likely to fit."""
        if self.prepared.first.full_step is None:
            return self.tightest_report.verdict
        return min((phase.verdict for phase in self.prepared.phases), key=lambda verdict: verdict.probability)

    @property
    def fits(self) -> bool:
        """Whether the steps of all phases fit."""
        return self.tightest_report.fits and self.verdict.is_likely

    @property
    def is_diverging(self) -> bool:
        """Whether some runs were given up, so that there is no mean."""
        return self.runs.num_unfinished > 0

    @property
    def ideal_days(self) -> float:
        if self.runs.scenario.horizon_seconds is not None:
            return self.runs.mean_of(lambda ledger: ledger.useful) / DAY
        return self.runs.scenario.ideal_seconds / DAY

    @property
    def expected_days(self) -> float | None:
        return None if self.is_diverging else self.runs.mean_days

    @property
    def days_range(self) -> tuple[float, float | None]:
        """5 and 95 % of the runs. The latter is None where as many were given up."""
        days = self.runs.days
        is_known = self.runs.num_unfinished <= (1 - HIGH) * len(days)
        return quantile(days, LOW), quantile(days, HIGH) if is_known else None

    @property
    def goodput_range(self) -> tuple[float, float]:
        """5 and 95 % of the runs."""
        fractions = self.runs.goodput_fractions
        return quantile(fractions, LOW), quantile(fractions, HIGH)

    @property
    def steps(self) -> float:
        """Steps of the run. For a run that ends by the clock, the mean of all."""
        if self.prepared.table.days is None:
            return self.runs.scenario.steps
        return self.runs.mean_of(lambda ledger: ledger.steps)

    @property
    def failures_range(self) -> tuple[float, float]:
        """5 and 95 % of the runs."""
        counts = [ledger.num_failures for ledger in self.runs.ledgers]
        return quantile(counts, LOW), quantile(counts, HIGH)

    @property
    def goodput_fraction(self) -> float:
        return self.runs.goodput_fraction

    @property
    def stored_bytes(self) -> int | None:
        """Bytes in the store at the end: the last saves that are kept, and those kept for ever.

        None where nothing is saved there.
        """
        saves = self.runs.scenario.phases[-1].saves
        if saves.remote is None:
            return None
        save_steps = saves.every * saves.remote_every
        number = max(math.ceil(self.steps / save_steps), 1)
        num_kept = number if saves.keep is None else min(saves.keep, number)
        if saves.archive_steps is not None:
            num_kept += max(math.floor((number - num_kept) * save_steps / saves.archive_steps), 0)
        return num_kept * saves.remote.bytes

    @property
    def lost_gpu_hours(self) -> dict[str, float]:
        """By cause of failure."""
        return {
            cause: seconds * self.gpus / _HOUR for cause, seconds in self.runs.lost_seconds_by_cause().items()
        }

    @cached_property
    def definitions(self) -> dict[str, float | None]:
        """Goodput by each of `page.DEFINITIONS`."""
        runs = self.runs
        useful = runs.mean_of(lambda ledger: ledger.useful)
        elapsed = runs.mean_of(lambda ledger: ledger.elapsed)
        lost_seconds = runs.lost_seconds()
        productive, start = useful + lost_seconds["degraded"], self.prepared.startup_seconds
        mfu = self.prepared.first.mfu_fraction
        return {
            "goodput": useful / elapsed,
            "ettr_rsc": productive / (elapsed + start),
            "effective_training_time_llama_3": productive / elapsed,
            "runtime_goodput_google": productive / (elapsed - lost_seconds["waiting"]),
            "goodput_dlrover": productive / (elapsed + start),
            "mfu_of_the_run": None if mfu is None else mfu * useful / elapsed,
        }

    @cached_property
    def bill(self) -> RunBill:
        """By phase, money = price * GPUs * t, energy = PUE * (GPUs * (E n + P (t - n s)) + nodes * Q * t).

        t is the seconds of the phase, the first one's with the start-up, and spares' GPUs are among all. n is
        the steps that were run, also those run again, of s seconds and E joules. P is the power of an idle
        GPU, Q that of a node's other parts.
        """
        cost, spares = self.prepared.experiment.cost, self.runs.scenario.recovery.spares
        hours, joules = 0.0, 0.0
        is_known = True
        for number, phase in enumerate(self.prepared.phases):
            seconds = self._mean_phase_seconds(number, "elapsed")
            seconds += self.prepared.startup_seconds if number == 0 else 0.0
            nodes = phase.nodes + spares
            gpus = phase.gpus * nodes / phase.nodes
            hours += gpus * seconds / _HOUR
            energy, power = phase.result.report.energy, phase.result.job.cluster.gpu.power
            if energy is None or power is None or phase.full_step is not None:
                is_known = False
                continue
            run = self._mean_phase_seconds(number, "worked")
            active = run / phase.step_seconds * energy.joules * phase.gpus
            idle = power.idle * (gpus * seconds - phase.gpus * run)
            joules += active + idle + (0.0 if cost is None else cost.node_power * nodes * seconds)
        price = None if cost is None else cost.gpu_hour_price
        megawatt_hours = (1.0 if cost is None else cost.pue) * joules / _MEGAWATT_HOUR if is_known else None
        currency = "USD" if cost is None else cost.currency
        return RunBill(hours, None if price is None else price * hours, currency, megawatt_hours)

    def _mean_phase_seconds(self, number: int, name: str) -> float:
        """Mean of all runs, of which some may not have reached the phase."""
        return self.runs.mean_of(
            lambda ledger: getattr(ledger.phases[number], name) if number < len(ledger.phases) else 0.0
        )

    @property
    def sources(self) -> dict[str, Table]:
        """Tables with the origin of their numbers, by what they are of."""
        table = self.prepared.table
        tables: dict[str, Table] = {"failures": resolve_failures(table.failures)}
        if table.checkpoint.mode != "none" and table.checkpoint.blocking is None:
            tables["storage"] = resolve_storage(table.storage)
        stated = {"source": "given by the experiment"}
        return {
            name: source_table if source_table.source != UNSAID else source_table.model_copy(update=stated)
            for name, source_table in tables.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim goodput --json` writes."""
        prepared, runs, curve = self.prepared, self.runs, self.curve
        report, checkpoint = prepared.first.result.report, self.checkpoint
        low, high = self.days_range
        interval = prepared.first.step_seconds_range
        repairs = estimate_repairs(runs)
        short = self.tightest_report.out_of_memory
        return {
            "zsim_version": __version__,
            "experiment": report.to_dict()["experiment"],
            "run": prepared.table.model_dump(mode="json"),
            "fits": self.fits,
            "out_of_memory": None if short is None else asdict(short),
            **verdict_content(self.verdict),
            "step_seconds": prepared.first.step_seconds,
            "step_seconds_range": None if interval is None else [*interval],
            "outer_step": None if prepared.first.outer is None else asdict(prepared.first.outer),
            "steps": self.steps,
            "ideal_days": self.ideal_days,
            "expected_days": self.expected_days,
            "expected_days_error": runs.days_error,
            "median_days": quantile(runs.days, 0.5),
            "days_range": [low, high],
            "unfinished_seeds": runs.num_unfinished,
            "goodput_fraction": None if self.is_diverging else self.goodput_fraction,
            "goodput_range": [*self.goodput_range],
            "goodput_by_mean_repairs_fraction": None if repairs is None else repairs.goodput_fraction,
            "definitions": self.definitions,
            "failures": runs.mean_of(lambda ledger: ledger.num_failures),
            "failures_range": [*self.failures_range],
            "failures_by_cause": runs.failures_by_cause(),
            "restarts": runs.mean_of(lambda ledger: ledger.num_restarts),
            "saves": runs.mean_of(lambda ledger: ledger.num_saves),
            "lost_seconds": runs.lost_seconds(),
            "lost_gpu_hours": self.lost_gpu_hours,
            "startup_seconds": prepared.startup_seconds,
            "startup": None if prepared.startup is None else asdict(prepared.startup),
            "interval_seconds": None if checkpoint is None else self.work_seconds,
            "best_interval_seconds": None if curve is None else curve.best_seconds,
            "best_interval_range": None if curve is None else [*curve.flat],
            "interval_curve": [] if curve is None else [asdict(point) for point in curve.points],
            "modes": [asdict(choice) for choice in self.modes],
            "spares": [asdict(choice) for choice in self.spares],
            "checkpoint": (
                None if checkpoint is None else {**asdict(checkpoint), "stored_bytes": self.stored_bytes}
            ),
            "cost": asdict(self.bill),
            "sources": {
                name: {"source": table.source, "evidence": table.evidence}
                for name, table in self.sources.items()
            },
            "seeds": len(runs.ledgers),
            "simulated_fraction": 1 / runs.num_parts,
        }  # fmt: skip


_MIN_GOODPUT = 1e-3  # goodput below which a run is not simulated
_GIVE_UP_FACTOR = 20.0  # times the expected time, after which a run is given up
_REMEDIES = (
    "expected a shorter run.checkpoint.every or run.recovery.restart, more run.recovery.spares, a lower rate "
    "of run.failures, or run.recovery.policy 'per-step'"
)


OnDone = Callable[[str, int], None]
PROGRESS_KINDS = ("intervals", "runs")  # what `OnDone` counts


def simulate_prepared(
    prepared: PreparedRun,
    *,
    seeds: int | None = None,
    jobs: int | None = None,
    compares: bool = True,
    on_done: OnDone | None = None,
) -> SimulatedRun:
    """Simulate the run of `[run]` from the first step on, once per seed. Its steps are simulated already.

    With `compares` it also tries other intervals, modes and spares. `on_done` is told the progress: one of
    `PROGRESS_KINDS`, and how many.

    Raises InputError for tables that contradict each other, and for a run that can never finish.
    """
    table, workers = prepared.table, jobs or os.cpu_count() or 1
    num_requested_seeds = seeds or table.seeds
    wait_for_workers = wake_processes(
        Draw(prepared.scenario(math.inf, mode="none"), num_requested_seeds), workers
    )
    cost = prepared.reported_cost()
    wait_for_workers()
    report_progress = on_done or (lambda kind, count: None)
    interval_number = count(1)

    def interval(work: float) -> Scenario:
        report_progress("intervals", next(interval_number))
        return prepared.scenario(work)

    is_auto = table.checkpoint.every == "auto"
    curve = None
    if not is_auto and cost is not None:
        _give_up_seconds(prepared.scenario(_work_seconds(prepared, None)))
    if cost is not None and (compares or is_auto):
        _give_up_seconds(prepared.scenario(starting_interval(prepared.scenario(math.inf), cost)))
        curve = best_interval(interval, cost, table.seed, jobs=workers)
    work = math.inf if cost is None else _work_seconds(prepared, curve)
    scenario = prepared.scenario(work)
    scenario = replace(scenario, limit_seconds=_give_up_seconds(scenario))
    pilot = pilot_of(scenario, table.seed)
    _check_pilot(scenario, pilot)
    num_run_parts = num_parts(scenario, num_requested_seeds, pilot)
    draw = Draw(
        shorten_scenario(scenario, num_run_parts), num_seeds(num_requested_seeds, num_run_parts, pilot)
    )
    finish_runs = start_draws(
        [draw], table.seed, jobs=workers, on_done=lambda done: report_progress("runs", done)
    )
    modes = tuple(mode_choices(prepared, jobs=workers)) if compares else ()
    spares = tuple(spare_choices(prepared, work, jobs=workers)) if compares else ()
    runs = finish_runs()[0].combine(scenario, num_run_parts)
    if runs.num_unfinished == len(runs.ledgers):
        raise InputError(
            f"run: can never finish: none of {len(runs.ledgers):,} runs was done after "
            f"{format_duration(scenario.limit_seconds)}, and the steps alone take "
            f"{format_duration(scenario.ideal_seconds)}; {_REMEDIES}"
        )
    typical = TrainingRun(draw.scenario, runs.typical_seed(), is_recorded=True).train()
    return SimulatedRun(
        prepared,
        runs,
        scenario.phases[0].saves.every * scenario.phases[0].step_seconds,
        curve,
        modes,
        spares,
        typical,
        num_requested_seeds,
    )


def _check_pilot(scenario: Scenario, pilot: Pilot) -> None:
    """Raises InputError where a run that was begun keeps hardly anything."""
    is_hopeless = not pilot.is_complete and pilot.goodput_fraction < _MIN_GOODPUT
    if is_hopeless and scenario.horizon_seconds is None:
        raise InputError(
            f"run: can never finish: after {pilot.failures:,} failures {pilot.goodput_fraction:.1e} of the "
            f"time was kept; {_REMEDIES}"
        )


def _work_seconds(prepared: PreparedRun, curve: IntervalCurve | None) -> float:
    checkpoint = prepared.table.checkpoint
    if checkpoint.every == "auto":
        assert curve is not None
        return curve.best_seconds
    return checkpoint.seconds_of(checkpoint.every, prepared.first.step_seconds)


def _give_up_seconds(scenario: Scenario) -> float:
    """Seconds after which a run of this scenario is given up. Raises InputError where hardly any work would
    be kept."""
    phase, failures = scenario.phases[0], scenario.failures
    tier = phase.saves.local or phase.saves.remote
    work = phase.saves.every * phase.step_seconds
    restart = phase.startup_seconds + (0.0 if tier is None else tier.load_seconds)
    blocking = 0.0 if tier is None else tier.blocking_seconds
    persist = 0.0 if tier is None else tier.durable_seconds - tier.blocking_seconds
    detection = scenario.recovery.detect_seconds
    expected = long_run_goodput(failures, work, blocking, persist, restart, detection)
    if scenario.recovery.policy == "per-step":
        expected = max(expected, 0.01)
    planned = failures.planned_every
    if planned is not None and planned <= failures.planned_takes + restart + persist + blocking:
        raise InputError(
            f"run: can never finish: a planned stop every {format_duration(planned)} leaves no time, with "
            f"{format_duration(failures.planned_takes + restart)} until training goes on; expected a lower "
            "run.failures.planned_per_day, or a shorter planned_takes or run.recovery.restart"
        )
    if expected < _MIN_GOODPUT:
        between = format_duration(1 / failures.per_second)
        raise InputError(
            f"run: can never finish: with a failure every {between} of {phase.nodes:,} nodes, "
            f"{format_duration(restart + detection)} until training goes on and saves "
            f"{format_duration(work)} apart, {expected:.1e} of the time would be kept; {_REMEDIES}"
        )
    if scenario.horizon_seconds is not None:
        return math.inf
    return _GIVE_UP_FACTOR * scenario.ideal_seconds / expected + _GIVE_UP_FACTOR * (restart + detection)
