"""Training files of other programs: their settings, values by key (YAML, JSON, TOML), and files they name."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.reading import parse_json, parse_toml, read_user_text
from zsim.specs.formats.safe_yaml import content_kind, load_yaml


@dataclass
class TrainingFile:
    """The settings in a training file of another program, as dotted keys of an experiment."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the file gives."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of its program, which the experiment may replace silently."""
    default_notes: dict[str, str] = field(default_factory=dict)
    """Notes on defaults, for those that the experiment does not replace."""
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
    has_pairs: bool = False
    """Whether a row of its batches is two sequences."""
    clips_in_loop: bool = False
    """Whether its training loop clips gradients, and DeepSpeed's engine by its JSON alone."""
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
    missing: dict[str, str] = field(default_factory=dict)
    """Settings whose values cannot be had here, with the reason. The experiment must say them."""

    def note(self, text: str, *, is_first: bool = False) -> None:
        """Add a note, before the others if it says that another job may be meant."""
        self.notes.insert(0 if is_first else len(self.notes), f"{self.name}: {text}")


def load_file(path: Path, notes: list[str] | None = None) -> Any:
    """The content of a YAML, JSON or TOML. Raises InputError for a file that is missing or damaged."""
    return load_text(read_user_text(path), path, notes)


def load_text(text: str, path: Path, notes: list[str] | None = None) -> Any:
    """The content of `text` as that of a file at `path`. Raises InputError for damaged text."""
    parse = {".json": parse_json, ".toml": parse_toml}.get(path.suffix.lower())
    if parse is None:
        return load_yaml(text, str(path), notes)
    try:
        return parse(text, path)
    except ValueError as error:
        kind = path.suffix[1:].upper()
        raise InputError(f"{path}: is not valid {kind}: {error}") from None


def load_table(path: Path, notes: list[str] | None = None) -> Mapping[str, Any]:
    """The content of a file with keys at the top. Raises InputError for any other file."""
    data = load_file(path, notes)
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: {content_kind(data)}; expected keys and values at the top")
    return data


def read_renamed(read: Callable[[], TrainingFile], names: Mapping[str, str]) -> TrainingFile:
    """The settings that `read` reads of a file by the keys of another file.

    `names` maps these keys to those that the file has, which stand for them in errors, notes and reasons.
    Keys of one word are keys only before a colon.
    """
    longest_first = sorted(names, key=len, reverse=True)
    ends = ((key, r"(?!\w)" if "_" in key or "." in key else "(?=:)") for key in longest_first)
    pattern = re.compile("|".join(rf"(?<![\w./]){re.escape(key)}{end}" for key, end in ends))

    def rename(text: str) -> str:
        return pattern.sub(lambda match: names[match[0]], text)

    try:
        file = read()
    except (InputError, NotSimulatedError) as error:
        raise type(error)(rename(str(error))) from None
    file.notes = [rename(note) for note in file.notes]
    file.missing = {key: rename(reason) for key, reason in file.missing.items()}
    return file


def change_values(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with values set at dotted keys. A value in the way of a table is replaced by it."""
    changed = dict(data)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        table = changed
        for parent in parents:
            below = table.get(parent)
            table[parent] = dict(below) if isinstance(below, Mapping) else {}
            table = table[parent]
        table[last] = value
    return changed


def flatten(
    data: Mapping[str, Any], kept: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values in nested tables. Tables at `kept` keys, and empty ones, stay."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in kept:
            yield from flatten(value, kept, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_file(
    path: str,
    read_values: Callable[[str, Mapping[str, Any]], TrainingFile],
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingFile:
    """The settings in the file at `path`, whose content `read_values` reads by key.

    `changes` of its values by dotted keys are as options behind it have them. Notes say which keys stand
    twice. Raises InputError for a file without keys.
    """
    repeats: list[str] = []
    file = read_values(path, change_values(load_table(Path(path), repeats), changes))
    file.notes = [*(f"{path}: {repeat}" for repeat in repeats), *file.notes]
    return file


_REPOSITORY = (".git", "pyproject.toml", "setup.py")
_MAX_FOLDERS = 12


def locate_named_file(name: str, folder: Path, where: str, expected: str) -> Path:
    """The file that a training file in `folder` names at `where`.

    It is looked for from the folder itself, those around it up to the root of its repository, and the working
    folder; of another machine's path its longest end with a folder. Raises InputError with every place.
    """
    tried: list[Path] = []
    names = name.split("/") if name[:1] in ("/", "~", "$") else []
    tails = [Path(*names[n:]) for n in range(1, len(names) - 1)]
    for start in _starts(folder):
        candidate = start / os.path.expanduser(name)
        if candidate in tried:
            continue
        if os.path.isfile(candidate):
            return candidate
        tried.append(candidate)
    for tail, start in itertools.product(tails, _starts(folder)):  # of another machine's folders
        if os.path.isfile(start / tail):
            return start / tail
    candidates = ", ".join(str(candidate) for candidate in tried)
    raise InputError(f"{where}: '{name}': no such file; expected {expected}; tried {candidates}")


def _starts(folder: Path) -> Iterator[Path]:
    absolute = folder.absolute()
    yield folder
    folders = [absolute, *absolute.parents][:_MAX_FOLDERS]
    roots = [
        number for number, entry in enumerate(folders) if any((entry / mark).exists() for mark in _REPOSITORY)
    ]
    if roots:
        yield from folders[1 : roots[0] + 1]
    yield Path()
