"""Irregularities of a step as tables: jitter, ranks that differ, jobs that share the fabric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zsim.report.gpu_types import GpuTypeRow
from zsim.report.irregular import JobRow, RankRow, StepSpread
from zsim.report.report import Report
from zsim.units import format_bytes, format_seconds

Row = tuple[str, ...]


class TextTable(NamedTuple):
    """A table: the first column is text, the rest are numbers."""

    title: str
    headings: Row
    rows: list[Row]


def irregular_tables(report: Report) -> Iterator[TextTable]:
    """The tables for which the report has rows."""
    if report.jobs:
        rows = [_job(row) for row in report.jobs]
        yield TextTable("Jobs on this fabric", ("", "GPUs", "alone", "together", "longer", ""), rows)
    if report.gpu_types:
        yield _gpu_types(report.gpu_types)
    jitter = report.jitter
    if jitter is not None:
        title = f"{jitter.steps:,} steps with jitter, seed {jitter.seed}"
        has_bubbles = report.pipeline is not None
        yield TextTable(
            title, ("", *jitter.step_seconds, "without"), _jitter_rows(jitter, has_bubbles=has_bubbles)
        )
    if report.ranks:
        rows = [_rank(row) for row in report.ranks]
        headings = ("", "ranks", "kernels", "exposed communication", "slowed")
        yield TextTable("Ranks that differ", headings, rows)


def _gpu_types(types: Sequence[GpuTypeRow]) -> TextTable:
    is_uneven = len({row.micro_batch_size for row in types}) > 1
    headings = ("", "GPUs", "kernels", "waits", "lost", "GPU-h/day", "GPU memory")
    return TextTable("Types of GPUs", headings, [_gpu_type(row, is_uneven=is_uneven) for row in types])


def _gpu_type(row: GpuTypeRow, *, is_uneven: bool) -> Row:
    return (
        row.name,
        f"{row.gpus:,} x {row.micro_batch_size:,}" if is_uneven else f"{row.gpus:,}",
        format_seconds(row.busy_seconds),
        format_seconds(row.waiting_seconds),
        format_seconds(row.lost_seconds),
        f"{row.lost_gpu_hours_per_day:,.1f}",
        f"{format_bytes(row.peak_bytes)}{'' if row.fits else ', does not fit'}",
    )


def _job(row: JobRow) -> Row:
    times = format_seconds(row.step_seconds_alone), format_seconds(row.step_seconds_together)
    return row.name, f"{row.gpus:,}", *times, f"{row.slowdown:.2f} times", f"{row.model}, {row.strategy}"


def _jitter_rows(jitter: StepSpread, *, has_bubbles: bool) -> list[Row]:
    steps = [format_seconds(seconds) for seconds in jitter.step_seconds.values()]
    waits = [format_seconds(seconds) for seconds in jitter.exposed_communication_seconds.values()]
    plain_step = format_seconds(jitter.step_seconds_without)
    return [
        ("step", *steps, plain_step),
        (f"exposed communication{' and bubbles' if has_bubbles else ''}", *waits, ""),
    ]


def _rank(row: RankRow) -> Row:
    return (
        f"rank {row.rank}" if row.ranks == 1 else f"like rank {row.rank}",
        f"{row.ranks:,}",
        format_seconds(row.kernel_seconds),
        format_seconds(row.exposed_communication_seconds),
        f"{row.kernel_slowdown:g} times" if row.kernel_slowdown > 1 else "-",
    )
