"""The trace of a step, simulated or recorded: spans on streams, and memory over time.

A span is an entry in four arrays (rank, info, start, end). Ops are described once per unique op in `infos`,
so a trace of a thousand ranks stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np

from zsim.arrays import Bools, Floats, Ints
from zsim.extras import require
from zsim.memo import Memo

if TYPE_CHECKING:
    import pandas


COLLECTIVES = frozenset(
    {
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather",
        "scatter", "send", "recv", "send_recv",
    }
)  # fmt: skip


Item = TypeVar("Item")


class SpanInfo(NamedTuple):
    """Description of an op."""

    name: str
    kind: str
    stream: str
    """"" if none was recorded: gloo has no streams."""
    bytes: int = 0
    """The full tensor as in `Collective.bytes` for collectives, moved bytes for copies, else 0."""
    dtype: str = ""
    group: str = ""
    group_size: int = 1
    phase: str = ""
    module: str = ""
    flops: float = 0.0
    hbm_bytes: float = 0.0
    messages: tuple[tuple[str, int, int], ...] = ()
    """For a call that sends and receives, each message's direction, bytes and the distance in its group to
    the other side, or () if not recorded.
    """


class _Shared(tuple[Item, ...], Memo):
    """A tuple that traces of one plan share, and with it the cache of `memoize`."""

    def __new__(cls, items: Iterable[Item] = ()) -> Self:
        instance = super().__new__(cls, items)
        instance._derived = {}
        return instance

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[Item, ...]]]:
        return type(self), (tuple(self),)


class SpanInfos(_Shared[SpanInfo]):
    """The unique ops of a trace."""


class Labels(_Shared[str]):
    """A word for each change of memory."""


def kind_mask(infos: SpanInfos, kinds: frozenset[str]) -> Bools:
    """Whether each op is of one of `kinds`, for `SpanInfos.memoize`."""
    return np.array([info.kind in kinds for info in infos], dtype=bool)


@dataclass(frozen=True)
class MemoryEvents:
    """Changes of memory in the order in which they happened: bytes of `category` on `device` of a rank."""

    ranks: Ints
    host_seconds: Floats
    """When the host made the change (as the allocator sees it)."""
    stream_seconds: Floats
    """When the compute stream reached that point of the program (as a timeline shows it)."""
    devices: tuple[str, ...]
    categories: tuple[str, ...]
    deltas: Ints
    names: tuple[str, ...] = ()
    """The op of each event. Empty if not known."""

    def clip(self, start: float, end: float) -> MemoryEvents:
        """The changes from `start` to `end`, on a clock that begins at `start`. Earlier changes are moved to
        `start`.
        """
        rows = [i for i, seconds in enumerate(self.stream_seconds.tolist()) if seconds <= end]
        host = np.maximum(self.host_seconds[rows], start) - start
        stream = np.maximum(self.stream_seconds[rows], start) - start
        return MemoryEvents(
            ranks=self.ranks[rows],
            host_seconds=host,
            stream_seconds=stream,
            devices=tuple(self.devices[i] for i in rows),
            categories=tuple(self.categories[i] for i in rows),
            deltas=self.deltas[rows],
            names=tuple(self.names[i] for i in rows) if self.names else (),
        )


def concatenate_memory(events_per_rank: Sequence[MemoryEvents]) -> MemoryEvents:
    """The changes of several ranks, concatenated rank by rank."""
    return MemoryEvents(
        ranks=np.concatenate([part.ranks for part in events_per_rank]),
        host_seconds=np.concatenate([part.host_seconds for part in events_per_rank]),
        stream_seconds=np.concatenate([part.stream_seconds for part in events_per_rank]),
        devices=tuple(device for part in events_per_rank for device in part.devices),
        categories=tuple(category for part in events_per_rank for category in part.categories),
        deltas=np.concatenate([part.deltas for part in events_per_rank]),
        names=tuple(name for part in events_per_rank for name in part.names),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded step.

    A rank's step begins with the host's part of it or, if later, when the last span of its step before ended.
    It ends with its last span or, if later, with the host's part.
    """

    number: int
    start_seconds: float
    """When the first rank began it."""
    end_seconds: float
    """When the last rank ended it."""
    seconds: float
    """Its duration on the slowest rank."""
    bounds: Mapping[int, tuple[float, float, float, float]] = field(default_factory=dict)
    """Per rank, (start, end) of the step and (start, end) of the host's part."""

    def seconds_of(self, rank: int) -> float:
        """Duration of the step on one rank, or on the slowest if that is not known."""
        if rank not in self.bounds:
            return self.seconds
        start, end, *_ = self.bounds[rank]
        return end - start

    def slowest_rank(self) -> int:
        """The rank whose step took `seconds`, or -1 if not known."""
        return max(self.bounds, key=self.seconds_of, default=-1)

    def shift(self, seconds: float) -> Step:
        """The same step on a clock that is `seconds` ahead."""
        bounds = {rank: (a + seconds, b + seconds, c + seconds, d + seconds)
                  for rank, (a, b, c, d) in self.bounds.items()}  # fmt: skip
        return Step(
            self.number, self.start_seconds + seconds, self.end_seconds + seconds, self.seconds, bounds
        )


