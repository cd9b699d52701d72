"""Parallelism on the page: the schedule as it ran, drawn as papers draw it, and the mesh on the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zsim.report.pipeline import Box, PipelineSection
from zsim.report.rank_map import RankMap
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout, time_scale
from zsim.report.views.meanings import BREAKDOWN, Meaning
from zsim.units import format_seconds, round_digits

# Forward blue and backward green, as in the figures of Narayanan et al. 2021 (Megatron-LM, SC'21), and the
# gradients of weights orange, as in those of Qi et al. 2023 (zero bubble); later chunks are paler.
ACTIONS: dict[str, Meaning] = {
    "F": Meaning("forward", "#2F7FBF", "blue"),
    "B": Meaning("backward", "#63B35C", "green"),
    "I": Meaning("backward of inputs", "#63B35C", "green"),
    "W": Meaning("gradients of weights", "#E69F00", "yellow"),
    "": BREAKDOWN["optimizer"],
}
_BUBBLE = Meaning("bubble", "#FFFFFF", "bright_white")
_BETWEEN = Meaning("communication and host", "#E9D8C8", "red")
_PALEST = 0.6  # of white in the colour of the last chunk
_THINNEST = 1 / 4000  # of the step: shorter bubbles are not drawn
_DIGITS = 6
_ROW, _MAX_HEIGHT = 30, 760
_PALETTE = ("#A9CCE8", "#F6CFA0", "#A8DDC0", "#E3B5D0", "#C9BBEA", "#F2E19A", "#BFC7D1", "#F0B5A8")


class _ScheduleBars(NamedTuple):
    """Horizontal bars of one meaning."""

    name: str
    color: str
    text_color: str
    rows: list[int]
    """Row indices from the top."""
    starts: list[float]
    lengths: list[float]
    texts: list[str]
    hovers: list[str]


def schedule_figure(section: PipelineSection) -> Figure:
    """One row per pipeline rank: boxes with the micro-batch's number, bubbles white."""
    scale, unit = time_scale(section.drawn_seconds)
    begin, end = section.bounds
    count = len(section.rows)
    height = min(118 + _ROW * count, _MAX_HEIGHT)
    figure = Figure(layout(height, barmode="overlay", bargap=0.1))
    for bars in _all_bars(section, begin, scale):
        figure.add_bar(
            name=bars.name,
            legendgroup=bars.name,
            showlegend=bool(bars.name),
            orientation="h",
            y=bars.rows,
            base=bars.starts,
            x=bars.lengths,
            text=bars.texts or None,
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": bars.text_color},
            marker={"color": bars.color, "line": {"width": 0.5, "color": "rgba(40,48,60,0.55)"}},
            hovertext=bars.hovers,
            hoverinfo="text",
        )
    figure.update_xaxes(
        title_text=unit, range=[0, round_digits((end - begin) * scale, _DIGITS)], title_standoff=6
    )
    figure.update_yaxes(
        title_text="pipeline rank",
        tickmode="array",
        tickvals=list(range(count)),
        ticktext=[str(row.rank) for row in section.rows],
        range=[count - 0.4, -0.6],
        automargin=True,
        fixedrange=True,
    )
    return figure


def _all_bars(section: PipelineSection, begin: float, scale: float) -> list[_ScheduleBars]:
    """From the back to the front: the time between boxes, the bubbles, the boxes."""
    between = _ScheduleBars(_BETWEEN.label, _BETWEEN.color, "#14181F", [], [], [], [], [])
    for row_index, row in enumerate(section.rows):
        hover = f"rank {row.rank}: {_BETWEEN.label}"
        _add_bar(
            between, row_index, (row.begin_seconds - begin) * scale, section.drawn_seconds * scale, hover
        )
    bubbles = _ScheduleBars(_BUBBLE.label, _BUBBLE.color, "#14181F", [], [], [], [], [])
    for row_index, row in enumerate(section.rows):
        for start, stop in row.bubbles:
            if stop - start >= _THINNEST * section.drawn_seconds:
                hover = f"rank {row.rank}: bubble<br>{format_seconds(stop - start)}"
                _add_bar(bubbles, row_index, (start - begin) * scale, (stop - start) * scale, hover)
    boxes: dict[tuple[str, int], _ScheduleBars] = {}
    for row_index, row in enumerate(section.rows):
        for box in row.boxes:
            bars = boxes.get((box.kind, box.chunk))
            if bars is None:
                bars = boxes[box.kind, box.chunk] = _box_bars(box, section.num_chunks)
            _add_bar(
                bars, row_index, (box.start_seconds - begin) * scale, box.seconds * scale,
                _hover(row.rank, box, section.num_chunks),
            )  # fmt: skip
            bars.texts.append(str(box.micro_batch) if box.kind else "")
    order = list(ACTIONS)
    drawn = sorted(boxes.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1]))
    return [between, bubbles, *(bars for _, bars in drawn)]


def _add_bar(bars: _ScheduleBars, row_index: int, start: float, length: float, hover: str) -> None:
    bars.rows.append(row_index)
    bars.starts.append(round_digits(start, _DIGITS))
    bars.lengths.append(round_digits(length, _DIGITS))
    bars.hovers.append(hover)


