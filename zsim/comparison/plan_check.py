"""The plan check: the same collectives, in the same order, on the same streams. No clock, no tolerance.

Two calls are the same when kind, bytes, dtype and group agree, and the module too where both sides use the
same names of modules. A field that one side does not know is not compared, and the check says so.

# [Note: streams by what shares them]
A recording numbers its streams, a plan names them. So streams are compared by the calls on them: each
simulated stream corresponds to the recorded stream that has most of its calls. A call on another stream is a
difference, and so are two simulated streams that are one in the recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

from zsim.comparison.alignment import Alignment, align
from zsim.comparison.calls import Call, names_are_shared, without_numbers
from zsim.comparison.verdict import Verdict
from zsim.dataclass import dataclass

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
    simulated: Sequence[Call], recorded: Sequence[Call], words: tuple[str, str] = ("simulated", "recorded")
) -> PlanCheck:
    """Compare two lists of calls of one rank. `labels` name the lists in the sentences."""
    compared = _compared_fields(simulated, recorded)
    aligned = align(
        [_key(call, compared) for call in simulated],
        [_key(call, compared) for call in recorded],
        lambda i, j: _likeness(simulated[i], recorded[j]),
    )
    found = list(_differences(simulated, recorded, aligned, compared, words))
    pairs = tuple(sorted((*aligned.same, *aligned.changed, *aligned.moved)))
    unknown = [name for name in ("dtype", "group_stride") if name not in compared]
    not_checked = [f"{_WORDS[name]} (not {words[1]})" for name in unknown]
    if _knows_streams(simulated) and _knows_streams(recorded):
        found += _stream_differences(simulated, recorded, aligned.same, words)
    else:
        not_checked.append(f"streams (not {words[1]})")
    if not simulated and not recorded:
        not_checked = []
    return PlanCheck(tuple(simulated), tuple(recorded), pairs, tuple(found), tuple(not_checked))


def first_difference(check: PlanCheck) -> str | None:
    """The first difference's sentence, with the number of further calls that differ. None without any."""
    if not check.differences:
        return None
    rest = sum(difference.count for difference in check.differences) - check.differences[0].count
    return check.differences[0].sentence + (f" (and {rest} more calls differ)" if rest else "")


# -- what is compared -------------------------------------------------------------------------------------


def _compared_fields(simulated: Sequence[Call], recorded: Sequence[Call]) -> tuple[str, ...]:
    """The fields that both sides know for all their calls."""
    chosen = ["kind", "bytes", "group_size"]
    both = (*simulated, *recorded)
    if all(call.dtype for call in both):
        chosen.append("dtype")
    if all(call.group_stride is not None for call in both):
        chosen.append("group_stride")
    if names_are_shared(simulated, recorded):
        chosen.append("module")
    return tuple(chosen)


def _key(call: Call, compared: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(call, name) for name in compared)


def _likeness(one: Call, other: Call) -> float:
    """Similarity of two unequal calls. Kind and module count more than the other fields."""
    score = 2.0 * (one.kind == other.kind)
    score += (one.bytes == other.bytes) + (one.dtype == other.dtype) + (one.group_size == other.group_size)
    return (score + 2.0 * (one.module == other.module and bool(one.module))) / 5.0


def _knows_streams(calls: Sequence[Call]) -> bool:
    return bool(calls) and all(call.stream for call in calls)


# -- in words ---------------------------------------------------------------------------------------------

_WORDS = {
    "kind": "kind", "bytes": "bytes", "dtype": "dtype", "group_size": "group size",
    "group_stride": "ranks of the group", "module": "module",
}  # fmt: skip


def _differences(
    simulated: Sequence[Call],
    recorded: Sequence[Call],
    aligned: Alignment,
    compared: tuple[str, ...],
    words: tuple[str, str],
) -> Sequence[CallDifference]:
    """Every difference in the order of the recording. Differences of the same kind in identical calls become
    one line.
    """
    if not aligned.is_whole:
        sentence = (
            f"the {len(simulated)} {words[0]} and the {len(recorded)} {words[1]} calls have too little in "
            "common to be matched: another model, strategy or wrapping?"
        )
        return [CallDifference("unrelated", (), (), sentence)]
    found: list[tuple[float, str, CallDifference]] = []
    alike = (
        _runs([_key(call, compared) for call in simulated]),
        _runs([_key(call, compared) for call in recorded]),
    )
    for i in aligned.only_first:
        place = _place(aligned.same, i)
        found.append(
            (place, "", CallDifference("only simulated", (i,), (), simulated[i].title + alike[0][i]))
        )
    found += [
        (j, "", CallDifference("only recorded", (), (j,), recorded[j].title + alike[1][j]))
        for j in aligned.only_second
    ]
    for i, j in aligned.changed:
        what = _changes(simulated[i], recorded[j], compared, words)
        title = replace(simulated[i], module=simulated[i].module or recorded[j].module).title
        found.append((j, what, CallDifference("changed", (i,), (j,), f"{title}: {what}")))
    for i, j in aligned.moved:
        found.append((j, "", CallDifference("moved", (i,), (j,), simulated[i].title)))
    found.sort(key=lambda row: row[0])
    return [_sentence(row, words) for row in _grouped(found, simulated, recorded)]


