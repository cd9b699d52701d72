"""Experiments read from any form that callers pass (a file, tables, the object, or nothing for the README's
example), and changed by dotted overrides.

# [Note: another model]
One rule applies wherever the model is changed (`--model`, `--set model=`, the page, a sweep's axis). Every
setting of [training] is kept, except a sequence that is longer than the new model's learned positions. It is
shortened to them, unless the same overrides set it. The report's notes say both.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import EXAMPLE
from zsim.reading import NULL, parse_toml, restore_nulls
from zsim.specs.cluster.files import cluster_tables, read_toml
from zsim.specs.experiment.overrides import apply_overrides, config_file_of, config_kind, extended_model
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import is_training_file, merge_training_file, names_training_file
from zsim.specs.key_index import takes_text
from zsim.specs.model.huggingface import model_from_config
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.registry import STRATEGIES, is_strategy
from zsim.specs.user_code import UserCode, load_named_model, load_user_models
from zsim.units import AS_IN_FILES, COUNTS, format_setting

_LENGTH = "sequence_length"


def load_experiment(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str | None = None,
    code: UserCode | None = None,
) -> Experiment:
    """Read an experiment file. `overrides` are dotted keys (`"training.precision"`) that replace its values.

    Paths in the file are relative to the file, paths in overrides to the working directory. `origin` is the
    prefix of error messages, by default the file's name. `code` is the permission to run functions that are
    named as models, see [Note: who may run code].
    """
    path = Path(path)
    data = resolve_paths(read_toml(path), path.parent)
    if not {"strategy.config", "strategy.kind"} & set(overrides or ()):
        _check_config(data, path)
    if "model" not in data and {"axes", "zip"} & set(data):
        raise InputError(f"{path.name}: is a study, not an experiment; zsim sweep runs it")
    return build_experiment(data, overrides or {}, origin=origin or path.name, code=code)


def _check_config(data: Mapping[str, Any], path: Path) -> None:
    """Raises InputError where `strategy.config` of an experiment file is the path of a JSON that is neither
    beside the file nor in the working directory.
    """
    strategy = data.get("strategy")
    name = strategy.get("config") if isinstance(strategy, Mapping) else None
    if not isinstance(name, str) or not name.endswith(".json") or " " in name or os.path.exists(name):
        return
    tried = dict.fromkeys((str(path.parent / name), name))
    raise InputError(f"{path.name}: strategy.config: '{name}': no such file; tried {' and '.join(tried)}")


_PATHS = (
    ("model",),
    ("model", "extends"),
    ("cluster",),
    ("cluster", "extends"),
    ("strategy", "config"),
    ("training", "lora", "config"),
    ("training", "lengths", "file"),
)


def resolve_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """File-shaped data as a file in `folder` means it.

    Paths that lead to a file from there are joined with `folder`, and "null" in the content of another
    program's file becomes None.
    """
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    if isinstance(data.get("model"), dict):
        data["model"] = restore_nulls(data["model"])
    strategy = data.get("strategy")
    if isinstance(strategy, dict) and isinstance(strategy.get("config"), dict):
        strategy["config"] = restore_nulls(strategy["config"])
    for keys in _PATHS:
        _make_relative(data, keys, folder)
    return data


def build_experiment(
    data: dict[str, Any], overrides: Mapping[str, Any], *, origin: str, code: UserCode | None = None
) -> Experiment:
    """An experiment from file-shaped data and dotted overrides.

    Overriding `strategy.kind` drops the keys of the old kind. Overriding `nodes` drops the file's `gpus`,
    and the other way round. A cluster that lists its nodes drops both. Overriding `model` keeps
    [training], see [Note: another model]. If `strategy.config` is another program's training file, the
    file's content replaces it.
    """
    if "model" not in overrides:
        data = load_user_models(data, origin, code)
    overrides = load_user_models(overrides, "--set", code)
    data, overrides = merge_training_file(data, overrides, origin=origin)
    if "model" not in overrides:
        data = load_user_models(data, origin, code)
    data = _apply_model_change(data, overrides)
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    new_kind = overrides.get("strategy.kind")
    if is_strategy(new_kind) and isinstance(data.get("strategy"), dict):
        allowed = STRATEGIES[str(new_kind)].model_fields
        data["strategy"] = {key: value for key, value in data["strategy"].items() if key in allowed}
    if "strategy.config" in overrides and isinstance(data.get("strategy"), dict):
        if data["strategy"].get("kind", config_kind()) != config_kind():
            data["strategy"] = {}
        data["strategy"].pop("stage", None)
        data["strategy"].setdefault("kind", config_kind())
    for count_key, other_key in (("nodes", "gpus"), ("gpus", "nodes")):
        if count_key in overrides and other_key not in overrides:
            data.pop(other_key, None)
    if not {"nodes", "gpus"} & set(overrides) and _lists_nodes(overrides):
        for key in ("nodes", "gpus"):
            data.pop(key, None)
    return Experiment.of_data(_note_thousands(apply_overrides(data, overrides)), origin=origin)


def _note_thousands(data: dict[str, Any]) -> dict[str, Any]:
    """The data with a note where a length is written in thousands: "128k" is 128,000, and "128Ki" 131,072."""
    training = data.get("training")
    length = training.get(_LENGTH) if isinstance(training, Mapping) else None
    match = re.fullmatch(r"(\d+) ?([kKM])", length) if isinstance(length, str) else None
    if match is None:
        return data
    count, unit = int(match[1]), match[2].upper()
    decimal, binary = (f"{count * COUNTS[name]:,}" for name in (unit, f"{unit}i"))
    note = f"training.sequence_length {length} is {decimal} tokens; {count}{unit}i is {binary}"
    return {**data, "notes": [*data.get("notes", ()), note]}


def _lists_nodes(overrides: Mapping[str, Any]) -> bool:
    """Whether overrides choose a cluster that lists its nodes, and so says how many there are."""
    if "cluster.nodes" in overrides:
        return True
    name = overrides.get("cluster")
    if isinstance(name, Mapping):
        return "nodes" in name
    try:
        return isinstance(name, str) and "nodes" in cluster_tables(name)
    except InputError:
        return False  # told with the rest of what is wrong


def change_experiment(experiment: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """The experiment changed by dotted overrides."""
    dumped_keys = {"model", "cluster", "nodes", "gpus", "training", "strategy", "program"}
    dumped_keys |= {key.partition(".")[0] for key in overrides} & set(Experiment.model_fields)
    data = experiment.model_dump(exclude_unset=True, include=dumped_keys, context=AS_IN_FILES)
    new = build_experiment(data, overrides, origin="experiment")
    notes = (*experiment.notes, *new.notes) if "notes" not in dumped_keys else new.notes
    return experiment.model_copy(update={**{key: getattr(new, key) for key in dumped_keys}, "notes": notes})


def _make_relative(data: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    table: Any = data
    for key in keys[:-1]:
        table = table.get(key) if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(table.get(keys[-1]), str):
        candidate = folder / table[keys[-1]]
        if os.path.exists(candidate):  # False, too, for a command line too long to be a path
            table[keys[-1]] = str(candidate)


def _apply_model_change(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """File-shaped `data` for the new model of the dotted `overrides`, with a [training] that the new model
    can run.

    It also has notes of the settings that are kept. It is unchanged if no model is changed. Raises InputError
    for a model that cannot be read.
    """
    old, new = data.get("model"), overrides.get("model")
    training = data.get("training")
    if old is None or new is None or old == new or not isinstance(training, Mapping):
        return dict(data)
    kept_settings = {key: value for key, value in training.items() if f"training.{key}" not in overrides}
    if not kept_settings:
        return dict(data)
    notes = []
    length = kept_settings.get(_LENGTH)
    if isinstance(length, int):
        model = _load_model(new)
        longest = model.captured.sequence_length if model.captured else model.learned_positions
        is_wrong = longest is not None and (length > longest or (model.captured and length != longest))
        if is_wrong:
            training = {**training, _LENGTH: longest}
            kept_settings.pop(_LENGTH)
            reason = "was captured with that" if model.captured else "has no more learned positions"
            notes.append(f"sequence_length {length} becomes {longest}: '{model.name}' {reason}")
    if kept_settings:
        settings = ", ".join(f"{key} {format_setting(value)}" for key, value in kept_settings.items())
        notes.insert(
            0,
            f"{_model_name(new)} in place of {_model_name(old)}, with the same [training]: {settings}",
        )
    return {**data, "training": training, "notes": [*data.get("notes", ()), *notes]}


def _load_model(source: Any) -> ModelSpec:
    if isinstance(source, ModelSpec):
        return source
    source = extended_model(source, "model")
    return (
        model_from_config(source, "model", "experiment")
        if isinstance(source, dict)
        else load_named_model(source)
    )


def _model_name(model: Any) -> str:
    if isinstance(model, ModelSpec):
        return f"'{model.function or model.name}'"
    return f"'{model}'" if isinstance(model, str) else "the experiment's own"


_MAX_PARTS = 32
ExperimentSource = Experiment | Mapping[str, Any] | str | os.PathLike[str] | None


def experiment_of(
    spec: ExperimentSource,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str = "overrides",
    code: UserCode | None = None,
) -> Experiment:
    """The experiment that `spec` names, changed by dotted `overrides` (`"training.micro_batch_size"`).

    A path leads to an experiment or to another program's training file (DeepSpeed JSON, Accelerate YAML,
    torchtitan TOML, Megatron's script or recipe). A mapping has the shape of an experiment file. None is the
    README's example. `origin` names the overrides in errors, `code` is the permission to run the functions
    that files name. Raises InputError for anything else.
    """
    changes = {key: plain_table(value) for key, value in (overrides or {}).items()}
    if isinstance(spec, Experiment):
        return change_experiment(spec, changes) if changes else spec
    if isinstance(spec, Mapping):
        if not changes:
            return Experiment.of_data(spec)
        tables = {key: plain_table(value) for key, value in spec.items()}
        return build_experiment(tables, changes, origin="experiment")
    if spec is None:
        if is_training_file(changes.get("strategy.config")):
            return build_experiment({}, changes, origin=origin, code=code)
        return load_experiment(EXAMPLE, changes, origin=origin if changes else "example", code=code)
    if not isinstance(spec, str | os.PathLike):
        raise InputError(
            f"experiment: found {type(spec).__name__}, expected a path, a zsim.Experiment, or a dict in the "
            "shape of an experiment file"
        )
    path = Path(spec)
    if names_training_file(path):
        return build_experiment({}, _add_file(changes, path), origin=origin, code=code)
    return load_experiment(path, changes, code=code)


def plain_table(value: Any) -> Any:
    """A typed table (`zsim.Fsdp2(replicate=8)`) as the dict of the keys that it sets. Any other value is
    returned unchanged.
    """
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(exclude_unset=True)


def _add_file(overrides: dict[str, Any], path: Path) -> dict[str, Any]:
    """The overrides with the training file added. Raises InputError where neither the file nor the overrides
    name a model or cluster.
    """
    config = overrides.setdefault("strategy.config", str(path))
    if not is_training_file(config):
        config_file_of(config_kind()).require(config)
        for key in ("model", "cluster"):
            if key not in overrides:
                raise InputError(f"{path.name} names no {key}: give it (--{key})")
    return overrides


def parse_setting(text: str) -> tuple[str, Any]:
    """`training.precision=bf16` -> a dotted key and a value: TOML if it parses as TOML, else a string.

    Where only text may stand, a number is the text as written (`strategy.version=0.10`). `null` is None: it
    unsets the key. Raises InputError for text of another shape.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set {text}: expected KEY=VALUE, e.g. --set training.micro_batch_size=2")
    if key.count(".") > _MAX_PARTS:
        raise InputError(f"--set {key[:60]}...: found {key.count('.') + 1:,} parts, expected a few")
    value_text = value.strip()
    if value_text == NULL:
        return key, None
    try:
        parsed = parse_toml(f"value = {value}", f"--set {key[:60]}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value_text
    is_number = isinstance(parsed, int | float) and not isinstance(parsed, bool)
    return key, value_text if is_number and takes_text(key, Experiment) else parsed
