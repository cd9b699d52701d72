"""Costs of one save and of one start, which a run of days is simulated with."""

from __future__ import annotations

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One save of a whole job. `blocking_seconds`: the step waits (gather, plan, staging, and writing where
    it is synchronous). `durable_seconds`: from the start of a save to its commit. `slowdown_seconds`: what
    background writing adds in all to the steps beside it. `load_seconds`: reading it back on all ranks.
    `host_bytes_per_node`: staging memory."""

    bytes: int
    blocking_seconds: float
    durable_seconds: float
    slowdown_seconds: float
    load_seconds: float
    host_bytes_per_node: int


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the launcher's call to the first step: `process` (imports, device, model),
    `communicators`, `compile`, `first_step` (how much longer it takes than a steady one)."""

    process_seconds: float
    communicators_seconds: float
    compile_seconds: float
    first_step_seconds: float

    @property
    def seconds(self) -> float:
        return (
            self.process_seconds + self.communicators_seconds + self.compile_seconds + self.first_step_seconds
        )
