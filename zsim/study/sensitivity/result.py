"""How much a step depends on each number. Each alone is turned down and up, all others unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from zsim.errors import InputError
from zsim.report.views.displayable import Displayable
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN
from zsim.report.views.result import ItemColumn, Medium, ResultTable, Section, columns_of, table_of
from zsim.report.views.text.plain import WIDTH, paragraph, text_table
from zsim.specs.experiment.job import gpus_label, strategy_label
from zsim.specs.experiment.load import ExperimentSource, change_experiment, experiment_of
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.study.rollouts import drop_rollout
from zsim.study.sensitivity.runs import (
    RunSensitivity,
    run_bar_dict,
    run_bar_lines,
    run_bar_section,
    run_sensitivity_of,
)
from zsim.study.sensitivity.sensitivity import (
    SPREAD,
    Requirement,
    SensitivityBar,
    check_resources,
    excluded_resources,
    hardware_variations,
    parse_target,
    requirements,
    rollout_variations,
    software_variations,
)
from zsim.study.sweep.points import Point
from zsim.study.sweep.records import points_folder
from zsim.study.sweep.sweep import run_points
from zsim.units import format_seconds

_WORTH_SAYING = 0.0005  # of the step


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
        ItemColumn("varied, %", _format_factors),
        ItemColumn("step, %", lambda bar: bar.error or _format_changes(bar, step_seconds)),
        ItemColumn("key", _format_keys, is_left=True, where="page"),
    ]
    return table_of("", fields, bars, medium)


def _format_keys(bar: SensitivityBar) -> str:
    """The first of the keys that were set."""
    first, *other_keys = bar.variation.overrides[0]
    return first + (f" and {len(other_keys)} more" if other_keys else "")


def requirement_lines(study: SensitivityResult) -> Iterator[str]:
    """The requirements that reach the target, then those that do not, then the excluded resources, with the
    reason.
    """
    yield f"for {study.target}:"
    sentences = [need.sentence() for need in study.requirements if need.needed is not None]
    unreachable = [_format_unreachable(need) for need in study.requirements if need.needed is None]
    if unreachable:
        sentences.append(f"not by themselves, however much (the step then): {', '.join(unreachable)}")
    sentences += [f"{name}: left out; {why}" for name, why in study.left_out.items()]
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


def _format_needed(need: Requirement) -> str:
    if need.needed is not None:
        return f"{need.needed:,.4g}"
    return "not by itself" if need.bound is None else f"not by itself, even at {need.bound:g}"


def tornado(study: SensitivityResult) -> Figure:
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


@dataclass(frozen=True, repr=False)
class SensitivityResult(Displayable):
    """The step with every number turned down and up, the largest effect first."""

    file: ClassVar[str] = "sensitivity"
    title: str
    step_seconds: float
    spread: float
    bars: tuple[SensitivityBar, ...]
    is_stopped: bool = False
    requirements: Sequence[Requirement] = ()
    """The least of each resource that reaches `target`."""
    target: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Resources that mean nothing for the target, with the reason."""
    run: RunSensitivity | None = None
    """The sensitivity of the days of the run. None without [run]."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per number, with the step's seconds and its relative change (`swing_fraction`)."""
        rows: list[dict[str, Any]] = self.to_dict()["numbers"]
        swings = [bar.swing(self.step_seconds) for bar in self.bars]
        return [{**row, "swing_fraction": swing} for row, swing in zip(rows, swings, strict=True)]

    def headline(self) -> str:
        return f"{self.title} | {format_seconds(self.step_seconds)} per step"

    def columns(self) -> Sequence[str]:
        return ("name", "value", "unit", "low_factor", "high_factor", "low_step_seconds",
                "high_step_seconds", "swing_fraction")  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The numbers that move the step, those with an error, those without effect, and what they need."""
        yield from paragraph(self.headline())
        moving = [bar for bar in self.bars if bar.error is None and not is_idle(bar, self.step_seconds)]
        yield from _table(moving, self.step_seconds)
        if any(bar.variation.is_spread_stated for bar in moving):
            yield "* over its stated range"
        for bar in self.bars:
            if bar.error is not None:
                yield from paragraph(f"{bar.variation.name}: {bar.error}", indent=2)
        idle_names = [bar.variation.name for bar in self.bars if is_idle(bar, self.step_seconds)]
        if idle_names:
            yield from paragraph(f"without effect: {', '.join(idle_names)}")
        if self.target and not self.is_stopped:
            yield ""
            yield from requirement_lines(self)
        if (run := self.run) is not None:
            yield from run_bar_lines(run)

    def to_dict(self) -> dict[str, Any]:
        """The content of sensitivity.json."""
        return {
            "title": self.title,
            "step_seconds": self.step_seconds,
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
                for bar in self.bars
            ],
            "target": self.target or None,
            "requirements": [
                {
                    "name": need.name,
                    "unit": need.unit or None,
                    "available": need.available,
                    "needed": need.needed,
                    "step_seconds_with_plenty": need.best_seconds,
                    "bound": need.bound,
                }
                for need in self.requirements
            ],
            "left_out": dict(self.left_out),
            **({} if self.run is None else {"run": run_bar_dict(self.run)}),
        }

    def heading(self) -> tuple[str, str]:
        names = [bar.variation.name for bar in self.bars if not is_idle(bar, self.step_seconds)]
        effects = ", ".join(names[:3]) or "none of the numbers"
        return self.title, f"{format_seconds(self.step_seconds)} per step; most depends on {effects}."

    def sections(self) -> Iterator[Section]:
        caption = (
            f"The step's time with each number turned down and up, the others as they are; by "
            f"{self.spread:.0%} where the number's own spread is not known (* where it is)."
        )
        bars = bar_table(self.bars, self.step_seconds, "page")
        yield Section("What the step depends on", [("tornado", caption, partial(tornado, self))], bars)
        if self.requirements:
            columns = columns_of("resource", "has", "needs", "step with plenty of it")
            rows = [
                [
                    f"{need.name}, {need.unit}".rstrip(", "),
                    f"{need.available:,.4g}",
                    _format_needed(need),
                    format_seconds(need.best_seconds),
                ]
                for need in self.requirements
            ]
            rows += [[name, "", f"left out: {why}", ""] for name, why in self.left_out.items()]
            title = f"What would have to be true for {self.target}"
            yield Section(title, table=ResultTable("", columns, rows))
        if self.run is not None:
            yield run_bar_section(self.run)


def sensitivity(
    experiment: ExperimentSource = None,
    *,
    spread: float = SPREAD,
    target: str | None = None,
    resources: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> SensitivityResult:
    """Turn every number of the hardware and the framework, each alone, as `zsim sensitivity` does.

    A number whose file states its spread is turned by that, all others by `spread`. `target` is
    "step_seconds=2.5", "mfu=0.5" or "tokens_per_second_per_gpu=4000". The least of each resource (or only of
    `resources`) that reaches it is then found by simulation. `cache` is a folder of simulated points.

        found = zsim.sensitivity("experiment.toml", target="mfu=0.5")
        found.figure(), found.to_frame().head(), found.requirements

    Raises InputError for an unknown target or resource, before anything is simulated.
    """
    resolved_experiment = experiment_of(experiment, overrides)
    excluded: dict[str, str] = {}
    if resources and target is None:
        raise InputError(
            f"--resource {resources[0]}: has no effect without --target, for which it names what may change"
        )
    if not 0 < spread < 1:
        raise InputError(f"--spread: found {spread:g}, expected a fraction between 0 and 1")
    if target is not None:  # an invalid target is reported before anything is simulated
        parsed_target = parse_target(target, resolve(resolved_experiment))
        check_resources(parsed_target, resources)
        excluded = excluded_resources(parsed_target)
    workers = jobs or os.cpu_count() or 1
    with points_folder(None if cache is None else Path(cache)) as folder:
        result = _turn_numbers(resolved_experiment, folder, spread, workers)
    result = replace(result, target=target or "", left_out=excluded)
    if result.is_stopped:
        return result
    if target is not None:
        needs = requirements(resolved_experiment, target, resources or None, jobs=workers)
        result = replace(result, requirements=needs)
    if resolved_experiment.run is not None:
        result = replace(result, run=run_sensitivity_of(resolved_experiment, jobs=workers))
    return result


def _turn_numbers(experiment: Experiment, folder: Path, spread: float, jobs: int) -> SensitivityResult:
    """Simulate the step with every number turned down and up. Results are kept in `folder` by content."""
    experiment = experiment.model_copy(update={"run": None})  # its days are a study of their own
    job = resolve(drop_rollout(experiment))
    variations = [*hardware_variations(job.cluster, spread), *software_variations(job, spread)]
    if experiment.rl is not None:
        variations += rollout_variations(experiment.rl, spread)
    points = [Point(0, {}, experiment)]
    for variation in variations:
        for changes in variation.overrides:
            points.append(Point.of(len(points), {}, partial(change_experiment, experiment, changes)))
    run = run_points(points, folder, jobs=jobs)
    seconds: list[float | None] = []
    errors: list[str | None] = []
    for point in points:
        record = run.records.get(point.number, {"status": "not run", "error": "not run"})
        is_ok = record["status"] == "ok"
        seconds.append(record["row"]["step_seconds"] if is_ok else None)
        errors.append(None if is_ok else record["error"])
    base = seconds[0]
    if base is None:
        raise InputError(f"the experiment itself cannot be simulated: {errors[0]}")
    bars = []
    for n, variation in enumerate(variations):
        low, high = 1 + 2 * n, 2 + 2 * n
        is_varied = variation.low < variation.high
        error = errors[low] or errors[high] if is_varied else "not varied: no other whole number near"
        bars.append(SensitivityBar(variation, seconds[low], seconds[high], error))
    bars.sort(key=lambda bar: -bar.swing(base))
    title = f"{job.model.name} | {strategy_label(job)} | {job.cluster.name} | {gpus_label(job)}"
    return SensitivityResult(title, base, spread, tuple(bars), run.is_stopped)
