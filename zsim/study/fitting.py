"""The most that fits, from plans alone: memory follows the order of the host program, not the clock."""

from __future__ import annotations

from collections.abc import Callable

from zsim.errors import ZsimError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_MOST = 2**16


def most_that_fits(experiment_with: Callable[[int], Experiment], most: int = _MOST) -> int:
    """The largest number from 1 to `most` with which an experiment fits, 0 where 1 does not: doubling, then
    halving what lies between. A number that is no experiment counts as one that does not fit."""

    def is_enough(number: int) -> bool:
        try:
            job = resolve(experiment_with(number))
            return fits(job, make_plan(job))
        except ZsimError:
            return False

    if not is_enough(1):
        return 0
    low = 1
    while low < most and is_enough(min(2 * low, most)):
        low = min(2 * low, most)
    high = min(2 * low, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low
