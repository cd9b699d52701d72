"""Collectives that overlap with kernels, which learn when the GPU of a member becomes busy or idle."""

from __future__ import annotations

from zsim.fabric.in_flight_transfer import InFlightTransfer


class TransfersInFlight:
    """The collectives in flight of one rank."""

    __slots__ = ("transfers",)

    def __init__(self) -> None:
        self.transfers: list[InFlightTransfer] = []

    def set_gpu_busy(self, is_busy: bool) -> None:
        """Tell all collectives in flight that the rank's GPU has become busy, or idle."""
        for transfer in self.transfers:
            transfer.set_member_busy(is_busy)
