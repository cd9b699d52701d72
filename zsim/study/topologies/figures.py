"""Figures of topologies: drawings, link utilisation, comparisons of experiments, measured curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import Drawing, FabricBox, draw_fabric
from zsim.units import format_rate, format_seconds

if TYPE_CHECKING:
    from zsim.specs.cluster.cluster import Cluster
    from zsim.study.topologies.bench import CurvePoint
    from zsim.study.topologies.topologies import TopologyComparison

PALETTE = ("#2F7FBF", "#D55E00", "#62D0AC", "#992641", "#FCBA18", "#3148D4", "#8A8F98")
_SCALE = ((0.0, "#F9DC84"), (0.5, "#EE8A2B"), (1.0, "#B3261E"))  # ever darker
_GREY = PALETTE[-1]


def fabric_figure(name: str, num_nodes: int) -> Figure:
    """The fabric of `num_nodes` nodes, folded where they are many. See `draw_fabric`."""
    cluster = load_cluster(name)
    return drawing_figure(draw_fabric(Topology(cluster, num_nodes, cluster.gpus_per_node)), cluster)


def drawing_figure(drawing: Drawing, cluster: Cluster, loads: Sequence[float] | None = None) -> Figure:
    """The figure of a drawn fabric. `loads` colours each line by the part in use of its busiest link, 0 to 1,
    to a tenth.
    """
    positions = drawing.positions()
    figure = Figure(layout(440, showlegend=False))
    shades = (
        [_GREY] * len(drawing.lines)
        if loads is None
        else [heat_color(math.ceil(load * 10) / 10) for load in loads]
    )
    kinds = [(line.tier, shade) for line, shade in zip(drawing.lines, shades, strict=True)]
    for tier, shade in dict.fromkeys(kinds):
        tier_lines = [line for line, kind in zip(drawing.lines, kinds, strict=True) if kind == (tier, shade)]
        width = 1.0 + 0.8 * math.log10(max(max(line.capacity for line in tier_lines) / 25e9, 1.0))
        ends = [(positions[line.ends[0]], positions[line.ends[1]]) for line in tier_lines]
        figure.add_scatter(
            x=[x for start, end in ends for x in (start[0], end[0], None)],
            y=[y for start, end in ends for y in (start[1], end[1], None)],
            mode="lines",
            line={"width": width, "color": shade},
            opacity=0.75,
            hoverinfo="skip",
            name=tier,
        )
    add_boxes(figure, drawing, f"{cluster.gpus_per_node} GPUs, {cluster.gpu.name}")
    return figure


def add_boxes(figure: Figure, drawing: Drawing, node_label: str) -> None:
    """Draw the boxes of a drawing as the figure's last trace. `node_label` names the contents of one node."""
    nodes, switches = PALETTE[0], PALETTE[2]
    figure.add_scatter(
        x=[box.position[0] for box in drawing.boxes],
        y=[box.position[1] for box in drawing.boxes],
        mode="markers+text",
        text=_labels(drawing.boxes),
        textposition=["bottom center" if box.is_nodes else "top center" for box in drawing.boxes],
        textfont={"size": 10},
        marker={
            "size": [_size(box) if len(drawing.boxes) <= _MAX_LABELLED else 9 for box in drawing.boxes],
            "symbol": ["square" if box.is_nodes else "circle" for box in drawing.boxes],
            "color": [nodes if box.is_nodes else switches for box in drawing.boxes],
            "opacity": 1,
        },
        hovertext=[_hover(box, drawing, node_label) for box in drawing.boxes],
        hoverinfo="text",
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, range=_room([box.position[1] for box in drawing.boxes]))


def _room(heights: Sequence[float]) -> list[float]:
    """The range of an axis, with room for names below the lowest boxes."""
    low, high = min(heights), max(heights)
    return [low - 0.14 * max(high - low, 1.0), high + 0.14 * max(high - low, 1.0)]


