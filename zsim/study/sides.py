"""A trace from whatever a user names: a trace file or folder, or an experiment simulated on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.api import simulate
from zsim.errors import InputError
from zsim.specs.experiment import load_experiment
from zsim.trace.read import read_trace
from zsim.trace.spans import Trace


def load_side(path: Path, overrides: Mapping[str, Any] | None = None) -> Trace:
    """The trace of a file: `.toml` is simulated, with `overrides` of its keys; anything else is read, and
    of a recording of several steps the typical one is taken.

    Raises InputError for what is neither.
    """
    if path.suffix == ".toml":
        return simulate(load_experiment(path, dict(overrides or {}))).trace
    if overrides:
        raise InputError(
            f"--set {next(iter(overrides))}: {path} is a trace; only an experiment can be changed"
        )
    return read_trace(path).typical_step()
