"""Costs of one save and of one start, which a run of days is simulated with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One save of a whole job."""

    bytes: int
    blocking_seconds: float
    """The time that the step waits: gather, plan, staging, and writing where it is synchronous."""
    durable_seconds: float
    """From the start of a save to its commit."""
    slowdown_seconds: float
    """The time that background writing adds in all to the steps that run meanwhile."""
    load_seconds: float
    """Reading it back on all ranks."""
    host_bytes_per_node: int
    """Staging memory."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the launcher's call to the first step."""

    process_seconds: float
    """Imports, device, model."""
    communicators_seconds: float
    compile_seconds: float
    first_step_seconds: float
    """How much longer the first step takes than a steady one."""

    @property
    def seconds(self) -> float:
        return (
            self.process_seconds + self.communicators_seconds + self.compile_seconds + self.first_step_seconds
        )
