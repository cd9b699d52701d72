"""Finds the table that a misplaced key belongs to: `power_limit` of a cluster is a key of its GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from zsim.errors import nearest
from zsim.specs.tables_within import behind

_MAX_DEPTH = 4  # tables in tables
_MAX_NAMED = 5
_ALIKE = 0.8  # of spellings: a slip of the finger, not another word


def nearest_key(
    key: str, value: object, table: Sequence[str], model_type: type[BaseModel], *, prefix: str = ""
) -> str:
    """The end of an error message about a key that its `table` does not have.

    It names the key of the table that is spelt most like it, the tables of `model_type` that have such a key,
    or both. It is empty if there is neither.

    `value` is the key's value. If it is a table with a single key, that key is corrected too. `prefix` begins
    the dotted keys of other tables in the message. A model may name tables that its annotations do not show,
    by key, in `inner_tables()`.
    """
    near = nearest(key, table)
    if near and SequenceMatcher(None, key, near).ratio() >= _ALIKE:
        return f"; did you mean '{near}'?"
    every = list(dict.fromkeys(_places(model_type)))
    found = [path for path in every if path.rpartition(".")[2] == key]
    if not found and near:
        return f"; did you mean '{near}'?"
    if not found:
        alike = get_close_matches(key, [path.rpartition(".")[2] for path in every], n=1, cutoff=_ALIKE)
        found = [path for path in every if path.rpartition(".")[2] in alike]
    if isinstance(value, Mapping) and len(value) == 1:
        inner = [_deeper(path, str(next(iter(value))), every) for path in found]
        found = [path for path in inner if path] or found
    if not 0 < len(found) <= _MAX_NAMED:
        return ""
    names = [f"'{prefix}{path}'" for path in found] + ([f"'{near}'"] if near else [])
    return f"; did you mean {', '.join(names[:-1])}{' or ' if len(names) > 1 else ''}{names[-1]}?"


def first_unknown(parts: list[str], model_type: type[BaseModel]) -> int | None:
    """The index of the first segment of a dotted key that its table does not have.

    None if every segment is known, or if it lies inside a value or a table with free keys.
    """
    choices: list[Any] = [model_type]
    for number, part in enumerate(parts):
        tables = [one for one in choices if _is_table(one)]
        if not tables or len(tables) < len(choices):
            return None
        if all(part not in _keys(table) for table in tables):
            return number
        choices = [choice for table in tables for choice in _inside(table, part)]
    return None


def keys_at(parts: list[str], model_type: type[BaseModel]) -> list[str]:
    """The keys of the table at a dotted key."""
    choices: list[Any] = [model_type]
    for part in parts:
        choices = [choice for table in filter(_is_table, choices) for choice in _inside(table, part)]
    return [key for table in filter(_is_table, choices) for key in _keys(table)]


def takes_text(dotted: str, model_type: type[BaseModel]) -> bool:
    """Whether the value of a dotted key can only be text, such as a release, a name or a fixed word."""
    *parents, key = dotted.split(".")
    choices: list[Any] = [model_type]
    for part in parents:
        choices = [choice for table in filter(_is_table, choices) for choice in _inside(table, part)]
    values = [value for table in filter(_is_table, choices) for value in _inside(table, key)]
    return bool(values) and all(value is str or _is_word(value) for value in values)


def _is_word(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(word, str) for word in get_args(annotation))


def _deeper(path: str, key: str, every: list[str]) -> str:
    """`path` with the key of its table that is spelt most like `key`. Empty if no key is close."""
    inner = [one.removeprefix(f"{path}.") for one in every if one.startswith(f"{path}.")]
    near = get_close_matches(key, [one for one in inner if "." not in one], n=1)
    return f"{path}.{near[0]}" if near else ""


def _places(model_type: type[BaseModel], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """The dotted keys of all tables in `model_type`, without those of the items of lists."""
    for key in _keys(model_type):
        yield prefix + key
        if depth < _MAX_DEPTH:
            for inner in filter(_is_table, _inside(model_type, key)):
                yield from _places(inner, f"{prefix}{key}.", depth + 1)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _keys(model_type: type[BaseModel]) -> list[str]:
    return [*(field.alias or name for name, field in model_type.model_fields.items()), *_hidden(model_type)]


def _inside(model_type: type[BaseModel], key: str) -> list[Any]:
    """The types that the value of a key may have, without lists of tables."""
    hidden = _hidden(model_type)
    return [hidden[key]] if key in hidden else behind(model_type, key)


def _hidden(model_type: type[BaseModel]) -> Mapping[str, Any]:
    tables = getattr(model_type, "inner_tables", None)
    return tables() if tables is not None else {}
