"""The tensors' bytes in the files that torch.save writes."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any


def folder_files(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes, bytes of tensors in it) of every file below a folder, by path."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            found[path.relative_to(folder).as_posix()] = len(content), tensor_bytes(content, path.suffix)
    return found


def tensor_bytes(content: bytes, suffix: str) -> int:
    """Bytes of the storages in one torch.save archive, or, of a `.distcp` file, in its archives one behind
    the other. A file of anything else has none."""
    if suffix == ".distcp":
        return sum(_storages(one) for one in _archives(content))
    return _storages(content) if content[:2] == b"PK" else 0


def _storages(content: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return sum(one.file_size for one in archive.infolist() if one.filename.split("/")[-2] == "data")


_END, _LOCATOR_BYTES, _END_BYTES = b"PK\x05\x06", 20, 22


def _archives(content: bytes) -> list[bytes]:
    """The archives of a file; what is between two of them is a pickled value that is no tensor. An end record
    says how long its archive is, so bytes of tensors that look like one are passed over."""
    found: list[bytes] = []
    position = 0
    while True:
        place = content.find(_END, position)
        if place < 0:
            return found
        end = place + _END_BYTES
        record = content.rfind(b"PK\x06\x06", position, place)  # zip64: sizes and the directory's offset
        size = int.from_bytes(content[record + 40 : record + 48], "little") if record >= 0 else -1
        offset = int.from_bytes(content[record + 48 : record + 56], "little") if record >= 0 else -1
        start = record - size - offset
        if record < 0 or start < 0 or content[start : start + 4] != b"PK\x03\x04":
            position = end
            continue
        found.append(content[start:end])
        position = end


def dcp_items(folder: Path) -> list[dict[str, Any]]:
    """The items of a DCP checkpoint, as its `.metadata` says: name, offsets, file, bytes."""
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    return [
        {
            "name": index.fqn,
            "offsets": None if index.offset is None else list(index.offset),
            "file": info.relative_path,
            "bytes": info.length,
        }
        for index, info in metadata.storage_data.items()
    ]
