"""Read an experiment from any form that callers pass: a file, tables, the object, or nothing for the README's
example.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import EXAMPLE
from zsim.reading import NULL, parse_toml
from zsim.specs.experiment.load import build_experiment, change_experiment, load_experiment
from zsim.specs.experiment.overrides import config_file_of, config_kind
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.detect import is_training_file, names_training_file
from zsim.specs.key_index import takes_text
from zsim.specs.user_code import UserCode

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
