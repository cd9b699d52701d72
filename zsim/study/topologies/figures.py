"""Figures of topologies: drawings, link utilisation, comparisons of experiments, measured curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zsim.arrays import Floats
from zsim.engine.link_loads import link_loads
from zsim.engine.simulate import Outcome
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN, COMPUTE_KINDS
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.study.topologies.drawing import (
    Drawing,
    FabricBox,
    Line,
    busiest_link_loads,
    draw_fabric,
    line_loads,
)
from zsim.trace.trace import COLLECTIVES, Trace
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
        _add_lines(
            figure, drawing, tier_lines, line={"width": width, "color": shade}, opacity=0.75, name=tier
        )
    add_boxes(figure, drawing, f"{cluster.gpus_per_node} GPUs, {cluster.gpu.name}")
    return figure


def _add_lines(figure: Figure, drawing: Drawing, lines: Sequence[Line], **style: Any) -> None:
    """Draw some lines of a drawing as one trace."""
    positions = drawing.positions()
    ends = [(positions[line.ends[0]], positions[line.ends[1]]) for line in lines]
    figure.add_scatter(
        x=[x for start, end in ends for x in (start[0], end[0], None)],
        y=[y for start, end in ends for y in (start[1], end[1], None)],
        mode="lines",
        hoverinfo="skip",
        **style,
    )


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


# -- A step as an animation over the drawing of its fabric: how busy each line is, frame by frame ----------


NUM_FRAMES = 120
LEVELS = 10  # shades of a line, from idle to full
SHADES = ("#B4BAC2", *(heat_color(level / (LEVELS - 1)) for level in range(1, LEVELS)))
_TIERS = dict(zip(("nvlink", "network", "leaf-spine", "spine-core"), PALETTE, strict=False))
_OTHER = PALETTE[len(_TIERS)]
CLUSTER_CAPTION = (
    "Boxes are nodes, circles switches. A line's colour and width: the busiest of its links in this part of "
    "the step; a node's: the busiest link inside."
)
LOADS_CAPTION = (
    "The busiest link of each kind over the step, as part of its usable bandwidth; hover for values."
)


@dataclass(frozen=True)
class Animation:
    """The frames of a step over the drawing of its fabric."""

    drawing: Drawing
    seconds: Floats
    """The middle of each frame."""
    loads: Mapping[str, Floats]
    """The part in use of the busiest link, per tier."""
    levels: Sequence[str]
    """Per frame the shade of each line, then of each box (of nodes, the busiest link inside), as digits."""
    captions: Sequence[str]
    """The description of each frame."""
    node_label: str
    """The contents of one node."""

    def to_dict(self) -> dict[str, Any]:
        """Lines, shades and captions: enough for a page to show any frame."""
        positions = self.drawing.positions()
        return {
            "lines": [[*positions[line.ends[0]], *positions[line.ends[1]]] for line in self.drawing.lines],
            "seconds": self.seconds.tolist(),
            "levels": list(self.levels),
            "words": list(self.captions),
            "shades": list(SHADES),
        }


def animate_step(outcome: Outcome) -> Animation:
    """The animation of a step, with captions for the first of its GPUs that were simulated."""
    topology, rank = outcome.topology, int(outcome.classes.representatives[0])
    drawing, loads = draw_fabric(topology), link_loads(outcome, NUM_FRAMES)
    usage = [*line_loads(drawing, loads)]
    usage += [
        np.max([busiest_link_loads(loads, links) for links in box.links.values()], axis=0)
        if box.links
        else np.zeros(NUM_FRAMES)
        for box in drawing.boxes
    ]
    shades = np.where(
        np.array(usage) < 0.005, 0, np.clip(np.ceil(np.array(usage) * (LEVELS - 1)), 1, LEVELS - 1)
    )  # fmt: skip
    tiers = dict(_busiest_by_tier(outcome, loads))
    width = outcome.trace.step_seconds / NUM_FRAMES
    seconds: Floats = (np.arange(NUM_FRAMES, dtype=np.float64) + 0.5) * width
    cluster = topology.cluster
    return Animation(
        drawing=drawing,
        seconds=seconds,
        loads=tiers,
        levels=["".join(map(str, frame)) for frame in shades.astype(int).T.tolist()],
        captions=list(_frame_captions(outcome.trace.select_rank(rank), seconds, width, tiers)),
        node_label=f"{topology.gpus_per_node} GPUs, {cluster.gpu.name}",
    )


def cluster_figure(animation: Animation) -> Figure:
    """The drawing at the step's first frame: a trace for each shade of lines, then the boxes."""
    figure = Figure(layout(400, showlegend=False))
    for level, shade in enumerate(SHADES):
        level_lines = [
            line for line, digit in zip(animation.drawing.lines, animation.levels[0], strict=False)
            if int(digit) == level
        ]  # fmt: skip
        style = {"width": 1.2 + 0.45 * level, "color": shade}
        _add_lines(figure, animation.drawing, level_lines, line=style, name=f"level {level}")
    add_boxes(figure, animation.drawing, animation.node_label)
    return figure


