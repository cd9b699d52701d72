"""Files that were made to be large: told by what they do not say, in seconds and little memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.trace.readers.content import Content

MEGABYTE = 2**20


def refusal(path: Path) -> str:
    with pytest.raises(zsim.InputError) as error:
        zsim.read_trace(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("piece", [b" " * MEGABYTE, b"{}," * 2**18, b"\n" * MEGABYTE])
def test_three_gigabytes_in_three_megabytes_are_refused_where_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    monkeypatch.setattr("zsim.trace.readers.content._ALWAYS_ALLOWED_BYTES", 2 * MEGABYTE)
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + gzip.compress(piece) * 3072)
    assert "unpacks to more than 200 times its size" in refusal(path)


def test_three_gigabytes_of_blanks_are_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [') + gzip.compress(b" " * MEGABYTE) * 3072)
    tracemalloc.start()
    assert "unpacks to more than 200 times its size" in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * MEGABYTE


def test_a_trace_that_packs_well_is_read_whatever_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kineto's JSON packs 10 to 60 times; here the size from which the ratio counts is nothing."""
    monkeypatch.setattr("zsim.trace.readers.content._ALWAYS_ALLOWED_BYTES", 0)
    number = random.Random(0).random
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm" * 20, "pid": 0, "tid": 7, "args": {"stream": 7}}
    events = [{**kernel, "ts": round(1e6 * number(), 3), "dur": 2.5} for _ in range(2000)]
    text = json.dumps({"traceEvents": events}).encode()
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(text))
    assert 10 < len(text) / path.stat().st_size < 60
    assert len(zsim.read_trace(path, whole=True)) == 2000


def test_blanks_without_end_are_refused_unzipped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zsim.trace.readers.content._MAX_BLANK", 3 * MEGABYTE)
    path = tmp_path / "rank0.json"
    path.write_bytes(b'{"traceEvents": [' + b" " * 6 * MEGABYTE + b"]}")
    assert "holds more than 3 MB of blanks in a row" in refusal(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"9" * 5000, "has a number of thousands of digits"),
        (b"[" * 100_000, "is nested deeper than any trace"),
        (b'{"a":' * 100_000, "is nested deeper than any trace"),
        (b"[" + b"1," * 2 * MEGABYTE, "has a value of more than 1 MB"),
    ],
)
@pytest.mark.parametrize("place", [b'{"traceEvents": [{"ts": VALUE}]}', b'{"schemaVersion": VALUE}'])
def test_what_python_gives_up_on_is_said_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: bytes, value: bytes, message: str
) -> None:
    monkeypatch.setattr("zsim.trace.readers.content._LONGEST_VALUE", MEGABYTE)
    path = tmp_path / "rank0.json"
    path.write_bytes(place.replace(b"VALUE", value))
    assert message in refusal(path)


def test_a_long_value_is_not_read_anew_for_every_piece_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MB in pieces of 4 kB: begun when it is twice as long as before, a dozen times and not 2,000."""
    from zsim.trace.readers import content as json_stream

    begun = 0

    def count(text: str, at: int) -> Any:
        nonlocal begun
        begun += 1
        return decode(text, at)

    decode = json_stream._decode
    monkeypatch.setattr(json_stream, "_decode", count)
    monkeypatch.setattr("zsim.trace.readers.content.CHUNK_BYTES", 4096)
    path = tmp_path / "rank0.json"
    path.write_text('{"ranks": [' + "1," * 4 * MEGABYTE + '1], "traceEvents": []}')
    stream = json_stream.JsonStream(path)
    assert list(stream.items("traceEvents")) == []
    assert len(stream.head["ranks"]) == 4 * MEGABYTE + 1
    assert begun < 30


@pytest.mark.parametrize("line", ["[" * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_a_line_of_a_span_log_that_python_gives_up_on_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"rank": 0, "world_size": 2}\n' + line + "\n")
    assert "line 2 is not JSON" in refusal(path)


def test_lines_come_one_at_a_time_and_a_line_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zsim.trace.readers.content.CHUNK_BYTES", 3)
    path = tmp_path / "log"
    path.write_text("one\ntwenty\n\nthree")
    assert list(Content(path).lines(max_characters=10)) == ["one", "twenty", "", "three"]
    with pytest.raises(zsim.InputError, match="a line of more than 3 characters"):
        list(Content(path).lines(max_characters=3))
