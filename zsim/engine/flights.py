"""Collectives that overlap with kernels, which learn when the GPU of a member becomes busy or idle."""

from __future__ import annotations

from zsim.fabric.flight import Flight


class Flights:
    """The collectives in flight of one rank."""

    __slots__ = ("under_way",)

    def __init__(self) -> None:
        self.under_way: list[Flight] = []

    def turn(self, is_busy: bool) -> None:
        """Tell all collectives in flight that the rank's GPU has become busy, or idle."""
        for flight in self.under_way:
            flight.turn(is_busy)
