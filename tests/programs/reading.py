"""Files of other programs, written and read as `zsim run FILE --cluster C` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def read_text(
    folder: Path,
    text: str,
    name: str = "train.yaml",
    model: str | None = "llama-3-8b",
    changes: Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment of a file's text on eight H100. `model` None leaves the file's."""
    path = folder / name
    path.write_text(text)
    overrides: dict[str, Any] = {"strategy.config": str(path), "cluster": "dgx-h100", **(changes or {})}
    if model is not None:
        overrides["model"] = model
    return build_experiment({}, overrides, origin="test")


def read_job(folder: Path, text: str, **options: Any) -> Job:
    return resolve(read_text(folder, text, **options))


def notes_of(experiment: Experiment) -> str:
    return "\n".join(experiment.notes)
