"""The plan check: the same collectives, in the same order, on the same streams. No clock, no tolerance.

Calls are those of one rank in the order in which its host makes them, of a plan and of a trace. As short JSON
they are rows, with repeats folded. A row is `[kind, bytes, dtype, group size, group stride, module]`, with
the stream as a seventh entry where it is known. `{"times": 79, "calls": [[...], [...]]}` is these calls
repeated 79 times. Numbers of blocks are written `*`.

Two calls are the same when kind, bytes, dtype and group agree, and the module too where both sides use the
same names of modules. A field that one side does not know is not compared, and the check says so.

# [Note: streams by what shares them]
A recording numbers its streams, a plan names them. So streams are compared by the calls on them: each
simulated stream corresponds to the recorded stream that has most of its calls. A call on another stream is a
difference, and so are two simulated streams that are one in the recording.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from zsim.comparison.alignment import Alignment, align
from zsim.comparison.verdict import Verdict
from zsim.errors import InputError
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.report.views.meanings import span_meaning
from zsim.trace.trace import Trace
from zsim.units import format_bytes, format_count


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
    def generic(self) -> Call:
        """The same call with the numbers of blocks in its module replaced by `*`."""
        return replace(self, module=mask_numbers(self.module))

    @property
    def wire(self) -> tuple[str, int, str, int, int | None]:
        """The fields that determine the traffic: everything but the module and the stream."""
        return self.kind, self.bytes, self.dtype, self.group_size, self.group_stride

    @property
    def title(self) -> str:
        """The call in words: `all-gather of blocks.3 (436.22 MB bf16, 64 ranks)`."""
        ranks = format_count(self.group_size, "rank")
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
    groups = trace.metadata.get("groups", {})
    calls = []
    for span in trace.calls(rank).tolist():
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


_FIELDS = ("kind", "bytes", "dtype", "group_size", "group_stride", "module")
_MAX_WORDS = 2  # maximum of positions named in a line on several calls
Kind = Literal["only simulated", "only recorded", "changed", "moved", "stream", "unrelated"]


@dataclass(frozen=True, slots=True)
class CallDifference:
    """One call that differs, or several that differ in the same way."""

    kind: Kind
    simulated: tuple[int, ...]
    """Indices of the list of simulated calls."""
    recorded: tuple[int, ...]
    """Indices of the list of recorded calls."""
    sentence: str

    @property
    def count(self) -> int:
        return max(len(self.simulated), len(self.recorded), 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "simulated_calls": list(self.simulated),
            "recorded_calls": list(self.recorded),
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """The calls of one rank on both sides."""

    simulated: tuple[Call, ...]
    recorded: tuple[Call, ...]
    pairs: tuple[tuple[int, int], ...]
    """Counterparts, changed and moved calls included."""
    differences: tuple[CallDifference, ...]
    not_checked: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        return "fail" if self.differences else "pass"

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "simulated_calls": len(self.simulated),
            "recorded_calls": len(self.recorded),
            "differences": [difference.to_dict() for difference in self.differences],
            "not_checked": list(self.not_checked),
        }


def check_plan(
    simulated: Sequence[Call], recorded: Sequence[Call], labels: tuple[str, str] = ("simulated", "recorded")
) -> PlanCheck:
    """Compare two lists of calls of one rank. `labels` name the lists in the sentences."""
    fields = _compared_fields(simulated, recorded)
    aligned = align(
        [_key(call, fields) for call in simulated],
        [_key(call, fields) for call in recorded],
        lambda i, j: _likeness(simulated[i], recorded[j]),
    )
    differences = list(_differences(simulated, recorded, aligned, fields, labels))
    pairs = tuple(sorted((*aligned.same, *aligned.changed, *aligned.moved)))
    unknown = [name for name in ("dtype", "group_stride") if name not in fields]
    not_checked = [f"{_FIELD_LABELS[name]} (not {labels[1]})" for name in unknown]
    if _has_streams(simulated) and _has_streams(recorded):
        differences += _stream_differences(simulated, recorded, aligned.same, labels)
    else:
        not_checked.append(f"streams (not {labels[1]})")
    if not simulated and not recorded:
        not_checked = []
    return PlanCheck(tuple(simulated), tuple(recorded), pairs, tuple(differences), tuple(not_checked))


def first_difference(check: PlanCheck) -> str | None:
    """The first difference's sentence, with the number of further calls that differ. None without any."""
    if not check.differences:
        return None
    num_others = sum(difference.count for difference in check.differences) - check.differences[0].count
    return check.differences[0].sentence + (f" (and {num_others} more calls differ)" if num_others else "")