def _box_bars(box: Box, num_chunks: int) -> _ScheduleBars:
    meaning = ACTIONS[box.kind]
    white_fraction = _PALEST * max(box.chunk, 0) / max(num_chunks - 1, 1)
    name = meaning.label + (f", chunk {box.chunk}" if box.kind and num_chunks > 1 else "")
    text = "#FFFFFF" if box.kind == "F" and white_fraction < 0.3 else "#14181F"
    return _ScheduleBars(name, paler(meaning.color, white_fraction), text, [], [], [], [], [])


def _hover(rank: int, box: Box, num_chunks: int) -> str:
    seconds = format_seconds(box.seconds)
    if not box.kind:
        return f"rank {rank}: optimizer<br>{seconds}"
    stage_label = f" of stage {box.stage}" if num_chunks > 1 else ""
    return f"rank {rank}: <b>{ACTIONS[box.kind].label} {box.micro_batch}</b>{stage_label}<br>{seconds}"


def paler(color: str, fraction: float) -> str:
    """The colour mixed with white, of which `fraction` is the part from 0 to 1."""
    mixed = (
        round(int(color[offset : offset + 2], 16) * (1 - fraction) + 255 * fraction) for offset in (1, 3, 5)
    )
    return "#" + "".join(f"{value:02X}" for value in mixed)


def mesh_figure(rank_map: RankMap) -> Figure:
    """The first nodes, a row each, and their GPUs: each cell has its rank and coordinates, and the colour of
    its pipeline rank (of its coordinate on the slowest axis without a pipeline)."""
    axes = rank_map.shown_axes
    colored = "pipeline" if "pipeline" in axes else axes[0]
    max_ranks = max(node.num_ranks for node in rank_map.nodes)
    numbers: list[list[int | None]] = []
    texts: list[list[str]] = []
    hovers: list[list[str]] = []
    for node in rank_map.nodes:
        empty = max_ranks - node.num_ranks
        ranks = range(node.num_ranks)
        coordinates = {axis: node.coordinates[axis] for axis in axes}
        numbers.append([*(coordinates[colored][index] % len(_PALETTE) for index in ranks), *[None] * empty])
        texts.append(
            [*(_cell(node.first_rank + index, coordinates, index) for index in ranks), *[""] * empty]
        )
        hovers.append(
            [*(_cell_hover(node.first_rank + index, coordinates, index) for index in ranks), *[""] * empty]
        )
    figure = Figure(layout(96 + 42 * len(rank_map.nodes), showlegend=False))
    figure.add_heatmap(
        z=numbers, text=texts, texttemplate="%{text}", textfont={"size": 11, "color": "#14181F"},
        hovertext=hovers, hoverinfo="text", xgap=2, ygap=2, showscale=False, zmin=0, zmax=len(_PALETTE) - 1,
        colorscale=_steps(_PALETTE),
    )  # fmt: skip
    figure.update_xaxes(
        title_text="GPU of the node", dtick=1, fixedrange=True, showgrid=False, zeroline=False
    )
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(range(len(rank_map.nodes))),
        ticktext=[f"node {node.node}" for node in rank_map.nodes],
        autorange="reversed",
        automargin=True,
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    return figure


_INITIALS = {
    "pipeline": "P", "data": "D", "context": "C", "tensor": "T",
    "expert": "E", "expert_tensor": "ET", "expert_data": "ED",
}  # fmt: skip


def _cell(rank: int, coordinates_of_axis: dict[str, tuple[int, ...]], index: int) -> str:
    coordinates = " ".join(
        f"{_INITIALS[axis]}{numbers[index]}" for axis, numbers in coordinates_of_axis.items()
    )
    return f"<b>{rank}</b><br>{coordinates}"


def _cell_hover(rank: int, coordinates_of_axis: dict[str, tuple[int, ...]], index: int) -> str:
    return "<br>".join(
        [
            f"<b>rank {rank}</b>",
            *(f"{axis} {numbers[index]}" for axis, numbers in coordinates_of_axis.items()),
        ]
    )


def _steps(colors: Sequence[str]) -> list[tuple[float, Any]]:
    """A colour scale of equal steps without transitions."""
    count = len(colors)
    return [
        (edge / count, color)
        for number, color in enumerate(colors)
        for edge in (number, number + 1)
    ]  # fmt: skip


def schedule_caption(section: PipelineSection) -> str:
    """Caption of the schedule: the bubble, and how many micro-batches."""
    chunks = f" on {section.num_chunks} stages per rank" if section.num_chunks > 1 else ""
    drawn = section.drawn_micro_batches
    few = "" if drawn == section.micro_batches else f", of which {drawn:,} are simulated and drawn"
    return (
        f"{section.micro_batches:,} micro-batches{chunks}{few}: bubbles are "
        f"{section.bubble_fraction * 100:.1f} % of the step in the mean over the ranks. A box lasts from the "
        "first to the last kernel of a forward or backward; its number is the micro-batch's."
    )


def mesh_caption(rank_map: RankMap) -> str:
    """Caption of the mesh: its axes, and how many of the nodes are drawn."""
    axes = " x ".join(f"{name} {size:,}" for name, size in rank_map.axes if size > 1)
    experts = " x ".join(f"{name} {size:,}" for name, size in rank_map.expert_axes if size > 1)
    expert_text = f"; routed experts: {experts}" if experts else ""
    shown = len(rank_map.nodes)
    first = "" if shown == rank_map.num_nodes else f" The first {shown} of {rank_map.num_nodes:,} nodes."
    letters = ", ".join(f"{_INITIALS[axis]} {axis}" for axis in rank_map.shown_axes)
    return f"{axes}, the last axis on adjacent ranks{expert_text}; {letters}.{first}"
