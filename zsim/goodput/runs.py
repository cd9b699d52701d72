"""Many runs of one scenario, drawn from seeds in a row, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean, stdev

from zsim.goodput.ledger import BINS, RunLedger
from zsim.goodput.run_parts import combine_parts
from zsim.goodput.scenario import Scenario
from zsim.goodput.training_run import TrainingRun

DAY = 86_400.0
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


def run_draws(
    draws: Sequence[Draw],
    first_seed: int = 1,
    *,
    jobs: int = 1,
    on_done: Callable[[int], None] | None = None,
) -> list[Runs]:
    """`run_seeds` of several scenarios concurrently, all from the same seeds on, on `jobs` processes where
    that pays.

    `on_done` is called with the number of runs that are done, whenever some are.
    """
    return start_draws(draws, first_seed, jobs=jobs, on_done=on_done)()


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
    draws: Sequence[Draw],
    first_seed: int = 1,
    *,
    jobs: int = 1,
    on_done: Callable[[int], None] | None = None,
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
