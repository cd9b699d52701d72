"""`zsim.sensitivity` and `zsim.needs`: which numbers a step depends on, and how much more would help."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.report.views.displayable import Displayable, DisplayableList, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import CAPACITY, COMMUNICATION
from zsim.report.views.text.plain import paragraph
from zsim.specs.experiment.resolve import resolve
from zsim.study.experiment_source import ExperimentSource, experiment_of
from zsim.study.needs import Need, offload_needs
from zsim.study.sensitivity.page import (
    requirement_lines,
    sensitivity_dict,
    sensitivity_lines,
    sensitivity_page,
    tornado,
)
from zsim.study.sensitivity.requirements import (
    Requirement,
    check_resources,
    excluded_resources,
    parse_target,
    requirements,
)
from zsim.study.sensitivity.runs import RunSensitivity, run_bar_lines, run_sensitivity_of
from zsim.study.sensitivity.sensitivity import SPREAD, Sensitivity, run_sensitivity
from zsim.study.sweep.sweep import points_folder
from zsim.units import format_seconds


@dataclass(frozen=True, repr=False)
class SensitivityResult(Displayable, Sensitivity):
    """The step with every number turned down and up, the largest effect first."""

    requirements: Sequence[Requirement] = ()
    """The least of each resource that reaches `target`."""
    target: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Resources that mean nothing for the target, with the reason."""
    whole: RunSensitivity | None = None
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
        yield from sensitivity_lines(self)
        if self.target and not self.is_stopped:
            yield ""
            yield from requirement_lines(self.requirements, self.target, self.left_out)
        if self.whole is not None:
            yield from run_bar_lines(self.whole)

    def to_dict(self) -> dict[str, Any]:
        """The content of sensitivity.json."""
        return sensitivity_dict(self, self.requirements, self.target, self.left_out, self.whole)

    def plots(self) -> Figures:
        return {"tornado": lambda: tornado(self)}

    def pages(self) -> Mapping[str, str]:
        page = sensitivity_page(self, self.requirements, self.target, self.left_out, self.whole)
        return {"sensitivity.html": page, "sensitivity.json": json.dumps(self.to_dict(), indent=1) + "\n"}


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
    if target is not None:  # an invalid target is reported before anything is simulated
        parsed_target = parse_target(target, resolve(resolved_experiment))
        check_resources(parsed_target, resources)
        excluded = excluded_resources(parsed_target)
    workers = jobs or os.cpu_count() or 1
    with points_folder(None if cache is None else Path(cache)) as folder:
        step_sensitivity = run_sensitivity(resolved_experiment, folder, spread=spread, jobs=workers)
    needed_resources: Sequence[Requirement] = ()
    if target is not None and not step_sensitivity.is_stopped:
        needed_resources = requirements(resolved_experiment, target, resources or None, jobs=workers)
    has_run = resolved_experiment.run is not None and not step_sensitivity.is_stopped
    run_part = run_sensitivity_of(resolved_experiment, jobs=workers) if has_run else None
    sensitivity_fields = {
        result_field.name: getattr(step_sensitivity, result_field.name)
        for result_field in fields(step_sensitivity)
    }
    return SensitivityResult(
        **sensitivity_fields,
        requirements=needed_resources,
        target=target or "",
        left_out=excluded,
        whole=run_part,
    )


@dataclass(frozen=True, repr=False, eq=False)
class NeedsResult(DisplayableList[Need]):
    """The need of each resource separately, all others unchanged."""

    items: tuple[Need, ...]

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per resource."""
        return self.to_dict()

    def columns(self) -> Sequence[str]:
        return ("resource", "available", "needed", "unit", "step_seconds", "best_step_seconds", "is_hidden")

    def lines(self) -> Iterator[str]:
        for need in self.items:
            yield from paragraph(need.sentence(), indent=2)

    def to_dict(self) -> list[dict[str, Any]]:
        """The array that `zsim needs --json` writes."""
        return [need.to_dict() for need in self.items]

    def plots(self) -> Figures:
        return {"steps": self._steps}

    def _steps(self) -> Figure:
        scale, unit = time_scale(max(need.step_seconds for need in self.items))
        figure = Figure(layout(150 + 60 * len(self.items), barmode="group"))
        for name, color, seconds in (
            ("now", CAPACITY.color, [need.step_seconds for need in self.items]),
            ("with what is needed", COMMUNICATION.color, [need.best_step_seconds for need in self.items]),
        ):
            figure.add_bar(
                name=name, orientation="h", y=[need.resource for need in self.items],
                x=[value * scale for value in seconds], marker_color=color,
            )  # fmt: skip
        figure.update_xaxes(title_text=f"{unit} per step", rangemode="tozero")
        figure.update_yaxes(autorange="reversed", automargin=True)
        return figure


def needs(
    experiment: ExperimentSource = None,
    resources: Sequence[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> NeedsResult:
    """How much more of what would hide the cost of offloading, as `zsim needs` finds it by simulation.

    `resources` are "drives", "drive bandwidth", "pcie", "c2c", "host memory", "cpu", by default all that the
    job uses.

        for need in zsim.needs("offloaded.toml", ["cpu"]):
            print(need.sentence())

    Raises InputError where nothing is offloaded.
    """
    return NeedsResult(tuple(offload_needs(experiment_of(experiment, overrides), resources)))
