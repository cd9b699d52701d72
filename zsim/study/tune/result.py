"""A tuned configuration as one HTML page: step time over memory, the best few, the changes to make."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.html.page import page
from zsim.report.views.meanings import CAPACITY, COMMUNICATION, TOTAL
from zsim.report.views.result import Column, Displayable, Figures, ResultTable, Section, columns_of
from zsim.study.experiment_source import ExperimentSource, experiment_of
from zsim.study.progress import Counts
from zsim.study.tune import tune as search
from zsim.study.tune.evaluate import CandidateResult
from zsim.study.tune.text import (
    best_table,
    format_change,
    format_doubtful,
    format_step,
    label_of,
    subject,
    tuning_files,
    tuning_lines,
    tuning_to_dict,
    verdict,
)
from zsim.study.tune.tune import Tuning
from zsim.units import format_bytes, format_seconds

_BEST = "#1B9E77"


def tuning_page(tuning: Tuning) -> str:
    """The page as text. The same result gives the same bytes."""
    best = Section("The best that fit", table=best_table(tuning, "page"))
    caption = (
        "Every simulated configuration. Down and to the left is better; the line joins those that no other "
        "beats in both."
    )
    sections = [best, Section("Time against memory", [("pareto", caption, pareto_figure(tuning))])]
    if tuning.steps:
        rows = [
            [
                str(number),
                "; ".join(format_change(change) for change in step.changes),
                format_step(step, tuning.given_verdict),
            ]
            for number, step in enumerate(tuning.steps, 1)
        ]
        sections.append(
            Section(
                "What to change",
                [("steps", "Each change on top of those above it, each simulated.", steps_figure(tuning))],
                ResultTable("", columns_of("", Column("change", is_left=True), "step time"), rows),
            )
        )
    doubtful = format_doubtful(tuning) if tuning.doubtful else ""
    summary = ". ".join(part for part in (verdict(tuning), tuning.settled, doubtful) if part)
    return page(subject(tuning), "tune", sections, summary)


def pareto_front(measured: list[CandidateResult]) -> list[CandidateResult]:
    """The results that no other beats in both time and memory, fastest first."""
    front: list[CandidateResult] = []
    for result in sorted(measured, key=lambda m: (m.seconds, m.gpu_bytes)):
        if not front or result.gpu_bytes < front[-1].gpu_bytes:
            front.append(result)
    return front


def pareto_figure(tuning: Tuning) -> Figure:
    """Step time over the fullest GPU's memory, one mark per simulated configuration."""
    points = [*tuning.measured, *(m for m in tuning.best if m not in tuning.measured)]
    scale, unit = time_scale(max(point.seconds for point in points))
    figure = Figure(layout(460, hovermode="closest"))
    front = pareto_front(points)
    figure.add_scatter(
        name="not beaten in both", mode="lines", x=[p.gpu_bytes / 1e9 for p in front],
        y=[p.seconds * scale for p in front], line={"color": TOTAL.color, "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )  # fmt: skip
    groups = [
        ("simulated", points, {"color": COMMUNICATION.color, "size": 8, "opacity": 0.7}),
        ("best", list(tuning.best[:1]), {"color": _BEST, "size": 14, "symbol": "star"}),
    ]
    if tuning.given is not None:
        groups.append(
            ("as given", [tuning.given], {"color": CAPACITY.color, "size": 12, "symbol": "diamond"})
        )
    for name, members, marker in groups:
        figure.add_scatter(
            name=name, mode="markers", marker=marker,
            x=[p.gpu_bytes / 1e9 for p in members], y=[p.seconds * scale for p in members],
            hovertext=[_hover(p) for p in members], hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title_text="GB of the fullest GPU", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(title_text=f"{unit} per step", rangemode="tozero", automargin=True)
    limit = tuning.best[0].row.get("gpu_capacity_bytes")
    if limit:
        figure.add_vline(
            x=limit / 1e9, line={"dash": "dash", "width": 2, "color": CAPACITY.color},
            text=f"capacity {format_bytes(limit)}",
        )  # fmt: skip
    return figure


def _hover(measured: CandidateResult) -> str:
    lines = label_of(measured).replace(", ", "<br>")
    return f"<b>{format_seconds(measured.seconds)}</b>, {format_bytes(measured.gpu_bytes)}<br>{lines}"


def steps_figure(tuning: Tuning) -> Figure:
    """Step time after each change."""
    first = tuning.steps[0].seconds_before
    names = ["as given"] if first is not None else []
    seconds = [first] if first is not None else []
    for number, step in enumerate(tuning.steps, 1):
        names.append(f"{number}. " + ", ".join(change.key.rpartition(".")[2] for change in step.changes))
        seconds.append(step.after.seconds)
    scale, unit = time_scale(max(seconds))
    figure = Figure(layout(110 + 40 * len(names), showlegend=False))
    figure.add_bar(
        orientation="h", y=names, x=[value * scale for value in seconds],
        marker_color=[COMMUNICATION.color] * (len(names) - 1) + [_BEST],
        text=[format_seconds(value) for value in seconds], textposition="auto",
    )  # fmt: skip
    figure.update_xaxes(title_text=f"{unit} per step", rangemode="tozero", title_standoff=6)
    figure.update_yaxes(autorange="reversed", automargin=True, fixedrange=True)
    return figure


# -- `zsim.tune`: the best configuration that fits ---------------------------------------------------------


class TuneResult(Displayable, Tuning):
    """The best configurations in order, the given one, and the changes that lead from it to the best.

    `save(folder)` writes each as files for its framework (`best/`, `2/`, ...) and tune.html.
    """

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The best configurations with their changes (`overrides`) and results, best first."""
        best: list[dict[str, Any]] = self.to_dict()["best"]
        return best

    def headline(self) -> str:
        return f"{subject(self)}. {verdict(self)}"

    def columns(self) -> Sequence[str]:
        return ("label", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction",
                "gpu_peak_bytes", "limit")  # fmt: skip

    def lines(self) -> Iterable[str]:
        return tuning_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim tune --json` writes."""
        return tuning_to_dict(self)

    def plots(self) -> Figures:
        steps = {"steps": lambda: steps_figure(self)} if self.steps else {}
        return {"pareto": lambda: pareto_figure(self), **steps}

    def pages(self) -> Mapping[str, str]:
        return {**tuning_files(self), "tune.html": tuning_page(self)}

    @property
    def label(self) -> str:
        """The best configuration in words."""
        return label_of(self.best[0])


def tune(
    experiment: ExperimentSource = None,
    goal: str = "fastest",
    *,
    overrides: Mapping[str, Any] | None = None,
    kinds: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    quantised: bool = False,
    parallelism: bool = False,
    simulations: int | None = None,
    headroom: float = 0.0,
    top: int = 5,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> TuneResult:
    """Find the best configuration that fits, as `zsim tune` does. The global batch stays.

    `experiment` is a file, a `zsim.Experiment`, a dict, or None for the README's example. `goal` is fastest,
    cheapest, fewest-days (of `[run]`), smallest-cluster, largest-model, largest-batch or longest-sequence.
    `kinds` are the strategies to look at, e.g. ["deepspeed", "fsdp2"], by default the experiment's. `keep` is
    what stays as it is, e.g. ["micro-batch"], or ["all"]. With `quantised` ZeRO++'s int8 gathers and int4
    reductions are tried too. With `parallelism` tensor, pipeline and context degrees are tried too, with at
    most `simulations` simulated. `headroom` is the fraction of GPU memory to leave free. `top` is how many
    are kept in `best`. `cache` is a folder of simulated points.

        found = zsim.tune("experiment.toml", kinds=["deepspeed", "fsdp2"], top=3)
        found.best[0].seconds, found.to_frame(), found.figure("pareto")
        found.save("tuned")                      # tuned/best/... for DeepSpeed or torchtitan

    Raises InputError where nothing fits.
    """
    resolved_experiment = experiment_of(experiment, overrides)
    with Counts("checked", "simulated") as progress:
        tuned = search.tune(
            resolved_experiment, goal, kinds=kinds or (), keep=keep, allows_quantised=quantised,
            searches_parallelism=parallelism, budget=simulations, headroom=headroom, count=top,
            jobs=jobs or os.cpu_count() or 1, cache=None if cache is None else Path(cache),
            on_done=progress.update,
        )  # fmt: skip
    return TuneResult(**{field.name: getattr(tuned, field.name) for field in fields(tuned)})
