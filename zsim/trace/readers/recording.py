"""The recording of one rank, before ranks are joined: spans in nanoseconds of that rank's clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from zsim.errors import InputError
from zsim.trace.trace import SpanInfo

UNKNOWN = -1
_MAX_RANKS = 10**6
_MAX_BYTES = 2**62  # columns hold 64 bits
T = TypeVar("T")


@dataclass
class Recording:
    """One rank's spans, in the order in which the host issued them if that is known."""

    path: Path
    rank: int
    world_size: int
    backend: str = ""
    infos: list[SpanInfo] = field(default_factory=list)
    info_indices: array[int] = field(default_factory=lambda: array("q"))
    issue: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds, or UNKNOWN if not recorded."""
    start: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds."""
    end: array[int] = field(default_factory=lambda: array("q"))
    """Nanoseconds."""
    sequence: array[int] = field(default_factory=lambda: array("q"))
    """The backend's number of a collective in its group, else UNKNOWN."""
    follows_wait: array[int] = field(default_factory=lambda: array("q"))
    """The same as in `Trace`."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """The host's steps (number, start, end)."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """A group's name -> its ranks, as far as they are known."""
    memory: list[tuple[int, str, str, int, str]] = field(default_factory=list)
    """Rows (time, device, category, change of bytes, name)."""
    host_blocks: list[tuple[int, int, SpanInfo | None]] = field(default_factory=list)
    """(start, end, the span that the host waited for, if known)."""
    allocator_blocks: list[tuple[int, int]] = field(default_factory=list)
    """The same as in `Trace`, as (start, end)."""
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_timed: bool = True
    """Whether the ends of spans were recorded. A Flight Recorder without timing has only the times of
    issue.
    """
    clock_zero: int | None = None
    """The epoch's time at the clock's zero, if the clock is a machine's monotonic one."""
    _index_of: dict[SpanInfo, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < _MAX_RANKS or not 1 <= self.world_size < _MAX_RANKS:
            raise InputError(
                f"{self.path}: says it is rank {self.rank} of {self.world_size}; expected ranks from 0 to "
                f"below {_MAX_RANKS:,}"
            )

    def __len__(self) -> int:
        return len(self.start)

    def add(
        self,
        info: SpanInfo,
        start: int,
        end: int,
        issue: int = UNKNOWN,
        sequence: int = UNKNOWN,
        follows_wait: bool = False,
    ) -> None:
        index = self._index_of.get(info)
        if index is None:
            if not 0 <= info.bytes < _MAX_BYTES:
                raise InputError(f"{self.path}: '{info.name[:60]}' is of {info.bytes:,} bytes")
            index = self._index_of[info] = len(self.infos)
            self.infos.append(info)
        self.info_indices.append(index)
        self.issue.append(issue)
        self.start.append(start)
        self.end.append(max(end, start))
        self.sequence.append(sequence)
        self.follows_wait.append(follows_wait)

    def info(self, span: int) -> SpanInfo:
        return self.infos[self.info_indices[span]]

    def sort(self) -> None:
        """Sort the spans by issue (by start if the issue is unknown)."""
        times = [s if i == UNKNOWN else i for s, i in zip(self.start, self.issue, strict=True)]
        order = sorted(range(len(self)), key=lambda span: (times[span], self.start[span]))
        for name in ("info_indices", "issue", "start", "end", "sequence", "follows_wait"):
            values = getattr(self, name)
            setattr(self, name, array("q", [values[span] for span in order]))


class Ranges(Generic[T]):
    """Properly nested ranges of one thread. Finds those that contain a time."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, T]] = []
        self._is_sorted = True
        self._stack: list[int] = []
        self._next_row = 0
        self._last_moment = -(2**62)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, start: int, end: int, payload: T) -> None:
        self._rows.append((start, -end, payload))
        self._is_sorted = False

    def containing(self, moment: int) -> list[T]:
        """The ranges that contain `moment`, the innermost last. To be called in the order of time."""
        if not self._is_sorted or moment < self._last_moment:
            self._rows.sort(key=lambda row: row[:2])
            self._is_sorted, self._stack, self._next_row = True, [], 0
        self._last_moment = moment
        rows, stack = self._rows, self._stack
        while self._next_row < len(rows) and rows[self._next_row][0] <= moment:
            while stack and -rows[stack[-1]][1] <= rows[self._next_row][0]:
                stack.pop()
            stack.append(self._next_row)
            self._next_row += 1
        while stack and -rows[stack[-1]][1] < moment:
            stack.pop()
        return [rows[row][2] for row in stack if -rows[row][1] >= moment]
