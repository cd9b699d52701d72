""""""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from tests.conftest import KinetoBuilder
from tests.expect import there
from tests.pipelines import one_f_one_b, pipeline_plan
from tests.report.test_bubbles import LONG, SHORT, free_job, seconds_of
from zsim.engine.simulate import Outcome, simulate_job
from zsim.explain.pipeline import pipeline_of
from zsim.trace.chrome import RankMarks, chrome_trace, merged_rank_traces, write_rank_traces

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def two_ranks(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    clocks: tuple[int, ...] = (0, 0),
    calls: Sequence[str] = ("_allgather_base",) * 2,
) -> Path:
    """A file per rank with one step and collectives from `starts` to `ends` (microseconds)."""
    for rank in (0, 1):
        file = kineto(rank=rank, base=clocks[rank] * 1000)
        file.step(1, 0, 1000)
        file.launch("gemm", 1, 2, 5)
        for number, (start, end) in enumerate(zip(starts[rank], ends[rank], strict=True)):
            args = metadata(calls[rank], 1000, 2000, [0, 1], seq=number)
            file.launch(ALL_GATHER, start - 5, start, end - start, stream=20, **args)
        file.write(tmp_path / f"rank{rank}.json.gz")
    return tmp_path


def test_waiting_for_the_other_rank_is_not_transfer(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 0 is there at 100 us, rank 1 at 160; both are done at 172: the transfer took 12 us, not 72."""
    folder = two_ranks(kineto, metadata, tmp_path, starts=([100], [160]), ends=([172], [172]))
    trace = zsim.read_trace(folder)
    is_collective = [bool(info.group) for _, info, _, _ in trace.rows()]
    transfers = there(trace.transfer_seconds)[is_collective]
    assert transfers.tolist() == pytest.approx([12e-6, 12e-6])
    assert trace.metadata["transfers_bounded"] == 0


def test_the_transfer_is_no_longer_than_the_shortest_kernel(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 0's clock reads 3 us more than rank 1's, too little to tell: 15 us of one end to another start."""
    folder = two_ranks(kineto, metadata, tmp_path, starts=([103], [160]), ends=([175], [172]))
    trace = zsim.read_trace(folder)
    assert there(trace.transfer_seconds)[-1] == pytest.approx(12e-6)
    assert trace.metadata["clock_offsets_seconds"] == (0.0, 0.0)


def test_one_rank_alone_takes_the_shortest_of_its_repeats(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The same all-gather took 72, 12 and 40 us on rank 0; 12 us is the most that its transfer can take."""
    file = kineto(rank=0)
    file.step(1, 0, 1000)
    for seq, (start, length) in enumerate(((100, 72), (200, 12), (300, 40))):
        args = metadata("_allgather_base", 1000, 2000, [0, 1], seq=seq)
        file.launch(ALL_GATHER, start - 5, start, length, stream=20, **args)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert there(trace.transfer_seconds).tolist() == pytest.approx([12e-6] * 3)
    assert trace.metadata["transfers_bounded"] == 3
    assert any("1 of 2 ranks" in note for note in trace.metadata["notes"])


def test_clocks_are_set_by_the_collectives_ends(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Rank 1's clock is 5,000 us ahead: its collectives end 5,000 us later, and never overlap rank 0's."""
    folder = two_ranks(
        kineto, metadata, tmp_path, ([100, 200], [160, 210]), ([172, 231], [172, 231]), clocks=(0, 5000)
    )
    trace = zsim.read_trace(folder)
    assert trace.metadata["clock_offsets_seconds"] == (0.0, -0.005)
    ends = [end for _, info, _, end in trace.rows() if info.group]
    assert ends == pytest.approx([172e-6, 231e-6] * 2)
    assert len(trace.steps) == 1
    assert trace.step_seconds == pytest.approx(1e-3)


def test_ranks_that_did_different_things_are_refused(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    calls = ("_allgather_base", "_reduce_scatter_base")
    folder = two_ranks(kineto, metadata, tmp_path, ([100], [160]), ([172], [172]), calls=calls)
    with pytest.raises(zsim.InputError, match=r"collective 1 of step 1.*reduce_scatter.*all_gather"):
        zsim.read_trace(folder)


def test_a_collective_that_one_rank_lacks_is_named(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = two_ranks(kineto, metadata, tmp_path, ([100, 200], [160]), ([172, 231], [172]))
    with pytest.raises(zsim.InputError, match=r"rank 1 has 1 collectives.*rank 0 has 2: number 2"):
        zsim.read_trace(folder)


@pytest.mark.parametrize(
    ("ranks", "worlds", "steps", "message"),
    [
        ((0, 0), (2, 2), (1, 1), "is of rank 0, and so is"),
        ((0, 1), (2, 4), (1, 1), "with 4 ranks, but"),
        ((0, 1), (2, 2), (1, 2), "no step in common"),
        ((0, 3), (2, 2), (1, 1), "says it is rank 3 of 2"),
    ],
)
def test_ranks_that_do_not_belong_together_are_refused(
    kineto: Callable[..., KinetoBuilder],
    tmp_path: Path,
    ranks: tuple[int, ...],
    worlds: tuple[int, ...],
    steps: tuple[int, ...],
    message: str,
) -> None:
    for place in (0, 1):
        file = kineto(rank=ranks[place], world_size=worlds[place])
        file.step(steps[place], 0, 100)
        file.launch("gemm", 1, 5, 20)
        file.write(tmp_path / f"file{place}.json")
    with pytest.raises(zsim.InputError, match=message):
        zsim.read_trace(tmp_path)


def test_a_recording_without_steps_is_refused_unless_it_is_one(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    file = kineto()
    file.launch("gemm", 1, 5, 20)
    path = file.write(tmp_path / "rank0.json")
    with pytest.raises(zsim.InputError, match="has no steps: no ProfilerStep"):
        zsim.read_trace(path)
    whole = zsim.read_trace(path, whole=True)
    assert whole.step_seconds == pytest.approx(22e-6)


# -- Pipeline ranks in one Chrome file: a process each, named, with their forwards and backwards above -----


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
