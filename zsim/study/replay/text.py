"""A replay on a terminal of 80 columns: the step, its parts, the collectives, the assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zsim.report.views.meanings import BREAKDOWN, span_meaning
from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zsim.study.replay.replay import Replay

_MAX_ROWS = 12


def replay_lines(replay: Replay, name: str) -> Iterator[str]:
    """The lines of a replay. The step comes first, then its categories and collectives, recorded and
    replayed, and the notes last.
    """
    where = f"{replay.cluster}, {_gpus(replay.world_size)}" if replay.cluster else "as recorded"
    if replay.keeps_kernels:
        where = f"kernels as recorded, collectives on {where}"
    recorded_on = replay.recorded.metadata.get("gpu", "")
    yield f"{name}  ({_gpus(replay.recorded.world_size)}{', ' + recorded_on if recorded_on else ''})"
    yield f"replayed: {where}"
    yield ""
    breakdowns = replay.breakdowns()
    rows = [_row("step", replay.recorded_seconds, replay.step_seconds)]
    for category, meaning in BREAKDOWN.items():
        before, after = breakdowns["recorded"][category], breakdowns["replayed"][category]
        if before or after:
            rows.append(_row(f"  {meaning.label}", before, after))
    yield from table([_title(f"rank {replay.rank}"), *_columns("recorded", "replayed", "change")], rows)
    collectives = sorted(replay.collectives(), key=lambda row: -row["replayed_seconds"])
    if collectives:
        yield ""
        columns = [_title("collectives"), *_columns("recorded", "transfer", "replayed")]
        yield from table(columns, [_collective(row) for row in collectives[:_MAX_ROWS]])
    if len(collectives) > _MAX_ROWS:
        yield f"and {len(collectives) - _MAX_ROWS} more (--json)"
    if replay.unexplained_seconds > 0:
        yield ""
        yield from paragraph(
            f"{format_seconds(replay.unexplained_seconds)} of delays that the recording does not explain are "
            "replayed as they were",
            indent=2,
        )
    if replay.notes:
        yield ""
    for note in replay.notes:
        yield from paragraph(note, first="note: ", indent=2)


def _gpus(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _title(title: str) -> Column:
    return Column(title, is_left=True, min_width=36)


def _columns(*titles: str) -> list[Column]:
    return [Column(title, min_width=11) for title in titles]


def _row(title: str, before: float, after: float) -> tuple[str, ...]:
    change = f"{(after / before - 1) * 100:+.1f} %" if before > 0 else "new"
    return title, format_seconds(before), format_seconds(after), change


def _collective(row: dict[str, Any]) -> tuple[str, ...]:
    size = f" {format_bytes(row['bytes'])}" if row["bytes"] else ""
    title = f"{row['count']} x {span_meaning(row['kind']).label}{size} ({row['group_size']})"
    seconds = (row[f"{name}_seconds"] for name in ("recorded", "transfer", "replayed"))
    return title, *(format_seconds(value) for value in seconds)
