"""The stream timeline: a bar per span on the row of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import pytest

from tests.browser import as_plotly
from tests.expect import about
from zsim.report.breakdown import step_breakdown
from zsim.report.views.html.timeline import close_ups, stream_timeline
from zsim.trace.trace import Trace


def drawn(trace: Trace, **options: Any) -> tuple[go.Figure, dict[str, go.Bar]]:
    figure = as_plotly(stream_timeline(trace, step_breakdown(trace), **options))
    return figure, {bar.name: bar for bar in figure.data}


def test_every_span_is_a_bar_on_its_stream_with_its_time(make_sharded_step: Callable[..., Trace]) -> None:
    """4 blocks: kernels of 2 ms forward, 4 ms backward; the first starts after the first gather at 1.1 ms."""
    figure, by_name = drawn(make_sharded_step())
    compute = by_name["compute"]
    assert set(compute.y) == {"compute"}
    assert list(compute.x) == pytest.approx([2.0] * 4 + [4.0] * 4)
    assert compute.base[0] == pytest.approx(1.1)
    assert len(by_name["all-gather"].x) == 8
    assert "blocks.0 forward" in compute.hovertext[0]
    assert figure.layout.xaxis.range == (0, pytest.approx(30.1))


def test_rows_are_the_waits_the_compute_stream_then_the_others(
    make_sharded_step: Callable[..., Trace],
) -> None:
    figure, _ = drawn(make_sharded_step())
    assert figure.layout.yaxis.categoryarray[::-1] == (
        "compute waits",
        "compute",
        "all_gather",
        "reduce_scatter",
    )


def test_waits_are_in_the_colour_of_the_breakdown_and_say_for_what(
    make_sharded_step: Callable[..., Trace],
) -> None:
    _, by_name = drawn(make_sharded_step())
    waits = by_name["exposed communication"]
    assert set(waits.y) == {"compute waits"}
    assert sum(waits.x) == pytest.approx(2.8)
    assert "for reduce_scatter blocks.0" in waits.hovertext[-1]


def test_only_one_rank_is_drawn(make_trace: Callable[..., Trace]) -> None:
    trace = make_trace([{"start": 0, "end": 1}, {"start": 0, "end": 2, "rank": 1}])
    _, by_name = drawn(trace, rank=1)
    assert list(by_name["compute"].x) == [2.0]


def test_recomputation_has_its_own_colour(make_trace: Callable[..., Trace]) -> None:
    spans = [{"start": 0, "end": 1, "phase": "recompute"}, {"start": 1, "end": 2, "phase": "backward"}]
    _, by_name = drawn(make_trace(spans))
    assert set(by_name) == {"compute", "recomputation"}


def test_a_long_trace_is_cut_to_the_longest_spans_and_says_so(make_trace: Callable[..., Trace]) -> None:
    """100 spans of 1 s and 100 of 0.1 s, at most 100 bars of which 80 are for spans: 80 of 110 s are left."""
    spans = [{"start": i, "end": i + (1.0 if i % 2 else 0.1), "name": f"k{i}"} for i in range(200)]
    figure, by_name = drawn(make_trace(spans), most_bars=100)
    assert list(by_name["compute"].x) == [1.0] * 80
    assert sum(len(bar.x) for bar in figure.data) <= 100
    (note,) = [note.text for note in figure.layout.annotations]
    assert note == "the 80 longest of 200 spans, 72.7 % of all busy time; the trace file has every one"


def test_a_short_trace_has_no_note(make_trace: Callable[..., Trace]) -> None:
    figure, _ = drawn(make_trace([{"start": 0, "end": 1}]))
    assert figure.layout.annotations == ()


def phase_names(trace: Trace) -> dict[str, float]:
    """Where the names of phases are, in seconds."""
    figure, _ = drawn(trace)
    scale = trace.step_seconds / figure.layout.xaxis.range[1]
    return {note.text: note.x * scale for note in figure.layout.annotations}


def test_names_of_phases_have_room_on_a_phone(make_trace: Callable[..., Trace]) -> None:
    """Names are in the middle of the longest run that is 0.3 of the step from other names: "forward" and
    "backward" are 56 pixels of 200 side by side. Forward 1 and backward 2 of 12 in turn: backward's first is
    at 2, and forward's first that is 3.6 from it at 6.5. An optimizer of 0.2 of 4 at the end has no name, one
    of 1 of 5 has."""
    turns = [
        {"start": 3 * turn + start, "end": 3 * turn + end, "phase": phase, "name": phase}
        for turn in range(4)
        for phase, start, end in (("forward", 0, 1), ("backward", 1, 3))
    ]
    assert phase_names(make_trace(turns)) == {"backward": about(2.0), "forward": about(6.5)}
    for end, more in ((4.0, {}), (4.8, {"optimizer": about(4.3)})):
        step = [
            {"start": start, "end": end, "phase": phase, "name": phase}
            for phase, start, end in (("forward", 0, 1), ("backward", 1, 3.8), ("optimizer", 3.8, end))
        ]
        assert phase_names(make_trace(step)) == {"forward": about(0.5), "backward": about(2.4), **more}


def test_ten_thousand_bars_are_a_few_traces(make_trace: Callable[..., Trace]) -> None:
    """Browsers are slow by trace, not by bar."""
    spans = [{"start": i, "end": i + 1, "name": "k"} for i in range(8000)]
    figure, _ = drawn(make_trace(spans))
    assert [len(bar.x) for bar in figure.data] == [8000]


def test_views_are_the_whole_the_ends_and_the_turn_to_backward(
    make_sharded_step: Callable[..., Trace],
) -> None:
    """30.1 ms; forward ends at 9.1 ms; a close-up is 3 %: 0.903 ms."""
    found = {name: (start, end) for name, start, end in close_ups(make_sharded_step())}
    assert found["whole step"] == (0.0, about(30.1))
    assert found["start"] == (0.0, about(0.903))
    assert found["forward to backward"] == pytest.approx((9.1 - 0.4515, 9.1 + 0.4515))
    assert found["end"] == pytest.approx((29.197, 30.1))
