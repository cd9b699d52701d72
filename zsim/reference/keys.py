"""Every key of a file, as entries to look up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.errors import InputError, did_you_mean, nearest
from zsim.reference.files import FILES, Schema, schema_of
from zsim.specs.experiment.programs import config_mappings, readable_programs
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.key_index import Concept
from zsim.specs.strategy.registry import framework_of, kinds_in_order

_NAME = "NAME"
_WORD = re.compile(r"[a-z0-9]+")
_FOREIGN_TABLES = ("config",)  # tables of another program's file


@dataclass(frozen=True, slots=True)
class FileKey:
    """One key of a file."""

    file: str
    path: str
    """The key as `--set` takes it, "NAME" for a name that the user chooses."""
    type: str
    sentence: str
    default: str = ""
    """The default as the file would say it, "" where it depends on the other keys of the file."""
    is_required: bool = False
    allowed: tuple[str, ...] = ()
    """Its values, or the limits of a number."""
    of: tuple[str, ...] = ()
    """The values of `kind` that it belongs to, () for all."""
    frameworks: tuple[str, ...] = ()
    """The kinds of `[strategy]` that read it, () for all."""
    elsewhere: tuple[tuple[str, str], ...] = ()
    """(program, how the setting is written there)."""

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def table(self) -> str:
        """The table that the key stands in, or "" for keys before the first table."""
        return self.path.rpartition(".")[0]


def keys_of(file: str) -> tuple[FileKey, ...]:
    """The keys of a kind of file, in the order of its tables.

    Raises InputError for a kind of file that there is not.
    """
    schema = schema_of(file)
    keys: dict[str, FileKey] = {}
    for key in _walk_keys(schema, schema, file, ""):
        previous = keys.get(key.path)
        keys[key.path] = key if previous is None else _merge_keys(previous, key)
    if file != "experiment":
        return tuple(keys.values())
    mappings = _mappings_by_path()
    return tuple(
        replace(key, elsewhere=_other_programs(key, mappings.get(key.path, ()))) for key in keys.values()
    )


def all_keys_of_files() -> list[FileKey]:
    """The keys of all kinds of files."""
    return [key for file in FILES for key in keys_of(file)]


def find_keys(query: str, all_keys: Sequence[FileKey] | None = None) -> tuple[FileKey, ...]:
    """The keys of `all_keys` (left out: of all kinds of files) that are meant by a full path, by its end, or
    by the name of a table.

    Keys of a topology are also found as `--set` has them, after "cluster.". Raises InputError, with the
    nearest keys, if there are none.
    """
    all_keys = all_keys_of_files() if all_keys is None else all_keys
    wanted_path = query.strip().strip("[]").removeprefix("cluster.")
    for matches in (
        [key for key in all_keys if key.path == wanted_path],
        [
            key
            for key in all_keys
            if key.path.startswith((f"{wanted_path}.", f"{wanted_path}[].", f"gpu.{wanted_path}."))
        ],
        [key for key in all_keys if key.path.endswith(f".{wanted_path}")],
        [key for key in all_keys if f".{wanted_path}." in key.path],
        [key for key in all_keys if key.name in _FOREIGN_TABLES and wanted_path.startswith(f"{key.path}.")],
    ):
        if matches:
            return tuple(matches)
    paths = [key.path for key in all_keys if _shares_words(wanted_path, key.path)]
    names = [key.name for key in all_keys if _shares_words(wanted_path, key.name)]
    name = nearest(wanted_path, names) if "." not in wanted_path else None
    if name is not None:  # a bare name is compared with names, which a table before them would lengthen
        paths = [key.path for key in all_keys if key.name == name]
        raise InputError(f"no key is called '{query}'; did you mean '{paths[0]}'?")
    hint = did_you_mean(wanted_path, paths) or did_you_mean(wanted_path.rsplit(".", 1)[-1], names)
    raise InputError(f"no key is called '{query}'{hint or '; `zsim explain` lists all tables'}")


def _shares_words(query: str, path: str) -> bool:
    """Whether each word of a query is spelt like a word of the key: `kv_cache` is not meant by
    `write_cache`.
    """
    words = _WORD.findall(path.lower())
    return all(nearest(word, words) for word in _WORD.findall(query.lower()))


def explained_keys(query: str, concept: Concept | None) -> tuple[FileKey, ...]:
    """The keys of a query, or else those of the concept that it names, in the concept's order.

    Raises InputError if there are neither.
    """
    all_keys = all_keys_of_files()
    try:
        return find_keys(query, all_keys)
    except InputError:
        if concept is None:
            raise
        return tuple(key for path in concept.keys for key in find_keys(path, all_keys))


def _walk_keys(
    node: Schema, root: Schema, file: str, prefix: str, kinds: tuple[str, ...] = ()
) -> Iterator[FileKey]:
    """The keys of a table, and of the tables in it."""
    required = node.get("required", ())
    for name, property_schema in node.get("properties", {}).items():
        value = _follow_reference(property_schema, root)
        path = f"{prefix}{name}"
        choices = value.get("oneOf")
        if choices:
            yield from _kinds(choices, root, file, path)
            continue
        inner, suffix = _nested_table(value, root)
        if inner is None or name in _FOREIGN_TABLES:
            yield _key(file, path, value, root, name in required, kinds)
            continue
        if suffix or value.get("anyOf"):
            yield _key(file, path, value, root, name in required, kinds)
        yield from _walk_keys(inner, root, file, f"{path}{suffix}.", kinds)


def _kinds(choices: Sequence[Schema], root: Schema, file: str, path: str) -> Iterator[FileKey]:
    """The keys of a table whose `kind` says which keys it has."""
    for choice in choices:
        table = _follow_reference(choice, root)
        kind = str(table["properties"]["kind"].get("const"))
        yield from _walk_keys(table, root, file, f"{path}.", (kind,))


def _merge_keys(first: FileKey, second: FileKey) -> FileKey:
    """One entry for a key of several kinds. Sentences and defaults that differ are listed with their kind."""
    allowed = tuple(dict.fromkeys((*first.allowed, *second.allowed)))
    sentence = first.sentence
    if second.sentence not in first.sentence:
        sentence = f"{first.sentence}; {second.of[-1]}: {second.sentence}" if second.of else first.sentence
    default = first.default
    if second.default != first.default and second.of:
        default = (
            f"{first.default or 'as the rest says'}; {second.of[-1]}: {second.default or 'as the rest says'}"
        )
    return replace(first, of=(*first.of, *second.of), allowed=allowed, sentence=sentence, default=default)


def _follow_reference(node: Schema, root: Schema) -> Schema:
    """The node with its reference followed. The node's entries win, but for a table's description."""
    reference = node.get("$ref")
    if reference is None:
        return node
    target = root["$defs"][reference.rsplit("/", 1)[-1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _nested_table(value: Schema, root: Schema) -> tuple[Schema | None, str]:
    """The table that a value is, and what follows its path: ".NAME" for tables by name, "[]" for a list of
    them.

    None for a plain value.
    """
    options = [_follow_reference(option, root) for option in value.get("anyOf", ())]
    for option in (value, *options):
        if "properties" in option:
            return option, ""
        value_schema = option.get("additionalProperties")
        if isinstance(value_schema, dict):
            inner, suffix = _nested_table(_follow_reference(value_schema, root), root)
            if inner is not None:
                return inner, f".{_NAME}{suffix}"
        items = option.get("items")
        if isinstance(items, dict):
            inner, suffix = _nested_table(_follow_reference(items, root), root)
            if inner is not None:
                return inner, f"[]{suffix}"
    return None, ""


def _key(
    file: str, path: str, value: Schema, root: Schema, is_required: bool, kinds: tuple[str, ...]
) -> FileKey:
    return FileKey(
        file=file,
        path=path,
        type=_type(value, root),
        sentence=str(value.get("description", "")),
        default=_format_default(value["default"]) if "default" in value else "",
        is_required=is_required,
        allowed=_allowed(value, root),
        of=kinds,
        frameworks=frameworks_of(path) if file == "experiment" else (),
    )


_TYPE_WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "table",
    "array": "list",
}


def _type(value: Schema, root: Schema) -> str:
    """A value's type in words. For a quantity, its unit."""
    if "anyOf" in value:
        options = (_type(_follow_reference(option, root), root) for option in value["anyOf"])
        return " or ".join(dict.fromkeys(options))
    if "format" in value:
        return str(value["format"])
    if "const" in value or "enum" in value:
        return "one of"
    kind = str(value.get("type", "value"))
    if kind == "array" and isinstance(value.get("items"), dict):
        return f"list of {_type(_follow_reference(value['items'], root), root)}"
    value_schema = value.get("additionalProperties")
    if kind == "object" and isinstance(value_schema, dict):
        return f"{_type(_follow_reference(value_schema, root), root)} by name"
    return _TYPE_WORDS.get(kind, "text")


_LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _allowed(value: Schema, root: Schema) -> tuple[str, ...]:
    """The values of a key, or the limits of a number."""
    if "const" in value:
        return (_format_default(value["const"]),)
    if "enum" in value:
        return tuple(_format_default(option) for option in value["enum"])
    texts = [f"{word} {_format_limit(value[name])}" for name, word in _LIMITS.items() if name in value]
    for option in value.get("anyOf", ()):
        texts += _allowed(_follow_reference(option, root), root)
    items = value.get("items")
    if isinstance(items, dict) and "enum" in items:
        texts += _allowed(items, root)
    return tuple(dict.fromkeys(texts))


def _format_limit(limit: float) -> str:
    """A whole number in full, but for one of many digits: 134,217,728, 0.5, 1e+15."""
    return f"{limit:,.0f}" if limit == int(limit) and abs(limit) < 10**12 else f"{limit:g}"


def _format_default(value: object) -> str:
    """A default as a file says it. An empty table or list is "none"."""
    if isinstance(value, Mapping | list | tuple) and not value:
        return "none"
    return json.dumps(value)


def _mappings_by_path() -> dict[str, list[tuple[str, ConfigMapping]]]:
    """By key of an experiment, the name of each program with a setting for it in a file, and the setting."""
    mappings: dict[str, list[tuple[str, ConfigMapping]]] = {}
    for name, program in readable_programs().items():
        for row in config_mappings(name):
            if row.location == "file" and row.instruction not in ("always", "never"):
                mappings.setdefault(row.key, []).append((program.title, row))
    return mappings


def _other_programs(
    key: FileKey, mappings: Sequence[tuple[str, ConfigMapping]]
) -> tuple[tuple[str, str], ...]:
    """How the same setting is written for other programs, in their words. `mappings` are those of its
    path.
    """
    ways_per_program: dict[str, list[str]] = {}
    for program, row in mappings:
        if not row.kinds or not key.of or set(row.kinds) & set(key.of):
            spellings = ways_per_program.setdefault(program, [])
            if row.instruction not in spellings:
                spellings.append(row.instruction)
    return tuple((program, "; ".join(spellings)) for program, spellings in ways_per_program.items())


def frameworks_of(path: str) -> tuple[str, ...]:
    """The frameworks that read the key at `path`, or () where all do."""
    kinds = kinds_in_order()
    unread = {path, path.rpartition(".")[0]}
    readers = tuple(kind for kind in kinds if not unread & framework_of(kind).unread_keys)
    return () if readers == kinds else readers
