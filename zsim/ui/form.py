"""The settings of the page and the experiment that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zsim.dataclass import dataclass
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import experiment_from
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.presets import model_preset_names, topology_preset_names
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.tables import DeepSpeedTable
from zsim.study.given import setting
from zsim.study.tune.axes import STAGE as JSON_STAGE
from zsim.study.tune.axes import ZERO, parameters_on, states_on
from zsim.study.tune.base import base_of
from zsim.ui.fields import (
    OFFLOAD_PARAMETERS,
    OFFLOAD_STATES,
    PARALLELISM,
    RUN,
    STAGE,
    STRATEGY,
    TOKENS,
    TRAINING,
    Field,
)

KIND = "strategy.kind"
SIZE = ("nodes", "gpus")
Shown = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """An experiment as a page of settings.

    A field with its initial display changes nothing, so the page starts with exactly the given experiment,
    including its files and tables.
    """

    data: Mapping[str, Any]
    """The experiment, file-shaped."""
    fields: Mapping[str, Field]
    initial: Shown
    """The initial display of each field."""

    def experiment(self, shown: Shown, more: str = "") -> Experiment:
        """The experiment that the page describes. `other_settings` has further settings, one KEY=VALUE per
        line.

        Raises InputError where it contradicts itself.
        """
        kind = self._value(KIND, shown)
        stage = self._value(STAGE, shown)
        is_same_kind = kind == self._value(KIND, self.initial)
        data = {key: dict(value) if isinstance(value, Mapping) else value for key, value in self.data.items()}
        changes: dict[str, Any] = {}
        if not any(self.fields[field.key].is_known(kind, stage) for field in PARALLELISM):
            data.pop("parallelism", None)  # hidden, with the strategy that had it
        if not is_same_kind:
            data.pop("strategy", None)
            changes[KIND] = kind
        has_run = self.has_run(shown)
        if not has_run:
            data.pop("run", None)
        for key, field in self.fields.items():
            if key == KIND or not field.is_known(kind, stage) or (field.is_of_run and not has_run):
                continue
            of_table = key in (STAGE, OFFLOAD_STATES, OFFLOAD_PARAMETERS) or key.startswith("strategy.")
            before = self.initial[key] if is_same_kind or not of_table else field.empty
            is_new = shown.get(key) != before or (key == STAGE and not is_same_kind)
            if not is_new:
                continue
            changes[key] = self._value(key, shown)
            table, _, name = key.partition(".")
            if (
                changes[key] is None and name and (table in data or field.is_of_run)
            ):  # open, whatever the file has
                changes.pop(key)
                _drop(data, key)
        if any(key in changes for key in SIZE):
            changes |= {key: self._value(key, shown) for key in SIZE}
        changes |= self._others(more)
        return experiment_from(data, self._spelt(data, changes), origin="settings")

    def has_run(self, shown: Shown) -> bool:
        """Whether the page describes a complete run: by its tokens, or as the experiment has it."""
        own = self.data.get("run") or {}
        by_file = any(own.get(key) for key in ("steps", "days", "phases"))
        return by_file or self.fields[TOKENS].read(shown.get(TOKENS)) is not None

    def _value(self, key: str, shown: Shown) -> Any:
        return self.fields[key].read(shown.get(key))

    def _others(self, more: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in filter(None, (line.strip() for line in more.splitlines())):
            key, value = setting(line)
            if key in self.fields and key not in ("model", "cluster"):
                raise InputError(f"other settings: {line}: it has its own field, '{self.fields[key].label}'")
            if key in found:
                raise InputError(f"other settings: {key} is there twice")
            found[key] = value
        return found

    def _spelt(self, data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """`changes` under the keys where DeepSpeed's JSON has its stage and offloading."""
        spelt = dict(changes)
        strategy = data.get("strategy")
        if STAGE in spelt and isinstance(strategy, Mapping) and strategy.get("config") is not None:
            spelt[JSON_STAGE] = spelt.pop(STAGE)
        if OFFLOAD_STATES in spelt:
            spelt[ZERO + OFFLOAD_STATES] = states_on(spelt.pop(OFFLOAD_STATES))
        if OFFLOAD_PARAMETERS in spelt:
            device, numel = spelt.pop(OFFLOAD_PARAMETERS), 0
            if device == "nvme":
                numel = _largest_shard_numel(resolve(experiment_from(data, spelt, origin="settings")))
            spelt[ZERO + OFFLOAD_PARAMETERS] = parameters_on(device, numel)
        return spelt


def _drop(data: dict[str, Any], key: str) -> None:
    """Leave out a dotted key, if it is there."""
    first, _, rest = key.partition(".")
    if not rest:
        data.pop(first, None)
    elif isinstance(data.get(first), Mapping):
        data[first] = dict(data[first])
        _drop(data[first], rest)


