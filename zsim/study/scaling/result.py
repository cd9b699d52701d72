"""A scaling study as plain data and as one HTML page with a table and sentences."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.report.critical.causes import cause_meaning, cause_noun
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import page
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.report.views.result import (
    Cell,
    Displayable,
    Figures,
    ItemColumn,
    Medium,
    ResultTable,
    Section,
    table_of,
)
from zsim.report.views.text.plain import paragraph, text_table
from zsim.study.experiment_source import ExperimentSource, experiment_of
from zsim.study.scaling.scaling import (
    KNEE,
    EfficiencyChange,
    Mode,
    Scaling,
    ScalingPoint,
    parse_counts,
    run_dict,
    run_lines,
    run_scaling,
    run_section,
)
from zsim.study.sweep.sweep import points_folder
from zsim.units import format_bytes, format_percent, format_seconds
from zsim.validated.ratios import NO_DIFFERENCE, ratio_range
from zsim.validated.validation import format_range
from zsim.validated.verdict import verdict_content, verdict_suffix

MODES = {
    "weak": "weak scaling: the same batch on every GPU",
    "strong": "strong scaling: the same batch in all",
    "fill": "the micro-batch that fills the GPU",
}
WORTH_SAYING = 0.01  # relative to a token's cost


def scaling_lines(scaling: Scaling) -> Iterator[str]:
    """The table, then the sentences."""
    yield scaling.title
    yield MODES[scaling.mode]
    heading, *lines = text_table(point_table(scaling, "text"))
    yield heading
    for point, line in zip(scaling.points, lines, strict=True):
        yield from [line] if point.error is None else paragraph(f"{line} {point.error}", indent=8)
    yield ""
    for sentence in sentences(scaling):
        yield from paragraph(sentence)


def point_table(scaling: Scaling, medium: Medium) -> ResultTable:
    """A row for each number of GPUs. One without a step has its error in the page's last column."""
    gpus: ItemColumn[ScalingPoint] = ItemColumn("GPUs", lambda point: f"{point.gpus:,}")
    causes: ItemColumn[ScalingPoint] = ItemColumn(
        "mostly waiting for", lambda point: point.error or _format_causes(point), is_left=True, where="page"
    )
    fields = [replace(field, cell=partial(_cell_of_run, field.cell)) for field in _fields(scaling)]
    return table_of("", [gpus, *fields, causes], scaling.points, medium)


def _cell_of_run(cell: Callable[[ScalingPoint], Cell], point: ScalingPoint) -> Cell:
    return "" if point.error is not None else cell(point)


def _fields(scaling: Scaling) -> Sequence[ItemColumn[ScalingPoint]]:
    return (
        ItemColumn("nodes", lambda point: f"{point.nodes:,}", where="page"),
        ItemColumn("batch", lambda point: f"{point.micro_batch_size}x{point.gradient_accumulation_steps}"),
        ItemColumn("step", lambda point: format_seconds(point.step_seconds)),
        ItemColumn("80 %", _format_ends, where="page"),
        ItemColumn("tokens/s", lambda point: f"{point.tokens_per_second:,.0f}"),
        ItemColumn("linear", lambda point: format_percent(scaling.efficiency(point), "")),
        ItemColumn("MFU", lambda point: format_percent(point.mfu_fraction, "")),
        ItemColumn("memory", lambda point: format_bytes(point.gpu_peak_bytes), where="text"),
        ItemColumn("memory", _format_memory, where="page"),
        ItemColumn("80 %", _format_range, where="text"),
    )


