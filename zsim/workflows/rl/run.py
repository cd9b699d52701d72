"""Whole runs of reinforcement learning: the phases of `zsim goodput` made of whole steps.

The trainer's update is what is saved and started, and the whole step what takes time, on the GPUs of both
sides. Where responses grow, the run is cut into parts of as many steps, each with the mean of its middle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.goodput.prepared import PreparedRun, SimulatedPhase, WholeStep, run_length
from zsim.goodput.scenario import DAY
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.tables import Experiment
from zsim.workflows.rl.result import RlResult, simulate_rl

_PARTS = 6
"""Parts of the steps in which responses grow. Twice as many change the days of a run whose responses grow
fourfold by less than one percent."""


def prepare_rl_run(experiment: Experiment) -> PreparedRun:
    """Simulate the whole steps of a run with `[rl]`.

    Raises InputError where the experiment does not say how far it goes, NotSimulatedError for phases,
    training apart and runs that go on with fewer nodes.
    """
    table, cost = run_length(experiment)
    _check(table)
    simulator = Simulator()
    phases: list[SimulatedPhase] = []
    steps_left: float = math.inf if table.steps is None else table.steps
    tokens_left: float = math.inf if table.tokens is None else table.tokens
    for steps, changes in _parts(experiment):
        result = _simulate(change_experiment(experiment, changes) if changes else experiment, simulator)
        if cost is not None and math.isinf(tokens_left):
            tokens_left = cost.run_tokens(result.tokens / result.job.num_samples) or math.inf
        by_tokens = math.inf if math.isinf(tokens_left) else math.ceil(tokens_left / result.tokens - 1e-9)
        by_days = math.inf if table.days is None else math.ceil(table.days * DAY / result.step.seconds) + 1
        count = max(1, int(min(steps, steps_left, by_tokens, by_days)))
        phases.append(_phase(experiment, result, count, tokens_left, continues=bool(phases)))
        steps_left -= count
        tokens_left -= count * result.tokens
        if steps_left <= 0 or tokens_left <= 0:
            break
    return PreparedRun(experiment, table, phases, simulator)


def _check(table: TrainingRunTable) -> None:
    for name, is_asked in (
        ("run.phases", bool(table.phases)),
        ("run.local", table.local is not None),
        (f"run.recovery.policy '{table.recovery.policy}'", table.recovery.policy in ("shrink", "per-step")),
    ):
        if is_asked:
            raise NotSimulatedError(f"{name}: is not simulated with [rl] yet")


def _parts(experiment: Experiment) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Steps and changes of the experiment of each part of the run. The last has no end of its own."""
    assert experiment.rl is not None
    lengths = experiment.rl.lengths
    if (growth := lengths.growth) is None:
        yield math.inf, {}
        return
    first = lengths.response.mean
    if first is None:
        raise InputError(
            "rl.lengths.growth: found without rl.lengths.response.mean, from which responses grow; expected "
            "it"
        )
    count = min(_PARTS, growth.steps)
    ends = [growth.steps * part // count for part in range(count + 1)]
    for begin, end in pairwise(ends):
        mean = growth.mean_at((begin + end) / 2, first)
        yield end - begin, {"rl.lengths.response.mean": mean}
    yield math.inf, {"rl.lengths.response.mean": growth.mean}


def _simulate(experiment: Experiment, simulator: Simulator) -> RlResult:
    return simulate_rl(experiment, simulator)


def _phase(
    experiment: Experiment, result: RlResult, steps: int, tokens: float, *, continues: bool
) -> SimulatedPhase:
    job = result.job
    step = WholeStep(
        result.step.seconds,
        result.step_seconds_range,
        -(-job.total_gpus // job.cluster.gpus_per_node),
        job.total_gpus,
        result.tokens,
        result.verdict,
        result.headline(),
    )
    return SimulatedPhase(
        experiment,
        result.times.update,
        steps,
        0.0,
        tokens=None if math.isinf(tokens) else tokens,
        full_step=step,
        continues=continues,
    )
