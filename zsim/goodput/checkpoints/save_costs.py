"""Seconds of a save and of a start of a job: simulated, or as the experiment states them.

A start is that of processes and communicators, compilation and the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.api import Result
from zsim.engine.simulator import Simulator
from zsim.goodput.checkpoint import Checkpoint, Startup
from zsim.goodput.checkpoints.cost import checkpoint_of
from zsim.goodput.checkpoints.rates import StartingRates, starting_rates
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.specs.experiment.run.checkpoint import CheckpointMode, CheckpointTable

STATED_KEYS = ("blocking", "durable", "slowdown", "load", "bytes")
_REQUIRED_KEYS = ("blocking", "load", "bytes")


def save_cost(
    result: Result,
    table: CheckpointTable,
    mode: CheckpointMode,
    files: Callable[[], SavedFiles] | None = None,
    simulator: Simulator | None = None,
) -> Checkpoint:
    """The cost of a save of this step's job in `mode`.

    What the table states is taken as it is, and a stated time that training waits is all of the save unless
    more is stated. `files` returns the files of the save. `simulator` is the one that simulated the step.
    """
    stated = {name: getattr(table, name) for name in STATED_KEYS if getattr(table, name) is not None}
    if table.blocking is not None and all(name in stated for name in _REQUIRED_KEYS):
        simulated = Checkpoint(0, 0.0, 0.0, 0.0, 0.0, 0)
    else:
        saved = None if files is None else files()
        simulated = checkpoint_of(result.job, result, mode=mode, saved=saved, simulator=simulator)
    cost = replace(
        simulated,
        bytes=stated.get("bytes", simulated.bytes),
        blocking_seconds=stated.get("blocking", simulated.blocking_seconds),
        load_seconds=stated.get("load", simulated.load_seconds),
    )
    if "blocking" in stated:
        cost = replace(cost, durable_seconds=cost.blocking_seconds, slowdown_seconds=0.0)
    durable = stated.get("durable", cost.durable_seconds)
    return replace(
        cost,
        durable_seconds=max(durable, cost.blocking_seconds),
        slowdown_seconds=stated.get("slowdown", cost.slowdown_seconds),
    )


def startup_cost(result: Result) -> Startup:
    """The start of this step's job, on machines that have its image."""
    job, rates = result.job, starting_rates()
    seconds = result.report.step_seconds
    compiled = rates.compile if job.training.compile else 0.0
    first = seconds * (rates.first_steps - 1)
    return Startup(rates.process, communicator_seconds(job.world_size, rates), compiled, first)


def communicator_seconds(ranks: int, rates: StartingRates) -> float:
    """Seconds of setting up the communicators of so many ranks: a power of their number."""
    if ranks == 1:
        return 0.0
    growth = (ranks / rates.communicator_ranks) ** rates.communicator_exponent
    return float(max(rates.communicator_least, rates.communicator_seconds * growth))
