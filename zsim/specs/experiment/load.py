"""Experiments read from files, and changed by dotted overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.reading import with_nulls
from zsim.specs.cluster.files import cluster_tables, read_toml
from zsim.specs.experiment.model_change import with_model
from zsim.specs.experiment.overrides import with_overrides
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import with_training_file
from zsim.specs.own_code import OwnCode, with_models
from zsim.specs.strategy.tables import STRATEGIES, is_strategy
from zsim.units import AS_IN_FILES


def load_experiment(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str | None = None,
    code: OwnCode | None = None,
) -> Experiment:
    """Read an experiment file. `overrides` are dotted keys (`"training.precision"`) that replace its values.

    Paths in the file are relative to the file, paths in overrides to the working directory. `origin` is the
    prefix of error messages, by default the file's name. `code` is the permission to run functions that are
    named as models, see [Note: who may run code].
    """
    path = Path(path)
    data = located(read_toml(path), path.parent)
    if "model" not in data and {"axes", "zip"} & set(data):
        raise InputError(f"{path.name}: is a study, not an experiment; zsim sweep runs it")
    return experiment_from(data, overrides or {}, origin=origin or path.name, code=code)


_PATHS = (
    ("model",),
    ("cluster",),
    ("cluster", "extends"),
    ("strategy", "config"),
    ("training", "lora", "config"),
    ("training", "lengths", "file"),
)


def located(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """File-shaped data as a file in `folder` means it.

    Paths that lead to a file from there are joined with `folder`, and "null" in the content of another
    program's file becomes None.
    """
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    if isinstance(data.get("model"), dict):
        data["model"] = with_nulls(data["model"])
    strategy = data.get("strategy")
    if isinstance(strategy, dict) and isinstance(strategy.get("config"), dict):
        strategy["config"] = with_nulls(strategy["config"])
    for keys in _PATHS:
        _make_relative(data, keys, folder)
    return data


def experiment_from(
    data: dict[str, Any], overrides: Mapping[str, Any], *, origin: str, code: OwnCode | None = None
) -> Experiment:
    """An experiment from file-shaped data and dotted overrides.

    Overriding `strategy.kind` drops the keys of the old kind. Overriding `nodes` drops the file's `gpus`, and
    the other way round. A cluster that lists its nodes drops both. Overriding `model` keeps [training], see
    `zsim.specs.experiment.model_change`. If `strategy.config` is another program's training file, the file's
    content replaces it.
    """
    if "model" not in overrides:
        data = with_models(data, origin, code)
    overrides = with_models(overrides, "--set", code)
    data, overrides = with_training_file(data, overrides, origin=origin)
    if "model" not in overrides:
        data = with_models(data, origin, code)
    data = with_model(data, overrides)
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    new_kind = overrides.get("strategy.kind")
    if is_strategy(new_kind) and isinstance(data.get("strategy"), dict):
        allowed = STRATEGIES[str(new_kind)].model_fields
        data["strategy"] = {key: value for key, value in data["strategy"].items() if key in allowed}
    if "strategy.config" in overrides and isinstance(data.get("strategy"), dict):
        if data["strategy"].get("kind", "deepspeed") != "deepspeed":
            data["strategy"] = {}
        data["strategy"].pop("stage", None)
        data["strategy"].setdefault("kind", "deepspeed")
    for one, other in (("nodes", "gpus"), ("gpus", "nodes")):
        if one in overrides and other not in overrides:
            data.pop(other, None)
    if not {"nodes", "gpus"} & set(overrides) and _lists_nodes(overrides):
        for key in ("nodes", "gpus"):
            data.pop(key, None)
    return Experiment.of_data(with_overrides(data, overrides), origin=origin)


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


def changed(experiment: Experiment, overrides: Mapping[str, Any]) -> Experiment:
    """The experiment changed by dotted overrides."""
    own = {"model", "cluster", "nodes", "gpus", "training", "strategy", "program"}
    own |= {key.partition(".")[0] for key in overrides} & set(Experiment.model_fields)
    data = experiment.model_dump(exclude_unset=True, include=own, context=AS_IN_FILES)
    new = experiment_from(data, overrides, origin="experiment")
    notes = (*experiment.notes, *new.notes) if "notes" not in own else new.notes
    return experiment.model_copy(update={**{key: getattr(new, key) for key in own}, "notes": notes})


def _make_relative(data: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    table: Any = data
    for key in keys[:-1]:
        table = table.get(key) if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(table.get(keys[-1]), str):
        candidate = folder / table[keys[-1]]
        if os.path.exists(candidate):  # False, too, for a command line too long to be a path
            table[keys[-1]] = str(candidate)
