"""Collectives that overlap with kernels, which learn when the GPU of a member becomes busy or idle."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.devices.gpu import GpuKernels
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


def num_busy(gpus: Iterable[GpuKernels | None]) -> int:
    """The number of GPUs on which kernels run."""
    return len([gpu for gpu in gpus if gpu is not None and gpu.is_busy])


def took_off(flight: Flight, members: Iterable[Flights]) -> None:
    """Add a starting collective to the collectives in flight of its members."""
    for member in members:
        member.under_way.append(flight)


def landed(flight: Flight, members: Iterable[Flights]) -> None:
    """Remove an ended collective from the collectives in flight of its members."""
    for member in members:
        member.under_way.remove(flight)
