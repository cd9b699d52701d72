"""A step as an animation over the drawing of its fabric: how busy each line is, frame by frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zsim.arrays import Floats
from zsim.dataclass import dataclass
from zsim.engine.link_loads import link_loads
from zsim.engine.simulate import Outcome
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import COMPUTE_KINDS
from zsim.study.topologies.figures import PALETTE, add_boxes, heat
from zsim.study.topologies.picture import Picture, busiest, line_loads, picture
from zsim.trace.trace import COLLECTIVES, Trace
from zsim.units import format_seconds

NUM_FRAMES = 120
LEVELS = 10  # shades of a line, from idle to full
SHADES = ("#B4BAC2", *(heat(level / (LEVELS - 1)) for level in range(1, LEVELS)))
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
class Film:
    """The frames of a step over the drawing of its fabric."""

    picture: Picture
    seconds: Floats
    """The middle of each frame."""
    loads: Mapping[str, Floats]
    """The part in use of the busiest link, per tier."""
    levels: Sequence[str]
    """Per frame the shade of each line, then of each box (of nodes, the busiest link inside), as digits."""
    words: Sequence[str]
    """The description of each frame."""
    node: str
    """The contents of one node."""

    def to_dict(self) -> dict[str, Any]:
        """Lines, shades and captions: enough for a page to show any frame."""
        places = self.picture.places()
        return {
            "lines": [[*places[line.ends[0]], *places[line.ends[1]]] for line in self.picture.lines],
            "seconds": self.seconds.tolist(),
            "levels": list(self.levels),
            "words": list(self.words),
            "shades": list(SHADES),
        }


def film_of_step(outcome: Outcome) -> Film:
    """The animation of a step, with captions for the first of its GPUs that were simulated."""
    return film_of(outcome, int(outcome.classes.representatives[0]))


def film_of(outcome: Outcome, rank: int) -> Film:
    """The animation of one simulated step, with captions for `rank`."""
    topology = outcome.topology
    drawn, loads = picture(topology), link_loads(outcome, NUM_FRAMES)
    own = [*line_loads(drawn, loads)]
    own += [
        np.max([busiest(loads, links) for links in box.links.values()], axis=0)
        if box.links
        else np.zeros(NUM_FRAMES)
        for box in drawn.boxes
    ]
    shades = np.where(
        np.array(own) < 0.005, 0, np.clip(np.ceil(np.array(own) * (LEVELS - 1)), 1, LEVELS - 1)
    )  # fmt: skip
    tiers = dict(_by_tier(outcome, loads))
    width = outcome.trace.step_seconds / NUM_FRAMES
    seconds: Floats = (np.arange(NUM_FRAMES, dtype=np.float64) + 0.5) * width
    cluster = topology.cluster
    return Film(
        picture=drawn,
        seconds=seconds,
        loads=tiers,
        levels=["".join(map(str, frame)) for frame in shades.astype(int).T.tolist()],
        words=list(_words(outcome.trace.of_rank(rank), seconds, width, tiers)),
        node=f"{topology.gpus_per_node} GPUs, {cluster.gpu.name}",
    )


def cluster_figure(film: Film) -> Figure:
    """The drawing at the step's first frame: a trace for each shade of lines, then the boxes."""
    figure = Figure(layout(400, showlegend=False))
    places = film.picture.places()
    for level, shade in enumerate(SHADES):
        shown = [
            line for line, digit in zip(film.picture.lines, film.levels[0], strict=False)
            if int(digit) == level
        ]  # fmt: skip
        ends = [(places[line.ends[0]], places[line.ends[1]]) for line in shown]
        figure.add_scatter(
            x=[x for one, other in ends for x in (one[0], other[0], None)],
            y=[y for one, other in ends for y in (one[1], other[1], None)],
            mode="lines",
            line={"width": 1.2 + 0.45 * level, "color": shade},
            hoverinfo="skip",
            name=f"level {level}",
        )
    add_boxes(figure, film.picture, film.node)
    return figure


def loads_figure(film: Film) -> Figure:
    """The busiest link of each tier over the step. The page moves the line that marks the frame."""
    figure = Figure(layout(210))
    for tier, values in film.loads.items():
        figure.add_scatter(
            name=tier,
            mode="lines",
            x=film.seconds.tolist(),
            y=(values * 100).round(1).tolist(),
            line={"width": 2, "color": _TIERS.get(tier, _OTHER), "shape": "hvh"},
            hovertemplate="%{x:.3g} s: %{y:.0f} % in use<extra>" + tier + "</extra>",
        )
    figure.update_xaxes(title_text="s", range=[0, float(film.seconds[-1] + film.seconds[0])])
    figure.update_yaxes(title_text="% in use", rangemode="tozero", automargin=True)
    figure.add_vline(float(film.seconds[0]), {"width": 2, "color": "#8A8F98"})
    return figure


def _by_tier(outcome: Outcome, loads: Floats) -> Iterator[tuple[str, Floats]]:
    """The busiest link of each tier that is used at all. PCIe, which every card's bytes cross, is left out
    where the network or NVLink is used.
    """
    found: dict[str, Floats] = {}
    for own in outcome.topology.classes.values():
        most = loads[own.first : own.first + own.count].max(axis=0, initial=0.0)
        found[own.tier] = np.maximum(found.get(own.tier, 0.0), most)
    used = {tier: values for tier, values in found.items() if values.max(initial=0.0) > 0}
    if "network" in used or "nvlink" in used:
        used = {tier: values for tier, values in used.items() if not tier.startswith("pcie")}
    yield from used.items()


def _words(own: Trace, seconds: Floats, width: float, tiers: Mapping[str, Floats]) -> Iterator[str]:
    """One line per frame: its time, what a GPU does, and how busy the links are."""
    names = [info.kind.replace("_", "-") for info in own.infos]
    wanted = [info.kind in COLLECTIVES or info.kind in COMPUTE_KINDS for info in own.infos]
    phases = [info.phase for info in own.infos]
    start, end, infos = own.start_seconds, own.end_seconds, own.info_indices
    for frame, middle in enumerate(seconds.tolist()):
        inside = np.minimum(end, middle + width / 2) - np.maximum(start, middle - width / 2)
        most: dict[str, float] = {}
        phase: dict[str, float] = {}
        for span in np.flatnonzero(inside > 0).tolist():
            info = int(infos[span])
            if wanted[info]:
                most[names[info]] = most.get(names[info], 0.0) + float(inside[span])
                phase[phases[info]] = phase.get(phases[info], 0.0) + float(inside[span])
        does = sorted(most, key=lambda name: -most[name])[:3]
        when = max(phase, key=lambda name: phase[name]) if phase else ""
        busy = ", ".join(f"{tier} {values[frame] * 100:.0f} %" for tier, values in tiers.items())
        what = ", ".join(does) if does else "idle"
        parts = [format_seconds(middle), when, what, f"in use: {busy}" if busy else "no link in use"]
        yield " | ".join(part for part in parts if part)
