"""Many runs of one scenario, drawn from seeds in a row, and their statistics.

Runs of very many failures, of which a part is simulated.

# [Note: a run of equal parts]
A run in which thousands of failures strike is many like runs in sequence. Each starts from a save, with
failures of the same law. So of n equal parts one is simulated per seed, and the full run takes the sum of n
independent ones. That is n times the mean m of the parts, and a value x of a part stands for one of the full
run that is as probable, n m + sqrt(n) (x - m), since variances add. A part is long against repairs and
against the time between saves, and the days of an ageing fleet are those of the full run, divided by n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from statistics import fmean, stdev

from zsim.goodput.progress import BINS, PhaseTime, RunLedger
from zsim.goodput.scenario import DAY, Scenario
from zsim.goodput.training_run import TrainingRun

_MIN_FAILURES_PER_POOL = 20_000  # failures, a second or two
LOW, HIGH = 0.05, 0.95


@dataclass(frozen=True)
class Runs:
    """The ledgers of runs that differ by their seed alone."""

    scenario: Scenario
    first_seed: int
    ledgers: tuple[RunLedger, ...]
    num_parts: int = 1
    """Equal parts that a run was taken for, of which one was simulated per seed."""

    def combine(self, full_scenario: Scenario, num_parts: int) -> Runs:
        """The runs of `full_scenario` of whose parts these are."""
        return replace(
            self, scenario=full_scenario, ledgers=combine_parts(self.ledgers, num_parts), num_parts=num_parts
        )

    @property
    def num_unfinished(self) -> int:
        return sum(not ledger.is_finished for ledger in self.ledgers)

    @cached_property
    def days(self) -> list[float]:
        """Days of every run, from its first step on."""
        return [ledger.elapsed / DAY for ledger in self.ledgers]

    @property
    def mean_days(self) -> float:
        return fmean(self.days)

    @property
    def days_error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.days) / len(self.days) ** 0.5 if len(self.days) > 1 else 0.0

    @property
    def goodput_fractions(self) -> list[float]:
        """Goodput of every run: seconds of the steps that were kept, as long as they ideally take, over all
        seconds."""
        return [ledger.useful / ledger.elapsed if ledger.elapsed else 1.0 for ledger in self.ledgers]

    @property
    def goodput_fraction(self) -> float:
        """Mean useful time over the mean of all time."""
        elapsed = self.mean_of(lambda ledger: ledger.elapsed)
        return self.mean_of(lambda ledger: ledger.useful) / elapsed if elapsed else 1.0

    def mean_of(self, value: Callable[[RunLedger], float]) -> float:
        return fmean(value(ledger) for ledger in self.ledgers)

    def seconds_by_bin(self) -> dict[str, float]:
        """Mean seconds of the steps that were kept, then of everything else."""
        return {"steps": self.mean_of(lambda ledger: ledger.useful), **self.lost_seconds()}

    def lost_seconds(self) -> dict[str, float]:
        """Mean seconds by bin. With the useful ones they sum to the mean of all."""
        return {name: self.mean_of(lambda ledger, name=name: ledger.seconds[name]) for name in BINS}  # type: ignore[misc]

    def lost_seconds_by_cause(self) -> dict[str, float]:
        """Mean lost seconds by cause, the largest first."""
        return self._means([ledger.by_cause for ledger in self.ledgers])

    def failures_by_cause(self) -> dict[str, float]:
        """Mean number of failures by cause, the most frequent first."""
        return self._means([ledger.failures for ledger in self.ledgers])

    def _means(self, tables: Sequence[dict[str, float]] | Sequence[dict[str, int]]) -> dict[str, float]:
        names = sorted(set(chain.from_iterable(tables)))
        means = {name: fmean(table.get(name, 0) for table in tables) for name in names}
        return dict(sorted(means.items(), key=lambda entry: -entry[1]))

    def typical_seed(self) -> int:
        """The seed whose days are the median's."""
        order = sorted(range(len(self.days)), key=lambda number: (self.days[number], number))
        return self.first_seed + order[len(order) // 2]


def quantile(values: Sequence[float], fraction: float) -> float:
    """By linear interpolation between the sorted values."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Draw:
    """`seeds` runs of a scenario that are to be drawn."""

    scenario: Scenario
    seeds: int

    @property
    def failures(self) -> float:
        """As many as strike while the steps take what they ideally take."""
        scenario, horizon = self.scenario, self.scenario.horizon_seconds
        seconds = scenario.ideal_seconds if horizon is None else min(horizon, scenario.ideal_seconds)
        return scenario.failures.per_second * seconds * self.seeds


def run_seeds(scenario: Scenario, seeds: int, first_seed: int = 1) -> Runs:
    """Run the scenario once per seed."""
    return run_draws([Draw(scenario, seeds)], first_seed)[0]


def run_draws(draws: Sequence[Draw], first_seed: int = 1, *, jobs: int = 1) -> list[Runs]:
    """`run_seeds` of several scenarios concurrently, all from the same seeds on, on `jobs` processes where
    that pays."""
    return start_draws(draws, first_seed, jobs=jobs)()


def wake_processes(draw: Draw, jobs: int) -> Callable[[], None]:
    """Start processes that import what a run needs while this process works, if `draw` will pay for them.

    The returned function waits for them.
    """
    if not _needs_processes([draw], jobs):
        return lambda: None
    import joblib

    started = joblib.Parallel(n_jobs=jobs, return_as="generator")(
        joblib.delayed(_train_seeds)(draw.scenario, ()) for _ in range(jobs)
    )

    def wait_for_start() -> None:
        for _ in started:
            pass

    return wait_for_start


def _needs_processes(draws: Sequence[Draw], jobs: int) -> bool:
    return jobs > 1 and sum(draw.failures for draw in draws) > _MIN_FAILURES_PER_POOL


def start_draws(
    draws: Sequence[Draw], first_seed: int = 1, *, jobs: int = 1, on_done: Callable[[int], None] | None = None
) -> Callable[[], list[Runs]]:
    """Begin `run_draws`, on other processes while this one works, if it uses any. The returned function
    returns the runs.
    """
    batches = [(number, range(first_seed, first_seed + draw.seeds)) for number, draw in enumerate(draws)]
    batch_ledgers: Iterable[list[RunLedger]]
    if _needs_processes(draws, jobs):
        import joblib

        size = -(-sum(draw.seeds for draw in draws) // (jobs * 4))
        batches = [
            (number, seeds[start : start + size])
            for number, seeds in batches
            for start in range(0, len(seeds), size)
        ]
        batch_ledgers = joblib.Parallel(n_jobs=jobs, return_as="generator")(
            joblib.delayed(_train_seeds)(draws[number].scenario, seeds) for number, seeds in batches
        )
    else:
        batches = [
            (number, seeds[index : index + 1]) for number, seeds in batches for index in range(len(seeds))
        ]
        batch_ledgers = (_train_seeds(draws[number].scenario, seeds) for number, seeds in batches)

    def collect_runs() -> list[Runs]:
        ledgers: list[list[RunLedger]] = [[] for _ in draws]
        num_done = 0
        for (number, seeds), new_ledgers in zip(batches, batch_ledgers, strict=True):
            ledgers[number] += new_ledgers
            num_done += len(seeds)
            if on_done is not None:
                on_done(num_done)
        return [
            Runs(draw.scenario, first_seed, tuple(draw_ledgers))
            for draw, draw_ledgers in zip(draws, ledgers, strict=True)
        ]

    return collect_runs


def _train_seeds(scenario: Scenario, seeds: Sequence[int]) -> list[RunLedger]:
    return [TrainingRun(scenario, seed).train() for seed in seeds]


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
