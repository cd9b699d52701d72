"""A simulated step against a recorded one: planted faults are named, foreign load decides nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.browser import Page, as_plotly, browse, in_browser, text_of
from tests.expect import about, there
from zsim.comparison import planted
from zsim.comparison.compare import compare
from zsim.comparison.comparison import Comparison, compare_page, format_error, twin_timeline
from zsim.comparison.verdict import Tolerances, judge, timing_doubt
from zsim.errors import InputError
from zsim.trace.trace import SpanInfos, Trace


@pytest.fixture
def step(make_sharded_step: Callable[..., Trace]) -> Trace:
    """4 blocks over 16 ranks: 8 gathers and 4 reduce-scatters of 1 GB; a step of 30.1 ms."""
    return make_sharded_step()


def recorded(trace: Trace, **metadata: Any) -> Trace:
    return replace(trace, source="recorded", metadata={**trace.metadata, **metadata})


def first(comparison: Comparison) -> str:
    return comparison.differences[0].sentence


def test_a_trace_is_the_same_as_itself(step: Trace) -> None:
    comparison = zsim.compare(step, recorded(step))
    assert comparison.verdict == "pass"
    assert comparison.differences == ()
    assert {metric.error for metric in comparison.metrics} == {0.0}


def test_a_dropped_collective_is_caught_and_named(step: Trace) -> None:
    comparison = compare(step, planted.drop_call(recorded(step), 2))
    assert comparison.verdict == comparison.plan_verdict == "fail"
    assert first(comparison) == (
        "dropped: all-gather of blocks.2 (1.00 GB bf16, 16 ranks) is simulated as call 3 and not recorded"
    )


def test_a_doubled_message_is_caught_and_named(step: Trace) -> None:
    comparison = compare(step, planted.double_message(recorded(step), 3))
    assert comparison.verdict == "fail"
    assert first(comparison).startswith("changed: call 4, all-gather of blocks.3")
    assert first(comparison).endswith("bytes 1,000,000,000 simulated, 2,000,000,000 recorded (2 x)")


def test_a_swapped_order_is_caught_and_named(step: Trace) -> None:
    comparison = compare(step, planted.swap_calls(recorded(step), 1))
    assert comparison.plan_verdict == "fail"
    assert first(comparison).startswith("order: all-gather of blocks.")


def test_a_ten_percent_slower_link_is_caught_and_named(step: Trace) -> None:
    """8 ms of gathers become 8.8: recorded 1.10 times as long, 1 / 1.1 = 0.91 of the bandwidth."""
    comparison = compare(step, planted.slow_link(recorded(step), 1.1), tolerances=0.05)
    assert comparison.plan_verdict == "pass"
    assert comparison.verdict == "fail"
    (gathers,) = [row for row in comparison.clock.classes if row.name == "all-gather, 16 ranks"]
    assert (gathers.metric.simulated, gathers.metric.recorded) == pytest.approx((8e-3, 8.8e-3))
    assert gathers.median_ratio == pytest.approx(1.1)
    assert any(
        row.sentence.startswith("all-gather, 16 ranks: 8.00 ms simulated, 8.80 ms recorded (-9.1 %): ")
        and row.sentence.endswith("every call 1.10 times as long: 0.91 of the simulated bandwidth")
        for row in comparison.differences
    )


def test_a_leaked_buffer_is_caught_and_named(step: Trace) -> None:
    """The first block's gathered gigabyte stays: 1 GB at the end where nothing was, and a higher peak."""
    comparison = compare(step, planted.leak(recorded(step)))
    assert (comparison.plan_verdict, comparison.verdict) == ("pass", "fail")
    assert {row.check for row in comparison.differences} == {"memory"}
    assert (
        "gpu buffers, at the end: 0 B simulated, 1.00 GB recorded (-100.0 %): 'blocks.0 reshard' holds back "
        "1.00 GB in the recording"
    ) in [row.sentence for row in comparison.differences]


