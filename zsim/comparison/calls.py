"""Collective calls of one rank in the order in which its host makes them: of a plan, and of a trace.

Lists of collective calls as short JSON: rows, with repeats folded.

A row is `[kind, bytes, dtype, group size, group stride, module]`, with the stream as a seventh entry where it
is known. `{"times": 79, "calls": [[...], [...]]}` is these calls repeated 79 times. Numbers of blocks are
written `*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zsim.errors import InputError
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.report.views.meanings import span_meaning
from zsim.trace.trace import COLLECTIVES, Trace
from zsim.units import format_bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One call. Unknown fields are "" or, for the stride, None."""

    kind: str
    bytes: int
    """The full tensor as in `Collective.bytes`."""
    dtype: str
    group_size: int
    group_stride: int | None = None
    """Member i of its group is so many ranks after member i - 1."""
    stream: str = ""
    module: str = ""
    span: int = -1
    """The index of the call's span in its trace, -1 without a trace."""

    @property
    def wire(self) -> tuple[str, int, str, int, int | None]:
        """The fields that determine the traffic: everything but the module and the stream."""
        return self.kind, self.bytes, self.dtype, self.group_size, self.group_stride

    @property
    def generic(self) -> Call:
        """The same call with the numbers of blocks in its module replaced by `*`."""
        return replace(self, module=mask_numbers(self.module))

    @property
    def title(self) -> str:
        """The call in words: `all-gather of blocks.3 (436.22 MB bf16, 64 ranks)`."""
        ranks = f"{self.group_size:,} rank{'' if self.group_size == 1 else 's'}"
        if self.group_stride not in (None, 1):
            ranks += f" {self.group_stride} apart"
        size = f"{format_bytes(self.bytes)} {self.dtype}".rstrip()
        module_suffix = f" of {self.module}" if self.module else ""
        return f"{span_meaning(self.kind).label}{module_suffix} ({size}, {ranks})"


def calls_of_plan(plan: Plan, rank: int = 0) -> list[Call]:
    """The collectives and calls with messages of a rank's program, in issue order."""
    calls = []
    for op in plan.program_on(rank).ops:
        if isinstance(op.work, Collective | PointToPoint):
            group, work = plan.groups[op.work.group], op.work
            calls.append(
                Call(work.kind, work.bytes, work.dtype, group.size, group.stride, op.stream, op.module)
            )
    return calls


def calls_of_trace(trace: Trace, rank: int) -> list[Call]:
    """The collectives of `rank`, by the time the host issued them, or their start where that is unknown."""
    is_collective = np.array([info.kind in COLLECTIVES for info in trace.infos], dtype=bool)
    if not len(trace):
        return []
    spans = np.flatnonzero((trace.ranks == rank) & is_collective[trace.info_indices])
    issue_times = np.where(np.isnan(trace.issue_seconds), trace.start_seconds, trace.issue_seconds)[spans]
    groups = trace.metadata.get("groups", {})
    calls = []
    for span in spans[np.argsort(issue_times, kind="stable")].tolist():
        info = trace.infos[trace.info_indices[span]]
        size, stride = groups.get(info.group, (info.group_size, None))
        stride = stride if size == info.group_size else None
        calls.append(
            Call(
                info.kind,
                info.bytes,
                info.dtype,
                info.group_size,
                stride,
                info.stream,
                info.module,
                int(span),
            )
        )
    return calls


def convert_to_gloo(calls: Iterable[Call], recorded: Iterable[Call]) -> list[Call]:
    """`calls` with every reduce-scatter as gloo, which has none, runs it: as an all-reduce of the same tensor
    or, where the recording has all-to-alls, as an all-to-all."""
    kind = "all_to_all" if any(call.kind == "all_to_all" for call in recorded) else "all_reduce"
    return [replace(call, kind=kind) if call.kind == "reduce_scatter" else call for call in calls]


def has_shared_names(first: Sequence[Call], second: Sequence[Call]) -> bool:
    """Whether both sides use the same names of modules: at least half of the names of either are in both."""
    first_names, second_names = {call.module for call in first}, {call.module for call in second}
    common = len((first_names & second_names) - {""})
    return common > 0 and 2 * common >= len(first_names - {""}) and 2 * common >= len(second_names - {""})


def mask_numbers(module: str) -> str:
    """The name with its numbers replaced by `*`: `model.layers.3.mlp` -> `model.layers.*.mlp`."""
    return re.sub(r"\b\d+\b", "*", module)


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
    row = [call.kind, call.bytes, call.dtype, call.group_size, call.group_stride, mask_numbers(call.module)]
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
