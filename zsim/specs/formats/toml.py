"""An experiment as the TOML that `load_experiment` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zsim.specs.experiment.tables import Experiment


def experiment_toml(experiment: Experiment, comment: str = "") -> str:
    """What the experiment says and is not a default; every line of `comment` stands above it."""
    data = experiment.model_dump(exclude_defaults=True)
    data["strategy"] = {"kind": experiment.strategy.kind, **data.get("strategy", {})}
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, *toml_lines(data)]) + "\n"


def toml_lines(data: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Scalars first, then tables; None is left out, as TOML has nothing for it."""
    for key, value in data.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in data.items():
        if isinstance(value, Mapping):
            name = f"{path}.{_key(key)}" if path else _key(key)
            yield ""
            yield f"[{name}]"
            yield from toml_lines(value, name)


def _key(key: str | int) -> str:
    name = str(key)
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def toml_value(value: Any) -> str:
    """A scalar, a list or an inline table."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml_value(entry)}" for key, entry in value.items()) + " }"
    return repr(value)
