"""Small scenarios for tests."""

from __future__ import annotations

from typing import Any

from zsim.goodput.scenario import Cause, Checkpoint, Failures, Phase, Recovery, Saves, Scenario

SOFTWARE = (Cause("software", 1.0, keeps_node=True),)


def save(blocking: float, *, persist: float = 0.0, slowdown: float = 0.0, load: float = 0.0) -> Checkpoint:
    """A save that is durable `persist` seconds after it held training."""
    return Checkpoint(0, blocking, blocking + persist, slowdown, load, 0)


def scenario(
    steps: int,
    every: int,
    place: Checkpoint | None = None,
    *,
    step: float = 1.0,
    nodes: int = 8,
    startup: float = 0.0,
    failures: Failures | None = None,
    recovery: Recovery | None = None,
    saves: dict[str, Any] | None = None,
    phase: dict[str, Any] | None = None,
    **more: Any,
) -> Scenario:
    """One phase of `steps` steps, saved every `every`."""
    kept = Saves(every, place, **(saves or {}))
    one = Phase(steps, step, nodes, kept, startup_seconds=startup, **(phase or {}))
    return Scenario((one,), failures or Failures(), recovery or Recovery(), **more)