def test_what_is_lost_in_time_but_not_in_calls_is_an_error_of_its_class_alone(step: Trace) -> None:
    """Backward kernels twice as slow: 16 ms simulated, and nothing said about forward's."""
    slow = replace(step, end_seconds=step.end_seconds.copy())
    for span, index in enumerate(step.info_indices):
        if step.infos[index].phase == "backward" and step.infos[index].kind == "compute":
            slow.end_seconds[span] += 2e-3
    names = {row.sentence.split(":")[0] for row in compare(step, recorded(slow)).differences}
    assert "backward kernels" in names
    assert "forward kernels" not in names


def test_a_latency_is_told_from_a_bandwidth(make_trace: Callable[..., Trace]) -> None:
    """Calls of 1, 2 and 4 ms: all 0.5 ms longer is a latency, all 1.5 times as long a bandwidth."""

    def calls(extra: float, factor: float) -> Trace:
        spans, at = [], 0.0
        for size in (1, 2, 4):
            end = at + factor * size * 1e-3 + extra
            fields = {
                "kind": "all_gather",
                "stream": "g",
                "bytes": size * 10**6,
                "group_size": 8,
                "dtype": "bf16",
            }
            spans.append({"start": at, "end": end, **fields})
            at = end
        return make_trace(spans)

    def why(trace: Trace) -> str:
        (row,) = compare(calls(0.0, 1.0), recorded(trace)).clock.classes
        return row.metric.reason

    assert why(calls(0.5e-3, 1.0)) == "every call 500.0 us longer, whatever its size: latency"
    assert why(calls(0.0, 1.5)).startswith("every call 1.50 times as long, from 1.00 MB to 4.00 MB: 0.67 of")


@pytest.mark.parametrize(
    ("metadata", "doubt"),
    [
        ({"foreign_cpu_fraction": 0.11}, "others used 11% of the machine during the recording"),
        ({"foreign_cpu_fraction": 0.10}, ""),
        ({"backend": "gloo"}, "the recording does not say how busy the machine was with others"),
        ({"backend": "gloo", "foreign_cpu_fraction": 0.02}, ""),
        ({"backend": "nccl"}, ""),
    ],
)
def test_times_beside_foreign_load_are_doubtful(step: Trace, metadata: dict[str, object], doubt: str) -> None:
    assert timing_doubt(recorded(step, **metadata)) == doubt
    assert timing_doubt(replace(step, metadata=metadata)) == ""  # simulated


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_foreign_load_is_never_a_failure_and_never_a_success(step: Trace, factor: float) -> None:
    """Neither when the times agree nor when they are three times as long."""
    busy = recorded(planted.slow_link(step, factor), foreign_cpu_fraction=0.4)
    comparison = compare(step, busy)
    assert comparison.verdict == "inconclusive"
    assert {metric.verdict for metric in comparison.clock.metrics} == {"inconclusive"}
    assert comparison.memory.metrics
    assert {metric.verdict for metric in comparison.memory.metrics} == {"pass"}


def test_a_wrong_call_fails_whatever_the_load(step: Trace) -> None:
    busy = recorded(planted.drop_call(step, 2), foreign_cpu_fraction=0.9)
    assert compare(step, busy).verdict == "fail"


def test_errors_are_signed_and_relative_to_the_recording(step: Trace) -> None:
    """Simulated 30.1 ms, recorded 33.11: 30.1 / 33.11 - 1 = -9.1 %."""
    (metric, *_) = compare(step, replace(step, step_seconds=33.11e-3)).metrics
    assert (metric.name, metric.error) == ("step", about(-1 / 11))


def test_what_neither_trace_has_is_not_new() -> None:
    """An optimizer on the CPU is no kernel in either trace, which was an error of "new"."""
    alike, added = (
        judge("optimizer", seconds, 0.0, unit="seconds", total=1.0, tolerance=0.05) for seconds in (0.0, 1.0)
    )
    assert [format_error(alike), format_error(added)] == ["+0.0%", "new"]


