"""Parallelism as tables and a sketch: the stages of a pipeline, its schedule, communication by group, and
the mesh on the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.report.pipeline import PipelineRow, PipelineSection
from zsim.report.rank_map import RankMap, ranges
from zsim.report.report import Report
from zsim.report.traffic import group_rows
from zsim.report.views.meanings import MEMORY
from zsim.report.views.result import ResultTable, columns_of
from zsim.units import format_bytes, format_seconds

_MAX_RANKS = 16  # that a table lists one by one
_MAX_SKETCHED = 16
_MAX_NODES = 4
_CELLS = 70  # of a row of the sketch
_LETTERS = "abcdefghij"
SKETCH = (
    "Digits are forwards, letters backwards (w: of weights) of micro-batches, u the\nupdate, dots bubbles, "
    "blanks communication and the host."
)


def parallel_tables(report: Report) -> Iterator[ResultTable]:
    """The tables of a job with more than data parallelism. There are none for others."""
    section = report.pipeline
    if section is not None:
        rows = _chosen(section)
        yield _stage_table(section, rows)
        yield _memory_table(rows)
    if section is not None or report.rank_map is not None:
        yield from _group_table(report)
    if report.rank_map is not None:
        yield _node_table(report.rank_map)


def _chosen(section: PipelineSection) -> list[PipelineRow]:
    """The ranks that a table lists: all, or the first and last ones, the slowest and the fullest."""
    rows = section.rows
    if len(rows) <= _MAX_RANKS:
        return list(rows)
    ranks = {*range(_MAX_RANKS // 2), *range(len(rows) - _MAX_RANKS // 4, len(rows))}
    ranks |= {section.slowest.rank, section.fullest.rank}
    return [row for row in rows if row.rank in ranks]


def _stage_table(section: PipelineSection, rows: Sequence[PipelineRow]) -> ResultTable:
    bubble = f"{section.bubble_fraction * 100:.1f} % bubble"
    title = f"Pipeline ranks: {bubble}, {section.micro_batches:,} micro-batches"
    columns = columns_of("rank", "layers", "busy", "bubble", "of the step", "GPU memory", "")
    return ResultTable(title, columns, [_stage_row(section, row) for row in rows])


def _stage_row(section: PipelineSection, row: PipelineRow) -> tuple[str, ...]:
    marks = [
        word
        for word, extreme in (("slowest", section.slowest), ("fullest", section.fullest))
        if extreme is row
    ]
    return (
        f"{row.rank}",
        "-" if row.layers is None else f"{row.layers}",
        format_seconds(row.busy_seconds),
        format_seconds(row.bubble_seconds),
        f"{row.bubble_seconds / section.step_seconds * 100:.1f} %",
        format_bytes(row.peak.total),
        ", ".join(marks),
    )


_SHORT = {
    "parameters": "params", "gradients": "grads", "optimizer_states": "states", "activations": "activ.",
    "buffers": "buffers", "framework": "other",
}  # fmt: skip


def _memory_table(rows: Sequence[PipelineRow]) -> ResultTable:
    names = [name for name in MEMORY if any(row.peak.at_total.get(name) for row in rows)]
    return ResultTable(
        "Memory of pipeline ranks, GB",
        columns_of("rank", *(_SHORT[name] for name in names), "peak"),
        [
            (
                f"{row.rank}",
                *(f"{row.peak.at_total.get(name, 0) / 1e9:.2f}" for name in names),
                f"{row.peak.total / 1e9:.2f}",
            )
            for row in rows
        ],
    )


def _group_table(report: Report) -> Iterator[ResultTable]:
    rows = group_rows(report.collectives)
    if rows:
        yield ResultTable(
            "Communication by group",
            columns_of("", "calls", "bytes", "busy", "exposed"),
            [
                (
                    row.group or "world",
                    f"{row.count:,}",
                    format_bytes(row.bytes),
                    format_seconds(row.busy_seconds),
                    format_seconds(row.exposed_seconds),
                )
                for row in rows
            ],
        )


def _node_table(rank_map: RankMap) -> ResultTable:
    """Coordinates of the ranks of the first nodes."""
    rows: list[tuple[str, ...]] = [
        (
            f"node {node.node}",
            f"{node.first_rank}-{node.first_rank + node.num_ranks - 1}",
            *(ranges(node.coordinates[axis]) for axis in rank_map.shown_axes),
        )
        for node in rank_map.nodes[:_MAX_NODES]
    ]
    num_unlisted = rank_map.num_nodes - len(rows)
    if num_unlisted:
        rows.append((f"{num_unlisted:,} more", *("" for _ in range(1 + len(rank_map.shown_axes)))))
    return ResultTable("Ranks by node", columns_of("", "ranks", *rank_map.shown_axes), rows)


def schedule_sketch(section: PipelineSection) -> list[str]:
    """One line per pipeline rank, each cell the middle of its part of the step: see `SKETCH`. None for more
    ranks than a screen shows."""
    if len(section.rows) > _MAX_SKETCHED:
        return []
    begin, end = section.bounds
    wide = max(len(str(row.rank)) for row in section.rows)
    width = (end - begin) / _CELLS
    middles = [begin + (cell + 0.5) * width for cell in range(_CELLS)]
    return [
        f"{row.rank:>{wide}}  {''.join(_cell(row, middle) for middle in middles)}" for row in section.rows
    ]


def _cell(row: PipelineRow, at: float) -> str:
    for box in row.boxes:
        if box.start_seconds <= at < box.end_seconds and box.kind:
            number = box.micro_batch % 10
            return {"F": f"{number}", "W": "w"}.get(box.kind, _LETTERS[number])
    if any(start <= at < end for start, end in row.bubbles):
        return "."
    is_update = any(not box.kind and box.start_seconds <= at < box.end_seconds for box in row.boxes)
    return "u" if is_update else " "
