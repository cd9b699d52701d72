"""Lists of collective calls as short JSON: rows, with repeats folded.

A row is `[kind, bytes, dtype, group size, group stride, module]`, with the stream as a seventh entry where it
is known. `{"times": 79, "calls": [[...], [...]]}` is these calls repeated 79 times. Numbers of blocks are
written `*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zsim.comparison.calls import Call, mask_numbers
from zsim.errors import InputError

_LONGEST_PERIOD = 6


def fold(calls: Iterable[Call]) -> list[Any]:
    """Calls as rows, with repeats folded."""
    return fold_rows([_row(call) for call in calls])


def fold_rows(rows: Sequence[list[Any]]) -> list[Any]:
    """Rows of any kind, with repeats folded, those that save most rows first."""
    folded: list[Any] = []
    start = 0
    while start < len(rows):
        period, times = _best_repeat(rows, start)
        part = rows[start : start + period]
        folded.extend(part if times == 1 else [{"times": times, "calls": part}])
        start += period * times
    return folded


def unfold(folded: Any, where: str = "calls") -> list[Call]:
    """The calls of a folded list. Raises InputError, naming `where`, for other data."""
    calls: list[Call] = []
    try:
        for entry in folded:
            if isinstance(entry, dict):
                calls.extend([_call(row) for row in entry["calls"]] * int(entry["times"]))
            else:
                calls.append(_call(entry))
    except (TypeError, ValueError, KeyError):
        raise InputError(
            f"{where}: found something else than calls; expected rows [kind, bytes, dtype, group size, "
            "group stride, module]"
        ) from None
    return calls


def _row(call: Call) -> list[Any]:
    row = [
        call.kind,
        call.bytes,
        call.dtype,
        call.group_size,
        call.group_stride,
        mask_numbers(call.module),
    ]
    return [*row, call.stream] if call.stream else row


def _call(row: Sequence[Any]) -> Call:
    kind, num_bytes, dtype, size, stride, module = row[:6]
    stride = None if stride is None else int(stride)
    stream = str(row[6]) if len(row) > 6 else ""
    return Call(str(kind), int(num_bytes), str(dtype), int(size), stride, stream, str(module))


def _best_repeat(rows: Sequence[list[Any]], start: int) -> tuple[int, int]:
    """(period, times) of the repeat at `start` that saves most rows, or (1, 1) where none does."""
    best = (1, 1)
    for period in range(1, _LONGEST_PERIOD + 1):
        part, times = rows[start : start + period], 1
        while rows[start + times * period : start + (times + 1) * period] == part:
            times += 1
        if period * (times - 1) > best[0] * (best[1] - 1):
            best = (period, times)
    return best
