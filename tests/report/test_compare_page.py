"""The page of a comparison: both timelines, the differences ranked, nothing fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser import Page, as_plotly, browse, in_browser, text_of
from zsim.comparison import planted
from zsim.comparison.compare import Comparison, compare
from zsim.comparison.views.page import compare_page, twin_timeline
from zsim.trace.trace import Trace


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
