"""A scaling study as plain data and as one HTML page with a table and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.report.critical.causes import cause_meaning
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.html.page import Section, page
from zsim.report.views.meanings import BREAKDOWN, CAPACITY
from zsim.study.scaling.scaling import Bend, Scale, Scaling
from zsim.study.scaling.text import MODES, WORTH_SAYING, because, range_of_efficiency, sentences
from zsim.study.scaling.whole_runs import run_dict, run_section
from zsim.units import format_bytes, format_seconds
from zsim.validated.validation import range_words
from zsim.validated.verdict import unless_fits, verdict_content


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
        ], ["GPUs", "nodes", "batch per GPU", "step", "80 %", "tokens/s", "of linear", "MFU", "GPU memory",
            "mostly waiting for"], [_cells(scaling, scale) for scale in scaling.scales]),
        *run_section(scaling),
        Section("Room", [("memory", "Memory of the fullest GPU.", memory(scaling))]),
    ]  # fmt: skip
    return page(f"{scaling.title} | {MODES[scaling.mode]}", "scaling", sections, " ".join(sentences(scaling)))


def _cells(scaling: Scaling, scale: Scale) -> list[str]:
    if scale.error is not None:
        return [f"{scale.gpus:,}", *[""] * 8, scale.error]
    top = sorted(scale.costs.items(), key=lambda item: -item[1])[:3]
    whole = sum(scale.costs.values()) or 1.0
    return [
        f"{scale.gpus:,}",
        f"{scale.nodes:,}",
        f"{scale.micro_batch_size} x {scale.gradient_accumulation_steps}",
        format_seconds(scale.step_seconds),
        "" if scale.step_seconds_range is None else range_words(scale.step_seconds_range),
        f"{scale.tokens_per_second:,.0f}",
        f"{scaling.efficiency(scale) * 100:.1f} %",
        "" if scale.mfu_fraction is None else f"{scale.mfu_fraction * 100:.1f} %",
        format_bytes(scale.gpu_peak_bytes) + unless_fits(scale.verdict),
        ", ".join(f"{cause_meaning(name).label} {cost / whole * 100:.0f} %" for name, cost in top),
    ]


def _axes(figure: Figure, scaling: Scaling, **y: Any) -> Figure:
    counts = [scale.gpus for scale in scaling.runs]
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=counts, ticktext=[f"{n:,}" for n in counts])
    figure.update_yaxes(automargin=True, **y)
    return figure


def efficiency(scaling: Scaling) -> Figure:
    """Efficiency against linear scaling, knees marked with their causes."""
    runs = scaling.runs
    shares = [scaling.efficiency(scale) * 100 for scale in runs]
    figure = Figure(layout(420))
    others = [(scale, share) for scale, share in zip(runs, shares, strict=True) if scale is not scaling.base]
    base = scaling.base
    ends = {scale.gpus: range_of_efficiency(share, scaling, scale, base) for scale, share in others}
    ends[base.gpus] = (100.0, 100.0)
    _band(figure, [(scale.gpus, *ends[scale.gpus]) for scale in runs])
    figure.add_scatter(
        name="of linear",
        x=[scale.gpus for scale in runs],
        y=shares,
        mode="lines+markers",
        line={"color": BREAKDOWN["compute"].color, "width": 3},
        marker={"symbol": ["circle" if s.fits else "x" for s in runs], "size": 9},
        hovertext=[_hover(scaling, scale) for scale in runs],
        hoverinfo="text",
    )
    for kind, bends, color in (
        ("knee", scaling.knees(), CAPACITY.color),
        ("faster than linear", scaling.gains(), BREAKDOWN["optimizer"].color),
    ):
        if not bends:
            continue
        by_gpus = dict(zip((scale.gpus for scale in runs), shares, strict=True))
        figure.add_scatter(
            name=kind,
            x=[bend.start for bend in bends],
            y=[by_gpus[bend.start] for bend in bends],
            mode="markers+text",
            marker={"symbol": "diamond", "size": 14, "color": color},
            text=[cause_meaning(bend.cause).label for bend in bends],
            textposition="top center",
            hovertext=[f"{bend.start:,} -> {bend.end:,} GPUs: {because(bend, scaling)}" for bend in bends],
            hoverinfo="text",
        )
    figure.add_hline(y=100, line={"dash": "dash", "width": 1, "color": "#8A8F98"})
    return _axes(
        figure, scaling, title_text="% of linear", range=[0, max(115.0, *(1.15 * s for s in shares))]
    )


def _band(figure: Figure, ends: Sequence[tuple[int, float, float]]) -> None:
    """Draw the 80 % interval as a band."""
    if not ends:
        return
    there, back = [gpus for gpus, _, _ in ends], [gpus for gpus, _, _ in reversed(ends)]
    figure.add_scatter(
        name="80 %",
        x=[*there, *back],
        y=[*(high for _, _, high in ends), *(low for _, low, _ in reversed(ends))],
        mode="lines",
        fill="toself",
        fillcolor="rgba(47, 127, 191, 0.15)",
        line={"width": 0},
        hoverinfo="skip",
    )


def _hover(scaling: Scaling, scale: Scale) -> str:
    share, found = scaling.efficiency(scale) * 100, scale.step_seconds_range
    step = format_seconds(scale.step_seconds) + (f" ({range_words(found)})" if found else "")
    return f"{scale.gpus:,} GPUs: {step} per step, {share:.1f} % of linear"


def throughput(scaling: Scaling) -> Figure:
    runs, base = scaling.runs, scaling.base
    figure = Figure(layout(360))
    counts = [scale.gpus for scale in runs]
    _band(figure, [
        (scale.gpus, scale.step_tokens / scale.step_seconds_range[1],
         scale.step_tokens / scale.step_seconds_range[0])
        for scale in runs if scale.step_seconds_range is not None
    ])  # fmt: skip
    figure.add_scatter(
        name="tokens/s",
        x=counts,
        y=[scale.tokens_per_second for scale in runs],
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
    whole = scaling.base.token_gpu_seconds
    names = dict.fromkeys(name for scale in runs for name in scale.costs)
    figure = Figure(layout(460, barmode="stack"))
    labels = [f"{scale.gpus:,}" for scale in runs]
    for name in names:
        shares = [scale.costs.get(name, 0.0) / whole * 100 for scale in runs]
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
        x=[scale.gpus for scale in runs],
        y=[scale.gpu_peak_bytes / 1e9 for scale in runs],
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
            {"gpus": scale.gpus, "error": scale.error}
            if scale.error is not None
            else {
                "gpus": scale.gpus,
                "error": None,
                "nodes": scale.nodes,
                "micro_batch_size": scale.micro_batch_size,
                "gradient_accumulation_steps": scale.gradient_accumulation_steps,
                "step_seconds": scale.step_seconds,
                "step_seconds_range": None
                if scale.step_seconds_range is None
                else [*scale.step_seconds_range],
                "tokens_per_second": scale.tokens_per_second,
                "efficiency_fraction": scaling.efficiency(scale),
                "mfu_fraction": scale.mfu_fraction,
                "fits": scale.fits,
                **verdict_content(scale.verdict),
                "gpu_peak_bytes": scale.gpu_peak_bytes,
                "allocator_retries": scale.allocator_retries,
                "largest_micro_batch_size": scale.largest_micro_batch,
                "token_gpu_seconds": dict(scale.costs),
                **run_dict(scale),
            }
            for scale in scaling.scales
        ],
        "knees": [_bend_dict(bend) for bend in scaling.knees()],
        "gains": [_bend_dict(bend) for bend in scaling.gains()],
    }


def _bend_dict(bend: Bend) -> dict[str, Any]:
    return {
        "from_gpus": bend.start,
        "to_gpus": bend.end,
        "efficiency_before_fraction": bend.before,
        "efficiency_after_fraction": bend.after,
        "cause": bend.cause,
        "cause_change_fraction": bend.cause_change,
        "change_fraction": bend.change,
        "cause_net_change_fraction": bend.net_change,
    }
