"""The text of a trace file, unzipped, in pieces, and refused beyond the size that a trace can have.

A tar, gzipped or not, is read in the order of the archive, without writing to disk.

# [Note: how large a trace may be]
Real traces are gigabytes of JSON, so size alone refuses nothing. A file that was made to be large is known by
its compression. gzip packs Kineto's JSON 10 to 60 times. A file that unpacks to more than 200 times its size
(and 16 MB) is refused, as is a run of 64 MB of blanks, unzipped or not. Files in between are read.
"""

from __future__ import annotations

import codecs
import gzip
import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, cast

from zsim.errors import InputError

_MAX_FILES = 10_000
_MAGIC = slice(257, 262), b"ustar"

CHUNK_BYTES = 2**20
_MAX_RATIO = 200  # deflate's own limit is 1,032
_MAX_BLANK = 64 * 2**20
_ALWAYS_ALLOWED_BYTES = 16 * 2**20
_GZIP = b"\x1f\x8b"


class Content:
    """One file, read once from beginning to end.

    `path` is its name in messages. `file` holds its bytes, if it is a member of an archive.
    """

    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self.path = path
        self._pieces = _read_pieces(path, file)
        self._first: bytes | None = None

    @property
    def beginning(self) -> bytes:
        """The first megabyte, unzipped, to be read before the remaining text."""
        if self._first is None:
            self._first = next(self._pieces, b"")
        return self._first

    def text(self) -> Iterator[str]:
        """The text of the file. Invalid UTF-8 is replaced."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        blank = 0
        yield decoder.decode(self.beginning)
        for piece in self._pieces:
            blank = 0 if piece.strip() else blank + len(piece)
            if blank > _MAX_BLANK:
                raise InputError(f"{self.path}: holds more than {_MAX_BLANK // 2**20} MB of blanks in a row")
            yield decoder.decode(piece)
        yield decoder.decode(b"", final=True)

    def lines(self, max_characters: int) -> Iterator[str]:
        """The lines one at a time. Raises InputError for a line of more than `max_characters`."""
        line_pieces: list[str] = []
        length = 0
        for piece in self.text():
            line_end, *next_lines = piece.split("\n")
            line_pieces.append(line_end)
            length += len(line_end)
            if next_lines:
                yield "".join(line_pieces)
                yield from next_lines[:-1]
                line_pieces, length = [next_lines[-1]], len(next_lines[-1])
            if length > max_characters:
                raise InputError(f"{self.path}: has a line of more than {max_characters:,} characters")
        if length:
            yield "".join(line_pieces)


def _read_pieces(path: Path, member: IO[bytes] | None) -> Iterator[bytes]:
    with raise_input_errors(path), member or path.open("rb") as file, unzip(path, file) as unzipped_file:
        while piece := unzipped_file.read(CHUNK_BYTES):
            yield piece


def unzip(path: Path, file: IO[bytes]) -> IO[bytes]:
    """The file, unzipped if it begins like a gzip stream, whatever its name."""
    is_zipped = cast(io.BufferedReader, file).peek(2)[:2] == _GZIP
    return cast(IO[bytes], _LimitedGzipFile(path, file)) if is_zipped else file


class _LimitedGzipFile(gzip.GzipFile):
    """A gzip stream with a limit on its ratio, [Note: how large a trace may be]."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(fileobj=file)
        self._path, self._packed, self._num_bytes = path, file, 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._num_bytes += len(data)
        if self._num_bytes > max(_ALWAYS_ALLOWED_BYTES, _MAX_RATIO * self._packed.tell()):
            raise InputError(
                f"{self._path}: unpacks to more than {_MAX_RATIO} times its size, which no trace does; "
                "is it damaged, or made to fill memory?"
            )
        return data


@contextmanager
def raise_input_errors(path: Path) -> Iterator[None]:
    """A context that raises errors of reading and unzipping a file as InputError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path}: the gzip stream is cut off or damaged ({error}); record or copy it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


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
