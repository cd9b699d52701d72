"""A replay on a terminal of 80 columns: the step, where it goes, the collectives, what was assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zsim.report.views.meanings import BREAKDOWN, span_meaning
from zsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from zsim.study.replay.replay import Replay

_WIDTH = 80
_MOST_ROWS = 12


def replay_lines(replay: Replay, name: str) -> Iterator[str]:
    """The step first; then its parts and collectives, recorded and replayed; notes last."""
    where = f"{replay.cluster}, {_gpus(replay.world_size)}" if replay.cluster else "as recorded"
    recorded_on = replay.recorded.metadata.get("gpu", "")
    yield f"{name}  ({_gpus(replay.recorded.world_size)}{', ' + recorded_on if recorded_on else ''})"
    yield f"replayed: {where}"
    yield ""
    yield f"{f'rank {replay.rank}':<36} {'recorded':>11} {'replayed':>11} {'change':>9}"
    yield _row("step", replay.recorded_seconds, replay.step_seconds)
    parts = replay.breakdowns()
    for part, meaning in BREAKDOWN.items():
        before, after = parts["recorded"][part], parts["replayed"][part]
        if before or after:
            yield _row(f"  {meaning.label}", before, after)
    rows = sorted(replay.collectives(), key=lambda row: -row["replayed_seconds"])
    if rows:
        yield ""
        yield f"{'collectives':<36} {'recorded':>11} {'transfer':>11} {'replayed':>9}"
    for row in rows[:_MOST_ROWS]:
        yield (
            f"{_title(row):<36} {format_seconds(row['recorded_seconds']):>11} "
            f"{format_seconds(row['transfer_seconds']):>11} {format_seconds(row['replayed_seconds']):>9}"
        )
    if len(rows) > _MOST_ROWS:
        yield f"and {len(rows) - _MOST_ROWS} more (--json)"
    if replay.unexplained_seconds > 0:
        yield ""
        yield from _wrapped(
            f"{format_seconds(replay.unexplained_seconds)} of delays that the recording does not explain are "
            "replayed as they were"
        )
    if replay.notes:
        yield ""
    for note in replay.notes:
        yield from _wrapped(f"note: {note}")


def _gpus(count: int) -> str:
    return f"{count:,} rank{'s' * (count != 1)}"


def _row(title: str, before: float, after: float) -> str:
    change = f"{(after / before - 1) * 100:+.1f} %" if before > 0 else "new"
    return f"{title:<36} {format_seconds(before):>11} {format_seconds(after):>11} {change:>9}"


def _title(row: dict[str, Any]) -> str:
    size = f" {format_bytes(row['bytes'])}" if row["bytes"] else ""
    return f"{row['count']} x {span_meaning(row['kind']).label}{size} ({row['group_size']})"[:36]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
