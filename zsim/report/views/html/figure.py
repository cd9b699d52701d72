"""A figure as plotly.js draws it: traces and a layout of plain data.

plotly's own Figure checks each attribute against a schema when it is set, which takes longer than the step
that is drawn. Here the tests have it check every figure of every page (tests/browser.py).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

Attributes = dict[str, Any]

# How a page's script may hold any text: no end of the script, no other tag.
_ESCAPES = {"<": r"\u003c", ">": r"\u003e", "/": r"\u002f"}


class Figure:
    """Traces and a layout, in the words of https://plotly.com/javascript/reference.

    No attribute of a trace, an axis or an annotation has an underscore there: `title_text="GB"` is
    `title={"text": "GB"}`. Values are what JSON holds, and arrays of one dimension.
    """

    def __init__(self, layout: Mapping[str, Any]) -> None:
        self.data: list[Attributes] = []
        self.layout: Attributes = dict(layout)

    def add_bar(self, **attributes: Any) -> None:
        self._add("bar", attributes)

    def add_scatter(self, **attributes: Any) -> None:
        self._add("scatter", attributes)

    def add_heatmap(self, **attributes: Any) -> None:
        self._add("heatmap", attributes)

    def _add(self, kind: str, attributes: Attributes) -> None:
        self.data.append({"type": kind, **_nest(attributes)})

    def update_xaxes(self, name: str = "xaxis", **attributes: Any) -> None:
        """Change the x axis, or another one by its name in the layout."""
        self.layout[name] = _merge(self.layout.get(name, {}), _nest(attributes))

    def update_yaxes(self, name: str = "yaxis", **attributes: Any) -> None:
        """Change the y axis, or another one by its name in the layout."""
        self.update_xaxes(name, **attributes)

    def add_annotation(self, **attributes: Any) -> None:
        self.layout.setdefault("annotations", []).append(_nest(attributes))

    def add_shape(self, **attributes: Any) -> None:
        self.layout.setdefault("shapes", []).append(_nest(attributes))

    def add_vline(self, x: float, line: Attributes, text: str = "") -> None:
        """A line from the bottom to the top, with `text` at its upper end, to the left."""
        self.add_shape(type="line", x0=x, x1=x, xref="x", y0=0, y1=1, yref="y domain", line=line)
        if text:
            self._note(text, x=x, xanchor="right", xref="x", y=1, yanchor="top", yref="y domain")

    def add_hline(self, y: float, line: Attributes, text: str = "") -> None:
        """A line from the left to the right, with `text` above its left end."""
        self.add_shape(type="line", x0=0, x1=1, xref="x domain", y0=y, y1=y, yref="y", line=line)
        if text:
            self._note(text, x=0, xanchor="left", xref="x domain", y=y, yanchor="bottom", yref="y")

    def add_vrect(self, x0: float, x1: float, text: str = "", **attributes: Any) -> None:
        """A band from the bottom to the top, with `text` in the middle of its upper edge."""
        self.add_shape(type="rect", x0=x0, x1=x1, xref="x", y0=0, y1=1, yref="y domain", **attributes)
        if text:
            middle = (x0 + x1) / 2
            self._note(text, x=middle, xanchor="center", xref="x", y=1, yanchor="top", yref="y domain")

    def _note(self, text: str, **position: Any) -> None:
        self.add_annotation(text=text, showarrow=False, **position)

    def to_plotly_json(self) -> Attributes:
        """{"data": traces, "layout": layout}, with arrays as plotly.js reads them."""
        encoded: Attributes = _encode({"data": self.data, "layout": self.layout})
        return encoded

    def to_json(self) -> str:
        """The same as text that a script of a page may hold, whatever the names in it."""
        return script_json(self.to_plotly_json())


def _nest(attributes: Attributes) -> Attributes:
    """`{"title_text": "GB"}` as `{"title": {"text": "GB"}}`."""
    nested: Attributes = {}
    for name, value in attributes.items():
        outer, _, inner = name.partition("_")
        nested = _merge(nested, {outer: _nest({inner: value}) if inner else value})
    return nested


def _merge(old: Attributes, new: Attributes) -> Attributes:
    """`old` with the attributes of `new`, also within attributes that both have."""
    merged = dict(old)
    for name, value in new.items():
        are_nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge(merged[name], value) if are_nested else value
    return merged


def _encode(value: Any) -> Any:
    """The value, its arrays as their bytes in base 64: the typed arrays of plotly.js."""
    if isinstance(value, dict):
        return {name: _encode(entry) for name, entry in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return [_encode(entry) for entry in value]
        return value
    if isinstance(value, np.ndarray):
        numbers = np.ascontiguousarray(value, "<f8")
        return {"dtype": "f8", "bdata": b64encode(numbers.tobytes()).decode()}
    return value


def script_json(value: Any) -> str:
    """JSON as text that a script of a page may hold, whatever the names in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text