# -- what is compared -------------------------------------------------------------------------------------


def _compared_fields(simulated: Sequence[Call], recorded: Sequence[Call]) -> tuple[str, ...]:
    """The fields that both sides know for all their calls."""
    fields = ["kind", "bytes", "group_size"]
    all_calls = (*simulated, *recorded)
    if all(call.dtype for call in all_calls):
        fields.append("dtype")
    if all(call.group_stride is not None for call in all_calls):
        fields.append("group_stride")
    if has_shared_names(simulated, recorded):
        fields.append("module")
    return tuple(fields)


def _key(call: Call, fields: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(call, name) for name in fields)


def _likeness(first: Call, second: Call) -> float:
    """Similarity of two unequal calls. Kind and module count more than the other fields."""
    score = 2.0 * (first.kind == second.kind)
    score += (
        (first.bytes == second.bytes)
        + (first.dtype == second.dtype)
        + (first.group_size == second.group_size)
    )
    return (score + 2.0 * (first.module == second.module and bool(first.module))) / 5.0


def _has_streams(calls: Sequence[Call]) -> bool:
    return bool(calls) and all(call.stream for call in calls)


# -- in words ---------------------------------------------------------------------------------------------

_FIELD_LABELS = {
    "kind": "kind", "bytes": "bytes", "dtype": "dtype", "group_size": "group size",
    "group_stride": "ranks of the group", "module": "module",
}  # fmt: skip


def _differences(
    simulated: Sequence[Call],
    recorded: Sequence[Call],
    aligned: Alignment,
    fields: tuple[str, ...],
    labels: tuple[str, str],
) -> Sequence[CallDifference]:
    """Every difference in the order of the recording. Differences of the same kind in identical calls become
    one line.
    """
    if not aligned.is_complete:
        sentence = (
            f"the {len(simulated)} {labels[0]} and the {len(recorded)} {labels[1]} calls have too little in "
            "common to be matched: another model, strategy or wrapping?"
        )
        return [CallDifference("unrelated", (), (), sentence)]
    rows: list[tuple[float, str, CallDifference]] = []
    repeat_texts = (
        _repeat_texts([_key(call, fields) for call in simulated]),
        _repeat_texts([_key(call, fields) for call in recorded]),
    )
    for i in aligned.only_first:
        position = _recorded_position(aligned.same, i)
        rows.append(
            (
                position,
                "",
                CallDifference("only simulated", (i,), (), simulated[i].title + repeat_texts[0][i]),
            )
        )
    rows += [
        (j, "", CallDifference("only recorded", (), (j,), recorded[j].title + repeat_texts[1][j]))
        for j in aligned.only_second
    ]
    for i, j in aligned.changed:
        change_text = _change_text(simulated[i], recorded[j], fields, labels)
        title = replace(simulated[i], module=simulated[i].module or recorded[j].module).title
        rows.append((j, change_text, CallDifference("changed", (i,), (j,), f"{title}: {change_text}")))
    for i, j in aligned.moved:
        rows.append((j, "", CallDifference("moved", (i,), (j,), simulated[i].title)))
    rows.sort(key=lambda row: row[0])
    return [_sentence(row, labels) for row in _group_differences(rows, simulated, recorded)]


def _recorded_position(matches: Sequence[tuple[int, int]], i: int) -> float:
    """The position that call `i` of the first list would have in the second: after the counterpart of its
    predecessor.
    """
    predecessor = bisect_left(matches, (i, 0)) - 1
    return matches[predecessor][1] + 0.5 if predecessor >= 0 else -0.5


def _repeat_texts(keys: Sequence[object]) -> list[str]:
    """Words for each call on the number of equal calls in its row, since any of these could be the one."""
    words: list[str] = []
    for _, run in groupby(keys):
        count = len(list(run))
        words += [f", one of {count} alike in a row," if count > 1 else ""] * count
    return words


