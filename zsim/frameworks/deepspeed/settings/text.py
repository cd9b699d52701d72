"""A DeepSpeed JSON as text, read as leniently as DeepSpeed's reader (Hjson) reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_json, read_user_text


def load_object(source: str | Path | Mapping[str, Any], name: str | None) -> tuple[str, dict[str, Any]]:
    """(name for messages, the object), from a path or an object. Raises InputError."""
    if isinstance(source, Mapping):
        return name or "DeepSpeed config", _copy_mapping(source)
    path, where = Path(source), name or str(source)
    data = _parse(read_user_text(path, "a DeepSpeed JSON", where), where)
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a JSON object at the top, found {_describe(data)}")
    return where, data


def _copy_mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copy_mapping(entry) for key, entry in value.items()}
    return value


def _describe(value: Any) -> str:
    return "a list" if isinstance(value, list) else json.dumps(value)[:40]


def _parse(text: str, where: str) -> Any:
    """JSON, forgiving comment lines and commas before a closing bracket (DeepSpeed reads Hjson)."""

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in entries:
            if key in seen:
                raise InputError(f"{where}: key '{key}' is there twice; expected it once")
            seen[key] = value
        return seen

    try:
        return parse_json(text, where, pairs)
    except json.JSONDecodeError as first:
        # Comment lines are emptied, not removed, so that line numbers stay true.
        relaxed = re.sub(r"(?m)^[ \t]*(//|#).*$", "", text)
        relaxed = re.sub(r",(\s*[}\]])", r"\1", relaxed)
        try:
            return parse_json(relaxed, where, pairs)
        except json.JSONDecodeError:
            position = f"line {first.lineno}, column {first.colno}"
            raise InputError(f"{where}: is not valid JSON at {position}: {first.msg}") from None


def drop_comments(data: MutableMapping[str, Any], where: str, notes: list[str]) -> None:
    """Remove keys that hold comments. DeepSpeed ignores any key that it does not know."""
    comments = [key for key in data if key.startswith(("_", "//", "#")) or key in ("comment", "comments")]
    for key in comments:
        del data[key]
    if comments:
        notes.append(f"{where}: read as comments: {', '.join(comments)}")
