"""A sensitivity study as text of 80 columns: the numbers that matter, and the requirements of a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zsim.report.views.result import ItemColumn, Medium, ResultTable, table_of
from zsim.report.views.text.plain import WIDTH, paragraph, text_table
from zsim.study.sensitivity.requirements import Requirement
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