def _format_causes(point: ScalingPoint) -> str:
    """The three largest costs of a token."""
    total_cost = sum(point.costs.values()) or 1.0
    largest = sorted(point.costs.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{cause_meaning(name).label} {cost / total_cost * 100:.0f} %" for name, cost in largest)


def _format_ends(point: ScalingPoint) -> str:
    return "" if point.step_seconds_range is None else format_range(point.step_seconds_range)


def _format_memory(point: ScalingPoint) -> str:
    """The memory of the fullest GPU, and the verdict unless the job fits."""
    return format_bytes(point.gpu_peak_bytes) + verdict_suffix(point.verdict)


def _format_range(point: ScalingPoint) -> str:
    """The step's interval relative to the step, in percent, or the verdict, unless the job fits."""
    if point.verdict is not None and point.verdict.word != "fits":
        return point.verdict.word
    if point.step_seconds_range is None:
        return ""
    low, high = (end / point.step_seconds - 1 for end in point.step_seconds_range)
    return f"{low * 100:+.0f} {high * 100:+.0f} %"


def sentences(scaling: Scaling) -> Iterator[str]:
    """Sentences on the study: that nothing fits, where efficiency changes and why, or that it does not, and
    where a smaller micro-batch than the largest is used, and why.
    """
    if scaling.runs and not any(point.fits for point in scaling.runs):
        yield "It fits on none of these; the steps are as if it did."
    deltas = sorted([*scaling.knees(), *scaling.gains()], key=lambda delta: (delta.start, delta.end))
    for delta in deltas:
        verb = "falls" if delta.after < delta.before else "rises"
        yield (
            f"{delta.start:,} -> {delta.end:,} GPUs: efficiency {verb} from {delta.before * 100:.0f} % to "
            f"{delta.after * 100:.0f} %; {explain_change(delta, scaling)}"
            f"{'' if _is_distinguishable(delta, scaling) else f' ({NO_DIFFERENCE})'}."
        )
    if not deltas and len(scaling.runs) > 1:
        last = scaling.runs[-1]
        share = scaling.efficiency(last) * 100
        yield (
            f"No knee up to {last.gpus:,} GPUs: {share:.0f} % of linear there, and no doubling loses "
            f"{KNEE * 100:.0f} points."
        )
    for point in scaling.runs:
        if point.largest_micro_batch and point.micro_batch_size < point.largest_micro_batch:
            yield (
                f"{point.gpus:,} GPUs: micro-batch {point.largest_micro_batch} fits as well, but torch's "
                f"allocator runs short with it; {point.micro_batch_size} makes a sequence cheapest."
            )


def range_of_efficiency(efficiency: float, scaling: Scaling, *points: ScalingPoint) -> tuple[float, float]:
    """The interval that contains the efficiency of one of two counts against the other with 80 %."""
    settings = ["GPUs"] if scaling.grow is None else ["GPUs", "parallelism"]
    return ratio_range(efficiency, settings, is_shared=any(point.is_shared for point in points))


def _is_distinguishable(delta: EfficiencyChange, scaling: Scaling) -> bool:
    ends = (point for point in scaling.runs if point.gpus in (delta.start, delta.end))
    low, high = range_of_efficiency(delta.after / delta.before, scaling, *ends)
    return not low <= 1.0 <= high


def explain_change(delta: EfficiencyChange, scaling: Scaling) -> str:
    """The reason for a change of efficiency: the causes by which a token costs more, or less."""
    more, less = ("more", "less") if delta.net_change > 0 else ("less", "more")
    netted_change = abs(delta.cause_change - delta.net_change)
    offset_text = ""
    if delta.offset and netted_change >= WORTH_SAYING:
        offset_text = (
            f" ({abs(delta.cause_change) * 100:.0f} % {more}, partly offset by {less} "
            f"{cause_meaning(delta.offset).label} on the critical path)"
        )
    total, part = (f"{abs(change) * 100:.0f} %" for change in (delta.change, delta.net_change))
    share_text = "" if part == total else f", {part}"
    return f"a token costs {total} {more}{share_text} because of {cause_noun(delta.cause)}{offset_text}"


def scaling_page(scaling: Scaling) -> str:
    """The page as text."""
    sections = [
        Section("How far from linear", [
            ("efficiency", "Tokens per second per GPU, of the best point that fits. Marked: knees.",
             efficiency(scaling)),
            ("throughput", "Tokens per second; dashed: linear.", throughput(scaling)),
        ]),
        Section("Why", [
            ("causes", "What a token costs in GPU time, by what the end of the step waited for (the critical "
             "path); 100 % is its cost at the best point. What grows is what keeps it from scaling.",
             causes(scaling)),
        ], point_table(scaling, "page")),
        *run_section(scaling),
        Section("Room", [("memory", "Memory of the fullest GPU.", memory(scaling))]),
    ]  # fmt: skip
    return page(f"{scaling.title} | {MODES[scaling.mode]}", "scaling", sections, " ".join(sentences(scaling)))


def _axes(figure: Figure, scaling: Scaling, **y: Any) -> Figure:
    counts = [point.gpus for point in scaling.runs]
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=counts, ticktext=[f"{n:,}" for n in counts])
    figure.update_yaxes(automargin=True, **y)
    return figure


