"""FSDP1's rate limiter (`limit_all_gathers`): how far the host may run ahead of the GPU.

# [Note: the free-event queue]
The host blocks before an all-gather when two or more freed flat parameters are queued, until the stream that
freed the oldest has come that far. The queue outlives the step: a step starts with what the step before left
in it, long done. So the queue is replayed once the step is written down, from the length at which it comes
back to itself. (In a plain step of blocks that is four, so that in forward block i waits for block i - 3.)
"""

from __future__ import annotations

from zsim.plan.ops import Op

_MAX_INFLIGHT_ALL_GATHERS = 2  # torch/distributed/fsdp/_limiter_utils.py
_STEPS_TO_STEADY = 8


class RateLimiter:
    """Collects frees and all-gathers in host order; see [Note: the free-event queue]."""

    def __init__(self) -> None:
        self._log: list[tuple[bool, int]] = []  # (True, event of a free) or (False, number of the next op)

    def freed(self, event: int) -> None:
        """A flat parameter is free once `event` has happened."""
        self._log.append((True, event))

    def before_all_gather(self, next_op: int) -> None:
        """The host may have to block before it issues op number `next_op`."""
        self._log.append((False, next_op))

    def apply(self, ops: list[Op]) -> None:
        """Put the host's waits into `ops`."""
        queue: list[int | None] = [None] * self._steady_length()
        for is_free, number in self._log:
            if is_free:
                queue.append(number)
            elif len(queue) >= _MAX_INFLIGHT_ALL_GATHERS:
                event = queue.pop(0)
                if event is not None:
                    ops[number] = ops[number]._replace(host_waits=(*ops[number].host_waits, event))

    def _steady_length(self) -> int:
        """Entries in the queue at the start of a step that leaves as many behind."""
        length = 0
        for _step in range(_STEPS_TO_STEADY):
            before = length
            for is_free, _number in self._log:
                if is_free:
                    length += 1
                elif length >= _MAX_INFLIGHT_ALL_GATHERS:
                    length -= 1
            if length == before:
                break
        return length
