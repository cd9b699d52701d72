"""The interval between saves with which a run has most goodput, searched on the simulation itself.

The search starts from closed forms of a run with saves and failures, which also tell a run that cannot end.

M: mean seconds between failures, tau: work between saves, c: what a save blocks, L = tau + c, P: further
seconds until it is durable, R: restart, in which failures strike, D: detection.

# [Note: the tail of repairs]
Repairs of nodes are lognormal in fleets that publish them, of a mean far above the median. With s the
standard deviation of the logarithm, half of all repair time is in repairs above median exp(s^2), which are a
part (1 - erf(s / sqrt 2)) / 2 of all. By the default law (mean 6 h, median 1 h, so s = 1.89) that is 1 of 34,
of 36 h or more. Most sets of a few dozen repairs hold too few of them, so that without spares the mean of a
few runs is too good, and says so with too small a standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from zsim.goodput.runs import MIN_PART_FACTOR, Draw, Runs, longest_delay_seconds, pilot_of, run_draws
from zsim.goodput.scenario import Cause, Checkpoint, Failures, Scenario

_HEAVY_DEVIATION = 1.0  # deviation of a repair's logarithm: 1 of 6 repairs is half of all time
_MAX_WAITING_FRACTION = 0.25  # of the time is waited for nodes at most: repairs hardly overlap
_NUM_INTERVALS = 200  # of a run that ends by the clock


def lambert_w(x: float) -> float:
    """The principal branch for -1/e <= x <= 0, by Halley's iteration from a series at the branch point
    (Corless et al., On the Lambert W Function, 1996, equations 4.22 and 5.9)."""
    p = math.sqrt(max(2 * (math.e * x + 1), 0.0))
    w = -1 + p - p * p / 3 + 11 * p**3 / 72
    for _ in range(50):
        e = math.exp(w)
        f = w * e - x
        if f == 0 or w == -1:
            break
        step = f / (e * (w + 1) - (w + 2) * f / (2 * w + 2))
        w -= step
        if abs(step) <= 1e-14 * abs(w):
            break
    return w


def best_work_seconds(mean_between: float, blocking: float) -> float:
    """The exact optimum of tau for exponential failures, M (1 + W(-exp(-1 - c / M))).

    It depends on neither R, D nor P (Daly, A higher order estimate of the optimum checkpoint interval, 2006,
    and Aupy et al. 2013).
    """
    return mean_between * (1 + lambert_w(-math.exp(-1 - blocking / mean_between)))


def survival(seconds: float, failures: Failures) -> float:
    """The probability that the next failure is later than `seconds` after the last one, without ageing."""
    if not failures.per_second:
        return 1.0
    scale = 1 / failures.per_second / math.gamma(1 + 1 / failures.shape)
    return math.exp(-((seconds / scale) ** failures.shape)) if seconds > 0 else 1.0


def long_run_goodput(
    failures: Failures, work: float, blocking: float, persist: float, restart: float, detection: float
) -> float:
    """The part of a long run that is work that is kept: per failure, tau times the expected number of saves
    that are durable when it strikes,

        tau sum over j >= 1 of S(R + P + j L) / (M + D)

    For exponential failures that is tau exp(-(R + P) / M) / ((M + D) (exp(L / M) - 1)). Failures while a node
    is awaited, and a limit to saves in flight, are not in it.
    """
    if not failures.per_second:
        return work / (work + blocking)
    mean, length = 1 / failures.per_second, work + blocking
    saves, number = 0.0, 1
    while number < 1_000_000:
        alive = survival(restart + persist + number * length, failures)
        saves += alive
        if alive < 1e-12 or alive < 1e-9 * saves:
            break
        number += 1
    return work * saves / (mean + detection)


@dataclass(frozen=True, slots=True)
class RepairEstimate:
    """A run without spares if repairs take their law's mean."""

    mean_seconds: float
    half_seconds: float
    """Half of all repair time is in repairs of so long and more."""
    half_fraction: float
    """The fraction of all repairs that are as long."""
    waiting_seconds: float
    """Waits in a run."""
    drawn_seconds: float
    """Waits that were drawn."""
    goodput_fraction: float


