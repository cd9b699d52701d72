"""A GPU running kernels.

Kernels on different streams of one GPU share it: n at once run at 1/n of their speed each (an equal share
of the multiprocessors and of HBM). While a collective is under way on the GPU, all of them run
`compute_slowdown` times slower, because it takes multiprocessors and bandwidth from them. That is the
fluid model with one resource, solved in closed form.
"""

from __future__ import annotations

from collections.abc import Callable


class Kernel:
    """A kernel that runs: `remaining` seconds of work alone on the GPU."""

    __slots__ = ("op", "remaining")

    def __init__(self, op: int, remaining: float) -> None:
        self.op = op
        self.remaining = remaining


class Gpu:
    """The kernels that run now. `wake(seconds, generation)` asks to be called back (`on_wake`);
    `on_end(op)` is called for each kernel that ends."""

    __slots__ = ("_collectives", "_generation", "_last_change", "_running", "_slowdown", "on_end", "wake")

    def __init__(
        self,
        slowdown: float,
        wake: Callable[[float, int], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._slowdown = slowdown
        self.wake = wake
        self.on_end = on_end
        self._running: list[Kernel] = []
        self._collectives = 0
        self._generation = 0
        self._last_change = 0.0

    def start(self, now: float, op: int, seconds: float) -> None:
        """Start the kernels of an op that take `seconds` on an idle GPU."""
        if self._running:
            self._settle(now)
        else:
            self._last_change = now
        self._running.append(Kernel(op, seconds))
        self._plan_wake_up()

    def collective_started(self, now: float) -> None:
        self._collectives += 1
        if self._collectives == 1 and self._slowdown > 1.0 and self._running:
            self._settle(now, was_slowed=False)
            self._plan_wake_up()

    def collective_ended(self, now: float) -> None:
        self._collectives -= 1
        if self._collectives == 0 and self._slowdown > 1.0 and self._running:
            self._settle(now, was_slowed=True)
            self._plan_wake_up()

    def on_wake(self, now: float, generation: int) -> None:
        """The kernels with the least work left end now, unless something changed since it was planned."""
        if generation != self._generation:
            return
        self._settle(now)
        least = min(kernel.remaining for kernel in self._running)
        ended = [kernel for kernel in self._running if kernel.remaining <= least]
        self._running = [kernel for kernel in self._running if kernel.remaining > least]
        if self._running:
            self._plan_wake_up()
        for kernel in ended:
            self.on_end(kernel.op)

    def _stretch(self, *, is_slowed: bool) -> float:
        """Wall seconds per second of work."""
        return len(self._running) * (self._slowdown if is_slowed else 1.0)

    def _settle(self, now: float, *, was_slowed: bool | None = None) -> None:
        slowed = self._collectives > 0 if was_slowed is None else was_slowed
        done = (now - self._last_change) / self._stretch(is_slowed=slowed)
        self._last_change = now
        for kernel in self._running:
            kernel.remaining -= done

    def _plan_wake_up(self) -> None:
        self._generation += 1
        least = min(kernel.remaining for kernel in self._running)
        stretch = self._stretch(is_slowed=self._collectives > 0)
        self.wake(max(least, 0.0) * stretch, self._generation)