def form_of(experiment: Experiment) -> Form:
    """The form that shows `experiment`. Raises InputError and NotSimulatedError as `resolve` does."""
    job = resolve(experiment)
    values = dict(_values(experiment, job))
    fields = {field.key: field.with_choice(values[field.key]) for field in _fields()}
    shown = {key: field.show(values[key]) for key, field in fields.items()}
    return Form(_data(experiment), fields, shown)


def resolved(job: Job) -> dict[str, str]:
    """The values that zsim uses for empty fields, by key."""
    training = job.training
    replicate = getattr(job.strategy, "replicate", 1)
    bucket = getattr(job.strategy, "bucket_cap_bytes", 0) / 2**20
    numbers = {
        "nodes": job.num_nodes,
        "gpus": job.world_size,
        "training.sequence_length": training.sequence_length,
        "training.micro_batch_size": training.micro_batch_size,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
        "strategy.replicate": replicate,
        "strategy.bucket_cap_mb": bucket,
        "parallelism.tensor": job.parallelism.tensor,
        "parallelism.pipeline": job.parallelism.pipeline,
        "parallelism.context": job.parallelism.context,
        "parallelism.virtual_stages": job.parallelism.virtual_stages,
        "parallelism.expert": job.parallelism.experts.ranks,
        "parallelism.expert_tensor": job.parallelism.experts.tensor,
    }
    return {
        key: f"{number:g}" if isinstance(number, float) else str(number) for key, number in numbers.items()
    }


def _fields() -> tuple[Field, ...]:
    return (*_where(), *TRAINING, *STRATEGY, *PARALLELISM, *RUN)


def _where() -> tuple[Field, ...]:
    return (
        Field("model", "Model", choices={name: name for name in model_preset_names()}),
        Field("cluster", "Cluster", choices={name: name for name in topology_preset_names()}),
        Field("nodes", "Nodes", is_half=True),
        Field("gpus", "GPUs", is_half=True),
    )


def _data(experiment: Experiment) -> dict[str, Any]:
    """The experiment as file-shaped data, including a DeepSpeed JSON, with its batch sizes in [training]."""
    table = experiment.strategy
    if isinstance(table, DeepSpeedTable) and table.config is not None:
        data = dict(base_of(experiment).data)
        if experiment.training.precision is None:
            data["training"] = {key: value for key, value in data["training"].items() if key != "precision"}
        return data
    data = experiment.model_dump(exclude_defaults=True)
    return {**data, "strategy": {"kind": table.kind, **data.get("strategy", {})}}


def _values(experiment: Experiment, job: Job) -> Iterator[tuple[str, Any]]:
    yield from ((key, getattr(experiment, key)) for key in ("model", "cluster", *SIZE))
    for field in TRAINING:
        yield field.key, getattr(experiment.training, field.key.partition(".")[2])
    if isinstance(experiment.strategy, DeepSpeedTable) and experiment.strategy.config is not None:
        yield "training.micro_batch_size", job.training.micro_batch_size
        yield "training.gradient_accumulation_steps", job.training.gradient_accumulation_steps
    for field in STRATEGY:
        name, table = field.key.partition(".")[2], experiment.strategy
        is_said = name == "kind" or name in table.model_fields_set
        yield field.key, getattr(table, name) if is_said else field.read(field.empty)
    for field in PARALLELISM:
        yield field.key, getattr(experiment.parallelism, field.key.partition(".")[2])
    yield from _run_values(experiment)
    if isinstance(job.strategy, DeepSpeedConfig):
        zero = job.strategy.zero
        yield STAGE, job.strategy.stage
        yield OFFLOAD_STATES, zero.offload_optimizer and zero.offload_optimizer.device
        yield OFFLOAD_PARAMETERS, zero.offload_param and zero.offload_param.device


def _run_values(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    run, cost = experiment.run, experiment.cost
    for field in RUN:
        if run is None and field.key.startswith("run."):
            yield field.key, field.read(field.empty)
    if run is not None:
        yield TOKENS, run.tokens
        yield "run.checkpoint.every", run.checkpoint.every
        yield "run.checkpoint.mode", run.checkpoint.mode
        yield "run.recovery.spares", run.recovery.spares or None
    yield "cost.gpu_hour_price", None if cost is None else cost.gpu_hour_price


def _largest_shard_numel(job: Job) -> int:
    """Elements of the largest parameter's shard, which NVMe buffers must hold."""
    return -(-max(parameter.numel for _, parameter in job.model.named_parameters()) // job.world_size)
