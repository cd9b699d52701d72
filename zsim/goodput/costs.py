"""Seconds of a save and of a start of a job: simulated, or as the experiment states them."""

from __future__ import annotations

from zsim.api import Result
from zsim.errors import NotSimulatedError
from zsim.goodput.checkpoint import Checkpoint, Startup
from zsim.specs.experiment.run.checkpoint import CheckpointMode, CheckpointTable

STATED = ("blocking", "durable", "slowdown", "load", "bytes")


def save_cost(result: Result, table: CheckpointTable, mode: CheckpointMode) -> Checkpoint:
    """The cost of a save of this step's job in `mode`; what the table states is taken as it is."""
    if table.blocking is None:
        raise NotSimulatedError("run.checkpoint: its cost is not simulated yet; expected blocking, load")
    blocking = table.blocking
    durable = blocking if table.durable is None else table.durable
    return Checkpoint(table.bytes or 0, blocking, durable, table.slowdown or 0.0, table.load or 0.0, 0)


def startup_cost(result: Result) -> Startup:
    """The start of this step's job."""
    raise NotSimulatedError("run.recovery.restart: is not simulated yet; expected a time")
