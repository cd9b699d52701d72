"""Dotted overrides of an experiment: `training.precision`, and keys inside files that an experiment names.

 strategy.config.zero_optimization.reduce_bucket_size    a key of the DeepSpeed JSON, or of `stage`'s default
 model.num_hidden_layers                                 a key of the model's config.json
 cluster.nvme.drives, cluster.gpu.memory.capacity        a number of the topology, of its GPU (gpu.*)

A file that an override reaches into is read, and its content replaces its name in the experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.reading import NULL, with_nulls
from zsim.specs.cluster.files import check_hardware_key
from zsim.specs.model.huggingface import model_from_config, read_model_config
from zsim.specs.strategy.deepspeed.text import load_object
from zsim.specs.strategy.deepspeed.zero_schema import ZeroBlock

_CONFIG = "strategy.config."
_MODEL = "model."
_CLUSTER = "cluster."
# With a stage alone, batch size and precision are the experiment's, or as Hugging Face fills "auto".
_FROM_STAGE = {"train_micro_batch_size_per_gpu": "auto"}
_AUTO_PRECISION = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def with_overrides(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """File-shaped `data` with dotted `overrides` applied.

    An override of None unsets its key. For a key of the model it writes null into the config.json. Raises
    InputError where a dotted key leads through something that is not a table.
    """
    changed = _copy(data)
    deeper: dict[str, dict[str, Any]] = {_CONFIG: {}, _MODEL: {}, _CLUSTER: {}}
    for given, value in overrides.items():
        dotted = f"cluster.{given}" if given.startswith("gpu.") else given
        if dotted.startswith(_CLUSTER):
            check_hardware_key(given, "--set ")
        prefix = next((prefix for prefix in deeper if dotted.startswith(prefix)), None)
        if prefix is None:
            put(changed, dotted, value)
        else:
            deeper[prefix][dotted.removeprefix(prefix)] = value
    if deeper[_MODEL]:
        changed["model"] = _model(changed.get("model"), deeper[_MODEL])
    if deeper[_CLUSTER]:
        changed["cluster"] = _cluster(changed.get("cluster"), deeper[_CLUSTER])
    if deeper[_CONFIG]:
        changed["strategy"] = _with_config(changed.get("strategy"), deeper[_CONFIG], overrides)
    return changed


def put(data: dict[str, Any], dotted: str, value: Any, *, prefix: str = "") -> None:
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


def _with_config(strategy: Any, changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`[strategy]` with the content of the DeepSpeed JSON as `config`, with `changes` applied."""
    table: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {}
    first = _CONFIG + next(iter(changes))
    kind = table.get("kind", "deepspeed")
    if kind != "deepspeed":
        raise InputError(
            f"--set {first}: is a key of DeepSpeed's JSON, but strategy.kind is '{kind}'; "
            "set strategy.stage or strategy.config too, for kind 'deepspeed'"
        )
    table["kind"] = "deepspeed"
    base = table.get("config")
    if base is None:
        config: dict[str, Any] = dict(_FROM_STAGE)
        if not any(key.split(".")[0] in ("bf16", "fp16", "bfloat16") for key in changes):
            config |= _copy(_AUTO_PRECISION)
        if table.get("stage") is not None:
            config["zero_optimization"] = {"stage": table["stage"]}
        name = "DeepSpeed config"
    else:
        name, config = load_object(base, table.get("config_name"))
    for key, value in changes.items():
        path = _spelt_as_in(config, key)
        put(config, path, value, prefix=_CONFIG)
        if key == "zero_optimization.stage" and "strategy.stage" not in overrides:
            table.pop("stage", None)
    return {**table, "config": config, "config_name": name}


def _spelt_as_in(config: Mapping[str, Any], key: str) -> str:
    """`key` in the spelling that the JSON already uses: `stage3_x` or `x`, `bfloat16` or `bf16`."""
    block, _, rest = key.partition(".")
    if block in ("bf16", "bfloat16"):
        return f"{'bfloat16' if 'bfloat16' in config else 'bf16'}.{rest}" if rest else block
    zero = config.get(block)
    if block != "zero_optimization" or not isinstance(zero, Mapping):
        return key
    for bare, info in ZeroBlock.model_fields.items():
        if rest in (bare, info.alias):
            used = next((spelling for spelling in (bare, info.alias) if spelling in zero), rest)
            return f"{block}.{used}"
    return key


def _model(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the model's config.json with `changes` applied. A key that nothing reads is an error."""
    if isinstance(base, Mapping):
        config, name = _copy(base), str(base.get("_name_or_path", "model"))
    elif isinstance(base, str | Path):
        read, name, _ = read_model_config(base)
        config = _copy(read)
    else:
        raise InputError(f"--set {_MODEL}{next(iter(changes))}: there is no model to change")
    for key, value in changes.items():
        put(config, key, NULL if value is None else value, prefix=_MODEL)
    config = with_nulls(config)
    config["_name_or_path"] = name
    asked = _Asked(config)
    model_from_config(asked, name, "model")
    for key in changes:
        first = key.split(".")[0]
        if first not in asked.keys_read:
            raise InputError(
                f"--set {_MODEL}{key}: says nothing about the shape of '{name}'"
                f"{did_you_mean(first, asked.keys_read)}"
            )
    return config


def _cluster(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
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
        if value is None and not _has(tables, key):
            raise InputError(
                f"--set {_CLUSTER}{key}=null: there is nothing to unset, the experiment does not say it; "
                "expected the value that it should have"
            )
        put(tables, key, value, prefix=_CLUSTER)
        if value is None:
            continue
        depth = 2 if key.startswith("gpu.") else 1
        parts = key.split(".")
        if len(parts) > depth:
            table = tables[parts[0]] if depth == 1 else tables[parts[0]][parts[1]]
            said = f"set by the user: {_CLUSTER}{key} = {value}"
            before = table.get("source")
            if key.endswith((".source", ".evidence")):
                continue
            table["source"] = f"{before}; {said}" if before else said
            table.setdefault("evidence", "assumed")
    return tables


def _has(tables: Mapping[str, Any], dotted: str) -> bool:
    """Whether there is a value at a dotted key."""
    *parents, key = dotted.split(".")
    table: Any = tables
    for parent in parents:
        table = table.get(parent) if isinstance(table, Mapping) else None
    return isinstance(table, Mapping) and key in table


class _Asked(dict[str, Any]):
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
