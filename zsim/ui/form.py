"""The settings of the page and the experiment that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, parse_setting
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.lora_table import merge_adapter_config
from zsim.specs.model.hub_names import hub_ids_of
from zsim.specs.presets import model_preset_names, topology_preset_names
from zsim.study.tune.axes import base_of
from zsim.ui.field import (
    ADAPTERS,
    KIND,
    RUN,
    STAGE,
    TOKENS,
    TRAINING,
    Field,
    degree_fields,
    fields_of,
    identity_choices,
    strategy_fields,
)

SIZE = ("nodes", "gpus")
DisplayedValues = Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """An experiment as a page of settings.

    A field with its initial display changes nothing, so the page starts with exactly the given experiment,
    including its files and tables.
    """

    data: Mapping[str, Any]
    """The experiment, file-shaped."""
    fields: Mapping[str, Field]
    initial: DisplayedValues
    """The initial display of each field."""

    def experiment(self, field_values: DisplayedValues, other_settings: str = "") -> Experiment:
        """The experiment that the page describes. `other_settings` has further settings, one KEY=VALUE per
        line.

        Raises InputError where it contradicts itself.
        """
        kind = self._value(KIND, field_values)
        stage = self._value(STAGE, field_values)
        is_same_kind = kind == self._value(KIND, self.initial)
        data = {key: dict(value) if isinstance(value, Mapping) else value for key, value in self.data.items()}
        changes: dict[str, Any] = {}
        if not any(self.fields[field.key].is_available(kind, stage) for field in degree_fields()):
            data.pop("parallelism", None)  # hidden, with the strategy that had it
        if not is_same_kind:
            data.pop("strategy", None)
            changes[KIND] = kind
        strategy_keys = {field.key for field in strategy_fields()}
        has_run = self.has_run(field_values)
        if not has_run:
            data.pop("run", None)
        for key, field in self.fields.items():
            if key == KIND or not field.is_available(kind, stage) or (field.is_of_run and not has_run):
                continue
            if not self.is_open(key, field_values):
                continue
            is_kept = is_same_kind or key not in strategy_keys
            initial_value = self.initial[key] if is_kept else field.empty
            is_new = field_values.get(key) != initial_value or (key == STAGE and not is_same_kind)
            if not is_new:
                continue
            changes[key] = self._value(key, field_values)
            table, _, name = key.partition(".")
            if (
                changes[key] is None and name and (table in data or field.is_of_run)
            ):  # open, whatever the file has
                changes.pop(key)
                _remove_key(data, field.opens or key)
        if any(key in changes for key in SIZE):
            changes |= {key: self._value(key, field_values) for key in SIZE}
        changes |= self._other_settings(other_settings)

        def job_with(changes: Mapping[str, Any]) -> Job:
            return resolve(build_experiment(data, changes, origin="settings"))

        translated = fields_of(kind).translate(data, changes, job_with)
        return build_experiment(data, translated, origin="settings")

    def has_run(self, field_values: DisplayedValues) -> bool:
        """Whether the page describes a complete run: by its tokens, or as the experiment has it."""
        run_data = self.data.get("run") or {}
        is_in_file = any(run_data.get(key) for key in ("steps", "days", "phases"))
        return is_in_file or self.fields[TOKENS].read(field_values.get(TOKENS)) is not None

    def is_open(self, key: str, field_values: DisplayedValues) -> bool:
        """Whether the table that has the key is asked for, where a field says that."""
        return all(
            field.key == key or not key.startswith(f"{field.opens}.") or self._value(field.key, field_values)
            for field in self.fields.values()
            if field.opens
        )

    def _value(self, key: str, field_values: DisplayedValues) -> Any:
        return self.fields[key].read(field_values.get(key))

    def _other_settings(self, other_settings: str) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for line in filter(None, (line.strip() for line in other_settings.splitlines())):
            key, value = parse_setting(line)
            field = self.fields.get(key)
            is_choice = field is None or field.choices is None or value in field.choices.values()
            if field is not None and is_choice and key not in ("model", "cluster"):
                raise InputError(f"other settings: {line}: it has its own field, '{field.label}'")
            if key in settings:
                raise InputError(f"other settings: {key} is there twice")
            settings[key] = value
        return settings


def _remove_key(data: dict[str, Any], key: str) -> None:
    """Leave out a dotted key, if it is there."""
    first, _, inner_key = key.partition(".")
    if not inner_key:
        data.pop(first, None)
    elif isinstance(data.get(first), Mapping):
        data[first] = dict(data[first])
        _remove_key(data[first], inner_key)


def make_form(experiment: Experiment) -> Form:
    """The form that shows `experiment`. Raises InputError and NotSimulatedError as `resolve` does."""
    job = resolve(experiment)
    values = dict(_values(experiment, job))
    fields = {field.key: field.add_choice(values[field.key]) for field in _fields()}
    initial_values = {key: field.show(values[key]) for key, field in fields.items()}
    return Form(_data(experiment), fields, initial_values)


def resolved_values(job: Job) -> dict[str, str]:
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
    return (*_cluster_fields(), *TRAINING, *ADAPTERS, *strategy_fields(), *degree_fields(), *RUN)


def _cluster_fields() -> tuple[Field, ...]:
    models = model_preset_names()
    hub_ids = {name: hub_ids_of(name) for name in models}
    return (
        Field("model", "Model", choices=identity_choices(*models), other_names=hub_ids),
        Field("cluster", "Cluster", choices={name: name for name in topology_preset_names()}),
        Field("nodes", "Nodes", is_half=True),
        Field("gpus", "GPUs", is_half=True),
    )


def _data(experiment: Experiment) -> dict[str, Any]:
    """The experiment as file-shaped data, with the framework's file, and its batch sizes in [training]."""
    table = experiment.strategy
    if table.has_settings_file:
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
    lora = None if experiment.training.lora is None else merge_adapter_config(experiment.training.lora)
    for field in ADAPTERS:
        yield field.key, None if lora is None else getattr(lora, field.key.rpartition(".")[2])
    if experiment.strategy.has_settings_file:
        for key in ("micro_batch_size", "gradient_accumulation_steps", "optimizer"):
            yield f"training.{key}", getattr(job.training, key)
    for field in strategy_fields():
        name, table = field.key.partition(".")[2], experiment.strategy
        is_said = name == "kind" or name in table.model_fields_set
        yield field.key, getattr(table, name) if is_said else field.read(field.empty)
    for field in degree_fields():
        yield field.key, getattr(experiment.parallelism, field.key.partition(".")[2])
    yield from _run_values(experiment)
    yield from fields_of(job.kind).values(job)


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
