"""What is irregular about a step, as tables: jitter, ranks that differ, jobs that share the fabric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zsim.report.report import Report
from zsim.units import format_seconds


class Words(NamedTuple):
    """A table: the first column is text, the rest are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def irregular_tables(report: Report) -> Iterator[Words]:
    """The tables that a report has anything for."""
    spread = report.jitter
    if spread is not None:
        steps = [format_seconds(seconds) for seconds in spread.step_seconds.values()]
        waits = [format_seconds(seconds) for seconds in spread.exposed_communication_seconds.values()]
        rows = [
            ("step", *steps, format_seconds(spread.step_seconds_without)),
            ("exposed communication", *waits, ""),
        ]
        title = f"{spread.steps:,} steps with jitter, seed {spread.seed}"
        yield Words(title, ("", *spread.step_seconds, "without"), rows)
    if report.ranks:
        rows = [
            (
                f"rank {row.rank}" if row.ranks == 1 else f"like rank {row.rank}",
                f"{row.ranks:,}",
                format_seconds(row.kernel_seconds),
                format_seconds(row.exposed_communication_seconds),
                f"{row.kernel_slowdown:g} times" if row.kernel_slowdown > 1 else "-",
            )
            for row in report.ranks
        ]
        headings = ("", "ranks", "kernels", "exposed communication", "slowed")
        yield Words("Ranks that differ", headings, rows)
