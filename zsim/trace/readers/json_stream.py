"""A trace file read in pieces: its events one at a time, its other entries in passing.

Measured on a 301 MB Kineto file of 1.4 million events: 9 to 10 s in 20 MB with the standard library's scanner
as here, 8 to 9 s in 13 MB with ijson 3.6 (yajl2_c), which cannot yield the entries besides `traceEvents` in
the same pass, and stops at NaN and at bytes that are not UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.trace.readers.content import Content

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
