"""Steps of reinforcement learning in studies: their rows, their sizes, and the numbers that are turned.

A point of an experiment with `[rl]` is a whole step. Its row has the columns of the trainer's update, with
the seconds, memory and verdict of the whole step in their place, and `rl.` columns of phases and sides.

The best layout of a step of reinforcement learning: colocated or apart, GPUs of the rollout, its engine.

For each placement that the framework has, the split of the GPUs is tried first, then the ranks of an engine,
then the part of the memory that it takes, the tokens of a micro-batch, and the way of new weights, each with
the best of the choices before it. The rest of the trainer stays, so that every answer trains on as many
samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError, check_choice
from zsim.report.views.displayable import Displayable
from zsim.report.views.text.plain import named_columns, paragraph, table
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.rl import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.units import format_seconds
from zsim.validated.verdict import verdict_content
from zsim.workflows.rl.framework import workflow_of
from zsim.workflows.rl.job import gpus_of
from zsim.workflows.rl.result import RlResult, simulate_rl

OF_UPDATES = (
    "mfu_fraction", "hfu_fraction", "model_flops_per_second_per_gpu", "overlap_fraction", "bubble_fraction",
    "missing_bytes", "validation.regime", "validation.runs", "validation.extrapolates", "gpu_watts",
    "gpu_joules_per_step",
)  # fmt: skip
"""Columns that hold for an update, and say nothing of the whole step."""
_SIZES = ("prompts_per_step", "mini_batch_samples")
"""Keys of `[rl]` that grow with the GPUs where every GPU keeps its part of the samples."""
_UNTURNED = frozenset({"seed", "sleep_level", "max_staleness", "turns", "draft_tokens", "epochs", "every"})
"""Numbers of which a fifth more means nothing, or is not a whole number."""


def drop_rollout(experiment: Experiment) -> Experiment:
    """The trainer's step of the experiment alone."""
    return experiment if experiment.rl is None else experiment.model_copy(update={"rl": None})


