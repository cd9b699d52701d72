"""Damaged and foreign files: one clear error each, in little memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.trace.readers.content import JsonStream

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
