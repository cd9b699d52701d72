"""A running collective, slower while kernels run on its GPUs.

Kernels and the copies of a collective compete for time slices of multiprocessors, caches and HBM bandwidth. A
ring is as fast as its slowest rank, so one busy GPU slows the whole collective. The fabric decides on which
links it is slowed (`Transfer.slow_profile`). Its latency is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zsim.fabric.communicators import Transfer
from zsim.fluid.pool import Activity, FluidPool


class Flight:
    """One run of a transfer.

    `num_busy` is the number of its GPUs on which kernels run. `member_transfers` are the lists of its
    members' collectives in flight, which it leaves when it ends.
    """

    __slots__ = ("_activity", "_on_end", "_pool", "_transfer", "busy", "under_way")

    def __init__(
        self, pool: FluidPool, transfer: Transfer, on_end: Callable[[], None], busy: int = 0
    ) -> None:
        self._pool = pool
        self._transfer = transfer
        self._on_end = on_end
        self._activity: Activity | None = None
        self.busy = busy
        self.under_way: Sequence[list[Flight]] = ()

    def begin(self, _event: object = None) -> None:
        """Move the bytes. Called when the latency is over."""
        transfer = self._transfer
        profile = transfer.beside if self.busy and transfer.beside is not None else transfer.profile
        self._activity = self._pool.start(profile, transfer.size, self._land)

    def _land(self) -> None:
        self._activity = None  # which calls this
        for flights in self.under_way:
            flights.remove(self)
        self._on_end()

    def turn(self, is_busy: bool) -> None:
        """Count one more GPU as busy, or one less, and change the profile when that changes it."""
        before, self.busy = self.busy, self.busy + (1 if is_busy else -1)
        beside = self._transfer.beside
        if self._activity is None or beside is None or (before > 0) == (self.busy > 0):
            return
        self._pool.change(self._activity, beside if self.busy else self._transfer.profile)
