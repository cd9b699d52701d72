"""The cost of simulating a step."""

from __future__ import annotations

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """Seconds of this process, events of the clock, simulated ranks (one per class), ranks in all, and drawn
    steps."""

    wall_seconds: float
    events: int
    rank_classes: int
    world_size: int
    steps: int = 1