def efficiency(scaling: Scaling) -> Figure:
    """Efficiency against linear scaling, knees marked with their causes."""
    runs = scaling.runs
    shares = [scaling.efficiency(point) * 100 for point in runs]
    figure = Figure(layout(420))
    other_points = [
        (point, share) for point, share in zip(runs, shares, strict=True) if point is not scaling.base
    ]
    base = scaling.base
    ends = {point.gpus: range_of_efficiency(share, scaling, point, base) for point, share in other_points}
    ends[base.gpus] = (100.0, 100.0)
    _band(figure, [(point.gpus, *ends[point.gpus]) for point in runs])
    figure.add_scatter(
        name="of linear",
        x=[point.gpus for point in runs],
        y=shares,
        mode="lines+markers",
        line={"color": BREAKDOWN["compute"].color, "width": 3},
        marker={"symbol": ["circle" if s.fits else "x" for s in runs], "size": 9},
        hovertext=[_hover(scaling, point) for point in runs],
        hoverinfo="text",
    )
    for kind, deltas, color in (
        ("knee", scaling.knees(), CAPACITY.color),
        ("faster than linear", scaling.gains(), BREAKDOWN["optimizer"].color),
    ):
        if not deltas:
            continue
        by_gpus = dict(zip((point.gpus for point in runs), shares, strict=True))
        figure.add_scatter(
            name=kind,
            x=[delta.start for delta in deltas],
            y=[by_gpus[delta.start] for delta in deltas],
            mode="markers+text",
            marker={"symbol": "diamond", "size": 14, "color": color},
            text=[cause_meaning(delta.cause).label for delta in deltas],
            textposition="top center",
            hovertext=[
                f"{delta.start:,} -> {delta.end:,} GPUs: {explain_change(delta, scaling)}" for delta in deltas
            ],
            hoverinfo="text",
        )
    figure.add_hline(y=100, line={"dash": "dash", "width": 1, "color": "#8A8F98"})
    return _axes(
        figure, scaling, title_text="% of linear", range=[0, max([115.0, *(1.15 * s for s in shares)])]
    )


def _band(figure: Figure, ends: Sequence[tuple[int, float, float]]) -> None:
    """Draw the 80 % interval as a band."""
    if not ends:
        return
    counts, reversed_counts = [gpus for gpus, _, _ in ends], [gpus for gpus, _, _ in reversed(ends)]
    figure.add_scatter(
        name="80 %",
        x=[*counts, *reversed_counts],
        y=[*(high for _, _, high in ends), *(low for _, low, _ in reversed(ends))],
        mode="lines",
        fill="toself",
        fillcolor="rgba(47, 127, 191, 0.15)",
        line={"width": 0},
        hoverinfo="skip",
    )


def _hover(scaling: Scaling, point: ScalingPoint) -> str:
    share, interval = scaling.efficiency(point) * 100, point.step_seconds_range
    step = format_seconds(point.step_seconds) + (f" ({format_range(interval)})" if interval else "")
    return f"{point.gpus:,} GPUs: {step} per step, {share:.1f} % of linear"


