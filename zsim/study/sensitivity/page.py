"""A sensitivity study as plain data and as one HTML page with a table and the tornado chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page
from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.result import ItemColumn, Medium, ResultTable, Section, columns_of, table_of
from zsim.report.views.text.plain import WIDTH, paragraph, text_table
from zsim.study.sensitivity.requirements import Requirement
from zsim.study.sensitivity.runs import RunSensitivity, run_bar_dict, run_bar_section
from zsim.study.sensitivity.sensitivity import Sensitivity, SensitivityBar
from zsim.units import format_seconds

_WORTH_SAYING = 0.0005  # of the step


def sensitivity_lines(study: Sensitivity) -> Iterator[str]:
    """A line for each number that moves the step, then the numbers with an error and those without effect."""
    yield from paragraph(f"{study.title} | {format_seconds(study.step_seconds)} per step")
    moving = [bar for bar in study.bars if bar.error is None and not is_idle(bar, study.step_seconds)]
    yield from _table(moving, study.step_seconds)
    if any(bar.variation.is_spread_stated for bar in moving):
        yield "* over the spread that is stated of it"
    for bar in study.bars:
        if bar.error is not None:
            yield from paragraph(f"{bar.variation.name}: {bar.error}", indent=2)
    idle_names = [bar.variation.name for bar in study.bars if is_idle(bar, study.step_seconds)]
    if idle_names:
        yield from paragraph(f"without effect: {', '.join(idle_names)}")


def _table(bars: Sequence[SensitivityBar], step_seconds: float) -> list[str]:
    """The table of the bars. Units keep their "per ..." if there is room."""
    values = bar_table(bars, step_seconds, "text")
    lines = text_table(values)
    if len(lines[0]) > WIDTH or any("..." in line for line in lines):
        rows = [(name, str(number).split(" per ")[0], *cells) for name, number, *cells in values.rows]
        lines = text_table(replace(values, rows=rows))
    return lines


def bar_table(bars: Sequence[SensitivityBar], step_seconds: float, medium: Medium) -> ResultTable:
    """A row for each number that is turned down and up."""
    fields: list[ItemColumn[SensitivityBar]] = [
        ItemColumn("", lambda bar: bar.variation.name, is_left=True),
        ItemColumn("kind", lambda bar: bar.variation.kind, is_left=True, where="page"),
        ItemColumn("value", lambda bar: f"{_format_number(bar)} {bar.variation.unit}".strip()),
        ItemColumn("turned, %", _format_factors),
        ItemColumn("step, %", lambda bar: bar.error or _format_changes(bar, step_seconds)),
        ItemColumn("key", _format_keys, is_left=True, where="page"),
    ]
    return table_of("", fields, bars, medium)


def _format_keys(bar: SensitivityBar) -> str:
    """The first of the keys that were set."""
    first, *other_keys = bar.variation.overrides[0]
    return first + (f" and {len(other_keys)} more" if other_keys else "")


def requirement_lines(
    needs: Sequence[Requirement], target: str, excluded: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The requirements that reach the target, then those that do not, then the excluded resources, with the
    reason.
    """
    yield f"for {target}:"
    sentences = [need.sentence() for need in needs if need.needed is not None]
    unreachable = [_format_unreachable(need) for need in needs if need.needed is None]
    if unreachable:
        sentences.append(f"not by themselves, however much (the step then): {', '.join(unreachable)}")
    sentences += [f"{name}: left out; {why}" for name, why in (excluded or {}).items()]
    for sentence in sentences:
        yield from paragraph(sentence, first=2)


def _format_unreachable(need: Requirement) -> str:
    """E.g. "network efficiency at 1 (666.38 ms)"."""
    most = "" if need.bound is None else f" at {need.bound:g}"
    return f"{need.name}{most} ({format_seconds(need.best_seconds)})"


def is_idle(bar: SensitivityBar, step_seconds: float) -> bool:
    """Whether the step does not depend on the number."""
    return bar.error is None and bar.swing(step_seconds) < _WORTH_SAYING


def _format_number(bar: SensitivityBar) -> str:
    """The varied number, without its unit."""
    return "" if bar.variation.value is None else f"{bar.variation.value:,.6g}"


def _format_factors(bar: SensitivityBar) -> str:
    """How far the number is turned down and up, in percent. A * marks a spread stated in its file."""
    low, high = (f"{(factor - 1) * 100:+.0f}" for factor in (bar.variation.low, bar.variation.high))
    return f"{low}/{high}" + ("*" if bar.variation.is_spread_stated else "")


