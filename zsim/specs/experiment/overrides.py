"""Dotted overrides of an experiment: `training.precision`, and keys inside files that an experiment names.

 strategy.config.zero_optimization.reduce_bucket_size    a key of the framework's own file
 model.num_hidden_layers                                 a key of the model's config.json
 cluster.nvme.drives, cluster.gpu.memory.capacity        a number of the topology, of its GPU (gpu.*)

A file that an override reaches into is read, and its content replaces its name in the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.reading import NULL, restore_nulls
from zsim.specs.cluster.files import check_hardware_key
from zsim.specs.model.huggingface import model_from_config, read_model_config
from zsim.specs.strategy.registry import kinds_with, role_of


class ConfigFile:
    """A framework's own file.

    `CONFIG_FILE` in the module of a framework's role `config_file`. Other programs' files, of which the
    strategy is a part, are in `zsim.programs`.
    """

    noun: str
    """The file in sentences."""
    keys: tuple[str, ...] = ("strategy.config",)
    """Keys of an experiment that make its strategy the framework's."""

    def change(
        self, table: dict[str, Any], changes: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`[strategy]` with the content of the file as `config`, with the dotted keys of `changes` set in it.

        `overrides` are all that change the experiment.
        """
        raise NotImplementedError

    def require(self, path: str | Path) -> None:
        """Raises InputError for a file that is not of this kind."""
        raise NotImplementedError


def config_kind() -> str:
    """The kind of strategy that has a file of its own."""
    return kinds_with("config_file")[0]


def config_file_of(kind: str) -> ConfigFile:
    """The file of the framework of a kind."""
    file: ConfigFile = role_of(kind, "config_file", "CONFIG_FILE")
    return file


def change_config(
    strategy: Any, changes: Mapping[str, Any], overrides: Mapping[str, Any], *, prefix: str
) -> dict[str, Any]:
    """`[strategy]` with `changes` of the file that it names. Each stands behind `prefix` in the overrides.

    Raises InputError for a strategy that has no file.
    """
    table: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {}
    kind = config_kind()
    file = config_file_of(kind)
    if (requested := table.get("kind", kind)) != kind:
        raise InputError(
            f"--set {prefix}{next(iter(changes))}: is a key of {file.noun}, but strategy.kind is "
            f"'{requested}'; set {' or '.join(file.keys)} too, for kind '{kind}'"
        )
    return file.change({**table, "kind": kind}, changes, overrides)


_CONFIG = "strategy.config."
_MODEL = "model."
_CLUSTER = "cluster."


def apply_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """File-shaped `data` with dotted `overrides` applied.

    An override of None unsets its key. For a key of the model it writes null into the config.json. Raises
    InputError where a dotted key leads through something that is not a table.
    """
    new_data = _copy(data)
    nested_overrides: dict[str, dict[str, Any]] = {_CONFIG: {}, _MODEL: {}, _CLUSTER: {}}
    for key, value in overrides.items():
        dotted = f"cluster.{key}" if key.startswith("gpu.") else key
        if dotted.startswith(_CLUSTER):
            check_hardware_key(key, "--set ")
        prefix = next((prefix for prefix in nested_overrides if dotted.startswith(prefix)), None)
        if prefix is None:
            set_dotted_key(new_data, dotted, value)
        else:
            nested_overrides[prefix][dotted.removeprefix(prefix)] = value
    if nested_overrides[_MODEL]:
        model = extended_model(new_data.get("model"), "model")
        new_data["model"] = _change_model(model, nested_overrides[_MODEL], f"--set {_MODEL}")
    if nested_overrides[_CLUSTER]:
        new_data["cluster"] = _apply_cluster_overrides(new_data.get("cluster"), nested_overrides[_CLUSTER])
    if nested_overrides[_CONFIG]:
        new_data["strategy"] = change_config(
            new_data.get("strategy"), nested_overrides[_CONFIG], overrides, prefix=_CONFIG
        )
    return new_data


def extended_model(model: Any, where: str) -> Any:
    """A model as an experiment names it. A table that `extends` a preset, a Hub id or a config.json becomes
    the content of that config.json with the table's other keys in it. Anything else stays as it is.

    Raises InputError, which begins with `where`, for a key that nothing reads and for a table that is neither
    that nor a config.json.
    """
    if not isinstance(model, Mapping):
        return model
    if "extends" not in model:
        if not {"model_type", "text_config"} & set(model):
            keys = ", ".join(map(repr, list(model)[:3])) or "none"
            raise InputError(
                f'{where}: found a table with the keys {keys}; expected extends = "llama-3-8b" (a preset, a '
                "Hub id or a config.json) with the keys that differ, or all of a config.json with its "
                "'model_type'"
            )
        return model
    base = model["extends"]
    if not isinstance(base, str):
        raise InputError(f"{where}.extends: found {base!r}; expected a preset, a Hub id or a config.json")
    changes = {key: value for key, value in model.items() if key != "extends"}
    return _change_model(base, changes, f"{where}.")


def set_dotted_key(data: dict[str, Any], dotted: str, value: Any, *, prefix: str = "") -> None:
    """Set a dotted key. Missing or null tables on the path are created. None removes the key."""
    *parents, key = dotted.split(".")
    table = data
    for parent in parents:
        if table.get(parent) is None:
            table[parent] = {}
        table = table[parent]
        if not isinstance(table, dict):
            raise InputError(f"--set {prefix}{dotted}: '{parent}' is {table!r}, not a table")
    if not key:
        raise InputError(f"--set {prefix}{dotted}: the key ends in a dot")
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _change_model(base: Any, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The content of the model's config.json with `changes` by dotted keys.

    Raises InputError, which begins with `where`, for a key that nothing reads.
    """
    if isinstance(base, Mapping):
        config, name = _copy(base), str(base.get("_name_or_path", "model"))
    elif isinstance(base, str | Path):
        file_config, name, _ = read_model_config(base)
        config = _copy(file_config)
    else:
        raise InputError(f"{where}{next(iter(changes))}: there is no model to change")
    for key, value in changes.items():
        set_dotted_key(config, key, NULL if value is None else value, prefix=_MODEL)
    config = restore_nulls(config)
    config["_name_or_path"] = str(changes.get("_name_or_path", name))
    recorder = _RecordingConfig(config)
    model_from_config(recorder, config["_name_or_path"], "model")
    for key in changes:
        first = key.split(".")[0]
        if first not in recorder.keys_read and not first.startswith("_"):
            raise InputError(
                f"{where}{key}: says nothing about the shape of '{name}'"
                f"{did_you_mean(first, recorder.keys_read)}"
            )
    return config


def _apply_cluster_overrides(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster as tables on top of the file that it extends. The source of a changed table says that the
    user set it.
    """
    if isinstance(base, Mapping):
        tables = _copy(base)
    elif isinstance(base, str):
        tables = {"extends": base, "name": f"{Path(base).stem}, changed"}
    else:
        raise InputError(f"--set {_CLUSTER}{next(iter(changes))}: there is no cluster to change")
    nodes = tables.get("nodes", changes.get("nodes"))
    for key, value in changes.items():
        if nodes is not None and key.startswith("gpu."):
            raise InputError(
                f"--set {_CLUSTER}{key}: the cluster lists nodes of several types, each with its own GPU; "
                'change it there: cluster.nodes=[{gpu={extends="h100-sxm-80gb", power_limit="500 W"}}]'
            )
        if value is None and not _has_key(tables, key):
            raise InputError(
                f"--set {_CLUSTER}{key}=null: there is nothing to unset, the experiment does not say it; "
                "expected the value that it should have"
            )
        set_dotted_key(tables, key, value, prefix=_CLUSTER)
        if value is None:
            continue
        depth = 2 if key.startswith("gpu.") else 1
        segments = key.split(".")
        if len(segments) > depth:
            table = tables[segments[0]] if depth == 1 else tables[segments[0]][segments[1]]
            source_note = f"set by the user: {_CLUSTER}{key} = {value}"
            old_source = table.get("source")
            if key.endswith((".source", ".evidence")):
                continue
            table["source"] = f"{old_source}; {source_note}" if old_source else source_note
            table.setdefault("evidence", "assumed")
    return tables


def _has_key(tables: Mapping[str, Any], dotted: str) -> bool:
    """Whether there is a value at a dotted key."""
    *parents, key = dotted.split(".")
    table: Any = tables
    for parent in parents:
        table = table.get(parent) if isinstance(table, Mapping) else None
    return isinstance(table, Mapping) and key in table


class _RecordingConfig(dict[str, Any]):
    """A config that records which keys are looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(entry) if isinstance(entry, Mapping) else entry for key, entry in table.items()}
