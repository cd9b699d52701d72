"""An experiment's run of days, simulated from many seeds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from zsim.errors import InputError
from zsim.goodput.prepared import PreparedRun
from zsim.goodput.result import RunResult, mode_choices, spare_choices
from zsim.goodput.runs import (
    Draw,
    Pilot,
    num_parts,
    num_seeds,
    pilot_of,
    shorten_scenario,
    start_draws,
    wake_processes,
)
from zsim.goodput.scenario import Scenario
from zsim.goodput.search import IntervalCurve, best_interval, long_run_goodput, starting_interval
from zsim.goodput.training_run import TrainingRun
from zsim.units import format_duration

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
) -> RunResult:
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
        _give_up_seconds(prepared, prepared.scenario(_work_seconds(prepared, None)))
    if cost is not None and (compares or is_auto):
        _give_up_seconds(prepared, prepared.scenario(starting_interval(prepared.scenario(math.inf), cost)))
        curve = best_interval(interval, cost, table.seed, jobs=workers)
    work = math.inf if cost is None else _work_seconds(prepared, curve)
    scenario = prepared.scenario(work)
    scenario = replace(scenario, limit_seconds=_give_up_seconds(prepared, scenario))
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
    return RunResult(
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


def _give_up_seconds(prepared: PreparedRun, scenario: Scenario) -> float:
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
