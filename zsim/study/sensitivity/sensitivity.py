"""How much a step depends on each number. Each alone is turned down and up, all others unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.table import Table
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.labels import gpus_label, strategy_label
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.rl.table import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.study.rollouts import changed_numbers, drop_rollout, turned_numbers
from zsim.study.sensitivity.knobs import HARDWARE, Knob, software_numbers
from zsim.study.sweep.points import Point
from zsim.study.sweep.sweep import run_points

SPREAD = 0.2  # relative, for a number whose spread is not stated


@dataclass(frozen=True)
class Variation:
    """One number turned down and up."""

    name: str
    kind: str  # "hardware" or "software"
    value: float | None
    unit: str
    low: float
    """The factor by which the number is turned down."""
    high: float
    """The factor by which the number is turned up."""
    overrides: tuple[Mapping[str, Any], Mapping[str, Any]]
    """The changes of the experiment, down and up."""
    is_spread_stated: bool
    """The factors come from the spread that the number's file states, not from the default."""


@dataclass(frozen=True)
class SensitivityBar:
    """The steps that a variation leads to."""

    variation: Variation
    low_seconds: float | None
    """The step with the number turned down, or None where that experiment is invalid."""
    high_seconds: float | None
    """The step with the number turned up, or None where that experiment is invalid."""
    error: str | None
    """The reason why an experiment is invalid."""

    def swing(self, step_seconds: float) -> float:
        """The largest relative change of the step."""
        step_times = [
            step_time for step_time in (self.low_seconds, self.high_seconds) if step_time is not None
        ]
        return max((abs(seconds / step_seconds - 1) for seconds in step_times), default=0.0)


@dataclass(frozen=True)
class Sensitivity:
    """The bars of all numbers, the largest effect first."""

    title: str
    step_seconds: float
    spread: float
    bars: tuple[SensitivityBar, ...]
    is_stopped: bool = False


def run_sensitivity(
    experiment: Experiment, folder: Path, *, spread: float = SPREAD, jobs: int = 1, is_quiet: bool = False
) -> Sensitivity:
    """Simulate the step with every number turned down and up. Results are kept in `folder` by content.

    A number whose file states a `spread` is turned by that, all others by the parameter `spread`.
    """
    if not 0 < spread < 1:
        raise InputError(f"--spread: found {spread:g}, expected a fraction between 0 and 1")
    experiment = experiment.model_copy(update={"run": None})  # its days are a study of their own
    job = resolve(drop_rollout(experiment))
    variations = [*hardware_variations(job.cluster, spread), *software_variations(job, spread)]
    if experiment.rl is not None:
        variations += rollout_variations(experiment.rl, spread)
    points = [Point(0, {}, experiment)]
    for variation in variations:
        for changes in variation.overrides:
            varied, error = None, None
            try:
                varied = change_experiment(experiment, changes)
            except ZsimError as problem:
                error = str(problem)
            points.append(Point(len(points), {}, varied, error))
    run = run_points(points, folder, jobs=jobs, is_quiet=is_quiet)
    seconds: list[float | None] = []
    errors: list[str | None] = []
    for point in points:
        record = run.records.get(point.number, {"status": "not run", "error": "not run"})
        is_ok = record["status"] == "ok"
        seconds.append(record["row"]["step_seconds"] if is_ok else None)
        errors.append(None if is_ok else record["error"])
    base = seconds[0]
    if base is None:
        raise InputError(f"the experiment itself cannot be simulated: {errors[0]}")
    bars = [
        SensitivityBar(
            variation, seconds[1 + 2 * n], seconds[2 + 2 * n], errors[1 + 2 * n] or errors[2 + 2 * n]
        )
        for n, variation in enumerate(variations)
    ]
    bars.sort(key=lambda bar: -bar.swing(base))
    title = f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {gpus_label(job)}"
    return Sensitivity(title, base, spread, tuple(bars), run.is_stopped)


def hardware_variations(cluster: Cluster, spread: float) -> list[Variation]:
    """A variation for every number that the cluster has."""
    variations = []
    for knob in HARDWARE.values():
        amount = knob.amount(cluster)
        if not amount:
            continue
        low, high, is_known = _factors(knob, cluster, spread)
        changes = knob.overrides(cluster, low), knob.overrides(cluster, high)
        unit = knob.display_unit
        if knob.is_excess:  # only the part above 1 is turned
            amount, unit = amount - 1, "above 1"
        variations.append(Variation(knob.name, "hardware", amount, unit, low, high, changes, is_known))
    return variations


def _factors(knob: Knob, cluster: Cluster, spread: float) -> tuple[float, float, bool]:
    """(low factor, high factor, whether they come from the spread stated in the number's table instead of the
    default).
    """
    *path, name = knob.keys[0].split(".")
    table: Any = cluster
    for part in path:
        table = getattr(table, part, None)
    stated = table.spread.get(name) if isinstance(table, Table) else None
    if stated is None:
        value = knob.amount(cluster) or 1.0
        high = min(1 + spread, 1 / value) if knob.is_fraction else 1 + spread
        return 1 - spread, high, False
    low, high = stated
    value = getattr(table, name)
    if knob.is_excess:
        return (low - 1) / (value - 1), (high - 1) / (value - 1), True
    return low / value, high / value, True


def rollout_variations(table: RlTable, deviation: float) -> list[Variation]:
    """A variation for every number that `[rl]` states."""
    variations = []
    for key, value, _ in turned_numbers(table):
        down, up = (changed_numbers(table, key, factor) for factor in (1 - deviation, 1 + deviation))
        low, high = (float(changes[key]) / value for changes in (down, up))
        variations.append(Variation(key, "software", value, "", low, high, (down, up), False))
    return variations


def software_variations(job: Job, spread: float) -> list[Variation]:
    """A variation for every size that the job's framework reads."""
    variations = []
    for name, (key, value, is_whole) in software_numbers(job).items():
        down, up = (value * (1 - spread), value * (1 + spread))
        changes = tuple({key: round(number) if is_whole else number} for number in (down, up))
        variations.append(
            Variation(name, "software", value, "", 1 - spread, 1 + spread, (changes[0], changes[1]), False)
        )
    return variations