def test_without_phases_the_recordings_kernels_are_one_class(step: Trace) -> None:
    kinds = {"optimizer": "compute"}
    infos = SpanInfos(info._replace(phase="", kind=kinds.get(info.kind, info.kind)) for info in step.infos)
    names = [row.name for row in compare(step, recorded(replace(step, infos=infos))).clock.classes]
    assert names == ["all-gather, 16 ranks", "kernels", "reduce-scatter, 16 ranks"]


def test_a_folded_simulation_stands_for_every_recorded_rank(
    step: Trace, make_sharded_step: Callable[..., Trace]
) -> None:
    other = make_sharded_step(rank=5)
    comparison = compare(step, recorded(other))
    assert list(comparison.plans) == [5]
    assert comparison.verdict == "pass"
    assert comparison.notes == (
        "1 of 1 recorded ranks are compared with a simulated rank that stands for them",
    )


def test_the_framework_is_left_out_where_the_allocator_could_not_see_it(step: Trace) -> None:
    """17.75 GB with 2 GB of CUDA context; 15.75 without."""
    memory = there(step.memory)
    keep = [i for i, name in enumerate(memory.categories) if name != "framework"]
    seen = replace(
        memory,
        ranks=memory.ranks[keep],
        host_seconds=memory.host_seconds[keep],
        stream_seconds=memory.stream_seconds[keep],
        devices=tuple(memory.devices[i] for i in keep),
        categories=tuple(memory.categories[i] for i in keep),
        deltas=memory.deltas[keep],
        names=tuple(memory.names[i] for i in keep),
    )
    comparison = compare(step, recorded(replace(step, memory=seen)))
    assert comparison.verdict == "pass"
    assert comparison.memory.metrics[0].simulated == 15.75e9
    assert comparison.not_checked[-1] == "gpu memory of the framework (known to one side only)"


def test_gloos_reduce_scatters_are_compared_as_the_all_reduces_that_they_are(step: Trace) -> None:
    infos = SpanInfos(i._replace(kind="all_reduce") if i.kind == "reduce_scatter" else i for i in step.infos)
    gloo = recorded(replace(step, infos=infos), backend="gloo")
    assert compare(step, gloo).plan_verdict == "pass"


def test_the_json_is_whole_and_plain(step: Trace) -> None:
    content = json.loads(json.dumps(compare(step, planted.drop_call(recorded(step), 2)).to_dict()))
    assert content["verdict"] == "fail"
    assert content["plan"]["0"]["differences"][0]["kind"] == "only simulated"
    assert content["metrics"][0]["name"] == "step"
    assert content["differences"][0]["sentence"].startswith("dropped: ")


def test_the_text_fits_80_columns_and_says_the_worst_first(step: Trace) -> None:
    text = str(compare(step, planted.drop_call(recorded(step), 2)))
    assert text.startswith("DIFFERENT  simulated | recorded\n")
    assert max(map(len, text.splitlines())) <= 80
    assert "  1  dropped: all-gather of blocks.2" in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Tolerances(0.05, 0.10, 0.03, 0.05)),
        (0.02, Tolerances(0.02, 0.02, 0.02, 0.02)),
        ({"memory": 0.01}, Tolerances(0.05, 0.10, 0.01, 0.05)),
    ],
)
def test_tolerances_are_given_at_once_or_by_name(given: Any, expected: Tolerances) -> None:
    assert Tolerances.of(given) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memmory=0.1", "expected one of step, time, memory, overlap; did you mean 'memory'"),
        ("5%", "found '5%', expected a fraction of at least 0, e.g. 0.05 for 5 %"),
        ("step=-1", "found '-1'"),
        ("nan", "found 'nan'"),
    ],
)
def test_a_wrong_tolerance_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"tolerance '{text}': .*{message}"):
        Tolerances.parse([text])


