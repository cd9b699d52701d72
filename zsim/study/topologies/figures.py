"""Figures of topologies: drawings, link utilisation, comparisons of experiments, measured curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import BREAKDOWN
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.units import format_rate, format_seconds

if TYPE_CHECKING:
    from zsim.study.topologies.bench import CurvePoint
    from zsim.study.topologies.topologies import TopologyComparison

_PALETTE = ("#2F7FBF", "#D55E00", "#12946C", "#B8568F", "#E69F00", "#6A5ACD", "#8A8F98")
_SCALE = ((0.0, "#4FB3BF"), (0.5, "#E69F00"), (1.0, "#B3261E"))
_MAX_NODES = 24  # drawn
_ROLES = {"node": 0, "leaf": 1, "router": 1, "network": 1, "spine": 2, "core": 3}


def drawing(name: str, num_nodes: int, load: Mapping[str, float] | None = None) -> Figure:
    """The fabric of `num_nodes` nodes (at most 24 are drawn); `load` colours each tier's links by
    utilisation, 0 to 1."""
    cluster = load_cluster(name)
    shown = min(num_nodes, max(_MAX_NODES, 2 * cluster.node_link.nodes_per_domain))
    topology = Topology(cluster, shown, cluster.gpus_per_node)
    edges = _edges(topology)
    places = _places(topology, sorted({end for pair in edges for end in pair}))
    figure = Figure(layout(440, showlegend=False))
    tiers = list(dict.fromkeys(tier for tier, _, _ in edges.values()))
    for tier in tiers:
        own = [pair for pair, (t, _, _) in edges.items() if t == tier]
        width = 1.0 + 0.8 * math.log10(max(max(edges[pair][2] for pair in own) / 25e9, 1.0))
        color = _heat(load[tier]) if load and tier in load else "#8A8F98"
        figure.add_scatter(
            x=[x for one, other in own for x in (places[one][0], places[other][0], None)],
            y=[y for one, other in own for y in (places[one][1], places[other][1], None)],
            mode="lines",
            line={"width": width, "color": color},
            opacity=0.75,
            hoverinfo="skip",
            name=tier,
        )
    figure.add_scatter(
        x=[places[device][0] for device in places],
        y=[places[device][1] for device in places],
        mode="markers+text",
        text=[_label(device, len(places)) for device in places],
        textposition="bottom center",
        textfont={"size": 10},
        marker={
            "size": [15 if device.startswith("node") else 18 for device in places],
            "symbol": ["square" if device.startswith("node") else "circle" for device in places],
            "color": [_PALETTE[0] if device.startswith("node") else _PALETTE[2] for device in places],
        },
        hovertext=[_hover(device, edges, topology) for device in places],
        hoverinfo="text",
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return figure


def heat_map(rows: Sequence[TopologyComparison]) -> Figure:
    """Clusters against tiers of links: utilisation of each tier's most utilised link over the step."""
    tiers = list(dict.fromkeys(use.tier for row in rows for use in row.tiers))
    names = [row.cluster for row in rows]
    used = [{use.tier: use.utilisation_fraction * 100 for use in row.tiers} for row in rows]
    values = [[own.get(tier) for tier in tiers] for own in used]
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
            marker_color=_PALETTE[number % len(_PALETTE)],
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
            marker_color=_PALETTE[number],
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
            line={"color": _PALETTE[number % len(_PALETTE)]},
            hovertemplate="%{x} GPUs: %{y:,.0f} tokens/s/GPU<extra>" + row.cluster + "</extra>",
        )
    figure.update_xaxes(title_text="GPUs", type="log", dtick=math.log10(2))
    figure.update_yaxes(title_text="tokens/s/GPU", rangemode="tozero", automargin=True)
    return figure


def curves(points: Sequence[CurvePoint]) -> Figure:
    """Measured (dots) and simulated (lines) bus bandwidth of the curves of one cluster."""
    figure = Figure(layout(440))
    for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
        own = [point for point in points if point.curve == name]
        style: dict[str, Any] = {"color": _PALETTE[number % len(_PALETTE)]}
        sizes = [point.size_bytes for point in own]
        simulated = [point.simulated_bus_bytes_per_second / 1e9 for point in own]
        measured = [point.measured_bus_bytes_per_second / 1e9 for point in own]
        figure.add_scatter(name=name, legendgroup=name, x=sizes, y=simulated, mode="lines", line=style)
        figure.add_scatter(
            name=f"{name}, measured",
            legendgroup=name,
            showlegend=False,
            x=sizes,
            y=measured,
            mode="markers",
            marker=style,
            hovertext=[f"{point.error * 100:+.1f} % in time, {point.source}" for point in own],
        )
    figure.update_xaxes(title_text="bytes", type="log")
    figure.update_yaxes(title_text="bus bandwidth, GB/s", automargin=True)
    return figure


