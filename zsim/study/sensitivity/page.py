"""A sensitivity study for people: a table, one HTML page with the tornado."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import Section, page
from zsim.report.views.meanings import BREAKDOWN
from zsim.study.sensitivity.requirements import Requirement
from zsim.study.sensitivity.sensitivity import Bar, Sensitivity
from zsim.units import format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_WIDTH = 80
_MOST_BARS = 18
_WORTH_SAYING = 0.0005  # of the step
_LESS, _MORE = BREAKDOWN["exposed_communication"].color, BREAKDOWN["compute"].color


def print_sensitivity(found: Sensitivity) -> None:
    """The table on a terminal."""
    print(textwrap.fill(f"{found.title} | {format_seconds(found.step_seconds)} per step", _WIDTH))
    moving = [bar for bar in found.bars if bar.error is None and not _is_idle(bar, found.step_seconds)]
    for line in _table(moving, found.step_seconds):
        print(line)
    if any(bar.turn.is_known for bar in moving):
        print("* over the spread that is stated of it")
    for bar in found.bars:
        if bar.error is not None:
            print(textwrap.fill(f"{bar.turn.name}: {bar.error}", _WIDTH, subsequent_indent="  "))
    rest = [bar.turn.name for bar in found.bars if _is_idle(bar, found.step_seconds)]
    if rest:
        print(textwrap.fill(f"without effect: {', '.join(rest)}", _WIDTH))


def _table(bars: Sequence[Bar], step_seconds: float) -> Iterator[str]:
    """A heading and a line for each bar, of at most 80 columns: units say what they are per where there is
    room."""
    cells = [("", "value", "turned, %", "step, %")]
    for bar in bars:
        turned, step = _turned(bar).replace(" %", ""), _changes(bar, step_seconds).removesuffix(" %")
        cells.append((bar.turn.name, f"{_value(bar)} {bar.turn.unit}".strip(), turned, step))
    if sum(_widths(cells)) + 6 > _WIDTH:
        cells = [(name, value.split(" per ")[0], turned, step) for name, value, turned, step in cells]
    name_width, *widths = _widths(cells)
    for name, *others in cells:
        yield f"{name:<{name_width}}" + "".join(
            f"  {cell:>{width}}" for cell, width in zip(others, widths, strict=True)
        )


def _widths(cells: Sequence[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def _is_idle(bar: Bar, step_seconds: float) -> bool:
    return bar.error is None and bar.swing(step_seconds) < _WORTH_SAYING


def _keys(bar: Bar) -> str:
    """The first of the keys that were set."""
    first, *others = bar.turn.overrides[0]
    return first + (f" and {len(others)} more" if others else "")


def _value(bar: Bar) -> str:
    value = bar.turn.value
    return "" if value is None else f"{value:,.6g}"


def _turned(bar: Bar) -> str:
    low, high = (f"{(factor - 1) * 100:+.0f}" for factor in (bar.turn.low, bar.turn.high))
    return f"{low}/{high} %" + ("*" if bar.turn.is_known else "")


def _changes(bar: Bar, step_seconds: float) -> str:
    parts = [
        "-" if seconds is None else f"{(seconds / step_seconds - 1) * 100:+.1f}"
        for seconds in (bar.low_seconds, bar.high_seconds)
    ]
    return f"{parts[0]}/{parts[1]} %"


def sensitivity_page(
    found: Sensitivity,
    needs: Sequence[Requirement] = (),
    target: str = "",
    left_out: Mapping[str, str] | None = None,
) -> str:
    """The page as text; `needs` are what would have to be true for `target`, `left_out` what was not asked
    about, with why."""
    caption = (
        f"The step's time with each number turned down and up, the others as they are; by {found.spread:.0%} "
        "where the number's own spread is not known."
    )
    head = ["number", "kind", "value", "turned by (* its stated spread)", "step", "key"]
    rows = [
        [
            bar.turn.name,
            bar.turn.kind,
            f"{_value(bar)} {bar.turn.unit}",
            _turned(bar),
            bar.error or _changes(bar, found.step_seconds),
            _keys(bar),
        ]
        for bar in found.bars
    ]
    sections = [Section("What the step depends on", [("tornado", caption, tornado(found))], head, rows)]
    if needs:
        names = ["resource", "has", "needs", "step with plenty of it"]
        table = [
            [
                f"{need.name}, {need.unit}".rstrip(", "),
                f"{need.available:,.4g}",
                _needed(need),
                format_seconds(need.best_seconds),
            ]
            for need in needs
        ]
        table += [[name, "", f"left out: {why}", ""] for name, why in (left_out or {}).items()]
        sections.append(Section(f"What would have to be true for {target}", [], names, table))
    summary = f"{format_seconds(found.step_seconds)} per step; most depends on {_most(found)}."
    return page(found.title, "sensitivity", sections, summary)


def _needed(need: Requirement) -> str:
    if need.needed is not None:
        return f"{need.needed:,.4g}"
    return "not by itself" if need.bound is None else f"not by itself, even at {need.bound:g}"


def _most(found: Sensitivity) -> str:
    names = [bar.turn.name for bar in found.bars if not _is_idle(bar, found.step_seconds)]
    return ", ".join(names[:3]) or "none of the numbers"


def tornado(found: Sensitivity) -> Figure:
    """Bars from the step as it is to the step with each number turned, the largest on top."""
    import plotly.graph_objects as go

    bars = [bar for bar in found.bars if not _is_idle(bar, found.step_seconds)][:_MOST_BARS]
    figure = go.Figure(layout=layout(150 + 30 * max(len(bars), 1), barmode="overlay"))
    for name, color, is_low in (("turned down", _LESS, True), ("turned up", _MORE, False)):
        ends = [bar.low_seconds if is_low else bar.high_seconds for bar in bars]
        figure.add_bar(
            name=name,
            orientation="h",
            y=[bar.turn.name for bar in bars],
            x=[None if end is None else (end / found.step_seconds - 1) * 100 for end in ends],
            marker_color=color,
            hovertext=[_hover(bar, end, is_low=is_low) for bar, end in zip(bars, ends, strict=True)],
            hoverinfo="text",
        )
    axis: dict[str, Any] = {"title_text": "% of the step's time", "zeroline": True, "zerolinewidth": 2}
    figure.update_xaxes(**axis)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _hover(bar: Bar, seconds: float | None, *, is_low: bool) -> str:
    factor = bar.turn.low if is_low else bar.turn.high
    said = "no experiment" if seconds is None else format_seconds(seconds)
    return f"{bar.turn.name} times {factor:.2f}: {said} per step"


def print_requirements(
    needs: Sequence[Requirement], target: str, left_out: Mapping[str, str] | None = None
) -> None:
    """What reaches the target, then what does not, then what was not asked about, with why."""
    print(f"for {target}:")
    said = [need.sentence() for need in needs if need.needed is not None]
    others = [_at_most(need) for need in needs if need.needed is None]
    if others:
        said.append(f"not by themselves, however much (the step then): {', '.join(others)}")
    said += [f"{name}: left out; {why}" for name, why in (left_out or {}).items()]
    for words in said:
        print(textwrap.indent(textwrap.fill(words, _WIDTH - 2), "  "))


def _at_most(need: Requirement) -> str:
    """E.g. "network efficiency at 1 (666.38 ms)"."""
    most = "" if need.bound is None else f" at {need.bound:g}"
    return f"{need.name}{most} ({format_seconds(need.best_seconds)})"


def sensitivity_dict(
    found: Sensitivity,
    needs: Sequence[Requirement] = (),
    target: str = "",
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The study as plain data; `left_out` as for the page."""
    return {
        "title": found.title,
        "step_seconds": found.step_seconds,
        "numbers": [
            {
                "name": bar.turn.name,
                "kind": bar.turn.kind,
                "value": bar.turn.value,
                "unit": bar.turn.unit or None,
                "low_factor": bar.turn.low,
                "high_factor": bar.turn.high,
                "is_stated_spread": bar.turn.is_known,
                "low_step_seconds": bar.low_seconds,
                "high_step_seconds": bar.high_seconds,
                "error": bar.error,
                "low_settings": dict(bar.turn.overrides[0]),
                "high_settings": dict(bar.turn.overrides[1]),
            }
            for bar in found.bars
        ],
        "target": target or None,
        "requirements": [
            {
                "name": need.name,
                "unit": need.unit or None,
                "available": need.available,
                "needed": need.needed,
                "step_seconds_with_plenty": need.best_seconds,
                "bound": need.bound,
            }
            for need in needs
        ],
        "left_out": dict(left_out or {}),
    }
