"""A running collective, slower while kernels run on its GPUs.

Kernels and the copies of a collective compete for time slices of multiprocessors, caches and HBM bandwidth. A
ring is as fast as its slowest rank, so one busy GPU slows the whole collective. The fabric decides on which
links it is slowed (`Transfer.slow_profile`). Its latency is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zsim.fabric.communicators import Transfer
from zsim.fluid.pool import Activity, FluidPool


class InFlightTransfer:
    """One run of a transfer.

    `num_busy` is the number of its GPUs on which kernels run. `member_transfers` are the lists of its
    members' collectives in flight, which it leaves when it ends.
    """

    __slots__ = ("_activity", "_on_end", "_pool", "_transfer", "member_transfers", "num_busy")

    def __init__(
        self, pool: FluidPool, transfer: Transfer, on_end: Callable[[], None], num_busy: int = 0
    ) -> None:
        self._pool = pool
        self._transfer = transfer
        self._on_end = on_end
        self._activity: Activity | None = None
        self.num_busy = num_busy
        self.member_transfers: Sequence[list[InFlightTransfer]] = ()

    def begin(self, _event: object = None) -> None:
        """Move the bytes. Called when the latency is over."""
        transfer = self._transfer
        profile = (
            transfer.slow_profile if self.num_busy and transfer.slow_profile is not None else transfer.profile
        )
        self._activity = self._pool.start(profile, transfer.size, self._finish)

    def _finish(self) -> None:
        self._activity = None  # which calls this
        for transfers in self.member_transfers:
            transfers.remove(self)
        self._on_end()

    def set_member_busy(self, is_busy: bool) -> None:
        """Count one more GPU as busy, or one less, and change the profile when that changes it."""
        num_busy_before, self.num_busy = self.num_busy, self.num_busy + (1 if is_busy else -1)
        slow_profile = self._transfer.slow_profile
        if self._activity is None or slow_profile is None or (num_busy_before > 0) == (self.num_busy > 0):
            return
        self._pool.change(self._activity, slow_profile if self.num_busy else self._transfer.profile)
