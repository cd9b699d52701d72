"""Span logs of validation.record, and the recordings in traces/."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import about
from zsim.trace.trace import COLLECTIVES

TRACES = Path(__file__).resolve().parents[2] / "traces" / "gloo"
HEADER = {"format": 1, "provenance": {"backend": "gloo"}, "rank": 0, "world_size": 2,
          "clock": {"perf_counter_ns": 0, "epoch_ns": 10**18}}  # fmt: skip


def write_log(path: Path, *events: dict[str, Any], **header: Any) -> Path:
    common = {"step": 7, "micro": 0}
    lines = [HEADER | header, *({**common, **event} for event in events)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def unit(op: str, name: str, start: int, end: int, phase: str = "forward") -> dict[str, Any]:
    return {"kind": "comp", "op": op, "unit": name, "phase": phase, "issue_ns": start, "done_ns": end}


def test_a_unit_computes_while_it_does_not_wait_and_no_unit_inside_does(tmp_path: Path) -> None:
    """The phase from 0 to 100 us holds root from 10 to 90, that holds a layer from 20 to 60, which waits for
    its parameters from 30 to 35 us."""
    gather = {"kind": "coll", "op": "all_gather", "unit": "layers.0", "phase": "forward", "bytes": 64,
              "dtype": "fp32", "group": 2, "seq": 1, "issue_ns": 15_000, "wait0_ns": 30_000,
              "done_ns": 34_000, "wait1_ns": 35_000}  # fmt: skip
    phase = {"kind": "phase", "op": "forward", "phase": "forward", "issue_ns": 0, "done_ns": 100_000}
    path = write_log(
        tmp_path / "rank0.jsonl",
        phase,
        unit("forward", "root", 10_000, 90_000),
        gather,
        unit("forward", "layers.0", 20_000, 60_000),
    )
    trace = zsim.read_trace(path)
    rows = [(i.kind, i.module, round(s * 1e6), round(e * 1e6)) for _, i, s, e in trace.rows()]
    assert sorted(rows, key=lambda row: row[2:]) == [
        ("compute", "", 0, 10),
        ("compute", "root", 10, 20),
        ("all_gather", "layers.0", 15, 34),
        ("compute", "layers.0", 20, 30),
        ("compute", "layers.0", 35, 60),
        ("compute", "root", 60, 90),
        ("compute", "", 90, 100),
    ]
    assert [(s.number, s.seconds) for s in trace.steps] == [(7, about(100e-6))]
    assert [block[:3] for block in trace.host_blocks] == [(0, about(30e-6), about(35e-6))]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": "x"}, "step is 'x'; expected a whole number"),
        ({"step": None}, "step is None; expected a whole number"),
        ({"step": [1]}, r"step is \[1\]; expected a whole number"),
        ({"done_ns": ""}, "done_ns is ''; expected a whole number"),
        ({"issue_ns": 3.7}, "issue_ns is 3.7; expected a whole number"),
        ({"issue_ns": 10**30}, "issue_ns is 10+; expected a whole number of 64 bits"),
        ({"op": []}, r"op is \[\]; expected a text"),
        ({"group": 2**62, "stride": 1}, "group is 4611686018427387904; expected a whole number of 64 bits"),
        ({"group": 10**9, "stride": 1}, "group is 1000000000; expected 1 to the 2 ranks"),
        ({"wait1_ns": 5}, r"is damaged, or no span log .* \(KeyError: 'wait0_ns'\)"),
    ],
)
def test_a_field_of_another_type_is_refused_with_its_event(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    event = {"kind": "coll", "op": "all_gather", "issue_ns": 10, "done_ns": 20, "bytes": 8, "group": 2}
    path = write_log(tmp_path / "rank0.jsonl", {**event, **changes})
    with pytest.raises(zsim.InputError, match=words) as refused:
        zsim.read_trace(path)
    assert str(refused.value).startswith(str(path))


def test_ranks_on_one_machines_clock_are_not_shifted(tmp_path: Path) -> None:
    """Their collectives do not even overlap: on clocks of two machines that would be a shift of 100 us."""
    for rank in (0, 1):
        start = 10_000 + 100_000 * rank
        coll = {"kind": "coll", "op": "all_gather", "phase": "forward", "bytes": 64, "dtype": "fp32",
                "group": 2, "seq": 1, "issue_ns": start, "done_ns": start + 5_000}  # fmt: skip
        phase = {"kind": "phase", "op": "forward", "phase": "forward", "issue_ns": 0, "done_ns": 200_000}
        write_log(tmp_path / f"rank{rank}.jsonl", phase, coll, rank=rank)
    assert zsim.read_trace(tmp_path).metadata["clock_offsets_seconds"] == (0.0, 0.0)


def test_collectives_without_an_end_are_counted_in_a_note(tmp_path: Path) -> None:
    """Two that nobody waited for, and one that ended."""
    coll = {"kind": "coll", "op": "reduce_scatter", "bytes": 64, "dtype": "fp32", "group": 2, "issue_ns": 1}
    phase = {"kind": "phase", "op": "forward", "issue_ns": 0, "done_ns": 9}
    path = write_log(tmp_path / "rank0.jsonl", phase, coll, coll, {**coll, "done_ns": 5})
    assert zsim.read_trace(path).metadata["notes"][0] == (
        "2 reduce_scatter without an end in the log: how long they took is not known, and 0 stands for it"
    )


def test_groups_of_one_size_are_told_apart_by_how_far_their_ranks_are_apart(tmp_path: Path) -> None:
    """HSDP on four ranks, as rank 3 sees it: shards with rank 2, replicas with rank 1."""
    coll = {"kind": "coll", "op": "all_reduce", "bytes": 64, "dtype": "fp32", "group": 2, "issue_ns": 1}
    phase = {"kind": "phase", "op": "forward", "issue_ns": 0, "done_ns": 9}
    path = write_log(
        tmp_path / "rank3.jsonl", phase, {**coll, "stride": 1}, {**coll, "stride": 2}, rank=3, world_size=4
    )
    trace = zsim.read_trace(path)
    assert trace.metadata["groups"] == {
        "world": (4, 1), "group of 2": (2, 1), "group of 2, 2 apart": (2, 2)
    }  # fmt: skip
    assert [info.group for _, info, _, _ in trace.rows() if info.kind == "all_reduce"] == [
        "group of 2", "group of 2, 2 apart"
    ]  # fmt: skip
    assert trace.metadata["group_members"]["group of 2, 2 apart"] == ((1, 3),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rank": 0, "world_size": 2}\n{"kind": "coll"', "line 2 is not JSON.*cut off"),
        ('{"rank": 0, "world_size": 2}\n[1]', r"line 2 is '\[1\]'; expected an object"),
        ('{"rank": 0, "world_size": 2}\n', "has a header and no events"),
        ('{"rank": 0, "world_size": 2}\n{"kind": "coll"}', "has no 'op'; expected a span log"),
    ],
)
def test_a_damaged_log_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(text)
    with pytest.raises(zsim.InputError, match=message):
        zsim.read_trace(path)


@pytest.mark.parametrize("case", sorted(path.name for path in TRACES.iterdir()))
def test_every_recorded_run_is_read_with_the_calls_of_its_summary(case: str) -> None:
    summary = json.loads((TRACES / case / "summary.json").read_text())
    trace = zsim.read_trace(TRACES / case)
    assert trace.world_size == summary["world_size"] == len(trace.metadata["ranks"])
    assert len(trace.steps) == 2
    expected: Counter[tuple[str, int, str, int]] = Counter()
    for row in summary["calls"]:
        times, calls = (row["times"], row["calls"]) if isinstance(row, dict) else (1, [row])
        for kind, count, dtype, size, _, _ in calls:
            expected[kind, count, dtype, size] += times
    step = trace.select_step(trace.steps[-1].number)
    for rank in range(trace.world_size):
        infos = [info for of_rank, info, _, _ in step.rows() if of_rank == rank]
        found = Counter((i.kind, i.bytes, i.dtype, i.group_size) for i in infos if i.kind in COLLECTIVES)
        assert found == expected


@pytest.mark.parametrize("case", ["fsdp2-reshard-even-2ranks", "ddp-even-2ranks", "zero3-even-2ranks"])
def test_the_profiles_of_recorded_runs_hold_the_flight_recorders_collectives(case: str) -> None:
    """Kineto and the Flight Recorder saw the same step: kinds as gloo ran them, elements of the input."""
    summary = json.loads((TRACES / case / "summary.json").read_text())
    files = sorted((TRACES / case).glob("*.kineto.json.gz"))
    trace = zsim.read_trace(files, whole=True)
    sizes: Counter[tuple[str, int]] = Counter()
    for name, inputs, _, _, _ in summary["flight_recorder"]:
        full = inputs[0][0] * (2 if name == "gloo:all_gather" else 1)
        sizes[name, full * 4] += 1
    infos = [info for rank, info, _, _ in trace.rows() if rank == 0 and info.kind in COLLECTIVES]
    assert Counter((info.name, info.bytes) for info in infos) == sizes
