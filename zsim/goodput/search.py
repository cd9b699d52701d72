"""The interval between saves with which a run has most goodput, found on the simulation itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from zsim.dataclass import dataclass
from zsim.goodput.checkpoint import Checkpoint
from zsim.goodput.closed_forms import best_work_seconds
from zsim.goodput.runs import Runs, run_seeds
from zsim.goodput.scenario import Scenario

_ENOUGH_FAILURES = 4_000
_LONGEST = 150  # failures in a run that intervals are compared on
_MIN_SEEDS, _MAX_SEEDS = 12, 200
_HALF_STEPS = range(-5, 6)  # of a factor of 2, around the closed form's interval
_NEAR = 2.1  # the factor around the best point within which the curve is fitted
_FLAT = 0.1  # of what is lost


@dataclass(frozen=True, slots=True)
class IntervalPoint:
    """Goodput with so much work between saves."""

    interval_seconds: float
    goodput_fraction: float


@dataclass(frozen=True, slots=True)
class IntervalCurve:
    """Goodput by interval. `best_seconds`: of the curve through the points near the highest; `flat`: from
    where to where at most a tenth more is lost. `closed_form_seconds`: Daly's, where the search began."""

    points: tuple[IntervalPoint, ...]
    best_seconds: float
    flat: tuple[float, float]
    closed_form_seconds: float


def shortened(scenario: Scenario, failures: float = _LONGEST) -> tuple[int | None, int]:
    """Steps of a run long enough to compare saves on (None: all of them), and the seeds that it takes."""
    first, rate = scenario.phases[0], scenario.failures.per_second
    steps = None
    expected = rate * scenario.ideal_seconds
    if rate and expected > failures:
        steps = max(round(failures / rate / first.step_seconds), 1)
        expected = failures
    seeds = round(_ENOUGH_FAILURES / max(expected, 1e-9)) if rate else 1
    return steps, min(max(seeds, _MIN_SEEDS if rate else 1), _MAX_SEEDS)


def starting_interval(scenario: Scenario, cost: Checkpoint) -> float:
    """The closed form's best interval: all that a save adds to the steps counts as its cost."""
    whole = scenario.phases[0].steps * scenario.phases[0].step_seconds
    rate = scenario.failures.per_second
    added = cost.blocking_seconds + cost.slowdown_seconds
    if not rate:
        return whole
    step = scenario.phases[0].step_seconds
    return min(max(best_work_seconds(1 / rate, added) if added else step, step), whole)


def best_interval(
    scenario_of: Callable[[float, int | None], Scenario], cost: Checkpoint, first_seed: int, *, jobs: int = 1
) -> IntervalCurve:
    """Search around the closed form's interval. `scenario_of(work_seconds, max_steps)`; every point has the
    same seeds, so that the same failures strike all."""
    whole = scenario_of(math.inf, None)
    step = whole.phases[0].step_seconds
    longest = whole.phases[0].steps * step
    start = starting_interval(whole, cost)
    max_steps, seeds = shortened(whole)
    found: dict[int, IntervalPoint] = {}

    def add(work: float) -> None:
        every = round(min(max(work, step), longest) / step)
        if every and every not in found:
            runs = run_seeds(scenario_of(every * step, max_steps), seeds, first_seed, jobs=jobs)
            found[every] = IntervalPoint(every * step, runs.goodput_fraction)

    for half in _HALF_STEPS:
        add(start * 2 ** (half / 2))
    for _ in range(6):  # the best point is at an end where the closed form leaves out what counts
        ordered = sorted(found)
        best = max(ordered, key=lambda every: found[every].goodput_fraction)
        before = len(found)
        if best == ordered[0]:
            add(best * step / 2)
        elif best == ordered[-1]:
            add(best * step * 2)
        if len(found) == before:
            break
    points = [found[every] for every in sorted(found)]
    seconds, flat = _smoothed(points, step, longest)
    return IntervalCurve(tuple(points), seconds, flat, start)


def _smoothed(
    points: Sequence[IntervalPoint], step: float, longest: float
) -> tuple[float, tuple[float, float]]:
    """The best interval and the flat band of x(tau) = a / tau + b + c tau, x: seconds of the clock per useful
    second, by least squares near the highest point."""
    top = max(points, key=lambda point: point.goodput_fraction)
    near = [
        point for point in points
        if top.interval_seconds / _NEAR <= point.interval_seconds <= top.interval_seconds * _NEAR
        and point.goodput_fraction > 0
    ]  # fmt: skip
    if len(near) < 4:
        return top.interval_seconds, (top.interval_seconds, top.interval_seconds)
    tau = np.array([point.interval_seconds for point in near]) / top.interval_seconds
    spent = np.array([1 / point.goodput_fraction for point in near])
    (a, b, c), *_ = np.linalg.lstsq(np.stack([1 / tau, np.ones_like(tau), tau]).T, spent, rcond=None)
    ends = points[0].interval_seconds, points[-1].interval_seconds
    if a <= 0 or c <= 0:
        return top.interval_seconds, (near[0].interval_seconds, near[-1].interval_seconds)
    best = math.sqrt(a / c)
    allowed = (2 * math.sqrt(a * c) + b - 1) * (1 + _FLAT) + 1 - b
    width = math.sqrt(max(allowed**2 - 4 * a * c, 0.0))
    low, high = (allowed - width) / (2 * c), (allowed + width) / (2 * c)
    scale = top.interval_seconds

    def within(value: float) -> float:
        return float(min(max(value * scale, ends[0], step), ends[1], longest))

    return within(best), (within(low), within(high))


def compared(scenario: Scenario, first_seed: int, *, jobs: int = 1) -> Runs:
    """Runs of a scenario that is long enough to compare."""
    max_steps, seeds = shortened(scenario)
    if max_steps is not None and max_steps < scenario.phases[0].steps:
        scenario = replace(scenario, phases=(replace(scenario.phases[0], steps=max_steps),))
    return run_seeds(replace(scenario, horizon_seconds=None), seeds, first_seed, jobs=jobs)
