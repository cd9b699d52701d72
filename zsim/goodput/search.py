"""The interval between saves with which a run has most goodput, searched on the simulation itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zsim.goodput.closed_forms import best_work_seconds
from zsim.goodput.runs import MIN_PART_FACTOR, Draw, Runs, longest_delay_seconds, pilot_of, run_draws
from zsim.goodput.scenario import Checkpoint, Scenario

_ENOUGH_FAILURES = 4_000
_MAX_FAILURES = 150  # failures in a run that intervals are compared on
_LOW_GOODPUT = 0.25  # goodput below which runs are compared by the clock
_GIVE_UP_FACTOR = 20.0  # times the steps' time, after which a run that is compared is given up
_MIN_SEEDS, _MAX_SEEDS = 12, 200
_HALF_STEPS = range(-5, 6)  # of a factor of 2, around the closed form's interval
_FIT_FACTOR = 2.1  # the factor around the best point within which the curve is fitted
_FLAT_FRACTION = 0.1  # of what is lost


@dataclass(frozen=True, slots=True)
class IntervalPoint:
    """Goodput with so much work between saves."""

    interval_seconds: float
    goodput_fraction: float


@dataclass(frozen=True, slots=True)
class IntervalCurve:
    """Goodput by interval."""

    points: tuple[IntervalPoint, ...]
    best_seconds: float
    """The best interval of the curve through the points near the highest."""
    flat: tuple[float, float]
    """From where to where at most a tenth more is lost."""
    closed_form_seconds: float
    """Daly's interval, where the search began."""


@dataclass(frozen=True, slots=True)
class ComparableRuns:
    """How long runs are that are compared, and from how many seeds each."""

    seeds: int
    max_steps: int | None = None
    """Steps of the first phase (None: all)."""
    seconds: float | None = None
    """Seconds of the clock, for runs that keep little."""

    def draw(self, scenario: Scenario) -> Draw:
        """The runs of a scenario, each given up after `_GIVE_UP_FACTOR` times its steps' time."""
        first = scenario.phases[0]
        if self.seconds is not None:
            scenario = replace(scenario, horizon_seconds=self.seconds)
        elif self.max_steps is not None:
            steps = min(self.max_steps, first.steps)
            phases = scenario.phases if steps == first.steps else (replace(first, steps=steps),)
            scenario = replace(scenario, phases=phases, horizon_seconds=None)
        return Draw(replace(scenario, limit_seconds=_GIVE_UP_FACTOR * scenario.ideal_seconds), self.seeds)


def comparable_runs(scenario: Scenario) -> ComparableRuns:
    """Runs like this one, long enough to compare what goodput they have."""
    first, rate = scenario.phases[0], scenario.failures.per_second
    if not rate:
        return ComparableRuns(1)
    expected, max_steps = rate * scenario.ideal_seconds, None
    pilot = pilot_of(replace(scenario, horizon_seconds=None), 1, _MAX_FAILURES)
    if not pilot.is_complete and pilot.goodput_fraction < _LOW_GOODPUT:
        # about as long as all steps would take, and long against repairs: at first, all spares are there
        seconds = max(_MAX_FAILURES / rate / _LOW_GOODPUT, MIN_PART_FACTOR * longest_delay_seconds(scenario))
        return ComparableRuns(_num_seeds(rate * seconds), seconds=seconds)
    if expected > _MAX_FAILURES:
        max_steps = max(round(_MAX_FAILURES / rate / first.step_seconds), 1)
        expected = _MAX_FAILURES
    return ComparableRuns(_num_seeds(expected), max_steps)


def _num_seeds(failures: float) -> int:
    return min(max(round(_ENOUGH_FAILURES / max(failures, 1e-9)), _MIN_SEEDS), _MAX_SEEDS)


def starting_interval(scenario: Scenario, cost: Checkpoint) -> float:
    """The closed form's best interval: all that a save adds to the steps counts as its cost."""
    phase_seconds = scenario.phases[0].steps * scenario.phases[0].step_seconds
    rate = scenario.failures_per_second
    added = cost.blocking_seconds + cost.slowdown_seconds
    if not rate:
        return phase_seconds
    step = scenario.phases[0].step_seconds
    return min(max(best_work_seconds(1 / rate, added) if added else step, step), phase_seconds)


