"""The settings that a search starts from, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.tune.framework import RECIPE, RECOMPUTED, Base, tuning_of

# what a key of [parallelism] means where it is left out
_UNSET = {
    "parallelism.virtual_stages": 1,
    "parallelism.schedule": "1f1b",
    "parallelism.sequence_parallel": False,
    "parallelism.first_stage_less_layers": 0,
    "parallelism.last_stage_less_layers": 0,
}
_UNRESOLVED = (*RECOMPUTED, RECIPE)  # keys of [training] that a job has in another form
_RESOLVED = ("virtual_stages", "schedule", "sequence_parallel")


def base_of(experiment: Experiment, simulator: Simulator | None = None) -> Base:
    """The experiment as a base, its batch sizes moved to [training]. `simulator` has read some files already.

    Raises InputError and NotSimulatedError as `resolve` does.
    """
    job = resolve(experiment) if simulator is None else simulator.job(experiment)
    data = _open_settings(experiment, job)
    steps = job.training.gradient_accumulation_steps
    return Base(data, job, job.training.micro_batch_size * steps)


def resize_base(base: Base, nodes: int, gpus: int) -> Base:
    """The base with the same global batch on another number of GPUs. Raises InputError if the GPUs do not
    divide the batch.
    """
    total, model_ranks = base.batch_sequences, base.job.parallelism.model_ranks
    if gpus % model_ranks or total % (gpus // model_ranks):
        raise InputError(f"gpus: {total} sequences per step do not divide among {gpus} GPUs")
    per_rank = total // (gpus // model_ranks)
    training = {**base.data["training"], "micro_batch_size": 1, "gradient_accumulation_steps": per_rank}
    data = {**base.data, "nodes": nodes, "gpus": gpus, "training": training}
    return Base(data, resolve(build_experiment(data, {}, origin="tune")), per_rank)


def change_kind(base: Base, kind: str, simulator: Simulator | None = None) -> Base:
    """The base with another kind of strategy, at its defaults, for the same training. `simulator` is as in
    `base_of`.
    """
    if kind == base.kind:
        return base
    strategy = {"kind": kind, **tuning_of(kind).start}
    training = base.job.training
    training_keys = {"precision": training.precision, "gradient_clipping": training.gradient_clipping}
    data = {**base.data, "training": {**base.data["training"], **training_keys}, "strategy": strategy}
    return base_of(build_experiment(data, {}, origin="tune"), simulator)


def _open_settings(experiment: Experiment, job: Job) -> dict[str, Any]:
    data = experiment.model_dump(exclude_defaults=True)
    data.pop("run", None)  # of days, beside the step that is searched
    training = dict(data.get("training", {}))
    training["micro_batch_size"] = job.training.micro_batch_size
    training["gradient_accumulation_steps"] = job.training.gradient_accumulation_steps
    if job.sequences is None:
        training.pop("global_batch_size", None)  # the same as the two, which a search may change
    strategy = {"kind": job.kind, **data.get("strategy", {})}
    opened = {**data, "training": training, "strategy": strategy}
    return tuning_of(job.kind).open_settings(experiment.strategy, job, opened)


def value_of(base: Base, overrides: Mapping[str, Any], key: str) -> Any:
    """The effective value of a dotted key: from `overrides`, else from the base's data, else the default."""
    tuning = tuning_of(base.kind)
    if key in overrides:
        return _comparable(base, key, overrides[key])
    value: Any = base.data
    *parents, last = key.split(".")
    for parent in parents:
        value = value.get(parent) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        for spelling in tuning.spellings(last):
            if spelling in value and value[spelling] != "auto":
                return _comparable(base, key, value[spelling])
    job = base.job
    if parents[:2] == ["training", "lora"]:
        return getattr(job.experiment.training.lora, last, None)
    if parents[:1] == ["training"]:
        return getattr(job.experiment.training if key in _UNRESOLVED else job.training, last)
    if parents[:1] == ["parallelism"]:
        setting = getattr(job.experiment.parallelism, last)
        return (
            getattr(job.parallelism, last)
            if setting is None and last in _RESOLVED
            else _comparable(base, key, setting)
        )
    return _comparable(base, key, tuning.resolved_value(job, key))


def _comparable(base: Base, key: str, value: Any) -> Any:
    """The value in comparable form."""
    if value is None and key in _UNSET:
        return _UNSET[key]
    return tuning_of(base.kind).comparable(key, value)
