"""A GPU running kernels.

Kernels on different streams of one GPU share it: n concurrent kernels run at 1/n of their speed each (an
equal share of the multiprocessors and of HBM). While a collective runs on the GPU, all kernels are
`compute_slowdown` times slower, because it takes multiprocessors and bandwidth from them, and less so while
only collectives run that are narrow: kernels of a library on a few multiprocessors. This is the fluid model
with one resource, of which the solution is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class GpuKernels(Generic[Owner]):
    """The kernels that run now: the ops, and the seconds of work that each has left alone on the GPU.

    `schedule(delay, (gpu, ticket))` must call `wake(now)` after `delay` seconds if `gpu.ticket` is still
    `ticket` then.
    `on_end(owner, op, now)` is called for each kernel that ends. `on_busy_change(is_busy)`, if given, is
    called when the GPU turns from idle to busy or back, but not when a kernel directly follows another.

    # [Note: kernels in a row]
    Where a kernel that nobody waits for is followed by another at once, its end needs no wake-up. `start_row`
    starts kernels in a row with the wake-up of the last one. If something slows them before the last has
    begun, `on_interruption(owner, now)` must call `resume_row` with the kernel that runs then.

    # [Note: late wake-ups]
    When kernels get slower, the wake-up that is already planned comes too early. It is left in place, and the
    next one is planned when it comes. Only when kernels get faster must a new one be planned at once.
    """

    __slots__ = (
        "_collectives",
        "_factor",
        "_is_early",
        "_last_change",
        "_narrow",
        "_narrow_slowdown",
        "_on_busy_change",
        "_on_end",
        "_on_interruption",
        "_ops",
        "_owner",
        "_remaining",
        "_schedule",
        "_slowdown",
        "is_busy",
        "ticket",
    )  # fmt: skip

    def __init__(
        self,
        slowdown: float,
        owner: Owner,
        schedule: Callable[[float, tuple[GpuKernels[Owner], int]], None],
        on_end: Callable[[Owner, int, float], None],
        on_busy_change: Callable[[bool], None] | None = None,
        on_interruption: Callable[[Owner, float], None] | None = None,
        narrow_slowdown: float | None = None,
    ) -> None:
        self._slowdown = slowdown
        self._narrow_slowdown = slowdown if narrow_slowdown is None else narrow_slowdown
        self._factor = 1.0
        self._owner = owner
        self._schedule = schedule
        self._on_end = on_end
        self._on_busy_change = on_busy_change
        self._on_interruption = on_interruption
        self.is_busy = False
        self._ops: list[int] = []
        self._remaining: list[float] = []
        self._collectives = self._narrow = 0
        self.ticket = 0
        self._is_early = False
        self._last_change = 0.0

    @property
    def is_undisturbed(self) -> bool:
        """Whether kernels that start now run alone and at full speed."""
        return not self._ops and self._factor == 1.0

    def start(self, now: float, op: int, seconds: float) -> None:
        """Start the kernels of an op, which take `seconds` alone on the GPU at full speed."""
        if not self._ops:
            self.start_row(op, seconds, now, seconds * self._factor)
            return
        self._interrupt_row(now)
        self._update_remaining(now)
        self._ops.append(op)
        self._remaining.append(seconds)
        self._schedule_wake_up()

    def start_row(self, op: int, seconds: float, began: float, delay: float) -> None:
        """Start kernels in a row on a GPU that runs no others. The last, `op`, has `seconds` of work from the
        time `began`, when those before it end, and ends after `delay`. Where there are several, the GPU must
        be undisturbed. See [Note: kernels in a row].
        """
        if not self.is_busy:
            self.is_busy = True
            if self._on_busy_change is not None:
                self._on_busy_change(True)
        self.resume_row(op, seconds, began, delay)

    def resume_row(self, op: int, seconds: float, began: float, delay: float) -> None:
        """Let `op`, which has `seconds` of work from the time `began`, be the one that ends after `delay`."""
        self._ops, self._remaining, self._last_change = [op], [seconds], began
        self._is_early = False
        self.ticket = ticket = self.ticket + 1
        self._schedule(delay, (self, ticket))

    def _interrupt_row(self, now: float) -> None:
        """Before anything slows kernels, end those that are over and forget those that have not begun."""
        if self._last_change > now:
            assert self._on_interruption is not None
            self._on_interruption(self._owner, now)

    def begin_collective(self, now: float, *, is_narrow: bool = False) -> None:
        if is_narrow:
            self._narrow += 1
        else:
            self._collectives += 1
        factor = self._slowdown if self._collectives else self._narrow_slowdown
        if factor <= self._factor:
            return
        if self._ops:
            self._interrupt_row(now)
            self._update_remaining(now)
            self._is_early = True  # see [Note: late wake-ups]
        self._factor = factor

    def end_collective(self, now: float, *, is_narrow: bool = False) -> None:
        if is_narrow:
            self._narrow -= 1
        else:
            self._collectives -= 1
        factor = self._slowdown if self._collectives else self._narrow_slowdown if self._narrow else 1.0
        if factor >= self._factor:
            return
        if self._ops:
            self._update_remaining(now)
        self._factor = factor
        if self._ops and not self._is_early:
            self._schedule_wake_up()

    def wake(self, now: float) -> None:
        """End the kernels with the least work left. To be called for the latest `ticket` only."""
        if self._is_early:
            self._update_remaining(now)
            self._schedule_wake_up()
            return
        if len(self._ops) == 1:
            op = self._ops.pop()
            self._on_end(self._owner, op, now)
        else:
            self._end_least(now)
        if not self._ops:
            self.is_busy = False
            if self._on_busy_change is not None:
                self._on_busy_change(False)

    def _end_least(self, now: float) -> None:
        """End those of several kernels that have the least work left."""
        self._update_remaining(now)
        ops, remaining = self._ops, self._remaining
        least_remaining = min(remaining)
        ended = []
        while least_remaining in remaining:
            index = remaining.index(least_remaining)
            ended.append(ops.pop(index))
            del remaining[index]
        if ops:
            self._schedule_wake_up()
        for op in ended:
            self._on_end(self._owner, op, now)

    def _update_remaining(self, now: float) -> None:
        """Bring the remaining work up to date: n concurrent kernels each run n times slower, and slower still
        while a collective runs."""
        remaining = self._remaining
        done = (now - self._last_change) / (len(remaining) * self._factor)
        for index, seconds in enumerate(remaining):
            remaining[index] = seconds - done
        self._last_change = now

    def _schedule_wake_up(self) -> None:
        remaining = self._remaining
        delay = min(remaining) * (len(remaining) * self._factor)
        self._is_early = False
        self.ticket = ticket = self.ticket + 1
        self._schedule(delay if delay > 0 else 0.0, (self, ticket))