def loads_figure(animation: Animation) -> Figure:
    """The busiest link of each tier over the step. The page moves the line that marks the frame."""
    figure = Figure(layout(210))
    for tier, values in animation.loads.items():
        figure.add_scatter(
            name=tier,
            mode="lines",
            x=animation.seconds.tolist(),
            y=(values * 100).round(1).tolist(),
            line={"width": 2, "color": _TIERS.get(tier, _OTHER), "shape": "hvh"},
            hovertemplate="%{x:.3g} s: %{y:.0f} % in use<extra>" + tier + "</extra>",
        )
    figure.update_xaxes(title_text="s", range=[0, float(animation.seconds[-1] + animation.seconds[0])])
    figure.update_yaxes(title_text="% in use", rangemode="tozero", automargin=True)
    figure.add_vline(float(animation.seconds[0]), {"width": 2, "color": "#8A8F98"})
    return figure


def _busiest_by_tier(outcome: Outcome, loads: Floats) -> Iterator[tuple[str, Floats]]:
    """The busiest link of each tier that is used at all. PCIe, which every card's bytes cross, is left out
    where the network or NVLink is used.
    """
    loads_by_tier: dict[str, Floats] = {}
    for link_class in outcome.topology.classes.values():
        peak_loads = loads[link_class.first : link_class.first + link_class.count].max(axis=0, initial=0.0)
        loads_by_tier[link_class.tier] = np.maximum(loads_by_tier.get(link_class.tier, 0.0), peak_loads)
    used_tiers = {tier: values for tier, values in loads_by_tier.items() if values.max(initial=0.0) > 0}
    if "network" in used_tiers or "nvlink" in used_tiers:
        used_tiers = {tier: values for tier, values in used_tiers.items() if not tier.startswith("pcie")}
    yield from used_tiers.items()


def _frame_captions(
    trace: Trace, seconds: Floats, width: float, tiers: Mapping[str, Floats]
) -> Iterator[str]:
    """One line per frame: its time, what a GPU does, and how busy the links are."""
    names = [info.kind.replace("_", "-") for info in trace.infos]
    is_shown = [info.kind in COLLECTIVES or info.kind in COMPUTE_KINDS for info in trace.infos]
    phases = [info.phase for info in trace.infos]
    start, end, infos = trace.start_seconds, trace.end_seconds, trace.info_indices
    for frame, middle in enumerate(seconds.tolist()):
        inside = np.minimum(end, middle + width / 2) - np.maximum(start, middle - width / 2)
        kind_seconds: dict[str, float] = {}
        phase_seconds: dict[str, float] = {}
        for span in np.flatnonzero(inside > 0).tolist():
            info = int(infos[span])
            if is_shown[info]:
                kind_seconds[names[info]] = kind_seconds.get(names[info], 0.0) + float(inside[span])
                phase_seconds[phases[info]] = phase_seconds.get(phases[info], 0.0) + float(inside[span])
        top_kinds = sorted(kind_seconds, key=lambda name: -kind_seconds[name])[:3]
        phase_name = max(phase_seconds, key=lambda name: phase_seconds[name]) if phase_seconds else ""
        busy = ", ".join(f"{tier} {values[frame] * 100:.0f} %" for tier, values in tiers.items())
        activity = ", ".join(top_kinds) if top_kinds else "idle"
        fields = [
            format_seconds(middle),
            phase_name,
            activity,
            f"in use: {busy}" if busy else "no link in use",
        ]
        yield " | ".join(field for field in fields if field)
