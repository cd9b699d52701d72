"""Pipeline ranks in one Chrome file: a process each, named, with their forwards and backwards above."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipelines import one_f_one_b, pipeline_plan
from tests.report.test_bubbles import LONG, SHORT, free_job, seconds_of
from zsim.engine.simulate import Outcome, simulate_job
from zsim.explain.pipeline import pipeline_of
from zsim.trace.chrome.write import RankMarks, chrome_trace, merged_rank_traces, write_rank_traces


def outcome() -> Outcome:
    """4 stages of 2 replicas, 3 micro-batches."""
    plan = pipeline_plan(one_f_one_b, 4, 3, (SHORT, LONG), replicas=2, sent_bytes=0, micro_bytes=10**9)
    return simulate_job(free_job(8), plan=plan)


def together(found: Outcome) -> dict[str, Any]:
    section = pipeline_of(found)
    assert section is not None
    return merged_rank_traces(found.trace, [RankMarks(row.first_rank, row.marks(1)) for row in section.rows])


def events_of(document: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    events = document["traceEvents"]
    return [event for event in events if all(event.get(key) == value for key, value in wanted.items())]


def test_every_rank_is_a_named_process_in_pipeline_order() -> None:
    document = together(outcome())
    names = {event["pid"]: event["args"]["name"] for event in events_of(document, name="process_name")}
    places = {
        event["pid"]: event["args"]["sort_index"] for event in events_of(document, name="process_sort_index")
    }
    gpus = [pid for pid in sorted(places, key=lambda pid: places[pid]) if pid < 8]
    assert gpus == [0, 2, 4, 6]
    assert [names[pid] for pid in gpus] == [
        f"zsim rank {2 * number}, pipeline rank {number}" for number in range(4)
    ]
    assert sorted(places.values()) == list(range(8))
    assert {event["pid"] for event in events_of(document, cat="kernel")} == {0, 2, 4, 6}


def test_forwards_and_backwards_stand_above_the_streams() -> None:
    """On rank 6, the last stage, the first forward begins when three others have forwarded."""
    found = outcome()
    forward = seconds_of(SHORT, found.job) * 1e6
    marks = events_of(together(found), cat="gpu_user_annotation", pid=6)
    assert [mark["name"] for mark in marks] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert marks[0]["ts"] == pytest.approx(3 * forward, abs=2e-3)
    assert marks[0]["dur"] == pytest.approx(forward, abs=2e-3)
    assert {mark["tid"] for mark in marks} == {0}


def test_launches_of_different_ranks_are_told_apart() -> None:
    """Flows are joined by their id in the whole file: no two launches may share one."""
    document = together(outcome())
    ids = [event["id"] for event in events_of(document, ph="s")]
    assert len(ids) == len(set(ids)) == len(events_of(document, ph="f"))
    by_id = {event["id"]: event["pid"] for event in events_of(document, ph="f")}
    assert all(by_id[event["id"]] == event["pid"] - 100_000 for event in events_of(document, ph="s"))


def test_no_event_is_before_the_beginning() -> None:
    """Where the last stage begins its step two seconds before the first, the clock starts with it."""
    found = outcome()
    trace = replace(found.trace, begins={6: -2.0})
    early = np.where(trace.ranks == 6, 2.0, 0.0)
    trace = replace(
        trace,
        start_seconds=trace.start_seconds - early,
        end_seconds=trace.end_seconds - early,
        issue_seconds=trace.issue_seconds - early,
    )
    document = merged_rank_traces(
        trace, [RankMarks(0, [("F0", 0.0, 1.0)]), RankMarks(6, [("F0", -2.0, -1.0)])]
    )
    timed = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert min(event["ts"] for event in timed) == 0.0
    marks = {event["pid"]: event["ts"] for event in events_of(document, cat="gpu_user_annotation")}
    assert marks == {0: 2e6, 6: 0.0}


def test_a_file_of_one_rank_has_the_name_of_its_program() -> None:
    found = outcome()
    names = events_of(chrome_trace(found.trace, 4), name="process_name")
    assert {event["args"]["name"] for event in names} == {"zsim rank 4, pipeline rank 2"}


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    found = outcome()
    ranks = [RankMarks(0, ()), RankMarks(2, ())]
    first = write_rank_traces(found.trace, ranks, tmp_path / "a.json.gz").read_bytes()
    assert write_rank_traces(found.trace, ranks, tmp_path / "b.json.gz").read_bytes() == first
    assert json.loads(gzip.decompress(first))["source"] == "zsim, simulated, 2 ranks"
