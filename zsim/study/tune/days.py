"""The days of a candidate's run: its best mode of saving, at the best interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.goodput.choices import mode_choices
from zsim.goodput.goodput import simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.specs.experiment.run.checkpoint import TWO_TIERS
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.tables import Experiment


@dataclass(frozen=True, slots=True)
class RunDays:
    """The expected days of a run."""

    days: float
    """Infinite for a run that cannot be."""
    goodput_fraction: float = 0.0
    mode: str = ""
    """The mode of its saves."""
    interval_seconds: float = 0.0
    """The interval between its saves."""
    ideal_days: float = 0.0
    error: str | None = None
    """The reason why there is no run."""

    def settings(self) -> dict[str, Any]:
        """The keys of `[run.checkpoint]` that it has."""
        if self.error is not None:
            return {}
        return {
            "run.checkpoint.mode": self.mode,
            "run.checkpoint.every": f"{self.interval_seconds:.6g} s",
        }


def best_run(experiment: Experiment, run: TrainingRunTable, *, jobs: int = 1) -> RunDays:
    """The fewest expected days over the modes of saving, each about at its best interval, then at the best
    interval of the best mode. The experiment's mode is kept where it states the cost of its saves, or that
    there are none.
    """
    try:
        prepared = prepare(experiment.model_copy(update={"run": run}))
        mode = prepared.table.checkpoint.mode
        ranked = [
            mode_choice
            for mode_choice in mode_choices(prepared, jobs=jobs)
            if mode_choice.goodput_fraction is not None
        ]
        if ranked:
            mode = max(ranked, key=lambda mode_choice: mode_choice.goodput_fraction or 0.0).mode
        saves = prepared.table.checkpoint
        remote = saves.remote_every if mode in TWO_TIERS else None
        saves = saves.model_copy(update={"mode": mode, "every": "auto", "remote_every": remote})
        table = prepared.table.model_copy(update={"checkpoint": saves})
        simulated = simulate_prepared(prepared.replace_table(table), jobs=jobs, compares=False)
    except ZsimError as error:
        return RunDays(inf, error=str(error))
    days = inf if simulated.expected_days is None else simulated.expected_days
    return RunDays(days, simulated.goodput_fraction, mode, simulated.work_seconds, simulated.ideal_days)


def least_days(run: TrainingRunTable | None, cost: CostTable | None, step_tokens: int) -> float:
    """Days per second of the step, without stops: a lower limit of every run with that step. Raises
    InputError where the experiment does not say how many steps it takes.
    """
    return _steps(run, cost, step_tokens) / 86_400.0


def _steps(table: TrainingRunTable | None, cost: CostTable | None, step_tokens: int) -> int:
    if table is None or table.days is not None or table.phases:
        raise InputError(
            "--goal fewest-days: needs the length of the run: expected run.tokens or run.steps, without "
            "run.days and run.phases"
        )
    if table.steps is not None:
        return table.steps
    tokens = table.tokens if table.tokens is not None else None if cost is None else cost.given_tokens
    if tokens is None:
        raise InputError('--goal fewest-days: how far does the run go? expected run.tokens (as in "15T")')
    return max(round(tokens / step_tokens), 1)
