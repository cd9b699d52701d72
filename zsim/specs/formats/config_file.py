"""Files of values by key, as YAML, JSON or TOML."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_json, parse_toml, read_user_text
from zsim.specs.formats.safe_yaml import content_kind, load_yaml
from zsim.specs.formats.training_file import TrainingFile


def load_file(path: Path, notes: list[str] | None = None) -> Any:
    """The content of a YAML, JSON or TOML. Raises InputError for a file that is missing or damaged."""
    text = read_user_text(path)
    parse = {".json": parse_json, ".toml": parse_toml}.get(path.suffix.lower())
    if parse is None:
        return load_yaml(text, str(path), notes)
    try:
        return parse(text, path)
    except ValueError as error:
        kind = path.suffix[1:].upper()
        raise InputError(f"{path}: is not valid {kind}: {error}") from None


def load_table(path: Path, notes: list[str] | None = None) -> Mapping[str, Any]:
    """The content of a file with keys at the top. Raises InputError for any other file."""
    data = load_file(path, notes)
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: {content_kind(data)}; expected keys and values at the top")
    return data


def change_values(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with values set at dotted keys. A value in the way of a table is replaced by it."""
    changed = dict(data)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        table = changed
        for parent in parents:
            below = table.get(parent)
            table[parent] = dict(below) if isinstance(below, Mapping) else {}
            table = table[parent]
        table[last] = value
    return changed


def flatten(
    data: Mapping[str, Any], kept: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values in nested tables. Tables at `kept` keys, and empty ones, stay."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in kept:
            yield from flatten(value, kept, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_file(
    path: str,
    read_values: Callable[[str, Mapping[str, Any]], TrainingFile],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingFile:
    """The settings in the file at `path`, whose content `read_values` reads by key.

    `changes` of its values by dotted keys are as options behind it have them. Notes say which keys stand
    twice. Raises InputError for a file without keys.
    """
    repeats: list[str] = []
    file = read_values(path, change_values(load_table(Path(path), repeats), changes))
    file.notes = [*(f"{path}: {repeat}" for repeat in repeats), *file.notes]
    return file
