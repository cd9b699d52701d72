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
from zsim.trace.readers.content import Content, JsonStream

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
    from zsim.trace.readers import content

    begun = 0

    def count(text: str, at: int) -> Any:
        nonlocal begun
        begun += 1
        return decode(text, at)

    decode = content._decode
    monkeypatch.setattr(content, "_decode", count)
    monkeypatch.setattr("zsim.trace.readers.content.CHUNK_BYTES", 4096)
    path = tmp_path / "rank0.json"
    path.write_text('{"ranks": [' + "1," * 4 * MEGABYTE + '1], "traceEvents": []}')
    stream = content.JsonStream(path)
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


# -- Damaged and foreign files: one clear error each, in little memory -------------------------------------


EVENT = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.0}


def text_of(count: int = 3, **head: Any) -> str:
    return json.dumps({**head, "traceEvents": [EVENT] * count})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected a trace"),
        (b"  \n", "is empty"),
        (b"step 1 loss 2.3\n", "is not JSON at character 0: 'step 1"),
        (b"PK\x03\x04....", "is not JSON"),
        (b"\x80\x04\x95junk", "is a pickle"),
        (b'{"model": "x", "steps": []}', "has no 'traceEvents' .it has model, steps.; expected a trace"),
        (b'{"traceEvents": 5}', "'traceEvents' is 5; expected a list of events"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph', "is cut off after 1 events"),
        (b'{"traceEvents": [', "is cut off"),
        (b'{"schemaVersion": 1', "is cut off"),
        (b'{"traceEvents": [1, 2]}', "event 1 is 1; expected an object"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"} nonsense]}', "is not JSON at character"),
        (b'{"traceEvents": []}', "has no kernel, copy, collective or CPU operator in 0 events"),
        (gzip.compress(text_of().encode(), mtime=0)[:-20], "the gzip stream is cut off or damaged"),
        (text_of().replace("1.5", '"soon"').encode(), "event 'gemm': ts is 'soon'; expected microseconds"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(zsim.InputError, match=message) as error:
        zsim.read_trace(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(zsim.InputError, match="no such file or folder"):
        zsim.read_trace(tmp_path / "nothing.json")
    with pytest.raises(zsim.InputError, match="has no trace in it"):
        zsim.read_trace(tmp_path)
    with pytest.raises(zsim.InputError, match="no trace files are given"):
        zsim.read_trace([])


def test_entries_around_the_events_are_read_in_the_same_pass(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"a": 1, "traceEvents": [{"ph": "X"}, {"ph": "M"}], "b": [2, {"c": NaN}], "d": 12}')
    stream = JsonStream(path)
    assert [event["ph"] for event in stream.items("traceEvents")] == ["X", "M"]
    assert (stream.head["a"], stream.head["b"][0], stream.head["d"]) == (1, 2, 12)


def test_a_bare_list_of_events_may_lack_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[{"ph": "X"},\n{"ph": "M"},\n')
    assert len(list(JsonStream(path).items("traceEvents"))) == 2


def test_values_across_the_edges_of_pieces_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1 to 40 bytes cut numbers, strings and two-byte letters everywhere."""
    path = tmp_path / "trace.json"
    path.write_text('{"n": 1234567, "traceEvents": [{"ph": "µ\\u00b5", "ts": 12.25e2}], "m": -3}', "utf-8")
    for size in range(1, 41):
        monkeypatch.setattr("zsim.trace.readers.content.CHUNK_BYTES", size)
        stream = JsonStream(path)
        assert list(stream.items("traceEvents")) == [{"ph": "µµ", "ts": 1225.0}]
        assert (stream.head["n"], stream.head["m"]) == (1234567, -3)


def test_bytes_that_are_not_utf8_do_not_stop_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text_of(1).encode().replace(b"gemm", b"ge\xff\xffmm"))
    (event,) = JsonStream(path).items("traceEvents")
    assert event["name"] == "ge��mm"


def test_memory_does_not_grow_with_what_is_not_kept(tmp_path: Path) -> None:
    """16 MB of Python frames around one kernel: their events are forgotten as they are read."""
    path = tmp_path / "trace.json"
    frame = json.dumps({**EVENT, "cat": "python_function", "name": "f" * 1000}) + ",\n"
    step = {**EVENT, "cat": "user_annotation", "name": "ProfilerStep#1", "dur": 50.0}
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        for _ in range(16):
            file.write(frame * 1000)
        file.write(json.dumps(step) + ",\n" + json.dumps(EVENT) + "]}")
    tracemalloc.start()
    trace = zsim.read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == 1
    assert peak < 8_000_000
