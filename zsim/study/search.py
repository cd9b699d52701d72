"""The least of something that is enough, found by asking."""

from __future__ import annotations

from collections.abc import Callable


def least_factor(is_enough: Callable[[float], bool], whole: float | None = None) -> float:
    """The least factor above 1 that is enough: of 1/whole steps, or to 1 %. Something must be enough."""
    low, high = 1.0, 2.0
    while not is_enough(high):
        low, high = high, 2 * high
    step = 1.0 / whole if whole else 0.0
    while high - low > max(step * 1.5, 0.01 * high if not whole else 0.0):
        middle = (low + high) / 2
        if whole:
            middle = round(middle * whole) / whole
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
