"""How far the step of a job lies open that does not say one of its settings.

    python -m validation.published.open_settings [RUNS.csv ...] [--seconds N]

simulates published rows with each choice of a setting that users leave out, and adds their steps to
open_settings.csv as they come (some minutes; delete it to simulate all again). The spread of a setting is
half the difference of the logarithms of its longest and its shortest step, as the mean of sources.
`accuracy.py` ships it.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from statistics import fmean
from typing import Any

from validation.published.job import row_experiment
from validation.published.predict import shipped_tables
from validation.published.strangers import parse_options, sample, strangers_runs
from validation.published.table import PublishedRun, read_runs
from zsim.errors import ZsimError
from zsim.report.job_features import open_settings_of
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.measured.prediction import predict_step
from zsim.validated.spread import OPEN_SENTENCES, setting_with_binding

TABLE = Path(__file__).resolve().parent / "open_settings.csv"
COLUMNS = ("row_id", "source", "setting", "choice", "seconds")
CHOICES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "dispatcher": [
        {"parallelism.dispatcher": name} for name in ("all-gather", "all-to-all", "deepep", "hybridep")
    ],
    "loss": [{"training.cross_entropy": name} for name in ("eager", "fused", "fused_linear")],
    "compile": [{"training.compile": value} for value in (False, True)],
    # Of ports whose rate is nominal: one gave 0.41 of it (BigScience's), one half (KempnerForge's).
    "network": [{"cluster.nic.efficiency": value} for value in (0.45, 0.9)],
}
SOURCES = 8  # of a setting
# Rows whose experts are on ranks of several nodes, where dispatchers differ most. One row of a source is
# likely to have them on one node, so that its dispatchers differ by a few percent.
ACROSS_NODES = ("megatron-bridge-2-0066", "megatron-moe-modelzoo-0001")
MAX_WORK = 2e5  # micro-batches times blocks times GPUs of a row


@dataclass(frozen=True)
class OpenStep:
    """A step with one choice of a setting."""

    row_id: str
    source: str
    setting: str
    choice: str
    seconds: float


def read_steps(path: Path = TABLE) -> list[OpenStep]:
    """The simulated steps. Empty without a file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            OpenStep(row["row_id"], row["source"], row["setting"], row["choice"], float(row["seconds"]))
            for row in csv.DictReader(file)
        ]


def open_spreads(steps: Sequence[OpenStep], bindings: Mapping[str, str] | None = None) -> dict[str, float]:
    """The spread of each of `OPEN_SENTENCES`, as a logarithm; one without steps has none.

    `bindings` is what bounds each row's step, by default as a stranger's prediction has it. It says which
    rows' networks and exchanges of tokens are hidden.
    """
    if bindings is None:
        bindings = _strangers_bindings()
    spreads = {}
    for setting in OPEN_SENTENCES:
        by_source: dict[str, list[float]] = {}
        rows: dict[tuple[str, str], list[float]] = {}
        for step in steps:
            if setting == setting_with_binding(step.setting, bindings.get(step.row_id, "")):
                rows.setdefault((step.source, step.row_id), []).append(step.seconds)
        for (source, _), seconds in rows.items():
            by_source.setdefault(source, []).append(log(max(seconds) / min(seconds)) / 2)
        spreads[setting] = fmean(fmean(values) for values in by_source.values()) if by_source else 0.0
    return spreads


def _strangers_bindings() -> dict[str, str]:
    return {run.row_id: run.features.binding for run in strangers_runs()}


def main() -> None:
    options, bindings = parse_options(__doc__), _strangers_bindings()
    began = time.monotonic()
    steps = read_steps()
    runs = read_runs([*shipped_tables(), *options.tables]).runs
    simulated = {step.row_id for step in steps if step.setting == "dispatcher"}
    for run in runs:
        if run.row_id in ACROSS_NODES and run.row_id not in simulated:
            steps += steps_of(run, "dispatcher", inf)
            write(steps)
    for run in sample(runs):
        for setting in CHOICES:
            if time.monotonic() - began > options.seconds:
                return
            name = setting_with_binding(setting, bindings.get(run.row_id, ""))
            sources = {
                step.source
                for step in steps
                if setting_with_binding(step.setting, bindings.get(step.row_id, "")) == name
            }
            if run.source not in sources and len(sources) < SOURCES:
                steps += steps_of(run, setting)
                write(steps)


def write(steps: Sequence[OpenStep], path: Path = TABLE) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([getattr(step, name) for name in COLUMNS] for step in steps)


def steps_of(run: PublishedRun, setting: str, max_work: float = MAX_WORK) -> list[OpenStep]:
    """The row's steps with every choice of a setting that matters to it; none where it does not, where the
    row is large, or where fewer than two can be simulated."""
    work = (run.count("grad_accum") or 1) * (run.count("n_layers") or 1) * (run.count("n_gpus") or 1)
    if work > max_work:
        return []
    try:
        experiment = row_experiment(replace(run, is_strangers=True)).experiment
        if not _matters(experiment, setting):
            return []
    except ZsimError:
        return []
    steps = []
    for choice in CHOICES[setting]:
        try:
            seconds = predict_step(resolve(change_experiment(experiment, dict(choice)))).seconds
        except ZsimError:
            continue
        text = ", ".join(str(value) for value in choice.values())
        steps.append(OpenStep(run.row_id, run.source, setting, text, round(seconds, 6)))
    return steps if len(steps) > 1 else []


def _matters(experiment: Experiment, setting: str) -> bool:
    """Whether a job that leaves the setting out has it open."""
    job = resolve(experiment)
    if setting == "network":
        return job.num_nodes > 1
    if setting == "dispatcher":
        return job.parallelism.experts.ranks > 1
    training = experiment.training.model_copy(update={"cross_entropy": None})
    return setting == "compile" or "loss" in open_settings_of(
        replace(job, experiment=experiment.model_copy(update={"training": training}))
    )


if __name__ == "__main__":
    main()