def throughput(scaling: Scaling) -> Figure:
    runs, base = scaling.runs, scaling.base
    figure = Figure(layout(360))
    counts = [point.gpus for point in runs]
    _band(figure, [
        (point.gpus, point.step_tokens / point.step_seconds_range[1],
         point.step_tokens / point.step_seconds_range[0])
        for point in runs if point.step_seconds_range is not None
    ])  # fmt: skip
    figure.add_scatter(
        name="tokens/s",
        x=counts,
        y=[point.tokens_per_second for point in runs],
        mode="lines+markers",
        line={"color": BREAKDOWN["compute"].color, "width": 3},
        hovertemplate="%{x:,} GPUs: %{y:,.0f} tokens/s<extra></extra>",
    )
    figure.add_scatter(
        name="linear",
        x=counts,
        y=[base.tokens_per_second * count / base.gpus for count in counts],
        mode="lines",
        line={"dash": "dash", "width": 1, "color": "#8A8F98"},
        hoverinfo="skip",
    )
    return _axes(figure, scaling, title_text="tokens/s", type="log")


def causes(scaling: Scaling) -> Figure:
    """Stacked bars: the cost of a token by cause, in percent of its cost at the base."""
    runs = scaling.runs
    base_cost = scaling.base.token_gpu_seconds
    names = dict.fromkeys(name for point in runs for name in point.costs)
    figure = Figure(layout(460, barmode="stack"))
    labels = [f"{point.gpus:,}" for point in runs]
    for name in names:
        shares = [point.costs.get(name, 0.0) / base_cost * 100 for point in runs]
        if max(shares) < WORTH_SAYING * 100:
            continue
        meaning = cause_meaning(name)
        figure.add_bar(
            name=meaning.label,
            x=labels,
            y=shares,
            marker_color=meaning.color,
            hovertemplate="%{x} GPUs: " + meaning.label + " %{y:.1f} %<extra></extra>",
        )
    figure.update_xaxes(title_text="GPUs", type="category")
    figure.update_yaxes(title_text="% of a token's cost at the best point", automargin=True)
    return figure


def memory(scaling: Scaling) -> Figure:
    runs = scaling.runs
    figure = Figure(layout(320))
    figure.add_scatter(
        name="fullest GPU",
        x=[point.gpus for point in runs],
        y=[point.gpu_peak_bytes / 1e9 for point in runs],
        mode="lines+markers",
        line={"color": BREAKDOWN["compute"].color, "width": 3},
        hovertext=[f"{s.gpus:,} GPUs: {format_bytes(s.gpu_peak_bytes)}, micro-batch {s.micro_batch_size}"
                   for s in runs],
        hoverinfo="text",
    )  # fmt: skip
    capacity = runs[0].gpu_capacity_bytes if runs else None
    if capacity:
        figure.add_scatter(
            name="capacity",
            x=[runs[0].gpus, runs[-1].gpus],
            y=[capacity / 1e9] * 2,
            mode="lines",
            line={"dash": "dash", "width": 2, "color": CAPACITY.color},
            hoverinfo="skip",
        )
    return _axes(figure, scaling, title_text="GB", rangemode="tozero")


def scaling_dict(scaling: Scaling) -> dict[str, Any]:
    """The study as plain data."""
    return {
        "title": scaling.title,
        "mode": scaling.mode,
        "base_gpus": scaling.base.gpus,
        "scales": [
            {"gpus": point.gpus, "error": point.error}
            if point.error is not None
            else {
                "gpus": point.gpus,
                "error": None,
                "nodes": point.nodes,
                "micro_batch_size": point.micro_batch_size,
                "gradient_accumulation_steps": point.gradient_accumulation_steps,
                "step_seconds": point.step_seconds,
                "step_seconds_range": None
                if point.step_seconds_range is None
                else [*point.step_seconds_range],
                "tokens_per_second": point.tokens_per_second,
                "efficiency_fraction": scaling.efficiency(point),
                "mfu_fraction": point.mfu_fraction,
                "fits": point.fits,
                **verdict_content(point.verdict),
                "gpu_peak_bytes": point.gpu_peak_bytes,
                "allocator_retries": point.allocator_retries,
                "largest_micro_batch_size": point.largest_micro_batch,
                "token_gpu_seconds": dict(point.costs),
                **run_dict(point),
            }
            for point in scaling.points
        ],
        "knees": [_change_dict(delta) for delta in scaling.knees()],
        "gains": [_change_dict(delta) for delta in scaling.gains()],
    }


