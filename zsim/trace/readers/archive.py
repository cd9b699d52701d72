"""Traces in a tar, gzipped or not: read in the order of the archive, without writing to disk."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from zsim.errors import InputError
from zsim.trace.readers.content import CHUNK_BYTES, Content, raise_input_errors, unzip

_MAX_FILES = 10_000
_MAGIC = slice(257, 262), b"ustar"


def is_tar(beginning: bytes) -> bool:
    """Whether a file is a tar, by the magic of POSIX and GNU in its first header."""
    span, magic = _MAGIC
    return beginning[span] == magic


def read_members(
    path: Path, select: Callable[[list[PurePosixPath]], list[PurePosixPath]]
) -> Iterator[Content]:
    """The files that `select` picks from all names, each to be read before the next.

    Raises InputError for an archive that is damaged, and for a selected link or device.
    """
    with _open_archive(path) as archive:
        names = [PurePosixPath(member.name) for member in _members(path, archive) if not member.isdir()]
    selected = set(select(names))
    with _open_archive(path) as archive:
        for member in _members(path, archive):
            name = PurePosixPath(member.name)
            if member.isdir() or name not in selected:
                continue
            file = archive.extractfile(member) if member.isreg() else None
            if file is None:
                raise InputError(f"{path / name}: is a link or a device; expected a file")
            yield Content(path / name, file)


@contextmanager
def _open_archive(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with (
            raise_input_errors(path),
            path.open("rb") as file,
            unzip(path, file) as plain,
            tarfile.open(fileobj=plain, mode="r|", bufsize=CHUNK_BYTES) as archive,
        ):
            yield archive
    except tarfile.TarError as error:
        raise InputError(f"{path}: the archive is cut off or damaged ({error})") from None


def _members(path: Path, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for number, member in enumerate(archive):
        if number >= _MAX_FILES:
            raise InputError(f"{path}: holds more than {_MAX_FILES:,} files")
        yield member
