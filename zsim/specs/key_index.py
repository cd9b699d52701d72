"""Finds the tables that a table may hold, and the one that a misplaced key belongs to: `power_limit` of a
cluster is a key of its GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zsim.errors import nearest
from zsim.files import preset_table
from zsim.specs.lazy_model import LazyKinds, LazyModel

_MAX_DEPTH = 4  # tables in tables
_MAX_SUGGESTIONS = 6
_MIN_SIMILARITY = 0.8  # of spellings: a slip of the finger, not another word


def nearest_key(
    key: str,
    value: object,
    table: Sequence[str],
    model_type: type[BaseModel],
    *,
    prefix: str = "",
    strategy_keys: Collection[str] | None = None,
) -> str:
    """The end of an error message about a key that its `table` does not have.

    It names the one key of the table that begins with it ("sequence" of "sequence_parallel"), the key that
    another program's name of a setting means, the key of the table that is spelt like it, the tables of
    `model_type` that have such a key, or the key of the table that is spelt most like it. It is empty if
    there is none.

    `value` is the key's value. If it is a table with a single key, that key is corrected too. `prefix` begins
    the dotted keys of other tables in the message. Of the keys of `[strategy]` only `strategy_keys` are
    proposed, those of the kind at hand, or all without a kind. A model may name tables that its annotations
    do not show, by key, in `inner_tables()`.
    """

    def is_of_kind(segments: Sequence[str]) -> bool:
        return segments[0] != "strategy" or strategy_keys is None or segments[1] in strategy_keys

    longer = [name for name in table if name.startswith(f"{key}_")]
    if len(longer) == 1:
        return f"; did you mean '{longer[0]}'?"
    concept = concept_of(key)
    meant = [path.split(".") for path in concept.keys] if concept else []
    meant = [path for path in meant if first_unknown_segment(path, model_type) is None and is_of_kind(path)]
    if meant:
        return f"; did you mean '{prefix}{'.'.join(meant[0])}'?"
    close_match = nearest(key, table)
    if close_match and SequenceMatcher(None, key, close_match).ratio() >= _MIN_SIMILARITY:
        return f"; did you mean '{close_match}'?"
    all_paths = [
        path for path in dict.fromkeys(_dotted_keys(model_type)) if is_of_kind((*path.split("."), "kind"))
    ]
    paths = [path for path in all_paths if path.rpartition(".")[2] == key]
    if not paths and close_match:
        return f"; did you mean '{close_match}'?"
    if not paths:
        close_names = get_close_matches(
            key, [path.rpartition(".")[2] for path in all_paths], n=1, cutoff=_MIN_SIMILARITY
        )
        paths = [path for path in all_paths if path.rpartition(".")[2] in close_names]
    paths = list(_shallowest(paths))
    if isinstance(value, Mapping) and len(value) == 1:
        inner_paths = [_closest_inner_path(path, str(next(iter(value))), all_paths) for path in paths]
        paths = [path for path in inner_paths if path] or paths
    if not 0 < len(paths) <= _MAX_SUGGESTIONS:
        return ""
    names = [f"'{prefix}{path}'" for path in paths]
    return f"; did you mean {', '.join(names[:-1])}{' or ' if len(names) > 1 else ''}{names[-1]}?"


def _shallowest(paths: Sequence[str]) -> Iterator[str]:
    """The paths that are nearest to the top of their first table: `gpu.memory.bandwidth` rather than
    `gpu.decode.all_reduce.bandwidth`.
    """
    depths = [(path.partition(".")[0], path.count(".")) for path in paths]
    for path, (table, depth) in zip(paths, depths, strict=True):
        if all(depth <= level for name, level in depths if name == table):
            yield path


def first_unknown_segment(segments: list[str], model_type: type[BaseModel]) -> int | None:
    """The index of the first segment of a dotted key that its table does not have.

    None if every segment is known, or if it lies inside a value or a table with free keys.
    """
    annotations: list[Any] = [model_type]
    for index, segment in enumerate(segments):
        tables = [annotation for annotation in annotations if _is_table(annotation)]
        if not tables or len(tables) < len(annotations):
            return None
        if all(segment not in _keys(table) for table in tables):
            return index
        annotations = [inner for table in tables for inner in _value_types(table, segment)]
    return None


def keys_at(segments: list[str], model_type: type[BaseModel]) -> list[str]:
    """The keys of the table at a dotted key."""
    return [key for table in filter(_is_table, _types_at(segments, model_type)) for key in _keys(table)]


def _types_at(segments: Sequence[str], model_type: type[BaseModel]) -> list[Any]:
    """The types that the value at a dotted key may have."""
    types: list[Any] = [model_type]
    for segment in segments:
        types = [inner for table in filter(_is_table, types) for inner in _value_types(table, segment)]
    return types


def takes_text(dotted: str, model_type: type[BaseModel]) -> bool:
    """Whether the value of a dotted key can only be text, such as a release, a name or a fixed word."""
    values = _types_at(dotted.split("."), model_type)
    return bool(values) and all(value is str or _is_word(value) for value in values)


def _is_word(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and all(isinstance(word, str) for word in get_args(annotation))


def _closest_inner_path(path: str, key: str, all_paths: list[str]) -> str:
    """`path` with the key of its table that is spelt most like `key`. Empty if no key is close."""
    inner_names = [
        candidate.removeprefix(f"{path}.") for candidate in all_paths if candidate.startswith(f"{path}.")
    ]
    close_matches = get_close_matches(key, [name for name in inner_names if "." not in name], n=1)
    return f"{path}.{close_matches[0]}" if close_matches else ""


def _dotted_keys(model_type: type[BaseModel], prefix: str = "", depth: int = 0) -> Iterator[str]:
    """The dotted keys of all tables in `model_type`, without those of the items of lists."""
    for key in _keys(model_type):
        yield prefix + key
        if depth < _MAX_DEPTH:
            for inner in filter(_is_table, _value_types(model_type, key)):
                yield from _dotted_keys(inner, f"{prefix}{key}.", depth + 1)


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _keys(model_type: type[BaseModel]) -> list[str]:
    return [
        *(field.alias or name for name, field in model_type.model_fields.items()),
        *_hidden_tables(model_type),
    ]


def _value_types(model_type: type[BaseModel], key: str) -> list[Any]:
    """The types that the value of a key may have, without lists of tables."""
    hidden = _hidden_tables(model_type)
    return [hidden[key]] if key in hidden else types_at(model_type, key)


def _hidden_tables(model_type: type[BaseModel]) -> Mapping[str, Any]:
    inner_tables = getattr(model_type, "inner_tables", None)
    return inner_tables() if inner_tables is not None else {}


@dataclass(frozen=True, slots=True)
class Concept:
    """A subject that has other names elsewhere, an entry of `presets/concepts.toml`."""

    name: str
    words: tuple[str, ...]
    """Its names elsewhere, in small letters with underscores."""
    sentence: str
    keys: tuple[str, ...] = ()
    """Keys and tables of the experiment file, the nearest first."""
    see: tuple[str, ...] = ()
    """Commands that answer questions about it."""


@cache
def concepts() -> tuple[Concept, ...]:
    """All subjects, in the order of the file."""
    return tuple(
        Concept(
            name,
            tuple(entry["words"]),
            entry["sentence"],
            tuple(entry.get("keys", ())),
            tuple(entry.get("see", ())),
        )
        for name, entry in preset_table("concepts").items()
        if isinstance(entry, Mapping)
    )


def concept_of(word: str) -> Concept | None:
    """The subject that goes by a word, or None.

    Capitals, hyphens, underscores, spaces and the dashes of a flag do not matter.
    """
    spelling = _normalise(word)
    return next(
        (
            concept
            for concept in concepts()
            if any(spelling == _normalise(name) for name in (concept.name, *concept.words))
        ),
        None,
    )


def _normalise(word: str) -> str:
    return word.strip().lstrip("-").lower().replace("-", "").replace("_", "").replace(" ", "")


def types_at(annotation: Any, part: int | str) -> list[Any]:
    """The types that a value of type `annotation` may have at a key or an index. A union has several, and
    None is not among them.
    """
    arguments = get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
        return _members_of_field(fields[str(part)]) if part in fields else []
    origin = get_origin(annotation)
    if not isinstance(origin, type) or not arguments:
        return []
    if origin is tuple and arguments[-1] is not ... and isinstance(part, int):
        return members_of(arguments[part]) if part < len(arguments) else []
    if issubclass(origin, Mapping):
        return members_of(arguments[-1])
    return members_of(arguments[0]) if issubclass(origin, Collection) else []


def _members_of_field(field: FieldInfo) -> list[Any]:
    """The types of a key. pydantic keeps what `Annotated` says of a key beside its type."""
    tables = next((note.tables for note in field.metadata if isinstance(note, LazyKinds)), None)
    return members_of(field.annotation) if tables is None else list(tables.values())


def members_of(annotation: Any) -> list[Any]:
    """The members of a union without None, or the type itself."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        lazy_model = next((note for note in notes if isinstance(note, LazyModel) and note.module_path), None)
        return members_of(inner if lazy_model is None else lazy_model.load_class())
    if get_origin(annotation) in (Union, UnionType):
        inner = (members_of(argument) for argument in get_args(annotation) if argument is not NoneType)
        return [member for members in inner for member in members]
    return [annotation]
