"""A trace from whatever a user names: a trace file or folder, or an experiment simulated on the spot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zsim.api import simulate
from zsim.comparison.comparison import STEP_RANGE
from zsim.errors import InputError
from zsim.specs.experiment.load import load_experiment
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import Trace


def load_side(path: Path, overrides: Mapping[str, Any] | None = None) -> Trace:
    """The trace of a file: `.toml` is simulated, with `overrides` of its keys; anything else is read, and
    of a recording of several steps the typical one is taken. What is simulated carries the interval of its
    step.

    Raises InputError for what is neither.
    """
    if path.suffix == ".toml":
        result = simulate(load_experiment(path, dict(overrides or {})))
        found = result.report.step_seconds_range
        known = {} if found is None else {STEP_RANGE: found}
        return replace(result.trace, metadata={**result.trace.metadata, **known})
    if overrides:
        raise InputError(
            f"--set {next(iter(overrides))}: {path} is a trace; only an experiment can be changed"
        )
    return read_trace(path).typical_step()
