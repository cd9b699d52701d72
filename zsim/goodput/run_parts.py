"""Runs of very many failures, of which a part is simulated.

# [Note: a run of equal parts]
A run in which thousands of failures strike is many like runs in sequence. Each starts from a save, with
failures of the same law. So of n equal parts one is simulated per seed, and the full run takes the sum of n
independent ones. That is n times the mean m of the parts, and a value x of a part stands for one of the full
run that is as probable, n m + sqrt(n) (x - m), since variances add. A part is long against repairs and
against the time between saves, and the days of an ageing fleet are those of the full run, divided by n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from zsim.goodput.ledger import PhaseTime, RunLedger
from zsim.goodput.scenario import Scenario
from zsim.goodput.training_run import TrainingRun

_ALL_FAILURES = 400_000  # that all seeds together may have, about
_LEAST_FAILURES = 2_000  # of a part
_PILOT_FAILURES = 2_000
_MOST_FAILURES = 2_000_000  # of all seeds, beyond which fewer are drawn
_LEAST_SEEDS = 20
MIN_PART_FACTOR = 10  # times a mean repair, and the work between saves, that a part is at least


@dataclass(frozen=True, slots=True)
class Pilot:
    """The beginning of one run, `failures` long."""

    failures: int
    done: float
    """The fraction of the run that it covers."""
    goodput_fraction: float
    """Goodput so far."""
    is_complete: bool
    """Nothing was left."""

    @property
    def all_failures(self) -> float:
        """An estimate of the failures of the complete run."""
        return self.failures / self.done if self.done > 0 else math.inf


def pilot_of(scenario: Scenario, seed: int, failures: int = _PILOT_FAILURES) -> Pilot:
    """Try a run until so many failures have struck."""
    run = TrainingRun(scenario, seed, max_failures=failures)
    ledger = run.train()
    horizon = scenario.horizon_seconds
    done_fraction = (
        ledger.elapsed / horizon if horizon is not None else ledger.useful / scenario.ideal_seconds
    )
    goodput = ledger.useful / ledger.elapsed if ledger.elapsed else 1.0
    return Pilot(run.num_strikes, max(done_fraction, 0.0), max(goodput, 0.0), ledger.is_finished)


def num_parts(scenario: Scenario, seeds: int, pilot: Pilot) -> int:
    """The number of parts of the run, of which one is simulated per seed. 1 if all of it is."""
    if pilot.is_complete or not pilot.done:
        return 1
    expected = pilot.all_failures
    max_parts = expected / max(_ALL_FAILURES / seeds, _LEAST_FAILURES)
    run_seconds = expected / scenario.failures.per_second
    if longest_delay_seconds(scenario):
        max_parts = min(max_parts, run_seconds / (MIN_PART_FACTOR * longest_delay_seconds(scenario)))
    for phase in scenario.phases:
        max_parts = min(
            max_parts, phase.steps / (MIN_PART_FACTOR * phase.saves.every * phase.saves.remote_every)
        )
    return max(int(max_parts), 1)


def longest_delay_seconds(scenario: Scenario) -> float:
    """The longest mean repair, or time until silent corruption is detected."""
    delays = [0.0]
    for cause in scenario.failures.causes:
        if cause.weight:
            delays += [0.0 if cause.keeps_node else cause.repair_seconds, cause.found_later or 0.0]
    return max(delays)


def num_seeds(seeds: int, num_run_parts: int, pilot: Pilot) -> int:
    """Seeds that are drawn, of those requested. Fewer where even parts have too many failures."""
    if pilot.is_complete or not pilot.done:
        return seeds
    return min(seeds, max(int(_MOST_FAILURES * num_run_parts / pilot.all_failures), _LEAST_SEEDS))


def shorten_scenario(scenario: Scenario, num_run_parts: int) -> Scenario:
    """One of so many equal parts of a run."""
    if num_run_parts == 1:
        return scenario
    failures, horizon = scenario.failures, scenario.horizon_seconds
    ageing = tuple((seconds / num_run_parts, factor) for seconds, factor in failures.ageing)
    phases = (replace(phase, steps=max(round(phase.steps / num_run_parts), 1)) for phase in scenario.phases)
    return replace(
        scenario,
        phases=tuple(phases),
        failures=replace(failures, ageing=ageing),
        horizon_seconds=None if horizon is None else horizon / num_run_parts,
        limit_seconds=scenario.limit_seconds / num_run_parts,
    )


def combine_parts(ledgers: tuple[RunLedger, ...], num_run_parts: int) -> tuple[RunLedger, ...]:
    """Ledgers of full runs from those of their parts, [Note: a run of equal parts]."""
    if num_run_parts == 1:
        return ledgers
    root = math.sqrt(num_run_parts)

    def extrapolate(value: Callable[[RunLedger], float]) -> list[float]:
        values = [value(ledger) for ledger in ledgers]
        mean = fmean(values)
        return [num_run_parts * mean + root * (part_value - mean) for part_value in values]

    def tables(table: Callable[[RunLedger], dict[str, float]]) -> list[dict[str, float]]:
        def entry(ledger: RunLedger, name: str) -> float:
            return table(ledger).get(name, 0.0)

        names = sorted({name for ledger in ledgers for name in table(ledger)})
        columns = {name: extrapolate(partial(entry, name=name)) for name in names}
        return [{name: columns[name][number] for name in names} for number in range(len(ledgers))]

    numbers = ("useful", "num_saves", "num_restarts", "num_scratch", "steps", "elapsed")
    columns = {name: extrapolate(lambda ledger, name=name: getattr(ledger, name)) for name in numbers}  # type: ignore[misc]
    seconds, causes = tables(lambda ledger: ledger.seconds), tables(lambda ledger: ledger.by_cause)
    phases = range(max(len(ledger.phases) for ledger in ledgers))

    def phase_seconds(ledger: RunLedger, number: int, name: str) -> float:
        return float(getattr(ledger.phases[number], name)) if number < len(ledger.phases) else 0.0

    times = [
        [extrapolate(partial(phase_seconds, number=n, name=name)) for name in ("elapsed", "worked")]
        for n in phases
    ]
    failures = tables(lambda ledger: {name: float(count) for name, count in ledger.failures.items()})
    return tuple(
        RunLedger(
            useful=columns["useful"][number],
            seconds=seconds[number],
            by_cause=causes[number],
            failures={name: round(count) for name, count in failures[number].items()},
            num_saves=round(columns["num_saves"][number]),
            num_restarts=round(columns["num_restarts"][number]),
            num_scratch=round(columns["num_scratch"][number]),
            steps=columns["steps"][number],
            elapsed=columns["elapsed"][number],
            is_finished=ledger.is_finished,
            phases=[PhaseTime(elapsed[number], worked[number]) for elapsed, worked in times],
        )
        for number, ledger in enumerate(ledgers)
    )
