"""Figures hold the numbers of the report, in the colours of their meanings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.browser import as_plotly
from zsim.report.memory import Ledger
from zsim.report.report import Report
from zsim.report.views.html import figures
from zsim.report.views.meanings import BREAKDOWN, CAPACITY, MEMORY, SPANS
from zsim.trace.trace import Trace


def bars(figure: go.Figure, name: str | None = None) -> go.Bar:
    return next(trace for trace in figure.data if trace.type == "bar" and name in (None, trace.name))


def test_an_axis_is_in_the_unit_that_fits_the_step() -> None:
    assert figures.time_scale(2.5) == (1.0, "s")
    assert figures.time_scale(0.25) == (1e3, "ms")
    assert figures.time_scale(25e-6) == (1e6, "us")


def test_the_step_is_a_bar_of_its_parts_and_one_for_each_phase(
    make_step_report: Callable[..., Report],
) -> None:
    """24 ms computing: 8 forward and 16 backward."""
    figure = as_plotly(figures.step_breakdown(make_step_report()))
    compute = bars(figure, "compute")
    assert list(compute.y) == ["whole step", "forward", "backward", "optimizer"]
    assert list(compute.x) == pytest.approx([24.0, 8.0, 16.0, 0.0])
    assert compute.marker.color == BREAKDOWN["compute"].color
    assert "offload stall" not in [trace.name for trace in figure.data]


def test_the_waterfall_climbs_from_category_to_category_to_the_peak(
    make_step_report: Callable[..., Report],
) -> None:
    """At the peak: 0.25 parameters, 1.5 optimizer states, 12 activations, 2 buffers, 2 framework."""
    figure = as_plotly(figures.memory_waterfall(make_step_report(), "gpu"))
    waterfall = bars(figure)
    assert list(waterfall.y) == [
        "parameters",
        "optimizer states",
        "activations",
        "buffers",
        "framework",
        "peak",
    ]
    assert list(waterfall.x) == [0.25, 1.5, 12.0, 2.0, 2.0, 17.75]
    assert list(waterfall.base) == [0.0, 0.25, 1.75, 13.75, 15.75, 0.0]
    assert waterfall.marker.color[2] == MEMORY["activations"].color
    assert [line.x0 for line in figure.layout.shapes] == [80.0]


@pytest.mark.parametrize(("capacity", "side"), [(50 * 10**9, "right"), (80 * 10**9, "left")])
def test_a_short_peak_has_its_label_behind_it(
    make_step_report: Callable[..., Report], capacity: int, side: str
) -> None:
    """17.75 GB are more than 30 % of 50 GB, where the label has room inside, and less than 30 % of 80."""
    figure = as_plotly(figures.memory_waterfall(make_step_report(capacity_bytes={"gpu": capacity}), "gpu"))
    (label,) = (note for note in figure.layout.annotations if note.y == "peak")
    assert label.xanchor == side


def test_a_peak_over_capacity_is_drawn_in_the_colour_of_the_limit(
    make_step_report: Callable[..., Report],
) -> None:
    figure = as_plotly(figures.memory_waterfall(make_step_report(capacity_bytes={"gpu": 10**10}), "gpu"))
    assert bars(figure).marker.color[-1] == CAPACITY.color


def test_without_a_capacity_there_is_no_line(make_step_report: Callable[..., Report]) -> None:
    figure = as_plotly(figures.memory_waterfall(make_step_report(capacity_bytes={}), "gpu"))
    assert figure.layout.shapes == ()


def test_the_memory_timeline_stacks_the_categories_up_to_the_end_of_the_step(
    make_step_report: Callable[..., Report], make_sharded_step: Callable[..., Trace]
) -> None:
    held = Ledger.of(make_sharded_step().memory).fullest("gpu")
    figure = as_plotly(figures.memory_timeline(held, make_step_report(), "gpu"))
    levels = {trace.name: np.asarray(trace.y) for trace in figure.data}
    assert np.sum(list(levels.values()), axis=0).max() == pytest.approx(17.75)
    assert levels["activations"][-1] == 0.0
    assert {trace.stackgroup for trace in figure.data} == {"memory"}
    assert figure.data[0].x[-1] == pytest.approx(30.1)


def test_thinning_keeps_the_highest_the_first_and_the_last_level() -> None:
    """10,000 levels with one spike; about 100 are kept."""
    totals = np.arange(10_000, dtype=np.int64)
    totals[4321] = 10**6
    kept = figures.thin_out(totals, 100)
    assert len(kept) <= 102
    assert {0, 4321, 9999} <= set(kept.tolist())
    assert figures.thin_out(totals[:50], 100).tolist() == list(range(50))


def test_collectives_show_what_is_waited_for_and_what_is_hidden(
    make_step_report: Callable[..., Report],
) -> None:
    """8 gathers of 1 ms: 0.8 ms exposed. 4 reduce-scatters of 2 ms: the last one's 2 ms exposed."""
    figure = as_plotly(figures.collectives(make_step_report()))
    exposed, hidden = bars(figure, "exposed"), bars(figure, "hidden under computing")
    assert [name.split("<br>")[0] for name in exposed.y] == [
        "8 × all-gather 1.00 GB",
        "4 × reduce-scatter 1.00 GB",
    ]
    assert list(exposed.x) == pytest.approx([0.8, 2.0])
    assert list(hidden.x) == pytest.approx([7.2, 6.0])
    assert exposed.marker.color[0] == SPANS["all_gather"].color


def test_links_show_bytes_and_utilisation(make_step_report: Callable[..., Report]) -> None:
    figure = as_plotly(figures.link_traffic(make_step_report()))
    assert list(bars(figure).x) == [4.1, 30.0]
    assert list(bars(figure).text) == ["82 % used", ""]


def test_figures_leave_text_and_background_to_the_page(make_step_report: Callable[..., Report]) -> None:
    figure = as_plotly(figures.step_breakdown(make_step_report()))
    assert figure.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.font.color is None
