"""Closed forms of a run with saves and failures: where the search for an interval starts, and what tells
a run that cannot end.

M: mean seconds between failures; tau: work between saves; c: what a save blocks; L = tau + c; P: further
seconds until it is durable; R: restart, in which failures strike; D: detection.
"""

from __future__ import annotations

import math

from zsim.goodput.scenario import Failures


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
    """The exact optimum of tau for exponential failures, M (1 + W(-exp(-1 - c / M))): it depends on neither
    R, D nor P (Daly, A higher order estimate of the optimum checkpoint interval, 2006; Aupy et al. 2013)."""
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
