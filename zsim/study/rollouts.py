"""Steps of reinforcement learning in studies: their rows, their sizes, and the numbers that are turned.

A point of an experiment with `[rl]` is a whole step. Its row has the columns of the trainer's update, with
the seconds, memory and verdict of the whole step in their place, and `rl.` columns of phases and sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.rl import RlTable
from zsim.specs.experiment.tables import Experiment
from zsim.validated.verdict import verdict_content
from zsim.workflows.rl.result import RlResult

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
    fullest = max(result.memory.values(), key=lambda phase: phase.total)
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
        "gpu_peak_bytes": fullest.total,
        "gpu_capacity_bytes": result.capacity_bytes,
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
    if experiment.gpus is not None:
        return experiment.gpus
    cluster = Simulator().cluster(experiment.cluster)
    return (experiment.nodes or 1) * cluster.gpus_per_node


def turned_numbers(table: RlTable) -> Iterator[tuple[str, float, bool]]:
    """The numbers of `[rl]` that the file states: key, value, and whether it has to be whole."""
    yield from _numbers(table, "rl")


def _numbers(table: BaseModel, prefix: str) -> Iterator[tuple[str, float, bool]]:
    for name in type(table).model_fields:
        value = getattr(table, name)
        if name not in table.model_fields_set or name in _UNTURNED:
            continue
        if isinstance(value, BaseModel):
            yield from _numbers(value, f"{prefix}.{name}")
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
