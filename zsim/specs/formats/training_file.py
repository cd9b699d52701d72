"""The settings in a training file of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.errors import InputError, unreadable_reason
from zsim.reading import parse_json, read_text
from zsim.specs.formats.safe_yaml import content_kind, load_yaml


@dataclass
class TrainingFile:
    """The settings in a training file of another program, as dotted keys of an experiment."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the file gives."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of its program, which the experiment may replace silently."""
    cluster_changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the experiment's cluster, as dotted keys of it, which variables of the environment make."""
    notes: list[str] = field(default_factory=list)
    """Keys without effect on a step, or that zsim leaves out."""
    shard_degree: int | None = None
    """Ranks that shard the model states. It is resolved once the number of GPUs is known."""
    global_batch_size: int | None = None
    """Sequences of a step. It is resolved once the number of GPUs is known."""
    weight_types: tuple[str, str, bool] | None = None
    """The type of products, that in which weights are loaded ("" for the products'), and whether adapters are
    trained. None where the program does not say.
    """
    epochs: float | None = None
    """How often a data set is trained on, where its size is known. None if steps say how far a run goes."""
    rollout_gpus: int = 0
    """GPUs that generate and do not train, of those that it has."""
    program: str | None = None
    """The name of the program that reads the file."""
    micro_batches_per_pass: int | None = None
    """Micro-batches of a pipeline that runs from start to end for each accumulation step."""
    resolve_stages: Callable[[int], Mapping[str, Any]] | None = None
    """Maps the number of layers to settings. It is called once the model is known."""
    resolve_rollout: Callable[[int], None] | None = None
    """Adds the rollout that belongs to a number of GPUs that train, of a program whose batches are by the
    GPU. The GPUs that a launcher or the file says train all, and those of engines are beside them.
    """

    missing_model: str = ""
    """Why the model that it names cannot be had here. Empty if it names none, or one that can."""

    def note(self, text: str) -> None:
        self.notes.append(f"{self.name}: {text}")


def load_file(path: Path, notes: list[str] | None = None) -> Any:
    """The content of a YAML or JSON. Raises InputError for a file that is missing or damaged."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    if path.suffix.lower() != ".json":
        return load_yaml(text, str(path), notes)
    try:
        return parse_json(text, path)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None


def load_table(path: Path, notes: list[str] | None = None) -> Mapping[str, Any]:
    """The content of a YAML or JSON with keys at the top. Raises InputError for any other file."""
    data = load_file(path, notes)
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: {content_kind(data)}; expected keys and values at the top")
    return data


def read_file(path: str, read_values: Callable[[str, Mapping[str, Any]], TrainingFile]) -> TrainingFile:
    """The settings in the file at `path`, whose content `read_values` reads by key.

    Notes say which keys stand twice. Raises InputError for a file without keys.
    """
    repeats: list[str] = []
    file = read_values(path, load_table(Path(path), repeats))
    file.notes = [*(f"{path}: {repeat}" for repeat in repeats), *file.notes]
    return file
