"""The starting point of a search: an experiment with everything that the search may set left open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.text import drop_comments, load_object
from zsim.frameworks.deepspeed.settings.zero_schema import ZeroBlock
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# what a key of [parallelism] means where it is left out
_UNSET = {
    "parallelism.virtual_stages": 1,
    "parallelism.schedule": "1f1b",
    "parallelism.sequence_parallel": False,
    "parallelism.first_stage_less_layers": 0,
    "parallelism.last_stage_less_layers": 0,
}
RECOMPUTED = tuple(f"training.recompute_{key}" for key in ("modules", "method", "layers"))  # Megatron's
_RESOLVED = ("virtual_stages", "schedule", "sequence_parallel")


@dataclass(frozen=True)
class Base:
    """One kind of strategy on one cluster."""

    data: Mapping[str, Any]
    """File-shaped, with its batch sizes in [training]."""
    job: Job
    sequences: int
    """Sequences per replica and step, micro-batch x accumulation steps. Searches keep this number."""

    @property
    def kind(self) -> str:
        return self.job.kind

    @property
    def program(self) -> Program | None:
        """The program whose configuration file the experiment comes from, or None for an experiment in zsim's
        format.
        """
        program: Program | None = self.data.get("program")
        return program

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def batch_sequences(self) -> int:
        """Sequences of all replicas in a step."""
        return self.sequences * self.job.data_parallel_size

    @cached_property
    def key(self) -> str:
        """The content of `data` as text."""
        return json.dumps(self.data, sort_keys=True, default=str)

    @cached_property
    def largest_shard_numel(self) -> int:
        """Elements of the largest parameter's shard, which NVMe buffers must hold."""
        largest = max(parameter.numel for _, parameter in self.job.model.named_parameters())
        return -(-largest // self.world_size)

    def experiment(self, overrides: Mapping[str, Any]) -> Experiment:
        """The experiment with `overrides`. Raises InputError where they contradict the rest."""
        return build_experiment(dict(self.data), overrides, origin="tune")


def base_of(experiment: Experiment) -> Base:
    """The experiment as a base, its batch sizes moved to [training].

    Raises InputError and NotSimulatedError as `resolve` does.
    """
    job = resolve(experiment)
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


def change_kind(base: Base, kind: str) -> Base:
    """The base with another kind of strategy, at its defaults, for the same training."""
    if kind == base.kind:
        return base
    strategy: dict[str, Any] = {"kind": kind, "stage": 3} if kind == "deepspeed" else {"kind": kind}
    training = base.job.training
    training_keys = {"precision": training.precision, "gradient_clipping": training.gradient_clipping}
    data = {**base.data, "training": {**base.data["training"], **training_keys}, "strategy": strategy}
    return base_of(build_experiment(data, {}, origin="tune"))


def _open_settings(experiment: Experiment, job: Job) -> dict[str, Any]:
    data = experiment.model_dump(exclude_defaults=True)
    data.pop("run", None)  # of days, beside the step that is searched
    training = dict(data.get("training", {}))
    training["micro_batch_size"] = job.training.micro_batch_size
    training["gradient_accumulation_steps"] = job.training.gradient_accumulation_steps
    if job.sequences is None:
        training.pop("global_batch_size", None)  # the same as the two, which a search may change
    strategy = {"kind": job.kind, **data.get("strategy", {})}
    table = experiment.strategy
    if isinstance(table, DeepSpeedTable):
        training["precision"] = job.training.precision
        strategy.pop("stage", None)
        strategy["config"], strategy["config_name"] = _open_config(table)
        if data.get("program") is None and _is_file(table):
            data["program"] = "deepspeed"
    return {**data, "training": training, "strategy": strategy}


def _is_file(table: DeepSpeedTable) -> bool:
    """Whether the strategy is a JSON file, not a stage or a table inside the experiment."""
    name = table.config_name or ""
    return isinstance(table.config, str) or (table.config is not None and name.lower().endswith(".json"))


def _open_config(table: DeepSpeedTable) -> tuple[dict[str, Any], str]:
    """(the JSON without batch sizes, its name). A stage alone becomes a config with this stage."""
    if table.config is None:
        return {"zero_optimization": {"stage": table.stage}}, "DeepSpeed config"
    name, config = load_object(table.config, table.config_name)
    drop_comments(config, name, [])
    for key in _BATCH_KEYS:
        config.pop(key, None)
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):  # missing, or the former boolean that switched stage 1 on
        config["zero_optimization"] = {"stage": 1 if zero is True else 0}
    return config, name


def value_of(base: Base, overrides: Mapping[str, Any], key: str) -> Any:
    """The effective value of a dotted key: from `overrides`, else from the base's data, else the default."""
    if key in overrides:
        return _comparable(key, overrides[key])
    value: Any = base.data
    *parents, last = key.split(".")
    for parent in parents:
        value = value.get(parent) if isinstance(value, Mapping) else None
    fields = ZeroBlock.model_fields
    if isinstance(value, Mapping):
        for spelling in _spellings(last):
            if spelling in value and value[spelling] != "auto":
                return _comparable(key, value[spelling])
    job = base.job
    if parents[:2] == ["training", "lora"]:
        return getattr(job.experiment.training.lora, last, None)
    if parents[:1] == ["training"]:
        return getattr(job.experiment.training if key in RECOMPUTED else job.training, last)
    if parents[:1] == ["parallelism"]:
        setting = getattr(job.experiment.parallelism, last)
        return (
            getattr(job.parallelism, last)
            if setting is None and last in _RESOLVED
            else _comparable(key, setting)
        )
    if parents[-1:] == ["zero_optimization"]:
        name = next((name for name, info in fields.items() if last in (name, info.alias)), last)
        return _comparable(key, getattr(job.strategy.zero, name, None))  # type: ignore[attr-defined]
    return _comparable(key, getattr(job.strategy, last, None))


def _spellings(last: str) -> list[str]:
    for name, info in ZeroBlock.model_fields.items():
        if last in (name, info.alias):
            return [name, *([info.alias] if info.alias else [])]
    return [last]


def _comparable(key: str, value: Any) -> Any:
    """The value in comparable form: offloading as its device, a whole float as the integer that DeepSpeed
    converts it to."""
    if key.endswith(("offload_optimizer", "offload_param")):
        device = value.get("device") if isinstance(value, Mapping) else getattr(value, "device", None)
        return None if device in (None, "none") else device
    if value is None and key in _UNSET:
        return _UNSET[key]
    return int(value) if isinstance(value, float) and value.is_integer() and "zero_opt" in key else value