def _change_dict(delta: EfficiencyChange) -> dict[str, Any]:
    return {
        "from_gpus": delta.start,
        "to_gpus": delta.end,
        "efficiency_before_fraction": delta.before,
        "efficiency_after_fraction": delta.after,
        "cause": delta.cause,
        "cause_change_fraction": delta.cause_change,
        "change_fraction": delta.change,
        "cause_net_change_fraction": delta.net_change,
    }


class ScalingResult(Displayable, Scaling):
    """The experiment on each number of GPUs. `knees()` says where efficiency bends, and why."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per number of GPUs."""
        scales: list[dict[str, Any]] = self.to_dict()["scales"]
        return scales

    def headline(self) -> str:
        return f"{self.title} | {MODES[self.mode]}"

    def columns(self) -> Sequence[str]:
        failed = ["error"] if any(scale.error for scale in self.points) else []
        return ["gpus", "step_seconds", "tokens_per_second", "efficiency_fraction", "mfu_fraction", "fits",
                "gpu_peak_bytes", *failed]  # fmt: skip

    def lines(self) -> Iterator[str]:
        yield from scaling_lines(self)
        yield from run_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The content of scaling.json."""
        return scaling_dict(self)

    def plots(self) -> Figures:
        return {
            "efficiency": lambda: efficiency(self),
            "throughput": lambda: throughput(self),
            "causes": lambda: causes(self),
            "memory": lambda: memory(self),
        }

    def pages(self) -> Mapping[str, str]:
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        return {"scaling.html": scaling_page(self), "scaling.json": content}


def scaling(
    experiment: ExperimentSource = None,
    gpus: str | Iterable[int] = "8..1024",
    *,
    mode: str = "weak",
    overrides: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    grow: str | None = None,
    jobs: int | None = None,
    cache: str | Path | None = None,
) -> ScalingResult:
    """Simulate an experiment on a growing number of GPUs, as `zsim scaling` does.

    `gpus` is "8..1024" (doubling), "8..4096:4", or numbers. `mode` "weak" keeps the batch of a GPU, "strong"
    that of all GPUs (`global_batch` sequences, else the experiment's), and "fill" takes the largest
    micro-batch that fits. `grow` is "tensor", "pipeline" or "context", the degree that grows in place of the
    replicas. `cache` is a folder of simulated points.

        found = zsim.scaling("experiment.toml", [8, 16, 32, 64])
        found.figure("efficiency"), [knee.cause for knee in found.knees()]

    Raises InputError where no count can be simulated.
    """
    if mode not in MODES:
        raise InputError(
            f"scaling: mode: found {mode!r}, expected one of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    parsed_mode: Mode = "fill" if mode == "fill" else "strong" if mode == "strong" else "weak"
    text = gpus if isinstance(gpus, str) else ",".join(str(count) for count in gpus)
    resolved_experiment, counts = experiment_of(experiment, overrides), parse_counts(text)
    with points_folder(None if cache is None else Path(cache)) as folder:
        scaling_study = run_scaling(
            resolved_experiment, counts, parsed_mode, folder, global_batch=global_batch, grow=grow,
            jobs=jobs or os.cpu_count() or 1,
        )  # fmt: skip
    return ScalingResult(
        **{field.name: getattr(scaling_study, field.name) for field in fields(scaling_study)}
    )
