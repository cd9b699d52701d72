"""The caching allocator as the host meets it: when it runs short, the host waits for the GPU.

Blocks that `record_stream` protects are not handed out again before their last use has ended on the GPU. An
allocation first collects those whose use has ended (`process_events`); if it still finds no room, the
allocator waits for *all* outstanding uses (`synchronize_and_free_events`, c10/cuda/CUDACachingAllocator.cpp,
torch 2.13) and tries again: `num_alloc_retries` in torch's memory statistics. What does not fit even then is
an out-of-memory error in torch; zsim notes it from the plan and simulates on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

Changes = Sequence[tuple[int, int]]  # (bytes, op that protects a freed block or -1), in the host's order


class ChangesOfOp:
    """What the host allocates and frees before one op: `need` bytes at most at once, `net` when all is done,
    without the blocks that stay `protected`, as (op, bytes)."""

    __slots__ = ("changes", "need", "net", "protected")

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        levels = list(accumulate(count for count, protector in changes if protector < 0))
        self.need = max(levels, default=0)
        self.net = levels[-1] if levels else 0
        self.protected = [(protector, -count) for count, protector in changes if protector >= 0]


class Allocator:
    """Free bytes of one GPU, and blocks that are free but still protected."""

    __slots__ = ("_changes", "_free", "_is_draining", "_last_op", "_position", "_protected", "num_retries")

    def __init__(self, free_bytes: int, changes: Mapping[int, ChangesOfOp]) -> None:
        self._free = free_bytes
        self._changes = changes
        self._protected: deque[tuple[int, int]] = deque()  # (op, bytes)
        self._position = 0
        self._last_op = -1
        self._is_draining = False
        self.num_retries = 0

    def advance(self, op: int, now: float, ended: Sequence[float]) -> int:
        """Make the changes before `op` is issued; -1, or an op that the host must first wait for.

        A host that then blocks on something else comes by once more: the changes are made once.
        """
        of_op = self._changes.get(op)
        if of_op is None or op == self._last_op:
            return -1
        if of_op.need <= self._free and not self._position:
            self._free -= of_op.net
            self._protected.extend(of_op.protected)
            self._is_draining = False
            self._last_op = op
            return -1
        changes = of_op.changes
        while self._position < len(changes):
            count, protector = changes[self._position]
            if count > self._free and self._protected:
                waits_for = self._collect(now, ended)
                if waits_for >= 0 and (self._is_draining or count > self._free):
                    self.num_retries += not self._is_draining
                    self._is_draining = True
                    return waits_for
            self._is_draining = False
            if protector >= 0:
                self._protected.append((protector, -count))
            else:
                self._free -= count
            self._position += 1
        self._position = 0
        self._last_op = op
        return -1

    def _collect(self, now: float, ended: Sequence[float]) -> int:
        """Take back blocks whose protecting op has ended by now; an op that has not, or -1."""
        kept: deque[tuple[int, int]] = deque()
        waits_for = -1
        for op, count in self._protected:
            end = ended[op]
            if end == end and end <= now:
                self._free += count
            else:
                kept.append((op, count))
                waits_for = op
        self._protected = kept
        return waits_for
