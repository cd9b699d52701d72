"""Every key of a file, as entries to look up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zsim.dataclass import dataclass
from zsim.errors import InputError, did_you_mean
from zsim.reference.files import FILES, Schema, schema_of
from zsim.reference.frameworks import frameworks_of
from zsim.specs.experiment.programs import NAMES, TELLINGS

_NAME = "NAME"
_FREE = ("config",)  # tables of another program's file


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
    found: dict[str, FileKey] = {}
    for key in _walk(schema, schema, file, ""):
        before = found.get(key.path)
        found[key.path] = key if before is None else _merged(before, key)
    return tuple(replace(key, elsewhere=_elsewhere(key)) for key in found.values())


def find_keys(asked: str) -> tuple[FileKey, ...]:
    """The keys that are meant by a full path, by its end, or by the name of a table.

    Keys of a topology are also found as `--set` has them, after "cluster.". Raises InputError, with the
    nearest keys, if there are none.
    """
    every = [key for file in FILES for key in keys_of(file)]
    wanted = asked.strip().strip("[]").removeprefix("cluster.")
    for matches in (
        [key for key in every if key.path == wanted],
        [key for key in every if key.path.startswith((f"{wanted}.", f"{wanted}[].", f"gpu.{wanted}."))],
        [key for key in every if key.path.endswith(f".{wanted}")],
        [key for key in every if f".{wanted}." in key.path],
    ):
        if matches:
            return tuple(matches)
    paths = [key.path for key in every]
    names = [key.name for key in every]
    hint = did_you_mean(wanted, paths) or did_you_mean(wanted.rsplit(".", 1)[-1], names)
    raise InputError(f"no key is called '{asked}'{hint or '; `zsim explain` lists all tables'}")


def _walk(node: Schema, root: Schema, file: str, prefix: str, of: tuple[str, ...] = ()) -> Iterator[FileKey]:
    """The keys of a table, and of the tables in it."""
    required = node.get("required", ())
    for name, given in node.get("properties", {}).items():
        value = _resolved(given, root)
        path = f"{prefix}{name}"
        choices = value.get("oneOf")
        if choices:
            yield from _kinds(choices, value, root, file, path)
            continue
        inner, suffix = _table_in(value, root)
        if inner is None or name in _FREE:
            yield _key(file, path, value, root, name in required, of)
            continue
        if suffix or value.get("anyOf"):
            yield _key(file, path, value, root, name in required, of)
        yield from _walk(inner, root, file, f"{path}{suffix}.", of)


def _kinds(choices: Sequence[Schema], value: Schema, root: Schema, file: str, path: str) -> Iterator[FileKey]:
    """The keys of a table whose `kind` says which keys it has."""
    for choice in choices:
        table = _resolved(choice, root)
        kind = str(table["properties"]["kind"].get("const"))
        yield from _walk(table, root, file, f"{path}.", (kind,))


def _merged(one: FileKey, other: FileKey) -> FileKey:
    """One entry for a key of several kinds. Sentences and defaults that differ are listed with their kind."""
    allowed = tuple(dict.fromkeys((*one.allowed, *other.allowed)))
    sentence = one.sentence
    if other.sentence not in one.sentence:
        sentence = f"{one.sentence}; {other.of[-1]}: {other.sentence}" if other.of else one.sentence
    default = one.default
    if other.default != one.default and other.of:
        default = (
            f"{one.default or 'as the rest says'}; {other.of[-1]}: {other.default or 'as the rest says'}"
        )
    return replace(one, of=(*one.of, *other.of), allowed=allowed, sentence=sentence, default=default)


def _resolved(node: Schema, root: Schema) -> Schema:
    """The node with its reference followed. The node's entries win, but for a table's description."""
    reference = node.get("$ref")
    if reference is None:
        return node
    target = root["$defs"][reference.rsplit("/", 1)[-1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def _table_in(value: Schema, root: Schema) -> tuple[Schema | None, str]:
    """The table that a value is, and what follows its path: ".NAME" for tables by name, "[]" for a list of
    them.

    None for a plain value.
    """
    options = [_resolved(option, root) for option in value.get("anyOf", ())]
    for option in (value, *options):
        if "properties" in option:
            return option, ""
        several = option.get("additionalProperties")
        if isinstance(several, dict):
            inner, suffix = _table_in(_resolved(several, root), root)
            if inner is not None:
                return inner, f".{_NAME}{suffix}"
        items = option.get("items")
        if isinstance(items, dict):
            inner, suffix = _table_in(_resolved(items, root), root)
            if inner is not None:
                return inner, f"[]{suffix}"
    return None, ""


def _key(
    file: str, path: str, value: Schema, root: Schema, is_required: bool, of: tuple[str, ...]
) -> FileKey:
    return FileKey(
        file=file,
        path=path,
        type=_type(value, root),
        sentence=str(value.get("description", "")),
        default=_as_toml(value["default"]) if "default" in value else "",
        is_required=is_required,
        allowed=_allowed(value, root),
        of=of,
        frameworks=frameworks_of(path) if file == "experiment" else (),
    )


_WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "table",
    "array": "list",
}


def _type(value: Schema, root: Schema) -> str:
    """A value's type in words. For a quantity, its unit."""
    if "anyOf" in value:
        options = (_type(_resolved(option, root), root) for option in value["anyOf"])
        return " or ".join(dict.fromkeys(options))
    if "format" in value:
        return str(value["format"])
    if "const" in value or "enum" in value:
        return "one of"
    kind = str(value.get("type", "value"))
    if kind == "array" and isinstance(value.get("items"), dict):
        return f"list of {_type(_resolved(value['items'], root), root)}"
    several = value.get("additionalProperties")
    if kind == "object" and isinstance(several, dict):
        return f"{_type(_resolved(several, root), root)} by name"
    return _WORDS.get(kind, "text")


_LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _allowed(value: Schema, root: Schema) -> tuple[str, ...]:
    """The values of a key, or the limits of a number."""
    if "const" in value:
        return (_as_toml(value["const"]),)
    if "enum" in value:
        return tuple(_as_toml(option) for option in value["enum"])
    found = [f"{word} {value[name]:g}" for name, word in _LIMITS.items() if name in value]
    for option in value.get("anyOf", ()):
        found += _allowed(_resolved(option, root), root)
    items = value.get("items")
    if isinstance(items, dict) and "enum" in items:
        found += _allowed(items, root)
    return tuple(dict.fromkeys(found))


def _as_toml(value: object) -> str:
    """A default as a file says it. An empty table or list is "none"."""
    if isinstance(value, Mapping | list | tuple) and not value:
        return "none"
    return json.dumps(value)


def _elsewhere(key: FileKey) -> tuple[tuple[str, str], ...]:
    """How the same setting is written for other programs, in their words."""
    if key.file != "experiment":
        return ()
    found: dict[str, list[str]] = {}
    for program, rows in TELLINGS.items():
        for row in rows:
            is_of = not row.kinds or not key.of or set(row.kinds) & set(key.of)
            if row.key == key.path and row.place == "file" and is_of and row.how not in ("always", "never"):
                ways = found.setdefault(NAMES[program], [])
                if row.how not in ways:
                    ways.append(row.how)
    return tuple((program, "; ".join(ways)) for program, ways in found.items())
