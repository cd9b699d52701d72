"""Columns that a run of days adds to a point's row, where the experiment has a `[run]` table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zsim.api import Result
from zsim.errors import ZsimError
from zsim.goodput.goodput import simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.goodput.simulated_run import SimulatedRun
from zsim.specs.experiment.tables import Experiment

# Of a run, what studies show.
RUN_COLUMNS = (
    "run_error", "ideal_days", "expected_days", "days_low", "days_high", "goodput_fraction", "failures",
    "interval_seconds", "run_gpu_hours", "run_money",
)  # fmt: skip


def run_columns(experiment: Experiment, result: Result) -> dict[str, Any]:
    """Columns of the run, named as in the JSON of `zsim goodput`. A step that makes no run, such as one that
    can never finish, has the reason in `run_error`.
    """
    try:
        run = simulate_prepared(prepare(experiment, result), jobs=1, compares=False)
        return {"run_error": None, **answer_columns(run)}
    except ZsimError as error:
        return {"run_error": str(error)}


def answer_columns(run: SimulatedRun) -> dict[str, Any]:
    """The answer as plain values: days, fractions, seconds, bytes, GPU-hours."""
    low, high = run.days_range
    checkpoint, bill, runs = run.checkpoint, run.bill, run.runs
    return {
        "run_steps": run.steps,
        "ideal_days": run.ideal_days,
        "expected_days": run.expected_days,
        "days_low": low,
        "days_high": high,
        "goodput_fraction": None if run.is_diverging else run.goodput_fraction,
        "failures": runs.mean_of(lambda ledger: ledger.num_failures),
        "startup_seconds": run.prepared.startup_seconds,
        "interval_seconds": None if checkpoint is None else run.work_seconds,
        "best_interval_seconds": None if run.curve is None else run.curve.best_seconds,
        **{f"lost_seconds.{name}": seconds for name, seconds in runs.lost_seconds().items()},
        **{f"checkpoint.{name}": value for name, value in (asdict(checkpoint) if checkpoint else {}).items()},
        "run_gpu_hours": bill.gpu_hours,
        "run_money": bill.money,
        "run_megawatt_hours": bill.megawatt_hours,
        "seeds": len(runs.ledgers),
        "unfinished_seeds": runs.num_unfinished,
    }