@dataclass(frozen=True)
class Trace:
    """All spans of one step, or of the complete steps of a recording.

    Arrays have one entry per span. `typical_step()` of a recording compares with a simulated step.
    """

    source: Literal["simulated", "recorded"]
    infos: SpanInfos
    ranks: Ints
    info_indices: Ints
    """Indices into `infos`."""
    issue_seconds: Floats
    """When the host enqueued the span. NaN if unknown."""
    start_seconds: Floats
    end_seconds: Floats
    world_size: int
    step_seconds: float
    """The duration of the typical step, in a recording."""
    memory: MemoryEvents | None = None
    host_blocks: tuple[
        tuple[int, float, float, int], ...
    ] = ()  # rank, start, end, info of what it waited for
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the source (model, cluster, framework, world size)."""
    steps: tuple[Step, ...] = ()
    """The steps of a recording."""
    step_numbers: Ints | None = None
    """The step of each span of a recording."""
    transfer_seconds: Floats | None = None
    """A collective's time without the wait for the slowest rank, in a recording. NaN for other spans."""
    follows_wait: Bools | None = None
    """The host made a stream wait for another stream between the previous launch and the span's."""
    begins: Mapping[int, float] = field(default_factory=dict)
    """When ranks began the step, for ranks that did not begin at 0."""
    allocator_blocks: tuple[tuple[int, float, float], ...] = ()  # rank, start, end
    """The times in which a simulated host was in torch's allocator, which had run short. Traces that zsim
    wrote have it too.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.infos, SpanInfos):  # a plain tuple, of a trace made elsewhere
            object.__setattr__(self, "infos", SpanInfos(self.infos))

    def __len__(self) -> int:
        return len(self.ranks)

    def is_of(self, kinds: frozenset[str]) -> Bools:
        """Whether each span is of one of `kinds`."""
        return self.infos.memoize(kind_mask, kinds)[self.info_indices]

    def calls(self, rank: int | None = None) -> Ints:
        """The collectives (of `rank`) by the time the host issued them, or their start where that is
        unknown."""
        is_call = self.is_of(COLLECTIVES)
        spans = np.flatnonzero(is_call if rank is None else is_call & (self.ranks == rank))
        issued = np.where(np.isnan(self.issue_seconds), self.start_seconds, self.issue_seconds)
        return spans[np.argsort(issued[spans], kind="stable")]

    def select_rank(self, rank: int) -> Trace:
        """The trace with the spans of one rank only."""
        blocks = tuple(block for block in self.host_blocks if block[0] == rank)
        allocator_blocks = tuple(block for block in self.allocator_blocks if block[0] == rank)
        return self.select_spans(self.ranks == rank, host_blocks=blocks, allocator_blocks=allocator_blocks)

    def select_step(self, number: int) -> Trace:
        """One step of a recording as a separate trace, whose clock starts with the step.

        Raises KeyError for a step that was not recorded.
        """
        step = next((step for step in self.steps if step.number == number), None)
        if step is None or self.step_numbers is None:
            raise KeyError(f"step {number}; recorded are {[step.number for step in self.steps]}")
        zero, end = step.start_seconds, step.end_seconds
        begins = {rank: start - zero for rank, (start, *_) in step.bounds.items() if start > zero}
        only = self.select_spans(self.step_numbers == number)
        return replace(
            only,
            issue_seconds=only.issue_seconds - zero,
            start_seconds=only.start_seconds - zero,
            end_seconds=only.end_seconds - zero,
            step_seconds=step.seconds,
            steps=(step.shift(-zero),),
            memory=self.memory.clip(zero, end) if self.memory else None,
            host_blocks=tuple(
                (rank, max(start, zero) - zero, min(stop, end) - zero, info)
                for rank, start, stop, info in self.host_blocks
                if stop > zero and start < end
            ),
            allocator_blocks=tuple(
                (rank, max(start, zero) - zero, min(stop, end) - zero)
                for rank, start, stop in self.allocator_blocks
                if stop > zero and start < end
            ),
            begins=begins,
        )

    def typical_step(self) -> Trace:
        """The recorded step of median length (the shorter of two). A simulated trace returns itself."""
        if not self.steps:
            return self
        by_length = sorted(self.steps, key=lambda step: (step.seconds, step.number))
        return self.select_step(by_length[(len(by_length) - 1) // 2].number)

    def select_spans(self, keep: Bools, **changes: Any) -> Trace:
        """The trace with the spans that `keep` marks, and other fields changed as in `changes`."""
        return replace(
            self,
            ranks=self.ranks[keep],
            info_indices=self.info_indices[keep],
            issue_seconds=self.issue_seconds[keep],
            start_seconds=self.start_seconds[keep],
            end_seconds=self.end_seconds[keep],
            step_numbers=None if self.step_numbers is None else self.step_numbers[keep],
            transfer_seconds=None if self.transfer_seconds is None else self.transfer_seconds[keep],
            follows_wait=None if self.follows_wait is None else self.follows_wait[keep],
            **changes,
        )

    def rank_view(self, rank: int) -> Trace:
        """The spans of one rank, on a clock that starts when the rank began the step."""
        rank_trace, begin = self.select_rank(rank), self.begins.get(rank, 0.0)
        if begin == 0.0:
            return rank_trace
        return replace(
            rank_trace,
            issue_seconds=rank_trace.issue_seconds - begin,
            start_seconds=rank_trace.start_seconds - begin,
            end_seconds=rank_trace.end_seconds - begin,
            host_blocks=tuple(
                (r, start - begin, end - begin, op) for r, start, end, op in rank_trace.host_blocks
            ),
            allocator_blocks=tuple(
                (r, start - begin, end - begin) for r, start, end in rank_trace.allocator_blocks
            ),
            begins={},
        )

    def rows(self) -> Iterator[tuple[int, SpanInfo, float, float]]:
        """(rank, info, start, end) of each span, in array order."""
        for rank, index, start, end in zip(
            self.ranks.tolist(),
            self.info_indices.tolist(),
            self.start_seconds.tolist(),
            self.end_seconds.tolist(),
            strict=True,
        ):
            yield rank, self.infos[index], start, end

    def to_frame(self) -> pandas.DataFrame:
        """rank, stream, name, kind, start_seconds, end_seconds, bytes (and dtype, group, phase, module).

        Raises InputError where pandas is not installed.
        """
        require("pandas", "Trace.to_frame")
        import pandas

        infos = pandas.DataFrame(
            [(i.stream, i.name, i.kind, i.bytes, i.dtype, i.group, i.phase, i.module) for i in self.infos],
            columns=["stream", "name", "kind", "bytes", "dtype", "group", "phase", "module"],
        )
        frame = infos.iloc[self.info_indices].reset_index(drop=True)
        frame.insert(0, "rank", self.ranks)
        frame.insert(4, "start_seconds", self.start_seconds)
        frame.insert(5, "end_seconds", self.end_seconds)
        return frame


@dataclass(frozen=True, slots=True)
class SimulationStats:
    """The cost of simulating a step."""

    wall_seconds: float
    """Seconds of this process."""
    events: int
    """Events of the clock."""
    rank_classes: int
    """Simulated ranks, one per class."""
    world_size: int
    """The number of all ranks."""
    steps: int = 1
    """Drawn steps."""


DIRECTIONS = ("read", "write")


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes per second that a node's drives read and write from `seconds[i]` to `seconds[i + 1]`.

    They are 0 after the last time. A request counts with its mean rate.
    """

    seconds: Floats
    read: Floats
    write: Floats


