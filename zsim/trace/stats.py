"""The cost of simulating a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """The cost of simulating a step."""

    wall_seconds: float
    """Seconds of this process."""
    events: int
    """Events of the clock."""
    rank_classes: int
    """Simulated ranks, one per class."""
    world_size: int
    """The number of all ranks."""
    steps: int = 1
    """Drawn steps."""
