"""`zsim.simulate_run`: a run of days, with saves, failures and recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from zsim.goodput import views
from zsim.goodput.goodput import PROGRESS_KINDS, SimulatedRun, simulate_prepared
from zsim.goodput.prepared import prepare
from zsim.goodput.scenario import DAY
from zsim.report.fit import fit_of
from zsim.report.views.displayable import Displayable
from zsim.report.views.result import Section
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.study.progress import Counts
from zsim.workflows.rl.run import prepare_rl_run


class RunResult(SimulatedRun, Displayable):
    """An experiment's run of days: `expected_days`, `goodput_fraction`, and where the days go."""

    file = "goodput"

    def records(self) -> Sequence[Mapping[str, Any]]:
        """Where the days go, mean of all seeds: days and fraction by kind of time."""
        seconds_per_bin = self.runs.seconds_by_bin()
        total_seconds = sum(seconds_per_bin.values())
        return [
            {"part": name, "days": seconds / DAY, "time_fraction": seconds / total_seconds}
            for name, seconds in seconds_per_bin.items()
        ]

    def headline(self) -> str:
        label = self.verdict.label if self.prepared.first.full_step else fit_of(self.tightest_report).label
        return f"{views.headline(self)}. {label}."

    def lines(self) -> Iterator[str]:
        return views.goodput_lines(self)

    def sections(self) -> Iterator[Section]:
        return views.goodput_sections(self)

    def heading(self) -> tuple[str, str]:
        summary = [views.verdict_sentence(self), *views.cut_sentences(self), *views.detail_sentences(self)]
        return views.headline(self), " ".join(summary)


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
        run = simulate_prepared(
            prepared(resolved_experiment), seeds=seeds, jobs=jobs, compares=compares, on_done=progress.update
        )
    return RunResult(**{field.name: getattr(run, field.name) for field in fields(run)})
