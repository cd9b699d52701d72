"""The text of a trace file, unzipped, in pieces, and refused beyond the size that a trace can have.

A tar, gzipped or not, is read in the order of the archive, without writing to disk.

# [Note: how large a trace may be]
Real traces are gigabytes of JSON, so size alone refuses nothing. A file that was made to be large is known by
its compression. gzip packs Kineto's JSON 10 to 60 times. A file that unpacks to more than 200 times its size
(and 16 MB) is refused, as is a run of 64 MB of blanks, unzipped or not. Files in between are read.

A trace file read in pieces: its events one at a time, its other entries in passing.

Measured on a 301 MB Kineto file of 1.4 million events: 9 to 10 s in 20 MB with the standard library's scanner
as here, 8 to 9 s in 13 MB with ijson 3.6 (yajl2_c), which cannot yield the entries besides `traceEvents` in
the same pass, and stops at NaN and at bytes that are not UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

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


_LONGEST_TOKEN = 2**20  # characters; JSON that is wrong further back than this is not just incomplete
_LONGEST_VALUE = 64 * 2**20  # characters of one event, or of one other entry
_LONGEST_NUMBER = 32
_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode
EXPECTED = (
    "expected a trace of torch.profiler (Kineto JSON with 'traceEvents'), a Flight Recorder dump as JSON, "
    "a span log of validation.record, or an export of `nsys export --type sqlite`"
)

WRONG_VALUE = (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError)


def wrong_value(path: Path, where: str, error: Exception) -> InputError:
    """The error for a value of another type or size than the reader's program writes."""
    return InputError(f"{path}: {where}: a value is not as expected ({type(error).__name__}: {error})")


class JsonStream:
    """One file. Iterate over `items("traceEvents")`.

    `head` holds the other top-level entries read so far, and all of them once the iteration is over.

    Raises InputError for a file that does not exist, is empty, not JSON, or cut off.
    """

    def __init__(self, source: Path | Content) -> None:
        content = source if isinstance(source, Content) else Content(source)
        self.path = content.path
        self.head: dict[str, Any] = {}
        self.num_items = 0
        self._buffer = ""
        self._offset = 0
        self._num_discarded = 0  # characters before the buffer
        self._text = content.text()

    def items(self, key: str) -> Iterator[dict[str, Any]]:
        """The objects in the array `key` of the top-level object, or in the array that is all of the file."""
        first = self._peek()
        if first == "[":  # Chrome's older form: nothing but the events; it may lack the closing bracket
            yield from self._array(may_be_open=True)
            return
        if first != "{":
            raise self._input_error("is not JSON" if first else "is empty")
        self._offset += 1
        while (char := self._peek()) != "}":
            if char == ",":
                self._offset += 1
                continue
            name = self._parse_value()
            if not isinstance(name, str) or self._peek() != ":":
                raise self._input_error("is not JSON")
            self._offset += 1
            if name == key and self._peek() == "[":
                self.head.setdefault(key, None)
                yield from self._array()
                continue
            value = self.head[name] = self._parse_value()
            if name == key:
                raise InputError(
                    f"{self.path}: '{key}' is {json.dumps(value)[:40]}; expected a list of events"
                )

    def _array(self, may_be_open: bool = False) -> Iterator[dict[str, Any]]:
        self._offset += 1
        while (char := self._peek()) != "]":
            if char == ",":
                self._offset += 1
                continue
            if not char and may_be_open:
                return
            value = self._parse_value()
            self.num_items += 1
            if not isinstance(value, dict):
                excerpt = repr(value)[:60]
                raise InputError(f"{self.path}: event {self.num_items} is {excerpt}; expected an object")
            yield value
        self._offset += 1

    def _peek(self) -> str:
        """The next character that is not space, or "" at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._offset)
            self._offset = space.end() if space is not None else self._offset
            if self._offset < len(self._buffer):
                return self._buffer[self._offset]
            if not self._read_more():
                return ""

    def _parse_value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = _decode(self._buffer, self._offset)
            except json.JSONDecodeError as error:
                is_certain = len(self._buffer) - error.pos > _LONGEST_TOKEN
                if is_certain or not self._double_buffer():
                    raise self._input_error(
                        "is not JSON" if is_certain or self._is_garbled(error) else ""
                    ) from None
                continue
            except RecursionError:
                raise self._input_error("is nested deeper than any trace") from None
            except ValueError:  # Python reads whole numbers of up to 4,300 digits
                raise self._input_error("has a number of thousands of digits") from None
            if len(self._buffer) - end < _LONGEST_NUMBER and self._read_more():  # it may go on: 12, 12., 12.5
                continue
            self._offset = end
            return value

    def _is_garbled(self, error: json.JSONDecodeError) -> bool:
        """Whether text follows the position that could not be read: then the file is wrong and not cut
        off."""
        remaining = self._buffer[error.pos :].strip()
        return bool(remaining) and not error.msg.startswith("Unterminated")

    def _double_buffer(self) -> bool:
        """Read until the buffer has doubled, so that a long value is parsed again only as often as its length
        doubles.

        Returns whether there was more.
        """
        length = len(self._buffer) - self._offset
        if length > _LONGEST_VALUE:
            raise self._input_error(f"has a value of more than {_LONGEST_VALUE // 2**20} MB")
        while len(self._buffer) - self._offset < 2 * length + 1:
            if not self._read_more():
                break
        return len(self._buffer) - self._offset > length

    def _read_more(self) -> bool:
        chunk = next((chunk for chunk in self._text if chunk), "")
        if not chunk:
            return False
        self._num_discarded += self._offset
        self._buffer = self._buffer[self._offset :] + chunk
        self._offset = 0
        return True

    def _input_error(self, problem: str) -> InputError:
        position = self._num_discarded + self._offset
        excerpt = self._buffer[self._offset : self._offset + 30]
        if problem == "is empty":
            return InputError(f"{self.path}: is empty; {EXPECTED}")
        if problem:
            where = f"character {position}: {excerpt!r}"
            return InputError(f"{self.path}: {problem} at {where}; {EXPECTED}")
        progress = f"{self.num_items} events" if self.num_items else f"{position} characters"
        return InputError(f"{self.path}: is cut off after {progress}; record or copy it again")