def _format_changes(bar: SensitivityBar, step_seconds: float) -> str:
    """The change of the step in percent, with the number turned down and up. A "-" marks an invalid
    experiment.
    """
    cells = [
        "-" if seconds is None else f"{(seconds / step_seconds - 1) * 100:+.1f}"
        for seconds in (bar.low_seconds, bar.high_seconds)
    ]
    return f"{cells[0]}/{cells[1]}"


_MAX_BARS = 18
_LESS, _MORE = BREAKDOWN["exposed_communication"].color, BREAKDOWN["compute"].color


def sensitivity_page(
    study: Sensitivity,
    needs: Sequence[Requirement] = (),
    target: str = "",
    excluded: Mapping[str, str] | None = None,
    run_study: RunSensitivity | None = None,
) -> str:
    """The page as text.

    `needs` are the requirements for `target`. `excluded` are the resources that were not examined, with the
    reason. `run_study` is the sensitivity of the run of days, where the experiment has one.
    """
    caption = (
        f"The step's time with each number turned down and up, the others as they are; by {study.spread:.0%} "
        "where the number's own spread is not known (* where it is)."
    )
    bars = bar_table(study.bars, study.step_seconds, "page")
    sections = [Section("What the step depends on", [("tornado", caption, tornado(study))], bars)]
    if needs:
        columns = columns_of("resource", "has", "needs", "step with plenty of it")
        rows = [
            [
                f"{need.name}, {need.unit}".rstrip(", "),
                f"{need.available:,.4g}",
                _format_needed(need),
                format_seconds(need.best_seconds),
            ]
            for need in needs
        ]
        rows += [[name, "", f"left out: {why}", ""] for name, why in (excluded or {}).items()]
        sections.append(
            Section(f"What would have to be true for {target}", table=ResultTable("", columns, rows))
        )
    sections += [] if run_study is None else [run_bar_section(run_study)]
    summary = f"{format_seconds(study.step_seconds)} per step; most depends on {_largest_effects(study)}."
    return page(study.title, "sensitivity", sections, summary)


def _format_needed(need: Requirement) -> str:
    if need.needed is not None:
        return f"{need.needed:,.4g}"
    return "not by itself" if need.bound is None else f"not by itself, even at {need.bound:g}"


def _largest_effects(study: Sensitivity) -> str:
    names = [bar.variation.name for bar in study.bars if not is_idle(bar, study.step_seconds)]
    return ", ".join(names[:3]) or "none of the numbers"


def tornado(study: Sensitivity) -> Figure:
    """Bars from the step as configured to the step with each number varied, the largest on top."""
    bars = [bar for bar in study.bars if not is_idle(bar, study.step_seconds)][:_MAX_BARS]
    figure = Figure(layout(150 + 30 * max(len(bars), 1), barmode="overlay"))
    for name, color, is_low in (("turned down", _LESS, True), ("turned up", _MORE, False)):
        ends = [bar.low_seconds if is_low else bar.high_seconds for bar in bars]
        figure.add_bar(
            name=name,
            orientation="h",
            y=[bar.variation.name for bar in bars],
            x=[None if end is None else (end / study.step_seconds - 1) * 100 for end in ends],
            marker_color=color,
            hovertext=[_hover(bar, end, is_low=is_low) for bar, end in zip(bars, ends, strict=True)],
            hoverinfo="text",
        )
    axis: dict[str, Any] = {"title_text": "% of the step's time", "zeroline": True, "zerolinewidth": 2}
    figure.update_xaxes(**axis)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _hover(bar: SensitivityBar, seconds: float | None, *, is_low: bool) -> str:
    factor = bar.variation.low if is_low else bar.variation.high
    step_text = "no experiment" if seconds is None else format_seconds(seconds)
    return f"{bar.variation.name} times {factor:.2f}: {step_text} per step"


def sensitivity_dict(
    study: Sensitivity,
    needs: Sequence[Requirement] = (),
    target: str = "",
    excluded: Mapping[str, str] | None = None,
    run_study: RunSensitivity | None = None,
) -> dict[str, Any]:
    """The study as plain data, with the same arguments as the page."""
    return {
        "title": study.title,
        "step_seconds": study.step_seconds,
        "numbers": [
            {
                "name": bar.variation.name,
                "kind": bar.variation.kind,
                "value": bar.variation.value,
                "unit": bar.variation.unit or None,
                "low_factor": bar.variation.low,
                "high_factor": bar.variation.high,
                "is_stated_spread": bar.variation.is_spread_stated,
                "low_step_seconds": bar.low_seconds,
                "high_step_seconds": bar.high_seconds,
                "error": bar.error,
                "low_settings": dict(bar.variation.overrides[0]),
                "high_settings": dict(bar.variation.overrides[1]),
            }
            for bar in study.bars
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
        "left_out": dict(excluded or {}),
        **({} if run_study is None else {"run": run_bar_dict(run_study)}),
    }
