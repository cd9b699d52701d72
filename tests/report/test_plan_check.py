"""The plan check: which calls are not the same, in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.expect import about
from zsim.comparison import alignment
from zsim.comparison.alignment import align
from zsim.comparison.compare import compare
from zsim.comparison.op_classes import add_transfers, match_transfers, op_seconds, waiting_seconds
from zsim.comparison.plan_check import Call, calls_of_trace, check_plan, first_difference
from zsim.trace.trace import Trace

GATHERS = [Call("all_gather", 400 + block, "bf16", 8, 1, "gather", f"blocks.{block}") for block in range(4)]
REDUCES = [Call("reduce_scatter", 800, "fp32", 8, 1, "reduce", f"blocks.{block}") for block in range(4)]
CALLS = [*GATHERS, *REDUCES]


def without_names(calls: list[Call]) -> list[Call]:
    return [replace(call, module="") for call in calls]


def sentences(simulated: list[Call], recorded: list[Call]) -> list[str]:
    return [difference.sentence for difference in check_plan(simulated, recorded).differences]


def test_the_same_calls_pass_whatever_the_streams_are_called() -> None:
    numbered = [replace(call, stream={"gather": "20", "reduce": "24"}[call.stream]) for call in CALLS]
    check = check_plan(CALLS, numbered)
    assert (check.verdict, check.differences, check.not_checked) == ("pass", (), ())
    assert first_difference(check) is None


def test_a_dropped_call_is_named() -> None:
    assert sentences(CALLS, CALLS[:2] + CALLS[3:]) == [
        "dropped: all-gather of blocks.2 (402 B bf16, 8 ranks) is simulated as call 3 and not recorded"
    ]


def test_a_call_too_many_is_named() -> None:
    assert sentences(CALLS[:-1], CALLS) == [
        "extra: reduce-scatter of blocks.3 (800 B fp32, 8 ranks) is recorded as call 8 and not simulated"
    ]


def test_a_doubled_message_is_a_change_of_its_bytes() -> None:
    doubled = [*CALLS[:1], replace(CALLS[1], bytes=802), *CALLS[2:]]
    assert sentences(CALLS, doubled) == [
        "changed: call 2, all-gather of blocks.1 (401 B bf16, 8 ranks): bytes 401 simulated, 802 recorded "
        "(2 x)"
    ]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", "fp32", "dtype bf16 simulated, fp32 recorded"),
        ("group_size", 4, "group size 8 simulated, 4 recorded"),
        ("group_stride", 2, "ranks of the group 1 simulated, 2 recorded"),
        ("kind", "broadcast", "kind all_gather simulated, broadcast recorded"),
    ],
)
def test_any_other_change_is_named_too(field: str, value: Any, words: str) -> None:
    (sentence,) = sentences(CALLS, [replace(CALLS[0], **{field: value}), *CALLS[1:]])
    assert sentence.startswith("changed: call 1, all-gather of blocks.0")
    assert sentence.endswith(words)


def test_calls_of_one_size_that_changed_places_are_told_apart_by_their_modules() -> None:
    """The bytes are the same; on the wire nobody could see it."""
    swapped = [*CALLS[:4], CALLS[5], CALLS[4], *CALLS[6:]]
    (sentence,) = sentences(CALLS, swapped)
    assert sentence.startswith("order: reduce-scatter of blocks.")
    assert "is simulated as call" in sentence
    assert sentences(without_names(CALLS), without_names(swapped)) == []


def test_names_that_both_sides_do_not_share_are_not_compared() -> None:
    """blocks.0 here is layers.0 there."""
    theirs = [replace(call, module=call.module.replace("blocks", "layers")) for call in CALLS]
    assert sentences(CALLS, theirs) == []


def test_a_call_lost_among_equal_ones_says_that_it_could_be_any_of_them() -> None:
    (sentence,) = sentences(without_names(REDUCES), without_names(REDUCES[:-1]))
    assert "one of 4 alike in a row, is simulated as call" in sentence


def test_the_same_change_in_many_blocks_is_one_line() -> None:
    wide = [*GATHERS, *(replace(call, bytes=1600) for call in REDUCES)]
    (difference,) = check_plan(CALLS, wide).differences
    assert difference.count == 4
    assert difference.sentence.startswith("changed: calls 5, 6, ..., reduce-scatter of blocks.0")
    assert difference.sentence.endswith("bytes 800 simulated, 1,600 recorded (2 x), and 3 more like it")


def test_a_call_on_another_stream_than_its_fellows_is_a_difference() -> None:
    strayed = [replace(CALLS[0], stream="reduce"), *CALLS[1:]]
    assert sentences(CALLS, strayed) == [
        "stream: 1 call of stream gather, first all-gather of blocks.0 (400 B bf16, 8 ranks), recorded on "
        "stream reduce where its others are on gather"
    ]


def test_two_streams_that_are_one_in_the_recording_are_a_difference() -> None:
    joined = [replace(call, stream="20") for call in CALLS]
    assert sentences(CALLS, joined) == [
        "stream: gather and reduce are separate streams, recorded on the one stream 20"
    ]


def test_what_the_recording_does_not_know_is_not_compared_and_said_to_be_so() -> None:
    bare = [replace(call, dtype="", group_stride=None, stream="", module="") for call in CALLS]
    check = check_plan(CALLS, bare)
    assert check.verdict == "pass"
    assert check.not_checked == (
        "dtype (not recorded)", "ranks of the group (not recorded)", "streams (not recorded)"
    )  # fmt: skip


def test_programs_that_have_nothing_in_common_are_one_line() -> None:
    mine = [Call("all_gather", 10 + i, "bf16", 8, 1) for i in range(700)]
    theirs = [Call("all_reduce", 10_000 + i, "fp32", 4, 1) for i in range(700)]
    (sentence,) = sentences(mine, theirs)
    assert sentence.startswith("the 700 simulated and the 700 recorded calls have too little in common")


def test_a_trace_gives_its_calls_in_the_order_the_host_made_them(make_trace: Callable[..., Trace]) -> None:
    """The second was issued first; its stream was busy. Kernels are no calls."""
    common = {"stream": "c", "group": "world", "group_size": 8, "dtype": "bf16"}
    trace = make_trace(
        [
            {"kind": "all_gather", "issue": 0.2, "start": 1.0, "end": 2.0, "bytes": 5, **common},
            {"kind": "all_reduce", "issue": 0.1, "start": 2.0, "end": 3.0, "bytes": 7, **common},
            {"kind": "compute", "start": 0.0, "end": 1.0},
        ],
        metadata={"groups": {"world": (8, 1)}},
    )
    calls = calls_of_trace(trace, 0)
    assert [(call.kind, call.bytes, call.group_stride) for call in calls] == [
        ("all_reduce", 7, 1),
        ("all_gather", 5, 1),
    ]


# -- Transfer told from waiting, so that a late rank is not a slow link ------------------------------------


GATHER = {"kind": "all_gather", "stream": "comm", "bytes": 10**6, "group_size": 2, "dtype": "bf16"}


@pytest.fixture
def on_time(make_trace: Callable[..., Trace]) -> Trace:
    """One rank of two: a gather of 1 ms, computing of 9 ms beside it."""
    return make_trace([{"start": 0, "end": 1e-3, **GATHER}, {"start": 0, "end": 9e-3}], world_size=2)


@pytest.fixture
def late(on_time: Trace) -> Trace:
    """The same recorded, but the other rank came 2 ms later: 3 ms, of which 1 is transfer."""
    return replace(
        on_time,
        source="recorded",
        end_seconds=np.array([3e-3, 9e-3]),
        transfer_seconds=np.array([1e-3, np.nan]),
    )


def test_a_late_rank_is_waiting_and_no_slow_link(on_time: Trace, late: Trace) -> None:
    comparison = compare(on_time, late)
    (gathers, *_) = comparison.clock.classes
    assert (gathers.metric.verdict, gathers.metric.recorded) == ("pass", about(1e-3))
    waits = [metric for metric in comparison.metrics if metric.name == "waiting for other ranks"]
    assert [(metric.simulated, metric.recorded) for metric in waits] == [(0.0, about(2e-3))]
    assert waits[0].verdict == "fail"


def test_a_transfer_that_is_only_a_bound_is_not_used(on_time: Trace, late: Trace) -> None:
    """One rank of two: 1 ms is the shortest of its repeats, no more. Whole spans are compared."""
    bounded = replace(late, metadata={"transfers_bounded": 1})
    comparison = compare(on_time, bounded)
    (gathers, *_) = comparison.clock.classes
    assert gathers.metric.recorded == pytest.approx(3e-3)
    assert "too few ranks to tell waiting from transfer" in comparison.notes[0]
    assert waiting_seconds(add_transfers(bounded)) is None


def test_both_sides_give_transfers_or_neither_does(on_time: Trace, late: Trace) -> None:
    unknown = replace(late, transfer_seconds=None)
    for trace in (*match_transfers(on_time, unknown), *match_transfers(late, unknown)):
        assert op_seconds(trace).tolist() == (trace.end_seconds - trace.start_seconds).tolist()


def test_of_simulated_ranks_the_last_one_waits_for_nobody(make_trace: Callable[..., Trace]) -> None:
    """Rank 1 arrives after 2 ms; both leave at 3: rank 0 waited 2 of its 3 ms."""
    trace = make_trace(
        [{"rank": 0, "start": 0, "end": 3e-3, **GATHER}, {"rank": 1, "start": 2e-3, "end": 3e-3, **GATHER}],
        world_size=2,
    )
    known = add_transfers(trace)
    assert op_seconds(known).tolist() == pytest.approx([1e-3, 1e-3])
    assert waiting_seconds(known.select_rank(0)) == pytest.approx(2e-3)
    assert waiting_seconds(known.select_rank(1)) == 0


def test_an_op_that_a_rank_runs_again_and_again_has_no_known_transfer(
    make_trace: Callable[..., Trace],
) -> None:
    """Three spans of one info on one rank: their shortest is not the others' transfer."""
    spans = [{"start": k, "end": k + 1 + k / 10, **GATHER} for k in range(3)]
    known = add_transfers(make_trace(spans, world_size=2))
    assert op_seconds(known).tolist() == pytest.approx([1.0, 1.1, 1.2])