def _edges(topology: Topology) -> dict[tuple[str, str], tuple[str, int, float]]:
    """By pair of devices: (tier, number of cables, their total capacity in one direction, bytes per
    second)."""
    found: dict[tuple[str, str], tuple[str, int, float]] = {}

    def add(one: str, other: str, tier: str, capacity: float) -> None:
        pair = (one, other) if one <= other else (other, one)
        _, count, total = found.get(pair, (tier, 0, 0.0))
        found[pair] = (tier, count + 1, total + capacity)

    cards, wiring = topology.cluster.nic.per_node, topology.wiring
    own = topology.classes["nic_out"]
    for port in range(own.count):
        nic, plane = divmod(port, wiring.planes)
        add(f"node{nic // cards}", wiring.port(nic, plane), own.tier, own.capacity)
    for links in wiring.links():
        link_class = topology.classes[links.name]
        for position in range(links.count):
            one, other = wiring.ends(links.name, position)
            if one < other:
                add(one, other, link_class.tier, link_class.capacity)
    return _as_built(topology, found)


def _as_built(
    topology: Topology, edges: Mapping[tuple[str, str], tuple[str, int, float]]
) -> dict[tuple[str, str], tuple[str, int, float]]:
    """The edges with as many spines and cores as the fabric is built of: several logical switches become one
    physical one, and a single leaf has none above it."""
    built, names = topology.inventory().switches, dict[str, str | None]()
    for role in ("spine", "core"):
        own = {end for pair in edges for end in pair if _role(end) == role}
        for place, device in enumerate(sorted(own, key=lambda end: [int(part) for part in _numbers(end)])):
            count = built.get(role, 0)
            packed = f"{role}{place * count // len(own)}" if count < len(own) else device
            names[device] = packed if count else None
    found: dict[tuple[str, str], tuple[str, int, float]] = {}
    for (one, other), (tier, count, capacity) in edges.items():
        first, second = names.get(one, one), names.get(other, other)
        if first is None or second is None:
            continue
        pair = (first, second) if first <= second else (second, first)
        _, before, total = found.get(pair, (tier, 0, 0.0))
        found[pair] = (tier, before + count, total + capacity)
    return found


def _role(device: str) -> str:
    return device.rpartition("plane")[2].lstrip("0123456789.").rstrip("0123456789.")


def _places(topology: Topology, devices: list[str]) -> dict[str, tuple[float, float]]:
    """Coordinates by device: tori as a grid, dragonflies as a ring, everything else in levels."""
    kind, shape = topology.cluster.network.kind, topology.cluster.network.shape
    routers = [device for device in devices if device.startswith("router")]
    places: dict[str, tuple[float, float]] = {}
    if kind in ("torus", "dragonfly") and routers:
        for device in routers:
            number = int(device[6:])
            if kind == "torus":
                x, y, z = number % shape[0], number // shape[0] % shape[1], number // (shape[0] * shape[1])
                places[device] = (x + 0.35 * z, y + 0.25 * z)
            else:
                angle = 2 * math.pi * number / len(routers)
                places[device] = (math.cos(angle), math.sin(angle))
        for device in devices:
            if device.startswith("node"):
                router = topology.wiring.port(int(device[4:]) * topology.cluster.nic.per_node, 0)
                x0, y0 = places[router]
                spread = (int(device[4:]) % 2) * 0.12
                scale = (0.12, -0.2) if kind == "torus" else (0.22 * x0 + spread, 0.22 * y0 + spread)
                places[device] = (x0 + scale[0], y0 + scale[1])
        return places
    levels: dict[int, list[str]] = {}
    for device in devices:
        levels.setdefault(_ROLES.get(_role(device), 1 if not device.startswith("node") else 0), []).append(
            device
        )
    for level, own in levels.items():
        own.sort(key=lambda device: [int(part) for part in _numbers(device)])
        for position, device in enumerate(own):
            places[device] = ((position + 0.5) / len(own), float(level))
    return places


def _numbers(device: str) -> list[str]:
    digits = "".join(letter if letter.isdigit() else " " for letter in device)
    return digits.split() or ["0"]


def _label(device: str, count: int) -> str:
    return device if count <= 40 else ""


def _hover(device: str, edges: Mapping[tuple[str, str], tuple[str, int, float]], topology: Topology) -> str:
    lines = [f"<b>{device}</b>"]
    if device.startswith("node"):
        lines.append(f"{topology.gpus_per_node} GPUs, {topology.cluster.gpu.name}")
    for (one, other), (tier, count, capacity) in edges.items():
        if device in (one, other) and len(lines) < 9:
            end = other if device == one else one
            lines.append(f"{count} x {tier} to {end}, {format_rate(capacity)} one way")
    return "<br>".join(lines)


def _heat(fraction: float) -> str:
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
