"""`zsim.simulate_run`: a run of days, with saves, failures and recovery."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from zsim.goodput import goodput, page
from zsim.goodput.prepared import prepare
from zsim.goodput.result import SimulatedRun
from zsim.goodput.text import goodput_lines, headline
from zsim.report.fit import fit_of
from zsim.report.views.result import Displayable, Figures
from zsim.specs.experiment.load import ExperimentSource, experiment_of
from zsim.study.progress import Counts
from zsim.workflows.rl.run import prepare_rl_run

_DAY = 86_400.0


class RunResult(Displayable, SimulatedRun):
    """An experiment's run of days: `expected_days`, `goodput_fraction`, and where the days go."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """Where the days go, mean of all seeds: days and fraction by kind of time."""
        seconds_per_bin = self.runs.seconds_by_bin()
        total_seconds = sum(seconds_per_bin.values())
        return [
            {"part": name, "days": seconds / _DAY, "time_fraction": seconds / total_seconds}
            for name, seconds in seconds_per_bin.items()
        ]

    def headline(self) -> str:
        label = self.verdict.label if self.prepared.first.full_step else fit_of(self.tightest_report).label
        return f"{headline(self)}. {label}."

    def lines(self) -> Iterable[str]:
        return goodput_lines(self)

    def plots(self) -> Figures:
        curve = {"interval": lambda: page.interval(self)} if self.curve is not None else {}
        spares = {"spares": lambda: page.spares(self)} if len(self.spares) > 1 else {}
        return {
            "waterfall": lambda: page.waterfall(self),
            "progress": lambda: page.progress(self),
            "timeline": lambda: page.timeline(self),
            **curve,
            **spares,
            "causes": lambda: page.causes(self),
            "days": lambda: page.days(self),
        }

    def pages(self) -> Mapping[str, str]:
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        return {"goodput.html": page.goodput_page(self), "goodput.json": content}


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
    with Counts(*goodput.PROGRESS_KINDS) as progress:
        prepared = prepare if resolved_experiment.rl is None else prepare_rl_run
        run = goodput.simulate_prepared(
            prepared(resolved_experiment), seeds=seeds, jobs=jobs, compares=compares, on_done=progress.update
        )
    return RunResult(**{field.name: getattr(run, field.name) for field in fields(run)})
