"""A sensitivity study as plain data and as one HTML page with a table and the tornado chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page
from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.result import ResultTable, Section, columns_of
from zsim.study.sensitivity.requirements import Requirement
from zsim.study.sensitivity.runs import RunSensitivity, run_bar_dict, run_bar_section
from zsim.study.sensitivity.sensitivity import Sensitivity, SensitivityBar
from zsim.study.sensitivity.text import bar_table, is_idle
from zsim.units import format_seconds

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