def estimate_repairs(runs: Runs) -> RepairEstimate | None:
    """Waits with the law's mean for every repair. None where other things decide.

    Every loss of a node waits for its repair. With losses at a rate r, repairs of mean m, drawn elapsed time
    E and waits W, the expected time is (E - W) / (1 - r m). In a run that ends by the clock at H, waits are r
    times the sum over its time of the mean of repairs cut off at H.

    None where runs have spares or go on with fewer nodes, where several nodes are lost at once, where waits
    are long, or where the law has no heavy tail.
    """
    scenario = runs.scenario
    node_losses = [cause for cause in scenario.failures.causes if not cause.keeps_node and cause.weight]
    if not node_losses or not _waits_for_each(scenario, node_losses):
        return None
    total = sum(cause.weight for cause in scenario.failures.causes)
    rate = scenario.failures_per_second / total
    heaviest = max(node_losses, key=_deviation)
    waits = sum(cause.weight * rate * cause.repair_seconds for cause in node_losses)
    if _deviation(heaviest) < _HEAVY_DEVIATION or not 0 < waits < _MAX_WAITING_FRACTION:
        return None
    elapsed = runs.mean_of(lambda ledger: ledger.elapsed)
    useful = runs.mean_of(lambda ledger: ledger.useful)
    drawn = runs.lost_seconds()["waiting"]
    horizon = scenario.horizon_seconds
    if horizon is None:
        expected_elapsed = (elapsed - drawn) / (1 - waits)
        waiting, goodput = waits * expected_elapsed, useful / expected_elapsed
    else:
        ends = [horizon * (number + 0.5) / _NUM_INTERVALS for number in range(_NUM_INTERVALS)]
        waiting = horizon * sum(
            cause.weight * rate * fmean(_truncated_mean(cause, end) for end in ends) for cause in node_losses
        )
        goodput = useful / (elapsed - drawn) * (1 - waiting / horizon)
    deviation = _deviation(heaviest)
    return RepairEstimate(
        heaviest.repair_seconds,
        (heaviest.repair_median or 0.0) * math.exp(deviation**2),
        _upper_tail(deviation),
        waiting,
        drawn,
        goodput,
    )


def _waits_for_each(scenario: Scenario, node_losses: list[Cause]) -> bool:
    recovery, failures = scenario.recovery, scenario.failures
    is_single_node = (
        not failures.rack_fraction and not failures.leaf_fraction and all(c.nodes == 1 for c in node_losses)
    )
    steady = failures.law == "exponential" and not failures.ageing and not failures.preemptions_per_second
    one_phase = len(scenario.phases) == 1 and not failures.stragglers_per_second
    waits = recovery.policy in ("restart", "in-process") and not recovery.spares
    return is_single_node and steady and one_phase and waits


def _deviation(cause: Cause) -> float:
    """The standard deviation of a repair's logarithm. 0 for an exponential law."""
    mean, median = cause.repair_seconds, cause.repair_median
    return math.sqrt(2 * math.log(mean / median)) if median and mean > median else 0.0


def _upper_tail(deviations: float) -> float:
    """The probability of a normal number above so many deviations."""
    return math.erfc(deviations / math.sqrt(2)) / 2


def _truncated_mean(cause: Cause, limit_seconds: float) -> float:
    """The mean of repairs that are cut off at `limit_seconds`."""
    mean, median, deviation = cause.repair_seconds, cause.repair_median, _deviation(cause)
    if not mean or median == 0:
        return 0.0
    if not deviation:
        return min(mean, limit_seconds) if median else mean * -math.expm1(-limit_seconds / mean)
    assert median is not None
    normal_limit = math.log(limit_seconds / median) / deviation
    return mean * _upper_tail(deviation - normal_limit) + limit_seconds * _upper_tail(normal_limit)


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
    """The closed form's best interval: all that a save adds to the steps counts as its cost.

    Local saves meet the failures that leave them. They are no rarer than saves to the store alone.
    """
    phase = scenario.phases[0]
    step, saves, causes = phase.step_seconds, phase.saves, scenario.failures.causes

    def interval(save: Checkpoint, fraction: float) -> float:
        rate = scenario.failures_per_second * fraction
        added = save.blocking_seconds + save.slowdown_seconds
        if not rate:
            return phase.steps * step
        return min(max(best_work_seconds(1 / rate, added) if added else step, step), phase.steps * step)

    if saves.local is None or saves.remote is None:
        return interval(cost, 1.0)
    weights = [(0 if cause.keeps_node else cause.nodes, cause.weight) for cause in causes]
    left = sum(weight for nodes, weight in weights if saves.has_local_after(nodes))
    total = sum(weight for _, weight in weights)
    return min(interval(cost, left / total if total else 0.0), interval(saves.remote, 1.0))


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