def best_interval(
    scenario_of: Callable[[float], Scenario], cost: Checkpoint, first_seed: int, *, jobs: int = 1
) -> IntervalCurve:
    """Search around the closed form's interval.

    Every point of `scenario_of(work_seconds)` has the same seeds, so that the same failures strike all.
    """
    scenario = scenario_of(math.inf)
    step = scenario.phases[0].step_seconds
    longest = scenario.phases[0].steps * step
    start = starting_interval(scenario, cost)
    comparable_setup = comparable_runs(scenario_of(start))
    points_by_steps: dict[int, IntervalPoint] = {}

    def add(*work_seconds: float) -> None:
        numbers = (round(min(max(work, step), longest) / step) for work in work_seconds)
        new_step_counts = [
            steps for steps in dict.fromkeys(numbers) if steps and steps not in points_by_steps
        ]
        draws = [comparable_setup.draw(scenario_of(steps * step)) for steps in new_step_counts]
        for steps, runs in zip(new_step_counts, run_draws(draws, first_seed, jobs=jobs), strict=True):
            points_by_steps[steps] = IntervalPoint(steps * step, runs.goodput_fraction)

    add(*(start * 2 ** (half / 2) for half in _HALF_STEPS))
    for _ in range(6):  # the best point is at an end where the closed form leaves out what counts
        ordered = sorted(points_by_steps)
        best = max(ordered, key=lambda steps: points_by_steps[steps].goodput_fraction)
        num_points = len(points_by_steps)
        if best == ordered[0]:
            add(best * step / 2)
        elif best == ordered[-1]:
            add(best * step * 2)
        if len(points_by_steps) == num_points:
            break
    points = [points_by_steps[steps] for steps in sorted(points_by_steps)]
    seconds, flat = _fit_curve(points, step, longest)
    return IntervalCurve(tuple(points), seconds, flat, start)


def _fit_curve(
    points: Sequence[IntervalPoint], step: float, longest: float
) -> tuple[float, tuple[float, float]]:
    """The best interval and the flat band of x(tau) = a / tau + b + c tau, by least squares near the highest
    point.

    x is seconds of the clock per useful second.
    """
    top = max(points, key=lambda point: point.goodput_fraction)
    near_points = [
        point for point in points
        if top.interval_seconds / _FIT_FACTOR <= point.interval_seconds <= top.interval_seconds * _FIT_FACTOR
        and point.goodput_fraction > 0
    ]  # fmt: skip
    if len(near_points) < 4:
        return top.interval_seconds, (top.interval_seconds, top.interval_seconds)
    tau = np.array([point.interval_seconds for point in near_points]) / top.interval_seconds
    inverse_goodput = np.array([1 / point.goodput_fraction for point in near_points])
    (a, b, c), *_ = np.linalg.lstsq(
        np.stack([1 / tau, np.ones_like(tau), tau]).T, inverse_goodput, rcond=None
    )
    ends = points[0].interval_seconds, points[-1].interval_seconds
    if a <= 0 or c <= 0:
        return top.interval_seconds, (near_points[0].interval_seconds, near_points[-1].interval_seconds)
    best = math.sqrt(a / c)
    allowed = (2 * math.sqrt(a * c) + b - 1) * (1 + _FLAT_FRACTION) + 1 - b
    width = math.sqrt(max(allowed**2 - 4 * a * c, 0.0))
    low, high = (allowed - width) / (2 * c), (allowed + width) / (2 * c)
    scale = top.interval_seconds

    def clamp(value: float) -> float:
        return float(min(max(value * scale, ends[0], step), ends[1], longest))

    return clamp(best), (clamp(low), clamp(high))


def run_comparable(scenarios: Sequence[Scenario], first_seed: int, *, jobs: int = 1) -> list[Runs]:
    """Runs of scenarios that are long enough to compare them, from the same seeds."""
    clockless = [replace(scenario, horizon_seconds=None) for scenario in scenarios]
    return run_draws([comparable_runs(endless).draw(endless) for endless in clockless], first_seed, jobs=jobs)
