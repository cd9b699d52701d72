"""Training files of other programs that an experiment names, and the settings that they fill in.

Besides a file of the strategy's own framework, `strategy.config` may be a training file of another program,
the command line that starts it, or a script with such a line.

The file fills in what the experiment leaves open. Two different explicit values are an error that names both.
A value given by `--set` wins over either. Readers are imported only when a file is named, since most runs
name none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zsim.errors import InputError
from zsim.specs.cluster.files import load_cluster, read_toml
from zsim.specs.experiment.overrides import apply_overrides
from zsim.specs.experiment.programs import listed_programs, programs
from zsim.specs.formats.config_file import TrainingFile, flatten
from zsim.specs.formats.program import ProgramSource, TrainingProgram
from zsim.specs.library import Library

Words = str | Sequence[str]


def is_training_file(config: Any) -> bool:
    """Whether `strategy.config` is another program's file or command line, not a file of the strategy's
    own framework.
    """
    source = _source_of(config)
    return source is not None and _reader_of(source) is not None


def names_training_file(path: str | Path) -> bool:
    """Whether a file given in place of an experiment is another program's."""
    path = Path(path)
    if any(program.names_file(path) for program in programs()):
        return True
    tables = _toml_tables(path)
    return "cluster" not in tables and any(program.has_tables(tables) for program in programs())


def names_experiment(path: str | Path) -> bool:
    """Whether a TOML is zsim's: another program's `model` is a table, and none has `cluster`."""
    data = _toml_tables(path)
    return "cluster" in data or "strategy" in data or isinstance(data.get("model"), str)


def _toml_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. The mapping is empty if the path is not one."""
    path = Path(path)
    return read_toml(path) if path.suffix.lower() == ".toml" and os.path.isfile(path) else {}


def read_training_file(config: Words, settings: Mapping[str, Any] = MappingProxyType({})) -> TrainingFile:
    """The settings in a training file or command line of another program.

    `settings` are values of the experiment by dotted key, for those that a script leaves open.
    Raises InputError if it is neither, or has keys that its program would refuse.
    """
    source = _source_of(config, settings)
    reader = None if source is None else _reader_of(source)
    if source is None or reader is None:
        expected = ", ".join(program.reads for program in listed_programs() if program.reads)
        example = next(program.example for program in programs() if program.example)
        raise InputError(f"{config}: expected {expected}, or a command line such as '{example}'")
    return reader.read(source)


def _source_of(config: Any, settings: Mapping[str, Any] = MappingProxyType({})) -> ProgramSource | None:
    """The source that `strategy.config` names. None if it is the content of a file."""
    if isinstance(config, str):
        return ProgramSource(config, settings=settings)
    if isinstance(config, list | tuple) and all(isinstance(word, str) for word in config):
        return ProgramSource("", tuple(config), settings)
    return None


def _reader_of(source: ProgramSource) -> TrainingProgram | None:
    """The program that reads a file or a command line.

    It is the first that recognises it. Of what none recognises, a file is of the program that usually has
    files of this ending, and options are of the program that takes any.
    """
    for program in programs():
        if program.recognises(source):
            return program
    if source.arguments is not None:
        return None
    for program in programs():
        if program.is_default_reader(source):
            return program
    if any(word.startswith("--") for word in source.words):
        return next((program for program in programs() if program.takes_any_options), None)
    return None


def merge_training_file(
    data: Mapping[str, Any], overrides: Mapping[str, Any], *, origin: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the training file that an experiment names into its settings.

    The file may be named in the file-shaped `data` or in the dotted `overrides`. Both are returned, with the
    name replaced by the file's content in `data`. They are returned unchanged if they name no training file.
    """
    strategy = data.get("strategy")
    table: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {}
    config = overrides.get("strategy.config", table.get("config"))
    if not is_training_file(config):
        return dict(data), dict(overrides)
    stated = {**dict(flatten(data)), **overrides}
    file = read_training_file(config, stated)
    remaining_overrides = {key: value for key, value in overrides.items() if key != "strategy.config"}
    if "strategy.config" in overrides:
        table = {}  # of the file that is replaced
    table.pop("config", None)
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    merged["strategy"] = table
    _resolve_shape(file, merged, remaining_overrides)
    model, requested_model = file.defaults.get("model"), remaining_overrides.get("model", merged.get("model"))
    if model is not None and requested_model not in (None, model):
        description = model if isinstance(model, str) else "a model of its own"
        file.note(f"written for {description}; the experiment's model is simulated")
    for dotted, value in file.settings.items():
        _fill(merged, dotted, value, remaining_overrides, f"{origin}: {dotted}", file.name)
    if remaining_overrides.get("strategy.kind") not in (None, file.settings.get("strategy.kind")):
        file.defaults.pop("training.software", None)  # of the strategy that the file says
    for dotted, value in file.defaults.items():
        _fill(merged, dotted, value, remaining_overrides)
        if dotted in file.default_notes and stated.get(dotted) is None:
            file.note(file.default_notes[dotted])
    if file.epochs is not None and _has_length(merged.get("cost"), remaining_overrides):
        _fill(merged, "cost.epochs", file.epochs, remaining_overrides)
    if file.resolve_stages is not None and remaining_overrides.get("model", merged.get("model")) is not None:
        for dotted, value in file.resolve_stages(_num_layers(merged, remaining_overrides)).items():
            _fill(merged, dotted, value, remaining_overrides, f"{origin}: {dotted}", file.name)
    for dotted, value in file.cluster_changes.items():
        remaining_overrides.setdefault(f"cluster.{dotted}", value)
    merged["notes"] = [*merged.get("notes", ()), *file.notes]
    merged.setdefault("program", file.program)
    requested = {**dict(flatten(data)), **remaining_overrides}
    needed = dict.fromkeys(("model", *file.missing, "cluster"))
    if absent := [
        key for key in needed if requested.get(key) is None and (key in file.missing or not merged.get(key))
    ]:
        reasons = "; ".join(file.missing[key] for key in absent if key in file.missing)
        first = absent[0]
        raise InputError(
            f"{file.name}: {reasons}" if reasons else f"{file.name} names no {first}: give it (--{first})"
        )
    return merged, remaining_overrides