def _place(same: Sequence[tuple[int, int]], i: int) -> float:
    """The position that call `i` of the first list would have in the second: after the counterpart of its
    predecessor.
    """
    before = bisect_left(same, (i, 0)) - 1
    return same[before][1] + 0.5 if before >= 0 else -0.5


def _runs(keys: Sequence[object]) -> list[str]:
    """Words for each call on the number of equal calls in its row, since any of these could be the one."""
    words: list[str] = []
    for _, run in groupby(keys):
        count = len(list(run))
        words += [f", one of {count} alike in a row," if count > 1 else ""] * count
    return words


def _changes(one: Call, other: Call, compared: tuple[str, ...], words: tuple[str, str]) -> str:
    """Words such as `bytes 1,048,576 simulated, 2,097,152 recorded (2 x)`."""
    parts = []
    for name in _FIELDS:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name in compared and mine != theirs:
            times = f" ({theirs / mine:.3g} x)" if name == "bytes" and mine else ""
            times = "" if times == " (1 x)" else times
            parts.append(f"{_WORDS[name]} {_value(mine)} {words[0]}, {_value(theirs)} {words[1]}{times}")
    return "; ".join(parts)


def _value(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _grouped(
    found: list[tuple[float, str, CallDifference]], simulated: Sequence[Call], recorded: Sequence[Call]
) -> list[CallDifference]:
    """The differences, with those of one kind in calls that differ only by the number of a block joined."""
    groups: dict[tuple[object, ...], CallDifference] = {}
    for _, what, difference in found:
        call = (
            simulated[difference.simulated[0]] if difference.simulated else recorded[difference.recorded[0]]
        )
        alone = len(groups) if difference.kind == "moved" else -1
        alike = (call.kind, call.bytes, call.dtype, call.group_size, without_numbers(call.module))
        key = (difference.kind, what, *alike, alone)
        before = groups.get(key)
        if before is None:
            groups[key] = difference
            continue
        groups[key] = replace(
            before,
            simulated=before.simulated + difference.simulated,
            recorded=before.recorded + difference.recorded,
        )
    return list(groups.values())


def _sentence(difference: CallDifference, words: tuple[str, str]) -> CallDifference:
    """The difference with its full sentence."""
    title, count = difference.sentence, difference.count
    more = f", and {count - 1} more like it" if count > 1 else ""
    i, j = _ordinals(difference.simulated), _ordinals(difference.recorded)
    text = {
        "only simulated": f"dropped: {title} is {words[0]} as {i} and not {words[1]}{more}",
        "only recorded": f"extra: {title} is {words[1]} as {j} and not {words[0]}{more}",
        "changed": f"changed: {j}, {title}{more}",
        "moved": f"order: {title} is {words[0]} as {i} and {words[1]} as {j}",
    }[difference.kind]
    return replace(difference, sentence=text)


def _ordinals(places: tuple[int, ...]) -> str:
    """`call 34`, `calls 34, 36, ...`: counted from 1."""
    if not places:
        return ""
    shown = ", ".join(f"{place + 1:,}" for place in places[:_MAX_WORDS])
    return f"call{'s' if len(places) > 1 else ''} {shown}" + (", ..." if len(places) > _MAX_WORDS else "")


# -- streams ----------------------------------------------------------------------------------------------


def _stream_differences(
    simulated: Sequence[Call],
    recorded: Sequence[Call],
    same: Sequence[tuple[int, int]],
    words: tuple[str, str],
) -> list[CallDifference]:
    """Differences between streams, [Note: streams by what shares them]."""
    votes: dict[str, Counter[str]] = {}
    for i, j in same:
        votes.setdefault(simulated[i].stream, Counter())[recorded[j].stream] += 1
    usual = {stream: counted.most_common(1)[0][0] for stream, counted in votes.items()}
    found = []
    for stream, counted in votes.items():
        for other, count in counted.items():
            if other == usual[stream]:
                continue
            places = [(i, j) for i, j in same if (simulated[i].stream, recorded[j].stream) == (stream, other)]
            first = simulated[places[0][0]].title
            text = (
                f"stream: {count} call{'s' if count > 1 else ''} of stream {stream}, first {first}, "
                f"{words[1]} on stream {other} where its others are on {usual[stream]}"
            )
            found.append(CallDifference("stream", *_columns(places), text))
    for target in dict.fromkeys(usual.values()):
        sharing = [stream for stream, other in usual.items() if other == target]
        if len(sharing) > 1:
            places = [(i, j) for i, j in same if simulated[i].stream in sharing[1:]]
            both = " and ".join(sharing)
            text = f"stream: {both} are separate streams, {words[1]} on the one stream {target}"
            found.append(CallDifference("stream", *_columns(places), text))
    return found


def _columns(places: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(i for i, _ in places), tuple(j for _, j in places)
