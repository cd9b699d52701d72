"""Reads users' files completely and within limits. Larger, deeper or longer ones are refused with a message.

Configurations of any program are kilobytes, a few levels deep. Errors of JSON or TOML are reported by the
file's reader. Here are the limits beyond which Python itself fails, or takes minutes and gigabytes.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, unreadable_reason

MAX_BYTES = 16_000_000
MAX_TOML_BYTES = 4_000_000  # read by Python itself, a few megabytes a second
_MAX_DEPTH = 64
_MAX_DIGITS = 4_000  # Python shows no more than 4,300
_TOO_LONG = 10**_MAX_DIGITS
_MAX_DECIMALS = 18
_DEEP = f"is nested more than {_MAX_DEPTH} levels deep; expected a few"
_LONG = f"has a number of more than {_MAX_DIGITS:,} digits"
NULL = "null"  # how an experiment file spells JSON's null
Pairs = Callable[[list[tuple[str, Any]]], Any]


def read_bytes(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """All of a file, which may be a pipe. Raises OSError, and InputError for a file that is too large."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > max_bytes:
        raise InputError(
            f"{path}: is of {max(size, len(content)):,} bytes; expected at most {max_bytes:,}, more than any "
            "such file has"
        )
    return content


def read_user_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """All of a file that somebody named. Raises InputError where it is missing, unreadable, blank or too
    large."""
    try:
        content = read_bytes(path, max_bytes)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    if not content.strip():
        raise InputError(f"{path.name}: the file is empty")
    return content


def read_text(
    path: Path | str, max_bytes: int = MAX_BYTES, encoding: str = "utf-8", errors: str = "strict"
) -> str:
    """All of a file as text. Raises OSError and UnicodeDecodeError, and InputError as `read_bytes`."""
    text = read_bytes(path, max_bytes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_user_text(
    path: Path, expected: str = "", where: str = "", max_bytes: int = MAX_BYTES, errors: str = "strict"
) -> str:
    """All of a text file that somebody named, which messages call `where`. Raises InputError where it is
    missing, and was `expected` to be something, or is unreadable, too large or no text.
    """
    try:
        return read_text(path, max_bytes, errors=errors)
    except FileNotFoundError:
        purpose = f"; expected {expected}" if expected else ""
        raise InputError(f"{where or path}: no such file{purpose}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where or path}: {unreadable_reason(error)}") from None


def parse_json(text: str, where: object, pairs: Pairs | None = None) -> Any:
    """The parsed value. `pairs` makes objects.

    Raises json.JSONDecodeError, and InputError for nesting that is too deep and numbers that are too long.
    """
    return _parse_checked(lambda: json.loads(text, object_pairs_hook=pairs), json.JSONDecodeError, where)


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """The parsed tables. Raises tomllib.TOMLDecodeError, and InputError for nesting that is too deep and
    numbers that are too long."""
    tables: dict[str, Any] = _parse_checked(lambda: tomllib.loads(text), tomllib.TOMLDecodeError, where)
    return tables


def restore_nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a table of another program's file as TOML spells it: "null", which TOML lacks, is None."""
    return {key: _restore_null(value) for key, value in table.items()}


def _restore_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return restore_nulls(value)
    if isinstance(value, list):
        return [_restore_null(entry) for entry in value]
    return None if value == NULL and isinstance(value, str) else value


def _parse_checked(parse: Callable[[], Any], is_wrong: type[ValueError], where: object) -> Any:
    try:
        value = parse()
    except RecursionError:
        raise InputError(f"{where}: {_DEEP}") from None
    except is_wrong:
        raise
    except ValueError:  # Python's limit of 4,300 digits
        raise InputError(f"{where}: {_LONG}") from None
    check_values(value, where)
    return value


def parse_whole_number(text: str) -> int | None:
    """`text` as a whole number of up to 18 decimal digits, or None if it is not one."""
    is_whole_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DECIMALS
    return int(text) if is_whole_number else None


def check_values(value: Any, where: object) -> None:
    """Raises InputError for tables and lists that are nested too deep, and for numbers that are too long."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise InputError(f"{where}: {_DEEP}")
        next_level: list[Any] = []
        for entry in level:
            if type(entry) is str:
                continue
            if isinstance(entry, Mapping):
                next_level += entry.values()
            elif isinstance(entry, list | tuple):
                next_level += entry
            elif isinstance(entry, int) and abs(entry) >= _TOO_LONG:
                raise InputError(f"{where}: {_LONG}")
        level = next_level
