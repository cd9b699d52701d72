"""Collectives under way beside kernels: which of a rank's are told when its GPU turns busy or idle."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.devices.gpu import GpuKernels
from zsim.fabric.flight import Flight


class Flights:
    """The collectives that a rank takes part in now."""

    __slots__ = ("under_way",)

    def __init__(self) -> None:
        self.under_way: list[Flight] = []

    def turn(self, is_busy: bool) -> None:
        """The rank's GPU has turned busy, or idle."""
        for flight in self.under_way:
            flight.turn(is_busy)


def num_busy(gpus: Iterable[GpuKernels | None]) -> int:
    """On how many GPUs kernels run."""
    return sum(gpu is not None and gpu.is_busy for gpu in gpus)


def took_off(flight: Flight, members: Iterable[Flights]) -> None:
    """A collective begins on its members."""
    for member in members:
        member.under_way.append(flight)


def landed(flight: Flight, members: Iterable[Flights]) -> None:
    """It is over."""
    for member in members:
        member.under_way.remove(flight)