def _change_text(
    simulated_call: Call, recorded_call: Call, fields: tuple[str, ...], labels: tuple[str, str]
) -> str:
    """Words such as `bytes 1,048,576 simulated, 2,097,152 recorded (2 x)`."""
    changes = []
    for name in _FIELDS:
        simulated_value, recorded_value = getattr(simulated_call, name), getattr(recorded_call, name)
        if name in fields and simulated_value != recorded_value:
            times = (
                f" ({recorded_value / simulated_value:.3g} x)" if name == "bytes" and simulated_value else ""
            )
            times = "" if times == " (1 x)" else times
            changes.append(
                f"{_FIELD_LABELS[name]} {_value(simulated_value)} {labels[0]}, {_value(recorded_value)} "
                f"{labels[1]}{times}"
            )
    return "; ".join(changes)


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _group_differences(
    rows: list[tuple[float, str, CallDifference]], simulated: Sequence[Call], recorded: Sequence[Call]
) -> list[CallDifference]:
    """The differences, with those of one kind in calls that differ only by the number of a block joined."""
    groups: dict[tuple[object, ...], CallDifference] = {}
    for _, change_text, difference in rows:
        call = (
            simulated[difference.simulated[0]] if difference.simulated else recorded[difference.recorded[0]]
        )
        unique_id = len(groups) if difference.kind == "moved" else -1
        call_key = (call.kind, call.bytes, call.dtype, call.group_size, mask_numbers(call.module))
        key = (difference.kind, change_text, *call_key, unique_id)
        group = groups.get(key)
        if group is None:
            groups[key] = difference
            continue
        groups[key] = replace(
            group,
            simulated=group.simulated + difference.simulated,
            recorded=group.recorded + difference.recorded,
        )
    return list(groups.values())


def _sentence(difference: CallDifference, labels: tuple[str, str]) -> CallDifference:
    """The difference with its full sentence."""
    title, count = difference.sentence, difference.count
    suffix = f", and {count - 1} more like it" if count > 1 else ""
    i, j = _ordinals(difference.simulated), _ordinals(difference.recorded)
    text = {
        "only simulated": f"dropped: {title} is {labels[0]} as {i} and not {labels[1]}{suffix}",
        "only recorded": f"extra: {title} is {labels[1]} as {j} and not {labels[0]}{suffix}",
        "changed": f"changed: {j}, {title}{suffix}",
        "moved": f"order: {title} is {labels[0]} as {i} and {labels[1]} as {j}",
    }[difference.kind]
    return replace(difference, sentence=text)


def _ordinals(indices: tuple[int, ...]) -> str:
    """`call 34`, `calls 34, 36, ...`: counted from 1."""
    if not indices:
        return ""
    ordinals = ", ".join(f"{index + 1:,}" for index in indices[:_MAX_WORDS])
    return f"call{'s' if len(indices) > 1 else ''} {ordinals}" + (
        ", ..." if len(indices) > _MAX_WORDS else ""
    )


# -- streams ----------------------------------------------------------------------------------------------


def _stream_differences(
    simulated: Sequence[Call],
    recorded: Sequence[Call],
    matches: Sequence[tuple[int, int]],
    labels: tuple[str, str],
) -> list[CallDifference]:
    """Differences between streams, [Note: streams by what shares them]."""
    votes: dict[str, Counter[str]] = {}
    for i, j in matches:
        votes.setdefault(simulated[i].stream, Counter())[recorded[j].stream] += 1
    usual_streams = {stream: counter.most_common(1)[0][0] for stream, counter in votes.items()}
    differences = []
    for stream, counter in votes.items():
        for recorded_stream, count in counter.items():
            if recorded_stream == usual_streams[stream]:
                continue
            call_pairs = [
                (i, j)
                for i, j in matches
                if (simulated[i].stream, recorded[j].stream) == (stream, recorded_stream)
            ]
            first = simulated[call_pairs[0][0]].title
            text = (
                f"stream: {count} call{'s' if count > 1 else ''} of stream {stream}, first {first}, "
                f"{labels[1]} on stream {recorded_stream} where its others are on {usual_streams[stream]}"
            )
            differences.append(CallDifference("stream", *_unzip(call_pairs), text))
    for target in dict.fromkeys(usual_streams.values()):
        sharing = [stream for stream, recorded_stream in usual_streams.items() if recorded_stream == target]
        if len(sharing) > 1:
            call_pairs = [(i, j) for i, j in matches if simulated[i].stream in sharing[1:]]
            stream_names = " and ".join(sharing)
            text = f"stream: {stream_names} are separate streams, {labels[1]} on the one stream {target}"
            differences.append(CallDifference("stream", *_unzip(call_pairs), text))
    return differences


def _unzip(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(i for i, _ in pairs), tuple(j for _, j in pairs)
