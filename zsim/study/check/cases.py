"""Recorded cases. Their checks are in the source checkout (`validation/cases`), since zsim's proof is not
part of the package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.resources import CHECKOUT
from zsim.study.check.rows import CheckRow

_MODULE = "validation.cases.cases"


def kind_of(content: object) -> str | None:
    """The kind of recorded case in a JSON file, by its keys: "oracle", "run", "shaped", "files" or "saves".
    None for anything else.
    """
    if not isinstance(content, Mapping):
        return None
    keys = set(content)
    if {"case", "calls", "peak_bytes"} <= keys:
        return "oracle"
    if {"case", "calls", "experiment", "world_size"} <= keys:
        return "run"
    if {"saves", "plans"} <= keys:
        return "saves"
    if isinstance(configurations := content.get("configurations"), Mapping):
        return (
            "files"
            if all(
                isinstance(configuration, Mapping) and "files" in configuration
                for configuration in configurations.values()
            )
            else None
        )
    return "shaped" if {"serial", "ahead", "rate"} <= keys else None


def case_rows(name: str, path: Path, content: Mapping[str, Any]) -> list[CheckRow]:
    """All checks of one recorded case.

    Raises InputError for a case that contradicts its own shape, and outside of a source checkout.
    """
    if not (CHECKOUT / "validation" / "cases").is_dir():
        raise InputError(
            f"{path}: is a recorded case, and their checks come with the source checkout only "
            "(validation/cases); expected zsim to run from there"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))  # before a package of that name elsewhere
    rows: list[CheckRow] = importlib.import_module(_MODULE).case_rows(name, path, content)
    return rows
