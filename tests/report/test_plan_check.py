"""The plan check: which calls are not the same, in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zsim.comparison.calls import Call, calls_of_trace
from zsim.comparison.plan_check import check_plan, first_difference
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