def heat_map(rows: Sequence[TopologyComparison]) -> Figure:
    """Clusters against tiers of links: utilisation of each tier's most utilised link over the step."""
    tiers = list(dict.fromkeys(use.tier for row in rows for use in row.tiers))
    names = [row.cluster for row in rows]
    percentages = [{use.tier: use.utilisation_fraction * 100 for use in row.tiers} for row in rows]
    values = [[by_tier.get(tier) for tier in tiers] for by_tier in percentages]
    figure = Figure(layout(150 + 46 * len(rows), showlegend=False))
    figure.add_heatmap(
        x=tiers,
        y=names,
        z=values,
        zmin=0,
        zmax=100,
        colorscale=[list(stop) for stop in _SCALE],
        text=[["" if v is None else f"{v:.0f} %" for v in line] for line in values],
        texttemplate="%{text}",
        colorbar={"title": {"text": "% busy"}},
        hovertemplate="%{y}: %{x} %{z:.1f} % busy<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def breakdowns(rows: Sequence[TopologyComparison]) -> Figure:
    """One bar per cluster: the step by what the GPU's compute stream runs or waits for."""
    figure = Figure(layout(150 + 50 * len(rows), barmode="stack"))
    for name, meaning in BREAKDOWN.items():
        seconds = [row.report.breakdown.seconds.get(name, 0.0) for row in rows]
        if any(seconds):
            figure.add_bar(
                name=meaning.label,
                orientation="h",
                y=[row.cluster for row in rows],
                x=seconds,
                marker_color=meaning.color,
                hovertext=[f"{meaning.label}: {format_seconds(value)}" for value in seconds],
                hoverinfo="text",
            )
    figure.update_xaxes(title_text="seconds per step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def traffic(rows: Sequence[TopologyComparison]) -> Figure:
    """Bytes that one GPU sends over each tier of links per step."""
    figure = Figure(layout(380, barmode="group"))
    for number, row in enumerate(rows):
        figure.add_bar(
            name=row.cluster,
            x=[use.tier for use in row.tiers],
            y=[use.bytes_per_gpu / 1e9 for use in row.tiers],
            marker_color=PALETTE[number % len(PALETTE)],
            hovertemplate="%{x}: %{y:.2f} GB per GPU<extra>" + row.cluster + "</extra>",
        )
    figure.update_yaxes(title_text="GB per GPU and step", automargin=True)
    return figure


def price(rows: Sequence[TopologyComparison]) -> Figure:
    """Counts of each fabric's switches, ports and cables."""
    figure = Figure(layout(360, barmode="group"))
    for number, (key, label) in enumerate(
        (("num_switches", "switches"), ("num_ports", "ports"), ("num_cables", "cables"))
    ):
        figure.add_bar(
            name=label,
            x=[row.cluster for row in rows],
            y=[row.facts[key] for row in rows],
            text=[f"{row.facts[key]:,}" for row in rows],
            marker_color=PALETTE[number],
        )
    figure.update_yaxes(title_text="count", type="log", automargin=True)
    return figure


def scaling(rows: Sequence[TopologyComparison]) -> Figure:
    """Tokens per second and GPU over the number of GPUs, at constant batch per GPU."""
    figure = Figure(layout(400))
    for number, row in enumerate(rows):
        gpus = sorted(row.scaling)
        figure.add_scatter(
            name=row.cluster,
            x=gpus,
            y=[row.report.work.tokens_per_gpu / row.scaling[count] for count in gpus],
            mode="lines+markers",
            line={"color": PALETTE[number % len(PALETTE)]},
            hovertemplate="%{x} GPUs: %{y:,.0f} tokens/s/GPU<extra>" + row.cluster + "</extra>",
        )
    figure.update_xaxes(title_text="GPUs", type="log", dtick=math.log10(2))
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="tozero", automargin=True)
    return figure


def curves(points: Sequence[CurvePoint]) -> Figure:
    """Measured (dots) and simulated (lines) bus bandwidth of the curves of one cluster."""
    figure = Figure(layout(440))
    for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
        curve_points = [point for point in points if point.curve == name]
        style: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)]}
        sizes = [point.size_bytes for point in curve_points]
        simulated = [point.simulated_bus_bytes_per_second / 1e9 for point in curve_points]
        measured = [point.measured_bus_bytes_per_second / 1e9 for point in curve_points]
        figure.add_scatter(name=name, legendgroup=name, x=sizes, y=simulated, mode="lines", line=style)
        figure.add_scatter(
            name=f"{name}, measured",
            legendgroup=name,
            showlegend=False,
            x=sizes,
            y=measured,
            mode="markers",
            marker=style,
            hovertext=[f"{point.error * 100:+.1f} % in time, {point.source}" for point in curve_points],
        )
    figure.update_xaxes(title_text="bytes", type="log")
    figure.update_yaxes(title_text="bus bandwidth, GB/s", automargin=True)
    return figure


_MAX_LABELLED = 64  # boxes, at most, that have names beside them
_SIDE_BY_SIDE = 12  # names in a row, at most


def _size(box: FabricBox) -> float:
    """Pixels: more for boxes of many devices."""
    return (15 if box.is_nodes else 18) + min(8.0, 2.0 * math.log2(box.devices))


def _labels(boxes: Sequence[FabricBox]) -> list[str]:
    """The names of the boxes. Where boxes are close, only every second one is named, and none where there are
    too many.
    """
    rows: dict[float, list[FabricBox]] = {}
    for box in boxes:
        rows.setdefault(box.position[1], []).append(box)
    labels: dict[str, str] = {}
    for row in rows.values():
        step = -(-len(row) // _SIDE_BY_SIDE)
        for number, box in enumerate(sorted(row, key=lambda node_box: node_box.position[0])):
            is_named = len(boxes) <= _MAX_LABELLED and number % step == 0
            labels[box.name] = box.name.partition(" from ")[0] if is_named else ""
    return [labels[box.name] for box in boxes]


def _hover(box: FabricBox, drawing: Drawing, node_label: str) -> str:
    lines = [f"<b>{box.name}</b>"]
    if box.is_nodes:
        lines.append(node_label if box.devices == 1 else f"{box.devices:,} nodes of {node_label}")
    elif box.devices > 1:
        lines.append(f"{box.devices:,} switches")
    for line in drawing.lines:
        if box.name in line.ends and len(lines) < 9:
            end = line.ends[1] if line.ends[0] == box.name else line.ends[0]
            lines.append(f"{line.count:,} x {line.tier} to {end}, {format_rate(line.capacity)} one way")
    return "<br>".join(lines)


def heat_color(fraction: float) -> str:
    """The colour of a utilisation, interpolated between the stops of the heat map."""
    fraction = min(max(fraction, 0.0), 1.0)
    for (low, first), (high, second) in itertools.pairwise(_SCALE):
        if fraction <= high:
            part = (fraction - low) / (high - low)
            mixed = [
                round(int(first[i : i + 2], 16) * (1 - part) + int(second[i : i + 2], 16) * part)
                for i in (1, 3, 5)
            ]
            return "#{:02X}{:02X}{:02X}".format(*mixed)
    return _SCALE[-1][1]
