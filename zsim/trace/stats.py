"""What it took to simulate a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """Seconds of this process, events of the clock, ranks that were simulated (one per class) of all, and how
    many steps were drawn."""

    wall_seconds: float
    events: int
    rank_classes: int
    world_size: int
    steps: int = 1