def drive_rates(trace: Trace, rank: int) -> DriveRates | None:
    """The rates on the node of `rank`. None if nothing is read or written.

    `Trace.metadata["node_ranks"]` maps each traced rank to the traced ranks on its node, and these to the
    number of the node's ranks that each represents. Without it `rank` represents all ranks of its node.
    """
    rates = {kind: _changes(trace, members_of(trace, rank), f"nvme_{kind}") for kind in DIRECTIONS}
    times = np.unique(np.concatenate([changes[0] for changes in rates.values()]))
    if not len(times):
        return None
    levels = []
    for kind in DIRECTIONS:
        change_times, rate_changes = rates[kind]
        changes = np.zeros(len(times))
        np.add.at(changes, np.searchsorted(times, change_times), rate_changes)
        level = np.cumsum(changes)
        levels.append(np.where(level > 1e-9 * max(float(level.max(initial=0.0)), 1.0), level, 0.0))
    return DriveRates(times, *levels)


def members_of(trace: Trace, rank: int) -> Mapping[int, int]:
    """Traced ranks on the node of `rank` -> how many of the node's ranks each represents."""
    node_ranks = trace.metadata.get("node_ranks")
    if node_ranks is not None and rank in node_ranks:
        members: Mapping[int, int] = node_ranks[rank]
        return members
    return {rank: int(trace.metadata.get("gpus_per_node", 1))}


def _changes(trace: Trace, members: Mapping[int, int], kind: str) -> tuple[Floats, Floats]:
    """(times, changes of the rate in bytes per second)."""
    is_kind = np.array([info.kind == kind for info in trace.infos], dtype=bool)
    sizes = np.array([float(info.bytes) for info in trace.infos])
    span_indices = np.flatnonzero(is_kind[trace.info_indices] & np.isin(trace.ranks, list(members)))
    starts, ends = trace.start_seconds[span_indices], trace.end_seconds[span_indices]
    has_length = ends > starts
    span_indices, starts, ends = span_indices[has_length], starts[has_length], ends[has_length]
    counts = np.array([members[rank] for rank in trace.ranks[span_indices].tolist()], dtype=np.float64)
    rates = sizes[trace.info_indices[span_indices]] / (ends - starts) * counts
    return np.concatenate([starts, ends]), np.concatenate([rates, -rates])
