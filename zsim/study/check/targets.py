"""The targets of `zsim check`, identified by content: measured runs, curves, recorded cases, traces,
experiments, and folders of these.

Recorded cases. Their checks are in the source checkout (`validation/cases`), since zsim's proof is not
part of the package.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from zsim.api import simulate
from zsim.comparison.comparison import STEP_RANGE
from zsim.errors import InputError
from zsim.files import CHECKOUT
from zsim.reading import MAX_TOML_BYTES, parse_json, parse_toml, read_text
from zsim.specs.experiment.load import load_experiment
from zsim.specs.user_code import UserCode
from zsim.study.check.baseline import CheckRow
from zsim.study.measured.experiment_table import is_experiment_table, is_published_table
from zsim.trace.readers.content import CHUNK_BYTES, Content
from zsim.trace.readers.read import read_trace
from zsim.trace.trace import Trace

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


TargetKind = Literal["runs", "curves", "case", "trace", "experiment"]
_EXPECTED = (
    "a table of measured runs (.csv), a recorded case or a trace (.json, .json.gz), an experiment (.toml), "
    "or a folder of these"
)
_RECORDINGS = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
_HEAD = 64 * 1024  # characters
_SMALL_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class CheckTarget:
    """One thing to check."""

    name: str
    """The path relative to the base of names."""
    path: Path
    kind: TargetKind
    content: Any = None
    """The JSON of a recorded case."""
    experiment: Path | None = None
    """The experiment file next to a trace, if there is one."""


@dataclass
class TargetSearch:
    """The targets in order, and the files in folders that are no targets."""

    targets: list[CheckTarget] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    """Tables in folders that another command checks."""


def checkout() -> Path:
    """The source checkout that this package runs from. Raises InputError in an installed package."""
    if not (CHECKOUT / "validation" / "published").is_dir():
        raise InputError(
            "check: nothing given, and the recorded cases come with the source checkout only (traces/, "
            f"validation/); expected {_EXPECTED}"
        )
    return CHECKOUT


def find_targets(paths: Sequence[Path], base: Path) -> TargetSearch:
    """The targets that `paths` name. Raises InputError for a path that is no target."""
    search = TargetSearch()
    for path in paths:
        if os.path.isdir(path):
            _search(path, base, search)
            continue
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file; expected {_EXPECTED}")
        target = _target(path, base)
        if target is None:
            _refuse_damaged(path)
            raise InputError(f"{path}: nothing that can be checked; expected {_EXPECTED}")
        search.targets.append(target)
    if paths and not search.targets:
        for name in search.ignored:
            _refuse_damaged(Path(os.path.normpath(base / name)))
        raise InputError(f"{paths[0]}: nothing in there can be checked; expected {_EXPECTED}")
    return search


def _search(folder: Path, base: Path, search: TargetSearch) -> None:
    """Find every target below a folder. The traces of several ranks next to an `experiment.toml` are one
    target. An experiment next to its trace is not a target by itself.
    """
    files = sorted(_files(folder))
    runs = {path.parent for path in files if path.name == "experiment.toml"}
    runs = {run for run in runs if any(path.parent == run and _is_trace_file(path) for path in files)}
    for run in sorted(runs):
        search.targets.append(CheckTarget(_name(run, base), run, "trace", experiment=run / "experiment.toml"))
    traces = [path for path in files if path.parent not in runs and _is_trace_file(path)]
    experiments = {adjacent_experiment(path) for path in traces}
    for path in files:
        if path.parent in runs or path in experiments:
            continue
        target = _target(path, base)
        columns = _columns(path) if target is not None and target.kind == "runs" else None
        if columns is not None and is_published_table(columns):
            search.published.append(_name(path, base))
        elif target is not None and (columns is None or is_experiment_table(columns)):
            search.targets.append(target)
        elif not _belongs_to_a_case(path):
            search.ignored.append(_name(path, base))
    search.targets.sort(key=lambda target: target.name)


def _is_trace_file(path: Path) -> bool:
    is_json = path.name.endswith((".json", ".json.gz"))
    return is_json and not (path.parent / "summary.json").is_file() and _is_trace(path)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _belongs_to_a_case(path: Path) -> bool:
    """Whether a file is a log next to a summary, a document, or checksums: no target, but not reported as
    ignored."""
    is_document = path.suffix in (".md", ".txt", ".py", ".pyc") or path.name == "SHA256SUMS"
    return is_document or (path.parent / "summary.json").is_file()


def _name(path: Path, base: Path) -> str:
    """The target's name: the folder of a `summary.json` (`traces/gloo/ddp-even-2ranks`), else the file's
    path."""
    shown = path.parent if path.name == "summary.json" else path
    return Path(os.path.relpath(shown.resolve(), base.resolve())).as_posix()


def _target(path: Path, base: Path) -> CheckTarget | None:
    name = _name(path, base)
    if path.suffix == ".csv":
        return CheckTarget(
            name, path, "curves" if "bus_gigabytes_per_second" in _head(path).partition("\n")[0] else "runs"
        )
    if path.suffix == ".toml":
        return CheckTarget(name, path, "experiment") if _is_experiment(path) else None
    if path.suffix == ".json":
        content = _small_json(path)
        if kind_of(content) is not None:
            return CheckTarget(name, path, "case", content)
        if content is None and path.name == "summary.json":
            _refuse_damaged(path)
    if path.name.endswith(".gz") and (path.parent / "summary.json").is_file():
        return None  # a single rank's log in a recorded run
    if path.suffix == ".json" or path.name.endswith(".json.gz"):
        experiment = adjacent_experiment(path)
        return CheckTarget(name, path, "trace", experiment=experiment) if _is_trace(path) else None
    return None


def _columns(path: Path) -> list[str]:
    """The columns of a CSV file found in a folder, which may be no table of runs. A file named explicitly is
    left to the reader to refuse.
    """
    return [column.strip() for column in _head(path).partition("\n")[0].split(",")]


def _is_experiment(path: Path) -> bool:
    """Whether a TOML file is an experiment, not a cluster or a study. True for an unreadable file, which the
    reader refuses."""
    try:
        content = parse_toml(read_text(path, MAX_TOML_BYTES), path)
    except (OSError, ValueError):
        return True
    is_job = {"model", "strategy", "training"} & set(content) and {"cluster", "training"} & set(content)
    return bool(is_job) and "experiment" not in content


def _small_json(path: Path) -> Any:
    """The content of a JSON file of up to 20 MB that is no trace, or None for anything else."""
    if path.stat().st_size > _SMALL_BYTES or '"traceEvents"' in _head(path):
        return None
    try:
        return parse_json(read_text(path, _SMALL_BYTES), path)
    except (OSError, ValueError):
        return None


def _refuse_damaged(path: Path) -> None:
    """Raise the trace reader's InputError for a file with a recording's name that cannot be read. A complete
    JSON object of another kind is accepted."""
    if path.name.endswith(_RECORDINGS) and not _is_object(path):
        read_trace(path)


def _is_object(path: Path) -> bool:
    if path.stat().st_size > _SMALL_BYTES:
        return False
    try:
        return isinstance(parse_json(_uncompressed_text(path), path), Mapping)
    except ValueError:
        return False


def _is_trace(path: Path) -> bool:
    head = _head(path)
    return any(word in head for word in ('"traceEvents"', '"schemaVersion"', '"pg_config"', '"ph"'))


def _head(path: Path) -> str:
    """The beginning of the file, uncompressed. Raises InputError if it cannot be read or uncompressed."""
    return Content(path).beginning.decode("utf-8", errors="replace")[:_HEAD]


def _uncompressed_text(path: Path) -> str:
    """The text of the file, uncompressed. Larger files are cut, which makes them invalid JSON."""
    return "".join(islice(Content(path).text(), _SMALL_BYTES // CHUNK_BYTES))


def adjacent_experiment(path: Path) -> Path | None:
    """The experiment file of a trace: `run.toml` next to `run.json.gz`, else `experiment.toml` in the same
    folder. None without one."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    for name in (f"{stem}.toml", "experiment.toml"):
        if (path.parent / name).is_file():
            return path.parent / name
    return None


def load_trace(path: Path, overrides: Mapping[str, Any] | None = None, code: UserCode | None = None) -> Trace:
    """The trace of a file.

    A `.toml` is simulated, with `overrides` of its keys, and its trace carries the interval of the step.
    Anything else is read as a recording, of which the typical step is taken. `code` is the permission to run
    functions that a `.toml` names as models.

    Raises InputError for anything else.
    """
    if path.suffix == ".toml":
        result = simulate(load_experiment(path, dict(overrides or {}), code=code))
        step_range = result.report.step_seconds_range
        range_metadata = {} if step_range is None else {STEP_RANGE: step_range}
        return replace(result.trace, metadata={**result.trace.metadata, **range_metadata})
    if overrides:
        raise InputError(
            f"--set {next(iter(overrides))}: {path} is a trace; only an experiment can be changed"
        )
    return read_trace(path).typical_step()