def test_traces_of_different_worlds_and_empty_ones_are_refused(
    step: Trace, make_sharded_step: Callable[..., Trace], make_trace: Callable[..., Trace]
) -> None:
    with pytest.raises(InputError, match="simulated is of 16 ranks and recorded of 8"):
        compare(step, make_sharded_step(world_size=8))
    with pytest.raises(InputError, match="recorded has no spans"):
        compare(step, make_trace([], world_size=16))
    with pytest.raises(InputError, match="found rank 3, expected one that recorded holds: 0"):
        compare(step, step, rank=3)


def test_an_exact_tolerance_accepts_equality_alone(step: Trace) -> None:
    assert compare(step, recorded(step), tolerances=0).verdict == "pass"
    almost = replace(step, step_seconds=step.step_seconds * (1 + 1e-9))
    assert compare(step, recorded(almost), tolerances=0).verdict == "fail"


# -- The page of a comparison: both timelines, the differences ranked, nothing fetched ---------------------


@pytest.fixture
def comparison(make_sharded_step: Callable[..., Trace]) -> Comparison:
    step = make_sharded_step()
    slow = replace(planted.slow_link(step, 1.5), source="recorded")
    return compare(step, planted.drop_call(slow, 2), names=("mine", "theirs"))


def test_the_page_fetches_nothing_and_has_every_figure(comparison: Comparison) -> None:
    page = Page(compare_page(comparison))
    assert page.fetched == []
    assert list(page.figures) == ["plot-timeline", "plot-ops", "plot-memory"]
    text = text_of(page)
    assert "mine against theirs Different" in text
    assert text.index("dropped: all-gather of blocks.2") < text.index("reduce-scatter, 16 ranks: ")


def test_both_timelines_stand_under_one_another_on_one_axis(comparison: Comparison) -> None:
    """The step of 30.1 ms gets 12 calls, half as long again: 4 ms of gathers and 4 of reduce-scatters."""
    figure = as_plotly(twin_timeline(comparison))
    assert {bars.xaxis for bars in figure.data} <= {None, "x"}
    assert {bars.yaxis for bars in figure.data} == {"y", "y2"}
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]
    assert figure.layout.xaxis.range[1] == pytest.approx(38.1)
    gathers = {bars.yaxis: bars for bars in figure.data if bars.name == "all-gather"}
    assert (len(gathers["y"].x), len(gathers["y2"].x)) == (8, 7)
    assert gathers["y2"].x[0] == pytest.approx(1.5 * gathers["y"].x[0])


def test_a_call_that_is_not_the_same_is_marked_where_it_is(comparison: Comparison) -> None:
    (marks,) = [
        trace for trace in as_plotly(twin_timeline(comparison)).data if trace.name == "not the same call"
    ]
    assert (list(marks.y), marks.yaxis) == (["all_gather"], "y")


def test_a_page_without_memory_or_matched_ops_is_a_page_all_the_same(
    make_trace: Callable[..., Trace],
) -> None:
    one = make_trace([{"start": 0, "end": 1, "name": "</script><script>alert(1)</script>"}])
    other = make_trace([{"start": 0, "end": 1, "kind": "h2d", "stream": "h2d"}])
    page = Page(compare_page(compare(one, other)))
    assert "No op could be matched." in text_of(page)
    assert "Not compared: one side has no memory events." in text_of(page)
    assert json.loads(page.figures["plot-timeline"])["data"]


def test_the_same_comparison_gives_the_same_bytes(comparison: Comparison, tmp_path: Path) -> None:
    first, second = (comparison.write_html(tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


@in_browser
def test_a_browser_draws_it_without_a_word_or_a_request(comparison: Comparison, tmp_path: Path) -> None:
    path = comparison.write_html(tmp_path / "page.html")
    dom, console = browse(path, tmp_path / "profile")
    assert console == []
    assert 'data-drawn="3"' in dom
    assert len(re.findall(r">not the same call</text>", dom)) == 1
