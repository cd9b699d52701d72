"""A GPU running kernels.

Kernels on different streams of one GPU share it: n concurrent kernels run at 1/n of their speed each (an
equal share of the multiprocessors and of HBM). While a collective runs on the GPU, all kernels are
`compute_slowdown` times slower, because it takes multiprocessors and bandwidth from them. This is the fluid
model with one resource, solved in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class GpuKernels(Generic[Owner]):
    """The kernels that run now: the ops, and the seconds of work that each has left alone on the GPU.

    One kernel is `_op` (-1: none, or more than two). A second one is `_second` (-1: none). More than two are
    `_ops`.

    `schedule(time, (gpu, ticket))` must call `wake(time)` at `time` if `gpu.ticket` is still `ticket` then.
    `on_end(owner, op, now)` is called for each kernel that ends. `on_busy_change(is_busy)`, if given, is
    called when the GPU turns from idle to busy or back, but not when a kernel directly follows another.

    # [Note: late wake-ups]
    When kernels get slower, the wake-up that is already planned comes too early. It is left in place, and the
    next one is planned when it comes. Only when kernels get faster must a new one be planned at once.
    """

    __slots__ = (
        "_call_at", "_collectives", "_is_early", "_last_change", "_left", "_lefts", "_on_end", "_on_turn",
        "_op", "_ops", "_owner", "_second", "_second_left", "_slowdown", "is_busy", "ticket",
    )  # fmt: skip

    def __init__(
        self,
        slowdown: float,
        owner: Owner,
        call_at: Callable[[float, tuple[GpuKernels[Owner], int]], None],
        on_end: Callable[[Owner, int, float], None],
        on_turn: Callable[[bool], None] | None = None,
    ) -> None:
        self._slowdown = slowdown
        self._owner = owner
        self._call_at = call_at
        self._on_end = on_end
        self._on_turn = on_turn
        self.is_busy = False
        self._op = self._second = -1
        self._left = self._second_left = 0.0
        self._ops: list[int] = []
        self._lefts: list[float] = []
        self._collectives = 0
        self.ticket = 0
        self._is_early = False
        self._last_change = 0.0

    def start(self, now: float, op: int, seconds: float) -> None:
        """Start the kernels of an op that take `seconds` on an idle GPU."""
        if self._op >= 0 or self._ops:
            self._join(now, op, seconds)
            return
        if not self.is_busy:
            self.is_busy = True
            if self._on_turn is not None:
                self._on_turn(True)
        self._op, self._left, self._last_change = op, seconds, now
        self._is_early = False
        self.ticket = ticket = self.ticket + 1
        self._call_at(now + (seconds * self._slowdown if self._collectives else seconds), (self, ticket))

    def _join(self, now: float, op: int, seconds: float) -> None:
        """Start kernels while others run."""
        self._settle(now)
        if self._op >= 0 and self._second < 0:
            self._second, self._second_left = op, seconds
        else:
            if self._op >= 0:
                self._ops, self._lefts = [self._op, self._second], [self._left, self._second_left]
                self._op = self._second = -1
            self._ops.append(op)
            self._lefts.append(seconds)
        self._plan_wake_up(now)

    def collective_started(self, now: float) -> None:
        if self._collectives == 0 and self._slowdown > 1.0 and (self._op >= 0 or self._ops):
            self._settle(now)
            self._is_early = True  # see [Note: late wake-ups]
        self._collectives += 1

    def collective_ended(self, now: float) -> None:
        if self._collectives == 1 and self._slowdown > 1.0 and (self._op >= 0 or self._ops):
            self._settle(now)
            self._collectives = 0
            if not self._is_early:
                self._plan_wake_up(now)
        else:
            self._collectives -= 1

    def on_wake(self, now: float) -> None:
        """End the kernels with the least work left. To be called for the latest `ticket` only."""
        if self._is_early:
            self._settle(now)
            self._plan_wake_up(now)
            return
        op = self._op
        if op < 0:
            self._end_least(now)
        elif self._second < 0:
            self._op = -1
            self._on_end(self._owner, op, now)
        else:
            self._end_one_of_two(now)
        if self._op < 0 and not self._ops:
            self.is_busy = False
            if self._on_turn is not None:
                self._on_turn(False)

    def _end_one_of_two(self, now: float) -> None:
        """End the one of two kernels that has less work left, or both."""
        self._settle(now)
        first, second = self._op, self._second
        left, second_left = self._left, self._second_left
        self._second = -1
        if left == second_left:
            self._op = -1
            self._on_end(self._owner, first, now)
            self._on_end(self._owner, second, now)
            return
        if left < second_left:
            self._op, self._left = second, second_left
        self._plan_wake_up(now)
        self._on_end(self._owner, first if left < second_left else second, now)

    def _end_least(self, now: float) -> None:
        """End those of more than two kernels that have the least work left."""
        self._settle(now)
        least = min(self._lefts)
        ended: list[int] = []
        ops: list[int] = []
        lefts: list[float] = []
        for op, left in zip(self._ops, self._lefts, strict=True):
            if left <= least:
                ended.append(op)
            else:
                ops.append(op)
                lefts.append(left)
        if len(ops) == 2:
            self._second, self._second_left = ops.pop(), lefts.pop()
        if len(ops) == 1:
            self._op, self._left = ops.pop(), lefts.pop()
        self._ops, self._lefts = ops, lefts
        if self._op >= 0 or self._ops:
            self._plan_wake_up(now)
        for op in ended:
            self._on_end(self._owner, op, now)

    def _settle(self, now: float) -> None:
        """Bring the remaining work up to date: n concurrent kernels each run n times slower, and slower still
        while a collective runs."""
        stretch = self._slowdown if self._collectives else 1.0
        elapsed, self._last_change = now - self._last_change, now
        if self._second >= 0:
            done = elapsed / (2 * stretch)
            self._left -= done
            self._second_left -= done
        elif self._op >= 0:
            self._left -= elapsed / stretch
        else:
            done = elapsed / (len(self._ops) * stretch)
            self._lefts = [each - done for each in self._lefts]

    def _plan_wake_up(self, now: float) -> None:
        stretch = self._slowdown if self._collectives else 1.0
        if self._second >= 0:
            least, other = self._left, self._second_left
            if other < least:
                least = other
            stretch = 2 * stretch
        elif self._op >= 0:
            least = self._left
        else:
            least, stretch = min(self._lefts), len(self._lefts) * stretch
        self._is_early = False
        self.ticket = ticket = self.ticket + 1
        self._call_at(now + least * stretch if least > 0.0 else now, (self, ticket))
