"""Figures hold the numbers of the report, in the colours of their meanings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import zsim
from tests.browser import as_plotly
from zsim.report.memory import Ledger
from zsim.report.offload import CAUSES
from zsim.report.report import Report
from zsim.report.views.html import figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import drive_timeline
from zsim.report.views.html.report import html_report
from zsim.report.views.meanings import BREAKDOWN, CAPACITY, MEMORY, SPANS
from zsim.report.views.tables import moved_table, offload_table
from zsim.trace.trace import Trace, drive_rates


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


# -- Figures of the pages, as plain data that plotly.js draws ----------------------------------------------


LINE = {"width": 2, "color": "#C7362B"}


def test_an_underscore_goes_one_attribute_down_and_keeps_what_is_there() -> None:
    figure = Figure({"xaxis": {"title": {"font": {"size": 13}}}})
    figure.add_bar(y=["a"], x=[1.5], marker_color="#112233")
    figure.update_xaxes(title_text="GB", title_standoff=6)
    figure.update_xaxes("xaxis2", anchor="y2")
    assert figure.data == [{"type": "bar", "y": ["a"], "x": [1.5], "marker": {"color": "#112233"}}]
    assert figure.layout == {
        "xaxis": {"title": {"font": {"size": 13}, "text": "GB", "standoff": 6}},
        "xaxis2": {"anchor": "y2"},
    }


def test_lines_and_bands_are_those_of_plotly() -> None:
    """plotly's own figure is the reference, to the attribute."""
    mine, theirs = Figure({}), go.Figure()
    mine.add_vline(2.0, LINE, "capacity")
    theirs.add_vline(x=2.0, line=LINE, annotation_text="capacity", annotation_position="top left")
    mine.add_hline(3.0, LINE, "capacity")
    theirs.add_hline(y=3.0, line=LINE, annotation_text="capacity", annotation_position="top left")
    mine.add_vrect(1.0, 4.0, "forward", opacity=0.1, line_width=0)
    theirs.add_vrect(
        x0=1.0, x1=4.0, opacity=0.1, line_width=0, annotation_text="forward", annotation_position="inside top"
    )
    mine.add_hline(5.0, LINE)
    theirs.add_hline(y=5.0, line=LINE)
    for part in ("shapes", "annotations"):
        assert mine.layout[part] == [dict(one.to_plotly_json()) for one in getattr(theirs.layout, part)]


def test_arrays_are_typed_and_text_cannot_end_the_script() -> None:
    """plotly.js reads the eight bytes of each number; plotly writes the same."""
    figure = Figure({})
    figure.add_scatter(x=np.array([0.5, 2.0]), y=[1, 2], name="</script>")
    assert "</script>" not in figure.to_json()
    assert json.loads(figure.to_json()) == figure.to_plotly_json()
    assert figure.to_plotly_json()["data"] == go.Figure(figure.data).to_plotly_json()["data"]


def test_plotly_refuses_what_plotly_js_does_not_know() -> None:
    figure = Figure({})
    figure.add_bar(x=[1], colour="red")
    with pytest.raises(ValueError, match="colour"):
        as_plotly(figure)


# -- What the page shows of offloading ---------------------------------------------------------------------


NVME = {"device": "nvme", "nvme_path": "/nvme"}


@pytest.fixture(scope="module")
def result() -> Any:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": NVME}}
    return zsim.simulate(
        zsim.Experiment(
            model="gpt2", cluster="dgx-h100", gpus=4,
            training={"sequence_length": 256, "micro_batch_size": 1}, strategy={"config": config},
        )
    )  # fmt: skip


def test_every_cause_of_a_stall_has_a_row_and_they_add_up(result: Any) -> None:
    section = result.report.offload
    waited = [f"stall: {cause}" for cause in CAUSES if section.stall_seconds.get(cause)]
    tiers = [tier.tier for tier in section.tiers]
    assert [row[0] for row in offload_table(result.report, section).rows] == [*waited, *tiers]
    stall = result.report.breakdown.seconds["offload_stall"]
    assert sum(section.stall_seconds.values()) == pytest.approx(stall)
    assert section.stall_seconds["drive read"] > 0
    assert section.stall_seconds["drive write"] > 0


def test_bytes_are_those_of_the_report(result: Any) -> None:
    work = {row[0] for row in moved_table(result.report.offload).rows}
    assert {"GPU to host", "CPU work on memory", "read from NVMe", "written to NVMe"} <= work
    assert "page-locked on each node" in work


def test_what_the_drives_did_adds_up_to_what_was_moved(result: Any) -> None:
    """The area under the node's rates is four ranks' bytes."""
    rates = drive_rates(result.trace, 0)
    assert rates is not None
    lasting = np.diff(rates.seconds)
    for direction in ("read", "write"):
        area = float((getattr(rates, direction)[:-1] * lasting).sum())
        assert area == pytest.approx(4 * result.report.offload.moved_bytes[f"nvme_{direction}"], rel=1e-6)
    figure = as_plotly(drive_timeline(rates, result.report))
    assert [line.name for line in figure.data] == ["NVMe read", "NVMe write"]


def test_the_page_has_a_section_only_where_something_is_offloaded(result: Any) -> None:
    page = html_report(result.report, result.trace)
    assert '<section class="card" id="offload">' in page
    assert 'data-plot="plot-drives"' in page
    plain = zsim.simulate(zsim.Experiment(model="gpt2", cluster="dgx-h100", gpus=4))
    assert 'id="offload"' not in html_report(plain.report, plain.trace)
