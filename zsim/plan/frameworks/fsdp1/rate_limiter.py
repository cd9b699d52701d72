"""FSDP1's rate limiter (`limit_all_gathers`), which bounds how far the host runs ahead of the GPU.

# [Note: the free-event queue]
The host blocks before an all-gather when two or more freed flat parameters are queued, until the event of the
oldest free has happened. The queue outlives the step: a step starts with the events that the previous step
left, all long past. So the queue is replayed after the step is issued, from the length that a step leaves
unchanged. (In a plain step of blocks that is four, so that in forward block i waits for block i - 3.)
"""

from __future__ import annotations

from zsim.plan.ops import Op

_MAX_INFLIGHT_ALL_GATHERS = 2  # torch/distributed/fsdp/_limiter_utils.py
_STEPS_TO_STEADY = 8


class RateLimiter:
    """Collects frees and all-gathers in host order. See [Note: the free-event queue]."""

    def __init__(self) -> None:
        self._log: list[tuple[bool, int]] = []  # (True, event of a free) or (False, number of the next op)

    def log_free(self, event: int) -> None:
        """Log that a flat parameter is free once `event` has happened."""
        self._log.append((True, event))

    def log_all_gather(self, next_op: int) -> None:
        """Log that the host may have to block before it issues op number `next_op`."""
        self._log.append((False, next_op))

    def apply(self, ops: list[Op]) -> None:
        """Add the host's waits to `ops`."""
        queue: list[int | None] = [None] * self._steady_length()
        for is_free, number in self._log:
            if is_free:
                queue.append(number)
            elif len(queue) >= _MAX_INFLIGHT_ALL_GATHERS:
                event = queue.pop(0)
                if event is not None:
                    ops[number] = ops[number]._replace(host_waits=(*ops[number].host_waits, event))

    def _steady_length(self) -> int:
        """The length of the queue at the start of a step that ends with the same length."""
        length = 0
        for _step in range(_STEPS_TO_STEADY):
            initial_length = length
            for is_free, _number in self._log:
                if is_free:
                    length += 1
                elif length >= _MAX_INFLIGHT_ALL_GATHERS:
                    length -= 1
            if length == initial_length:
                break
        return length
