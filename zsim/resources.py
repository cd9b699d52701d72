"""Locations of the files that ship with zsim, in an installed package or in a source checkout."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # of a source checkout; in an installed package, the folder of packages
PRESETS = PACKAGE / "presets"
EXAMPLE = PRESETS / "experiments" / "llama-3-70b-zero3.toml"  # what a bare `zsim run` simulates
TEMPLATES = PACKAGE / "report" / "templates"


@cache
def preset_table(name: str) -> Mapping[str, Any]:
    """The table of a preset that is zsim's own data: `presets/NAME.toml`. Errors in it are ours."""
    return tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))


def topologies_folder() -> Path:
    """The folder of shipped clusters and GPUs: next to the package in a source checkout, inside it when
    installed."""
    installed = PACKAGE / "topologies"
    return installed if installed.is_dir() else CHECKOUT / "topologies"
