"""A hash of everything that a result depends on: the experiment, the files it names, and zsim."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import make_folder, write_atomically
from zsim.resources import PACKAGE
from zsim.specs.experiment.tables import Experiment
from zsim.specs.library import Library
from zsim.specs.model.huggingface import read_model_config
from zsim.specs.model.spec import ModelSpec
from zsim.version import __version__


class Identities:
    """Hashes experiments by content. Each file is read once per study."""

    def __init__(self) -> None:
        self._zsim = {"version": __version__, "source": source_digest()}
        self._models: dict[str, Any] = {}
        self._captured: dict[int, tuple[ModelSpec, str]] = {}
        self._clusters: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        self._library = Library()

    def identify(self, experiment: Experiment) -> str:
        """The hash of everything that decides the result. Raises InputError where a file cannot be read."""
        settings = experiment.model_dump(mode="json", exclude={"model", "cluster", "program"})
        content = {
            "zsim": self._zsim,
            "experiment": settings,
            "files": {name: self._file(name) for name in sorted(_file_names(settings))},
            "model": self._model(experiment.model),
            "cluster": self._cluster(experiment.cluster),
            "config": experiment.strategy.file_content(),
        }
        return hashlib.sha256(_canonical(content).encode()).hexdigest()

    def _file(self, name: str) -> str:
        if name not in self._files:
            try:
                with open(name, "rb") as file:
                    self._files[name] = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise InputError(f"{name}: cannot be read: {error.strerror}") from None
        return self._files[name]

    def _model(self, model: str | Mapping[str, Any] | ModelSpec) -> Any:
        if isinstance(model, ModelSpec):
            if id(model) not in self._captured:
                self._captured[id(model)] = model, repr(model)
            return self._captured[id(model)][1]
        if not isinstance(model, str):
            return model
        if model not in self._models:
            config, name, _ = read_model_config(model)
            self._models[model] = [name, config]
        return self._models[model]

    def _cluster(self, cluster: str | Mapping[str, Any]) -> Any:
        key = cluster if isinstance(cluster, str) else _canonical(cluster)
        if key not in self._clusters:
            self._clusters[key] = self._library.cluster(cluster).model_dump(mode="json", by_alias=True)
        return self._clusters[key]


def _file_names(settings: Any) -> set[str]:
    """The files that settings name: lengths of documents, an adapter's file, a pipeline's order."""
    if isinstance(settings, Mapping):
        return set().union(*map(_file_names, settings.values()))
    if isinstance(settings, list | tuple):
        return set().union(*map(_file_names, settings))
    return {settings} if isinstance(settings, str) and os.path.isfile(settings) else set()


def source_digest() -> str:
    """A hash of zsim's code and of the data it computes with, except for models and clusters, which are part
    of each identity."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.glob("presets/*.toml")]):
        digest.update(str(path.relative_to(PACKAGE)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)


# -- Finished points on disk: one file per identity, written atomically, with a checksum of its content ----


Record = dict[str, Any]
_CHECKSUM = "sha256"


def _checksum(record: Record) -> str:
    """The checksum of a record as JSON, in which a number has one spelling."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


class Store:
    """A folder of records by identity. Several processes may write to it concurrently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, identity: str) -> Record | None:
        """The record, or None if it is missing, damaged, or not as it was saved."""
        try:
            record = json.loads(self._path(identity).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(record, dict) or record.get("identity") != identity:
            return None
        checksum = record.pop(_CHECKSUM, None)
        return record if checksum == _checksum(record) else None

    def save(self, record: Record) -> None:
        """Write the record. Raises InputError where the folder cannot be written."""
        path = self._path(record["identity"])
        make_folder(path.parent)
        write_atomically(path, json.dumps({**record, _CHECKSUM: _checksum(record)}))

    def mark(self, identity: str) -> None:
        """Mark the point that this process is working on. Raises InputError where the folder cannot be
        written."""
        folder = self.folder / "running"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / identity).touch()
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror}") from None

    def unmark(self, identity: str) -> None:
        (self.folder / "running" / identity).unlink(missing_ok=True)

    def running(self) -> frozenset[str]:
        """The points that processes are working on, or died at."""
        folder = self.folder / "running"
        return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()

    def _path(self, identity: str) -> Path:
        return self.folder / identity[:2] / f"{identity}.json"