def _has_length(cost: Any, overrides: Mapping[str, Any]) -> bool:
    """Whether the experiment says how large the data set is."""
    table = cost if isinstance(cost, Mapping) else {}
    return any(overrides.get(f"cost.{key}", table.get(key)) is not None for key in ("tokens", "samples"))


def _fill(
    data: dict[str, Any],
    dotted: str,
    value: Any,
    overrides: Mapping[str, Any],
    where: str | None = None,
    name: str = "",
) -> None:
    """Set a key that is open.

    `where` begins the error for an explicit value that differs. If `where` is None, the explicit value is
    kept.
    """
    if dotted in overrides:
        return
    *parents, key = dotted.split(".")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
    if table.get(key) is None:
        table[key] = value
    elif where is not None and table[key] != value:
        raise InputError(
            f"{where}: found {table[key]!r}, but {name} says {value!r}; make them equal or leave one out"
        )


def _resolve_shape(file: TrainingFile, data: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set the number of GPUs, which the experiment may give instead of the file, as options of a
    launcher do.
    """
    shape: dict[str, Any] = {key: file.settings.pop(key) for key in ("nodes", "gpus") if key in file.settings}
    replicate = file.settings.get("strategy.replicate", file.defaults.get("strategy.replicate", 1))
    degrees = {key: _parallel_degree(file, data, overrides, key) for key in ("tensor", "pipeline", "context")}
    model_ranks = math.prod(degrees.values())
    if file.shard_degree is not None:
        shape.setdefault("gpus", file.shard_degree * replicate * model_ranks)
    rollout_gpus = _rollout_gpus(file, data, overrides)
    if file.resolve_rollout is not None and rollout_gpus and "gpus" in shape:
        shape = {"gpus": shape["gpus"] + rollout_gpus}
    if all(overrides.get(key, data.get(key)) is None for key in ("nodes", "gpus")):
        data.update(shape)
    if file.micro_batches_per_pass is not None:
        file.settings["training.gradient_accumulation_steps"] = file.micro_batches_per_pass
    is_open = file.shard_degree is None and file.global_batch_size is None and "gpus" not in shape
    if is_open and file.resolve_rollout is None:
        return
    total = _world_size(data, overrides)
    world_size = total - rollout_gpus
    if world_size < 1:
        raise InputError(
            f"{file.name}: {rollout_gpus} GPUs generate, but the experiment has {total}; expected more, "
            f"as --gpus {total + rollout_gpus}, or fewer of rl.rollout.gpus"
        )
    if file.resolve_rollout is not None:
        file.resolve_rollout(world_size)
    if file.shard_degree is not None and file.shard_degree * replicate * model_ranks != world_size:
        factors = "".join(f", {key} {degree}" for key, degree in degrees.items() if degree > 1)
        raise InputError(
            f"{file.name}: {replicate} replicas of {file.shard_degree} shards{factors} are "
            f"{replicate * file.shard_degree * model_ranks} GPUs, but the experiment has {world_size}"
        )
    if shape.get("gpus", total) != total:
        file.note(f"written for {shape['gpus']} GPUs; the experiment's {total} are simulated")
    if file.global_batch_size is not None and world_size % model_ranks == 0:
        _set_accumulation(file, data, overrides, world_size // model_ranks)


def _value_at(data: Mapping[str, Any], overrides: Mapping[str, Any], dotted: str) -> Any:
    """Value that an experiment, or a change of it, has at a dotted key. None if neither has one."""
    value: Any = data
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return overrides.get(dotted, value)


def _rollout_gpus(file: TrainingFile, data: Mapping[str, Any], overrides: Mapping[str, Any]) -> int:
    """GPUs that generate and do not train: as the experiment requests them, else as the file says."""
    requested = _value_at(data, overrides, "rl.rollout.gpus")
    return requested if file.rollout_gpus and isinstance(requested, int) else file.rollout_gpus


def _parallel_degree(
    file: TrainingFile, data: Mapping[str, Any], overrides: Mapping[str, Any], key: str
) -> int:
    """The degree of one kind of parallelism: as the experiment requests it, else as the file says."""
    dotted = f"parallelism.{key}"
    requested = _value_at(data, overrides, dotted)
    degree = file.settings.get(dotted, file.defaults.get(dotted, 1)) if requested is None else requested
    return degree if isinstance(degree, int) and degree >= 1 else 1


def _set_accumulation(
    file: TrainingFile, data: Mapping[str, Any], overrides: Mapping[str, Any], replicas: int
) -> None:
    """Set the accumulation from `global batch = micro-batch x accumulation x replicas of the model`.

    A pipeline that takes a fixed number of micro-batches runs several times in a step (`parallelism.passes`).
    """
    key = "training.micro_batch_size"
    micro_batch_size = overrides.get(key, file.settings.get(key, file.defaults.get(key)))
    assert file.global_batch_size is not None
    micro_batches_per_pass = file.micro_batches_per_pass or 1
    if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise InputError(
            f"{file.name}: {key}: found {micro_batch_size!r}, expected a whole number of sequences, at least "
            f"1, to divide the global batch of {file.global_batch_size} by"
        )
    if file.settings.get("rl.batching") == "packed":
        # the samples of a whole step are dealt out by their tokens, and what simulates the update alone takes
        # the replica with most
        each = micro_batch_size * micro_batches_per_pass * replicas
        file.global_batch_size = -(-file.global_batch_size // each) * each
    if file.global_batch_size % (micro_batch_size * micro_batches_per_pass * replicas):
        batch_text = (
            f"{micro_batches_per_pass} micro-batches of {micro_batch_size}"
            if micro_batches_per_pass > 1
            else f"micro-batch {micro_batch_size}"
        )
        rank_noun = "GPUs" if replicas == _world_size(data, overrides) else "replicas of the model"
        raise InputError(
            f"{file.name}: global batch of {file.global_batch_size} sequences: expected a multiple of "
            f"{batch_text} x {replicas} {rank_noun}"
        )
    passes = file.global_batch_size // (micro_batch_size * micro_batches_per_pass * replicas)
    file.settings["training.gradient_accumulation_steps"] = passes * micro_batches_per_pass
    if file.micro_batches_per_pass is not None and passes > 1:
        file.settings["parallelism.passes"] = passes


def _num_layers(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> int:
    changes = {key: value for key, value in overrides.items() if key.partition(".")[0] == "model"}
    model = apply_overrides({"model": data.get("model")}, changes)["model"]
    return len(Library().model(model).blocks)


def _world_size(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> int:
    shape = {key: overrides.get(key, data.get(key)) for key in ("cluster", "nodes", "gpus")}
    if overrides.get("gpus") is None and overrides.get("nodes") is not None:
        shape["gpus"] = None
    if isinstance(shape["gpus"], int):
        return shape["gpus"]
    if shape["cluster"] is None:
        raise InputError("cluster: missing; expected a preset, or the path of a topology TOML")
    nodes = shape["nodes"] if isinstance(shape["nodes"], int) else 1
    return nodes * load_cluster(shape["cluster"]).gpus_per_node
