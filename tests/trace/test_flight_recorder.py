from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.trace.readers.flight_recorder import repeating_period


def entry(
    number: int, name: str, inputs: list[list[int]], outputs: list[list[int]], at: int, **more: Any
) -> dict[str, Any]:
    return {"record_id": number, "profiling_name": name, "process_group": ["0", "default_pg"],
            "input_sizes": inputs, "output_sizes": outputs, "input_dtypes": ["Float"], "is_p2p": False,
            "collective_seq_id": number + 1, "time_created_ns": at, **more}  # fmt: skip


def write_dump(path: Path, entries: Sequence[dict[str, Any]], **head: Any) -> Path:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    path.write_text(json.dumps({"version": "2.10", "entries": entries, "pg_config": groups, **head}))
    return path


def two_steps(**more: Any) -> list[dict[str, Any]]:
    entries = []
    for step in (0, 1):
        at = 1_000_000 * step
        entries += [
            entry(3 * step, "nccl:_all_gather_base", [[1000]], [[2000]], at, **more),
            entry(3 * step + 1, "nccl:_all_gather_base", [[1000]], [[2000]], at + 10, **more),
            entry(3 * step + 2, "nccl:_reduce_scatter_base", [[2000]], [[1000]], at + 20, **more),
        ]
    return entries


def test_a_dump_says_which_collectives_in_which_order(tmp_path: Path) -> None:
    trace = zsim.read_trace(write_dump(tmp_path / "trace_rank_0.json", two_steps()))
    assert [step.number for step in trace.steps] == [0, 1]
    step = trace.select_step(1)
    assert [(i.kind, i.bytes, i.dtype, i.group_size) for _, i, _, _ in step.rows()] == [
        ("all_gather", 8000, "fp32", 2),
        ("all_gather", 8000, "fp32", 2),
        ("reduce_scatter", 8000, "fp32", 2),
    ]
    assert trace.metadata["is_timed"] is False


def test_a_dump_with_timing_says_how_long(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "trace_rank_0.json", two_steps(duration_ms=0.005))
    trace = zsim.read_trace(dump)
    assert trace.metadata["is_timed"] is True
    assert (trace.end_seconds - trace.start_seconds).tolist() == pytest.approx([5e-6] * 6)


def test_ranks_are_told_from_the_names_of_the_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_dump(tmp_path / f"trace_rank_{rank}.json", two_steps())
    assert zsim.read_trace(tmp_path).metadata["ranks"] == (0, 1)


@pytest.mark.parametrize(
    ("values", "period"),
    [
        ([1, 2, 2, 1, 2, 2], 3),
        ([9, 9, 1, 2, 2, 1, 2, 2], 3),  # what came before the first whole step does not count
        ([1, 2, 3, 4], 0),
        ([1, 2, 3, 5, 5], 0),  # the end repeats, but it is not half of all
        ([7, 7, 7, 7], 1),
        ([], 0),
    ],
)
def test_the_period_of_a_sequence_is_that_of_its_end(values: list[int], period: int) -> None:
    assert repeating_period(values) == period


def test_dumps_of_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(zsim.InputError, match=r"has version '1\.5'; expected a Flight Recorder dump"):
        zsim.read_trace(write_dump(tmp_path / "a.json", two_steps(), version="1.5"))
    with pytest.raises(zsim.InputError, match="has no entries"):
        zsim.read_trace(write_dump(tmp_path / "b.json", []))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"duration_ms": "x"}, r"entry \{.*: a value is not as expected \(ValueError: could not convert"),
        ({"duration_ms": 1e300}, r"entry \{.* \(OverflowError"),
        ({"process_group": -1}, r"entry \{.* \(TypeError: 'int' object is not iterable"),
        ({"input_dtypes": 5}, r"entry \{.* \(TypeError"),
    ],
)
def test_an_entry_with_a_field_of_another_type_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = write_dump(tmp_path / "trace_rank_0.json", two_steps(**changes))
    with pytest.raises(zsim.InputError, match=words) as refused:
        zsim.read_trace(path)
    assert str(refused.value).startswith(f'{path}: entry {{"record_id": 0, ')


def test_a_rank_that_is_not_in_the_group_of_its_collectives_is_refused(tmp_path: Path) -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[1, 2]"}}
    path = write_dump(tmp_path / "trace_rank_0.json", two_steps(), pg_config=groups)
    with pytest.raises(zsim.InputError, match=r"is of rank 0 and does 'nccl:.*', which has the ranks 1, 2"):
        zsim.read_trace(path)


def test_more_ranks_than_there_can_be_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    path = write_dump(tmp_path / "trace_rank_0.json", two_steps(), rank=10**9)
    with pytest.raises(zsim.InputError, match="says it is rank 1000000000 of 2; expected ranks from 0"):
        zsim.read_trace(path)