# -- Aligning two sequences: what stays the same, and what happened to the rest ----------------------------


def longest_common(first: str, second: str) -> int:
    """The length of a longest common subsequence, by the table of all prefixes."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else longer
    return table[-1][-1]


@given(st.text("abc", max_size=14), st.text("abc", max_size=14))
def test_as_many_entries_as_possible_are_matched_in_order(first: str, second: str) -> None:
    found = align(first, second)
    assert all(first[i] == second[j] for i, j in found.same)
    assert list(found.same) == sorted(found.same)
    assert all(i < k and j < m for (i, j), (k, m) in zip(found.same, found.same[1:], strict=False))
    assert len(found.same) == longest_common(first, second)


@given(st.text("abcd", max_size=14), st.text("abcd", max_size=14))
def test_every_entry_ends_up_in_one_place(first: str, second: str) -> None:
    found = align(first, second, lambda i, j: 0.7)
    pairs = (*found.same, *found.moved, *found.changed)
    assert sorted([*(i for i, _ in pairs), *found.only_first]) == list(range(len(first)))
    assert sorted([*(j for _, j in pairs), *found.only_second]) == list(range(len(second)))


def test_one_lost_entry_costs_one_line() -> None:
    found = align("gather the parameters", "gather he parameters")
    assert (found.only_first, found.only_second, found.moved) == ((7,), (), ())


def test_two_entries_that_changed_places_are_one_move() -> None:
    found = align("abcdef", "abdcef")
    assert (found.only_first, found.only_second) == ((), ())
    assert len(found.moved) == 1


def test_an_entry_that_stands_far_away_is_not_the_same_one() -> None:
    """x is lost at the beginning and another one comes 20 places later."""
    found = align("x" + "abcdefghijklmnopqrst", "abcdefghijklmnopqrst" + "x")
    assert (found.only_first, found.only_second, found.moved) == ((0,), (20,), ())


def test_entries_between_the_same_neighbours_are_a_change_when_alike_enough() -> None:
    assert align("abc", "aXc", lambda i, j: 0.5).changed == ((1, 1),)
    found = align("abc", "aXc", lambda i, j: 0.4)
    assert (found.changed, found.only_first, found.only_second) == ((), (1,), (1,))


def test_sequences_without_anything_in_common_are_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 edits: only the common ends are matched, and the result says so."""
    monkeypatch.setattr(alignment, "MAX_EDITS", 20)
    found = align("<" + "a" * 50 + ">", "<" + "b" * 50 + ">")
    assert found.is_complete is False
    assert found.same == ((0, 0), (51, 51))
