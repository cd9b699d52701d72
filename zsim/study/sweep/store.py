"""Finished points on disk: one file per content, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import make_folder, write_whole

Record = dict[str, Any]


class Store:
    """A folder of records by identity. Processes may write to it side by side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, identity: str) -> Record | None:
        """The record, or None where there is none, or a damaged one."""
        try:
            record = json.loads(self._path(identity).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and record.get("identity") == identity else None

    def save(self, record: Record) -> None:
        """Raises InputError where the folder cannot be written."""
        path = self._path(record["identity"])
        make_folder(path.parent)
        write_whole(path, json.dumps(record))

    def mark(self, identity: str) -> None:
        """Say that this process is at a point. Raises InputError where the folder cannot be written."""
        folder = self.folder / "running"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / identity).touch()
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror}") from None

    def unmark(self, identity: str) -> None:
        (self.folder / "running" / identity).unlink(missing_ok=True)

    def marked(self) -> frozenset[str]:
        """The points that processes are at, or died at."""
        folder = self.folder / "running"
        return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()

    def _path(self, identity: str) -> Path:
        return self.folder / identity[:2] / f"{identity}.json"
