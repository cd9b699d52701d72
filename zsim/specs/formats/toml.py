"""TOML as zsim writes it: experiments, and the tables of imported or calibrated clusters.

Not tomli-w, which puts every element of a list on a line by itself: rows of links and ranges of points would
fill pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from zsim.files import preset_table
from zsim.reading import NULL
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ModelSpec
from zsim.units import AS_IN_FILES

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def experiment_toml(experiment: Experiment, comment: str = "") -> str:
    """The experiment's values that are not defaults. Every line of `comment` stands above them.

    A captured model is written as the name of its function, for `--allow-code`. A model that was given as a
    module has no name.
    """
    data = experiment.model_dump(exclude_defaults=True, context=AS_IN_FILES)
    if isinstance(experiment.model, ModelSpec):
        data["model"] = experiment.model.function or None
        comment = f"{comment}\n{_capture_comment(experiment.model)}".strip()
    data["strategy"] = {"kind": experiment.strategy.kind, **data.get("strategy", {})}
    if experiment.training.software is not None:  # releases have other defaults
        stated = experiment.model_dump(
            exclude_unset=True, include={"training", "strategy"}, context=AS_IN_FILES
        )
        for entry in preset_table("software")["default"]:
            table, _, key = entry["key"].partition(".")
            if key in stated.get(table, {}):
                data.setdefault(table, {})[key] = stated[table][key]
    return experiment_text(data, comment)


def experiment_text(tables: Mapping[str, Any], comment: str = "") -> str:
    """The text of file-shaped tables of an experiment.

    Tables may hold values of another program's file, such as `q_lora_rank` of a config.json. A null among
    these is written as "null".
    """
    data = dict(tables)
    if isinstance(data.get("model"), Mapping):
        data["model"] = _spell_out_nulls(data["model"])
    if isinstance(data.get("strategy"), Mapping) and isinstance(data["strategy"].get("config"), Mapping):
        data["strategy"] = {**data["strategy"], "config": _spell_out_nulls(data["strategy"]["config"])}
    return toml_text(data, comment)


def _spell_out_nulls(value: Any) -> Any:
    """A value of another program's file with "null" for None, as `zsim.reading.restore_nulls` reads it."""
    if isinstance(value, Mapping):
        return {key: _spell_out_nulls(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out_nulls(entry) for entry in value]
    return NULL if value is None else value


def _capture_comment(model: ModelSpec) -> str:
    if model.function:
        return f"The model is a function, which runs with --allow-code, or with --model {model.function}."
    return (
        f"The model, {model.name}, was captured from a torch module, which no file holds: give it by --model."
    )


def toml_text(data: Mapping[str, Any], comment: str = "") -> str:
    """The text of a whole file. None is left out, since TOML has no null."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    return "\n".join([*lines, *_lines(data)]).lstrip("\n") + "\n"


def inline_text(value: Any) -> str:
    """A value as it stands on one line after "KEY = ". None is left out of tables."""
    return _value(value)


def _lines(data: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The lines of values, then those of tables and lists of tables. A table that holds only tables needs no
    header.
    """
    entries = [(_key(key), value) for key, value in data.items() if value is not None]
    for key, value in entries:
        if not isinstance(value, Mapping) and not _is_tables(value):
            yield f"{key} = {_value(value)}"
    for key, value in entries:
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            has_header = not value or not all(isinstance(entry, Mapping) for entry in value.values())
            yield from (["", f"[{name}]"] if has_header else [])
            yield from _lines(value, name)
        elif _is_tables(value):
            for row in value:
                yield from ("", f"[[{name}]]", *_lines(row, name))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _key(key: str | int) -> str:
    return str(key) if _BARE.fullmatch(str(key)) else _value(str(key))


def _value(value: Any) -> str:
    """A scalar, a list or an inline table."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(_ESCAPES.get(c) or _printable(c) for c in value)}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    if isinstance(value, Mapping):
        entries = ", ".join(
            f"{_key(key)} = {_value(entry)}" for key, entry in value.items() if entry is not None
        )
        return f"{{ {entries} }}"
    return repr(value)


def _printable(character: str) -> str:
    """The character, or its escape if a terminal would act on it."""
    return character if character.isprintable() else f"\\U{ord(character):08x}"
