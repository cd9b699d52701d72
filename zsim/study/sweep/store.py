"""Finished points on disk: one file per identity, written atomically, with a checksum of its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.files import make_folder, write_atomically

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
