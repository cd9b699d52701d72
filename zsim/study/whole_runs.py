"""`zsim.simulate_run`: a run of days, with saves, failures and recovery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.goodput.goodput import PROGRESS_KINDS, RunResult, simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.study.progress import Counts
from zsim.workflows.rl.run import prepare_rl_run


def simulate_run(
    experiment: ExperimentSource = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    compares: bool = True,
) -> RunResult:
    """Simulate a whole run, as `zsim goodput` does: days and money to the last token.

    `experiment` has a `[run]` table, or `overrides` set it: {"run.tokens": 1e12}. `seeds` is the number of
    runs that are drawn, by default run.seeds. With `compares` it also tries other intervals between saves,
    modes and spares.

        run = zsim.simulate_run("experiment.toml", overrides={"run.tokens": 1e12})
        run.expected_days, run.goodput_fraction, run.figure("waterfall")

    Raises InputError for tables that contradict each other, and for a run that can never finish.
    """
    resolved_experiment = experiment_of(experiment, overrides)
    with Counts(*PROGRESS_KINDS) as progress:
        prepared = prepare if resolved_experiment.rl is None else prepare_rl_run
        return simulate_prepared(
            prepared(resolved_experiment), seeds=seeds, jobs=jobs, compares=compares, on_done=progress.update
        )
