"""A step as an animation over the drawing of its fabric: how busy each line is, frame by frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zsim.arrays import Floats
from zsim.engine.link_loads import link_loads
from zsim.engine.simulate import Outcome
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import COMPUTE_KINDS
from zsim.study.topologies.drawing import Drawing, busiest_link_loads, draw_fabric, line_loads
from zsim.study.topologies.figures import PALETTE, add_boxes, heat_color
from zsim.trace.trace import COLLECTIVES, Trace
from zsim.units import format_seconds

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
    return animate_rank(outcome, int(outcome.classes.representatives[0]))


def animate_rank(outcome: Outcome, rank: int) -> Animation:
    """The animation of one simulated step, with captions for `rank`."""
    topology = outcome.topology
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
    positions = animation.drawing.positions()
    for level, shade in enumerate(SHADES):
        level_lines = [
            line for line, digit in zip(animation.drawing.lines, animation.levels[0], strict=False)
            if int(digit) == level
        ]  # fmt: skip
        ends = [(positions[line.ends[0]], positions[line.ends[1]]) for line in level_lines]
        figure.add_scatter(
            x=[x for start, end in ends for x in (start[0], end[0], None)],
            y=[y for start, end in ends for y in (start[1], end[1], None)],
            mode="lines",
            line={"width": 1.2 + 0.45 * level, "color": shade},
            hoverinfo="skip",
            name=f"level {level}",
        )
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
