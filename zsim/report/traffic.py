"""Traffic of a step: calls per collective, their bandwidth, and the part of them that computing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.report.breakdown import HOST, NO_WAITS, Waits
from zsim.report.views.meanings import COMPUTE_KINDS
from zsim.trace.trace import COLLECTIVES, SpanInfos, Trace, kind_mask

_SAME = 1e-9  # relative: times closer than this are the same


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """All calls of one (kind, group, dtype, bytes) of one rank in one step."""

    kind: str
    group: str
    group_size: int
    count: int
    bytes: int
    """Bytes of one full tensor."""
    dtype: str
    busy_seconds: float
    """From the beginning of each call to its end, with `peers_seconds`. So the exposed seconds are never
    more.
    """
    exposed_seconds: float = 0.0
    """Time that the compute stream waited for the calls (delay by other ranks included)."""
    peers_seconds: float = 0.0
    """The part of that wait in which the other ranks had not arrived yet."""

    @property
    def algorithm_bytes_per_second(self) -> float | None:
        """nccl-tests' algbw: the full tensor over the time of one call, once all ranks have arrived."""
        seconds = self.busy_seconds - self.peers_seconds
        return self.bytes * self.count / seconds if seconds > 0 else None

    @property
    def bus_bytes_per_second(self) -> float | None:
        """nccl-tests' busbw: algbw times the fraction of the tensor that each rank must send."""
        algorithm = self.algorithm_bytes_per_second
        return None if algorithm is None else algorithm * bus_factor(self.kind, self.group_size)


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One class of links: bytes that one GPU puts on it per step, and the maximum utilisation of a link."""

    link_class: str
    bytes_per_gpu: float
    utilisation_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class SentRow:
    """Bytes that one GPU sends per step, as mean over all GPUs, for the collectives of a phase, kind and
    group: inside its NVLink domain (its node, where no NVLink leaves it), and through the network cards."""

    phase: str
    kind: str
    group: str
    group_size: int
    intra_node_bytes_per_gpu: float
    inter_node_bytes_per_gpu: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """All calls of one rank and step on the communicators of one kind of group."""

    group: str
    count: int
    bytes: int
    """The sum of the bytes of their full tensors. For messages it is sent plus received."""
    busy_seconds: float
    """Waits for other ranks included."""
    exposed_seconds: float


PIPELINE, CONTEXT = "pipeline", "context"


def reported_group(name: str) -> str:
    """The name under which a group is reported: the pairs of a pipeline ("pipeline 0-1") as "pipeline", parts
    of context groups ("context ring") as "context"."""
    first = name.partition(" ")[0]
    return first if first in (PIPELINE, CONTEXT) else name


def group_rows(rows: Sequence[CollectiveRow]) -> list[GroupRow]:
    """The collectives by group, in the order of the first calls."""
    row_of_group: dict[str, GroupRow] = {}
    for row in rows:
        group_row = row_of_group.get(row.group, GroupRow(row.group, 0, 0, 0.0, 0.0))
        row_of_group[row.group] = GroupRow(
            row.group,
            group_row.count + row.count,
            group_row.bytes + row.count * row.bytes,
            group_row.busy_seconds + row.busy_seconds,
            group_row.exposed_seconds + row.exposed_seconds,
        )
    return list(row_of_group.values())


def bus_factor(kind: str, group_size: int) -> float:
    """Factor in busbw = algbw * factor: 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter and
    all-to-all, 1 for the rest. Source: nccl-tests, doc/PERFORMANCE.md, "Bandwidth"."""
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (group_size - 1) / group_size
    return 1.0


def collective_rows(
    trace: Trace, rank: int | None = None, waits: Waits = NO_WAITS
) -> tuple[CollectiveRow, ...]:
    """The collectives of `rank` (by default the first) in the order of their first call. `waits` are the
    waits of its breakdown.
    """
    rank_trace = _select_rank(trace, rank)
    kinds, of_info = rank_trace.infos.memoize(_unique_calls)
    spans = rank_trace.calls()
    numbers = of_info[rank_trace.info_indices[spans]]
    counts = np.bincount(numbers, minlength=len(kinds)).tolist()
    starts, ends = rank_trace.start_seconds[spans], rank_trace.end_seconds[spans]
    busy = np.bincount(numbers, ends - starts, len(kinds)).tolist()
    waited_for = of_info[waits.infos]
    is_call = (waits.infos != HOST) & (waited_for >= 0)
    exposed = np.bincount(waited_for[is_call], waits.seconds[is_call], len(kinds))
    exposed_seconds: list[float] = exposed.astype(np.float64).tolist()  # integers where nothing was counted
    rows = []
    for n in dict.fromkeys(numbers.tolist()):
        kind, group, size, num_bytes, dtype = kinds[n]
        peers_seconds = 0.0
        if exposed_seconds[n]:
            calls, row_waits = numbers == n, is_call & (waited_for == n)
            peers_seconds = _seconds_before_calls(
                waits.starts[row_waits], waits.ends[row_waits], starts[calls], ends[calls]
            )
        seconds = max(busy[n] + peers_seconds, exposed_seconds[n])
        rows.append(
            CollectiveRow(
                kind, group, size, counts[n], num_bytes, dtype, seconds, exposed_seconds[n], peers_seconds
            )
        )
    return tuple(rows)


def _seconds_before_calls(starts: Floats, ends: Floats, call_starts: Floats, call_ends: Floats) -> float:
    """Seconds of the intervals from `starts` to `ends` in which none of the calls was running. The calls
    began at `call_starts` and ended at `call_ends`.
    """
    order = np.argsort(call_starts, kind="stable")
    call_starts, call_ends = call_starts[order], np.maximum.accumulate(call_ends[order])
    begins = np.maximum(
        call_starts, np.append(-np.inf, call_ends[:-1])
    )  # of what the calls before leave of each
    covered_before = np.append(0.0, np.cumsum(call_ends - begins))

    def covered_seconds(until: Floats) -> Floats:
        index = np.searchsorted(begins, until, side="right") - 1
        partial = np.minimum(until, call_ends[index]) - begins[index]
        return np.where(index < 0, 0.0, covered_before[index] + partial)

    uncovered_seconds = (ends - starts) - (covered_seconds(ends) - covered_seconds(starts))
    return float(uncovered_seconds[uncovered_seconds > _SAME * ends].sum())


_CallKey = tuple[str, str, int, int, str]


def _unique_calls(infos: SpanInfos) -> tuple[list[_CallKey], Ints]:
    """The distinct (kind, group, its size, bytes, dtype) of collectives, and each op's index among them (-1:
    no collective), to be cached with the infos.
    """
    index_of_call: dict[_CallKey, int] = {}
    numbers = np.full(len(infos), -1, dtype=np.int64)
    for position in np.flatnonzero(infos.memoize(kind_mask, COLLECTIVES)).tolist():
        info = infos[position]
        key = info.kind, reported_group(info.group), info.group_size, info.bytes, info.dtype
        numbers[position] = index_of_call.setdefault(key, len(index_of_call))
    return list(index_of_call), numbers


def overlap_fraction(trace: Trace, rank: int | None = None) -> float | None:
    """Fraction of communication time during which kernels ran on any stream. None without communication."""
    hidden, total = overlap_seconds(trace, rank)
    return hidden / total if total > 0 else None


def overlap_seconds(trace: Trace, rank: int | None = None) -> tuple[float, float]:
    """Seconds of communication during which kernels ran on any stream, and of all communication."""
    rank_trace = _select_rank(trace, rank)
    communication = _merge_spans(rank_trace, COLLECTIVES)
    computing = _merge_spans(rank_trace, COMPUTE_KINDS)
    return _length(_intersection(communication, computing)), _length(communication)


def _select_rank(trace: Trace, rank: int | None) -> Trace:
    if rank is None and len(trace):
        rank = int(trace.ranks[0])
    return trace if rank is None else trace.select_rank(rank)


def _merge_spans(rank_trace: Trace, kinds: frozenset[str]) -> Floats:
    """Disjoint, sorted intervals (n, 2) that cover the same instants as the spans of `kinds`."""
    spans = np.flatnonzero(rank_trace.is_of(kinds))
    order = spans[np.argsort(rank_trace.start_seconds[spans], kind="stable")]
    starts, ends = rank_trace.start_seconds[order], np.maximum.accumulate(rank_trace.end_seconds[order])
    if not len(order):
        return np.zeros((0, 2))
    is_first = np.concatenate([[True], starts[1:] > ends[:-1]])
    is_last = np.concatenate([is_first[1:], [True]])
    return np.stack([starts[is_first], ends[is_last]], axis=1)


def _length(intervals: Floats) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _intersection(left: Floats, right: Floats) -> Floats:
    """The instants that both of two disjoint, sorted lists of intervals cover."""
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")  # on the right that ends after it begins
    count = np.maximum(np.searchsorted(right[:, 0], left[:, 1]) - first, 0)
    left_indices = np.repeat(np.arange(len(left)), count)
    right_indices = np.arange(len(left_indices)) + np.repeat(first - (np.cumsum(count) - count), count)
    starts, ends = (
        np.maximum(left[left_indices, 0], right[right_indices, 0]),
        np.minimum(left[left_indices, 1], right[right_indices, 1]),
    )
    intervals: Floats = np.stack([starts, ends], axis=1)[starts < ends]
    return intervals
