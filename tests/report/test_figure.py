"""Figures of the pages, as plain data that plotly.js draws."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.browser import as_plotly
from zsim.report.views.html.figure import Figure

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