def rollout_columns(result: RlResult) -> dict[str, Any]:
    """Columns of the whole step, over those of the trainer's update."""
    job, step = result.job, result.step
    low, high = result.step_seconds_range
    capacities = {name: result.phase_capacity_bytes(name) for name in result.memory}
    fullest = max(capacities, key=lambda name: result.memory[name].total / capacities[name])
    return {
        "nodes": -(-job.total_gpus // job.cluster.gpus_per_node),
        "gpus": job.total_gpus,
        "step_seconds": step.seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "step_tokens": round(result.tokens),
        "tokens_per_second": result.tokens / step.seconds,
        "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
        "fits": result.fits,
        **verdict_content(result.verdict),
        "gpu_peak_bytes": result.memory[fullest].total,
        "gpu_capacity_bytes": capacities[fullest],
        "limit": max(result.exposed_seconds, key=lambda name: result.exposed_seconds[name]),
        **{f"rl.{name}_seconds": seconds for name, seconds in result.phases_seconds.items()},
        **{
            f"critical_path_seconds.{name.replace('_', ' ')}": seconds
            for name, seconds in result.exposed_seconds.items()
            if seconds
        },
        "rl.rollout_gpus": job.rollout_gpus,
        "rl.training_gpus": job.training_gpus,
        "rl.tail_seconds": step.tail,
        "rl.busy_trainer_fraction": step.busy_training,
        "rl.busy_rollout_fraction": step.busy_rollout,
        "rl.staleness": step.mean_staleness,
    }


def resize_rollout(experiment: Experiment, gpus: int, mode: str) -> Experiment:
    """The experiment on `gpus` GPUs: with the samples of each GPU ("weak"), or all of them ("strong"). GPUs
    of the rollout stay the same part.

    Raises InputError for another mode, or where prompts or GPUs of the rollout do not divide.
    """
    table = experiment.rl
    assert table is not None
    if mode not in ("weak", "strong"):
        raise InputError(
            f"--{mode}: does nothing for an experiment with [rl], whose micro-batches are packed; expected "
            "--strong, or neither"
        )
    total = total_gpus(experiment)
    changes: dict[str, Any] = {"gpus": gpus, "nodes": None}
    keys = _SIZES if mode == "weak" else ()
    sizes = {f"rl.{key}": getattr(table, key) for key in keys}
    sizes["rl.rollout.gpus"] = table.rollout.gpus
    for key, value in sizes.items():
        if value is None:
            continue
        if value * gpus % total:
            raise InputError(f"{key}: {value:,} on {total:,} GPUs are no whole number on {gpus:,}")
        changes[key] = value * gpus // total
    return change_experiment(experiment, changes)


def total_gpus(experiment: Experiment) -> int:
    """GPUs of an experiment with `[rl]`, those of its engines among them."""
    return gpus_of(experiment, Simulator().cluster(experiment.cluster))


def turned_numbers(table: BaseModel, prefix: str = "rl") -> Iterator[tuple[str, float, bool]]:
    """The numbers of `[rl]` that the file states: key, value, and whether it has to be whole."""
    for name in type(table).model_fields:
        value = getattr(table, name)
        if name not in table.model_fields_set or name in _UNTURNED:
            continue
        if isinstance(value, BaseModel):
            yield from turned_numbers(value, f"{prefix}.{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield f"{prefix}.{name}", value, isinstance(value, int)


def changed_numbers(table: RlTable, key: str, factor: float) -> Mapping[str, Any]:
    """The change that turns a number of `[rl]`. A rollout's prompts and the samples of an update are turned
    to what divides, and updates are as many.
    """
    value, is_whole = next(number for name, *number in turned_numbers(table) if name == key)
    turned = value * factor
    if key == "rl.rollout.gpu_memory_utilization":
        turned = min(turned, 0.98)
    changes: dict[str, Any] = {key: max(1, round(turned)) if is_whole else turned}
    samples = table.prompts_per_step * table.samples_per_prompt
    if key in ("rl.prompts_per_step", "rl.samples_per_prompt") and table.mini_batch_samples:
        updates = samples // table.mini_batch_samples
        multiplier = table.samples_per_prompt if key == "rl.prompts_per_step" else table.prompts_per_step
        while changes[key] * multiplier % updates:
            changes[key] += 1
        changes["rl.mini_batch_samples"] = changes[key] * multiplier // updates
    if key == "rl.mini_batch_samples":
        divisors = [size for size in range(1, samples + 1) if samples % size == 0]
        changes[key] = min(divisors, key=lambda size: abs(size - turned))
    return changes


AXES = ("placement", "split", "engine", "utilization", "micro-batch", "sync")
_UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.9)
_MICRO_BATCHES = (0.5, 2, 4)
_SPLITS = 8  # parts of the GPUs of which the rollout gets one to seven


@dataclass(frozen=True)
class RolloutCandidate:
    """A layout that was simulated."""

    changes: Mapping[str, Any]
    """The keys that differ from the experiment's."""
    result: RlResult

    @property
    def seconds(self) -> float:
        return self.result.step.seconds

    @property
    def placement(self) -> str:
        return self.result.job.table.placement

    @property
    def settings(self) -> str:
        """The options of `zsim run` that ask for it."""
        return " ".join(f"--set {key}={value}" for key, value in self.changes.items() if value is not None)

    def to_dict(self) -> dict[str, Any]:
        result, job = self.result, self.result.job
        return {
            "changes": dict(self.changes),
            "placement": self.placement,
            "rollout_gpus": job.rollout_gpus,
            "training_gpus": job.training_gpus,
            "tensor": job.table.rollout.tensor,
            "step_seconds": self.seconds,
            "step_seconds_range": result.step_seconds_range,
            "tokens_per_second_per_gpu": result.tokens_per_second_per_gpu,
            "busy_fraction": {"trainer": result.step.busy_training, "rollout": result.step.busy_rollout},
            "staleness": result.step.mean_staleness,
            "fits": result.fits,
        }


@dataclass(frozen=True)
class RolloutTuning(Displayable):
    """The layouts of a step, the fastest that fits first."""

    title: str
    candidates: Sequence[RolloutCandidate]
    """All that fit, then those that do not, each by their seconds."""
    refused: Mapping[str, str]
    """Reasons of layouts that are no step, by their options."""
    count: int = 5
    """Splits and engines that the text shows of each placement."""

    @property
    def best(self) -> RolloutCandidate:
        return self.candidates[0]

    def best_of(self, placement: str) -> RolloutCandidate | None:
        """The best layout of a placement that fits, if any does."""
        return next((best for best in self._of(placement) if best.result.fits), None)

    def _of(self, placement: str) -> list[RolloutCandidate]:
        return [candidate for candidate in self.candidates if candidate.placement == placement]

    def _distinct(self, placement: str) -> list[RolloutCandidate]:
        """The best layout of each split and engine, whatever its part of the memory."""
        layouts: dict[tuple[int, int], RolloutCandidate] = {}
        for candidate in self._of(placement):
            job = candidate.result.job
            layouts.setdefault((job.rollout_gpus, job.model.layout.gpus), candidate)
        return list(layouts.values())

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `zsim tune` with `[rl]`."""
        return {"best": [candidate.to_dict() for candidate in self.candidates], "refused": dict(self.refused)}

    def records(self) -> Sequence[Mapping[str, Any]]:
        return [candidate.to_dict() for candidate in self.candidates]

    def headline(self) -> str:
        return f"{self.title}: {_layout_label(self.best)}, {format_seconds(self.best.seconds)}"

    def lines(self) -> Iterator[str]:
        """The text of `zsim tune`."""
        yield from paragraph(f"{self.headline()}.")
        yield ""
        placements = dict.fromkeys(candidate.placement for candidate in self.candidates)
        shown = [row for placement in placements for row in self._distinct(placement)[: self.count]]
        yield from table(
            named_columns(
                "Placement",
                "rollout",
                "engine",
                "memory",
                "step",
                "trainer",
                "engines",
                "verdict",
            ),
            [_layout_cells(candidate) for candidate in shown],
        )
        yield "In percent: how long GPUs of the trainer and of the engines are busy."
        yield ""
        for placement in placements:
            best = self.best_of(placement)
            if best is not None and best is not self.best:
                factor = best.seconds / self.best.seconds
                yield from paragraph(
                    f"The best '{placement}' takes {factor:.2f} times as long: {_layout_label(best)}."
                )
        if self.best.result.step.mean_staleness:
            yield from paragraph(
                f"Samples of the best are {self.best.result.step.mean_staleness:.1f} updates of the weights "
                "old in the mean, whose effect on learning is not predicted."
            )
        settings = self.best.settings
        yield from paragraph(
            f"The options for it: {settings}" if settings else "The experiment has the best already."
        )


def tune_rollout(
    experiment: Experiment, *, keep: Sequence[str] = (), count: int = 5, simulator: Simulator | None = None
) -> RolloutTuning:
    """Search the layouts of a step of reinforcement learning, but for the axes of `keep`.

    Raises InputError for an unknown axis, or where no layout is a step that fits.
    """
    for name in keep:
        check_choice(f"--keep {name}: ", name, AXES, " for an experiment with [rl]")
    search = _Search(experiment, keep, simulator or Simulator())
    search.run()
    if not any(candidate.result.fits for candidate in search.candidates):
        sentences = [remedy for candidate in search.candidates[:1] for remedy in candidate.result.remedies]
        sentences += [f"{name}: {reason}" for name, reason in search.refused.items()]
        raise InputError(f"no layout fits; {'; '.join(sentences[:3])}")
    ordered = sorted(search.candidates, key=_rank)
    return RolloutTuning(ordered[0].result.headline(), ordered, search.refused, count)


def _rank(candidate: RolloutCandidate) -> tuple[bool, float, int]:
    """Layouts that fit, the fastest, and of as fast ones those with fewer changes come first."""
    num_changes = sum(value is not None for value in candidate.changes.values())
    return not candidate.result.fits, float(f"{candidate.seconds:.6g}"), num_changes


class _Search:
    def __init__(self, experiment: Experiment, keep: Sequence[str], simulator: Simulator) -> None:
        self.experiment, self.keep, self.simulator = experiment, keep, simulator
        assert experiment.rl is not None
        self.table: RlTable = experiment.rl
        self.gpus = total_gpus(experiment)
        self.candidates: list[RolloutCandidate] = []
        self.refused: dict[str, str] = {}
        self._seen: dict[str, RolloutCandidate | None] = {}

    def run(self) -> None:
        """Each placement's axes, one after the other."""
        framework = workflow_of(self.table.framework)
        stated = self.table.placement
        placements = (stated,) if "placement" in self.keep else framework.placements
        for placement in placements:
            changes: dict[str, Any] = {}
            if placement != stated:
                unset = ("rollout.gpus", "max_staleness", "stream_prompts", "sync.transport")
                changes = {"rl.placement": placement, **{f"rl.{key}": None for key in unset}}
            best = self._best(changes, "split", self._splits(placement))
            best = self._best(best, "engine", self._engines())
            shares = _UTILIZATIONS if framework.memory_utilization else ()
            best = self._best(best, "utilization", [{"rl.rollout.gpu_memory_utilization": x} for x in shares])
            best = self._best(best, "micro-batch", self._micro_batches())
            ways = [way for way in framework.syncs if way != "ipc" or placement == "colocated"]
            self._best(best, "sync", [{"rl.sync.transport": way} for way in ways] if len(ways) > 1 else [])

    def _splits(self, placement: str) -> list[dict[str, Any]]:
        if placement == "colocated":
            return []
        counts = sorted({self.gpus * part // _SPLITS for part in range(1, _SPLITS)} - {0})
        return [{"rl.rollout.gpus": count} for count in counts]

    def _engines(self) -> list[dict[str, Any]]:
        most = self.simulator.cluster(self.experiment.cluster).gpus_per_node
        return [{"rl.rollout.tensor": 2**power} for power in range(most.bit_length()) if 2**power <= most]

    def _micro_batches(self) -> list[dict[str, Any]]:
        """Half, twice and four times the tokens, or the samples, of a micro-batch."""
        tokens = self.table.micro_batch_tokens
        key = "training.micro_batch_size" if tokens is None else "rl.micro_batch_tokens"
        size = tokens or self.experiment.training.micro_batch_size or 1
        return [{key: int(size * factor)} for factor in _MICRO_BATCHES if size * factor >= 1]

    def _best(
        self, start: Mapping[str, Any], axis: str, choices: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The changes of the best of the choices of an axis, `start` among them, which wins ties."""
        options = [dict(start)]
        if axis not in self.keep:
            options += [{**start, **choice} for choice in choices]
        simulated = [
            (candidate, option) for option in options for candidate in [self._simulate(option)] if candidate
        ]
        if not simulated:
            return dict(start)
        return min(simulated, key=lambda pair: _rank(pair[0])[:2])[1]  # the first of equals

    def _simulate(self, changes: Mapping[str, Any]) -> RolloutCandidate | None:
        key = self._key(changes)
        if key not in self._seen:
            self._seen[key] = None
            try:
                result = simulate_rl(change_experiment(self.experiment, changes), self.simulator)
                candidate = RolloutCandidate(changes, result)
                self.candidates.append(candidate)
                self._seen[key] = candidate
            except ZsimError as error:
                self.refused[key] = str(error)
        return self._seen[key]

    def _key(self, changes: Mapping[str, Any]) -> str:
        """The layout in options, with the framework's default where neither the changes nor the file say."""
        placement = changes.get("rl.placement", self.table.placement)
        framework = workflow_of(self.table.framework)
        default = framework.memory_utilization.get(placement)
        layout: dict[str, Any] = {"rl.placement": placement}
        layout["rl.sync.transport"] = framework.transports[placement]
        if placement != "colocated":
            layout["rl.rollout.gpus"] = self.gpus // 2
        layout["rl.rollout.tensor"] = self.table.rollout.tensor
        if default is not None:
            layout["rl.rollout.gpu_memory_utilization"] = default
        stated = {f"rl.rollout.{name}": getattr(self.table.rollout, name)
                  for name in ("gpus", "gpu_memory_utilization")}  # fmt: skip
        stated["rl.sync.transport"] = self.table.sync.transport
        layout |= {name: value for name, value in stated.items()
                   if name in layout and name not in changes and value is not None}  # fmt: skip
        layout |= {name: value for name, value in changes.items() if value is not None}
        return " ".join(f"{name}={value}" for name, value in layout.items())


def _layout_label(candidate: RolloutCandidate) -> str:
    """E.g. "async, 8 of 16 GPUs for the rollout, engines of 2 GPUs, 0.8 of the memory"."""
    job = candidate.result.job
    phrases = [candidate.placement]
    if not job.is_colocated:
        phrases.append(f"{job.rollout_gpus:,} of {job.total_gpus:,} GPUs for the rollout")
    size = job.model.layout.gpus
    phrases.append(f"engines of {size} GPU{'' if size == 1 else 's'}")
    utilization = job.table.rollout.gpu_memory_utilization
    if utilization is not None:
        phrases.append(f"{utilization:g} of the memory")
    if any("micro_batch" in key for key in candidate.changes):
        phrases.append(f"micro-batches of {job.micro_batch_room:,} tokens")
    if candidate.changes.get("rl.sync.transport"):
        phrases.append(f"new weights by '{job.transport}'")
    return ", ".join(phrases)


def _layout_cells(candidate: RolloutCandidate) -> list[str]:
    step, job = candidate.result.step, candidate.result.job
    default = job.framework.memory_utilization.get(job.table.placement)
    utilization = job.table.rollout.gpu_memory_utilization or default
    return [
        candidate.placement,
        "all" if job.is_colocated else f"{job.rollout_gpus:,}",
        f"{job.model.layout.gpus}",
        "-" if utilization is None else f"{utilization:g}",
        format_seconds(candidate.seconds),
        f"{100 * step.busy_training:.0f} %",
        f"{100 * step.busy_rollout:.0f} %",
        candidate.result.verdict.word,
    ]
