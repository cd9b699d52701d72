"""Choices for a run: how it saves, and how many spares it has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zsim.errors import ZsimError
from zsim.goodput.checkpoint import Checkpoint
from zsim.goodput.checkpoints.save_costs import STATED_KEYS
from zsim.goodput.prepared import PreparedRun
from zsim.goodput.search import run_comparable, starting_interval
from zsim.specs.experiment.run.checkpoint import CheckpointMode

_MODES: tuple[CheckpointMode, ...] = ("sync", "async", "in-memory", "local-then-remote")
_QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode of saving at about its best interval."""

    mode: CheckpointMode
    interval_seconds: float = 0.0
    blocking_seconds: float = 0.0
    goodput_fraction: float | None = None
    error: str | None = None
    """Why it cannot be had."""


@dataclass(frozen=True, slots=True)
class SpareChoice:
    """A number of spare nodes, and what it costs."""

    spares: int
    goodput_fraction: float
    waiting_fraction: float
    gpu_hours_fraction: float
    """GPU-hours of training and idle nodes, over those of the steps alone."""


def mode_choices(prepared: PreparedRun, *, jobs: int = 1) -> list[ModeChoice]:
    """Every mode. None where the experiment states the cost of a save, which is of one mode."""
    table = prepared.table.checkpoint
    if table.mode == "none" or any(getattr(table, name) is not None for name in STATED_KEYS):
        return []
    costs: dict[CheckpointMode, tuple[float, Checkpoint]] = {}
    errors: dict[CheckpointMode, str] = {}
    for mode in _MODES:
        try:
            cost = prepared.cost(mode)
            work = starting_interval(prepared.scenario(math.inf, mode=mode), cost)
        except ZsimError as error:
            errors[mode] = str(error)
        else:
            costs[mode] = max(work, cost.durable_seconds - cost.blocking_seconds), cost
    scenarios = [prepared.scenario(work, mode=mode) for mode, (work, _) in costs.items()]
    runs = dict(zip(costs, run_comparable(scenarios, prepared.table.seed, jobs=jobs), strict=True))
    return [
        ModeChoice(mode, error=errors[mode])
        if mode in errors
        else ModeChoice(mode, costs[mode][0], costs[mode][1].blocking_seconds, runs[mode].goodput_fraction)
        for mode in _MODES
    ]


def spare_choices(prepared: PreparedRun, work_seconds: float, *, jobs: int = 1) -> list[SpareChoice]:
    """Numbers of spares around the nodes that are in repair at a time: a Poisson number, of mean the rate
    of losses times the mean repair (Little's law)."""
    failures, nodes = prepared.failures, prepared.first.nodes
    total = sum(cause.weight for cause in failures.causes)
    node_losses = [cause for cause in failures.causes if not cause.keeps_node]
    if not failures.per_second or not node_losses or not total:
        return []
    mean = failures.per_second * sum(c.weight / total * c.repair_seconds * c.nodes for c in node_losses)
    counts = {0, prepared.recovery.spares, *(poisson_quantile(mean, quantile) for quantile in _QUANTILES)}
    spare_counts = sorted(count for count in counts if count <= nodes)
    scenarios = [prepared.scenario(work_seconds, spares=spares) for spares in spare_counts]
    choices = []
    for spares, runs in zip(
        spare_counts, run_comparable(scenarios, prepared.table.seed, jobs=jobs), strict=True
    ):
        goodput = runs.goodput_fraction
        waiting = runs.mean_of(lambda ledger: ledger.seconds["waiting"])
        elapsed = runs.mean_of(lambda ledger: ledger.elapsed)
        hours = (nodes + spares) / nodes / goodput if goodput else math.inf
        choices.append(SpareChoice(spares, goodput, waiting / elapsed, hours))
    return choices


def poisson_quantile(mean: float, part: float) -> int:
    """The smallest number that a Poisson number of this mean exceeds with at most 1 - `part`."""
    if mean > 500:  # where exp(-mean) is no help: the normal law, with continuity
        from statistics import NormalDist

        return math.ceil(mean + NormalDist().inv_cdf(part) * math.sqrt(mean) - 0.5)
    number, term = 0, math.exp(-mean)
    total = term
    while total < part:
        number += 1
        term *= mean / number
        total += term
    return number
