"""Failures of a run, drawn from published rates and laws."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from zsim.goodput.scenario import Cause, Failures, Recovery


class Incident(NamedTuple):
    """A failure."""

    cause: str
    nodes: int
    """Nodes that are lost with it. 0 if all go on."""
    detect_seconds: float
    repair_seconds: tuple[float, ...] = ()
    found_later: float | None = None
    corrupted_steps: float | None = None
    """The number of steps after which the state is bad, where silent corruption is detected. None for a loud
    failure.
    """


class FailureDraws:
    """Failures of one run, in order.

    Times are drawn at the rate of all nodes. `share_present` of them is accepted where fewer are there.
    """

    def __init__(self, failures: Failures, recovery: Recovery, times: Random, kinds: Random) -> None:
        self.failures, self.recovery = failures, recovery
        self.times, self.kinds = times, kinds
        self.cumulative = list(accumulate(cause.weight for cause in failures.causes))
        self.scale = 0.0
        if failures.per_second > 0:
            self.scale = 1 / failures.per_second / math.gamma(1 + 1 / failures.shape)

    def gap(self, now: float) -> float:
        """Seconds from `now` to the next failure. Infinite without failures."""
        if not self.scale:
            return math.inf
        if self.failures.law == "weibull":
            exposure = self.times.weibullvariate(self.scale, self.failures.shape)
        else:
            exposure = self.times.expovariate(1.0) * self.scale
        return apply_ageing(exposure, now, self.failures.ageing)

    def incident(self, nodes: int) -> Incident:
        """The next failure, of a job on so many nodes."""
        kinds, failures = self.kinds, self.failures
        number = bisect(self.cumulative, kinds.random() * self.cumulative[-1])
        cause = failures.causes[min(number, len(failures.causes) - 1)]
        num_lost = 0 if cause.keeps_node else min(self._scope(cause), nodes)
        repairs = tuple(repair_seconds(cause, kinds) for _ in range(num_lost))
        later = None if cause.found_later is None else kinds.expovariate(1.0) * cause.found_later
        return Incident(cause.name, num_lost, self._detection(cause), repairs, later)

    def _scope(self, cause: Cause) -> int:
        failures = self.failures
        if not failures.rack_fraction and not failures.leaf_fraction:
            return cause.nodes
        where = self.kinds.random()
        if where < failures.leaf_fraction:
            return max(cause.nodes, failures.leaf_nodes)
        if where < failures.leaf_fraction + failures.rack_fraction:
            return max(cause.nodes, failures.rack_nodes)
        return cause.nodes

    def _detection(self, cause: Cause) -> float:
        recovery = self.recovery
        if cause.detect_seconds is not None:
            return cause.detect_seconds
        if recovery.hang_fraction and self.kinds.random() < recovery.hang_fraction:
            return recovery.hang_seconds
        return recovery.detect_seconds


def repair_seconds(cause: Cause, draws: Random) -> float:
    """A node's time in repair: lognormal of the given mean and median (mean = median exp(sigma^2 / 2)), else
    exponential."""
    mean, median = cause.repair_seconds, cause.repair_median
    if median is None:
        return draws.expovariate(1.0) * mean
    if not median:
        return 0.0
    return median * math.exp(math.sqrt(2 * math.log(mean / median)) * draws.gauss(0.0, 1.0))


def apply_ageing(exposure: float, now: float, ageing: Sequence[tuple[float, float]]) -> float:
    """Seconds from `now` in which the rate's factor, integrated, is `exposure`."""
    if not ageing:
        return exposure
    time, factor = now, 1.0
    for start, following in (*ageing, (math.inf, 1.0)):
        if start > time:
            if factor > 0 and exposure <= (start - time) * factor:
                return time + exposure / factor - now
            exposure -= (start - time) * factor if factor else 0.0
            time = start
        factor = following
    return math.inf
