"""When ZeRO-3 fetches and releases parameters.

The logic of DeepSpeed 0.19.8's `partitioned_param_coordinator.py`, with a complete trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np

from zsim.arrays import Ints
from zsim.frameworks.deepspeed.settings.config import ZeroConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace
from zsim.frameworks.deepspeed.stage3.parameter_store import ParameterStore
from zsim.plan.hooks import BlockPosition


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parameters gathered by one call, in registration order, among the ranks of `group`."""

    parameters: tuple[int, ...]
    group: str


class Coordinator:
    """State of one micro-batch: the available parameters, and the remaining fetch queue. Parameters are
    sharded over the ranks of `group`, and `store` holds their shards.
    """

    def __init__(self, trace: FetchTrace, zero: ZeroConfig, store: ParameterStore, group: str) -> None:
        self.trace, self.store, self.group = trace, store, group
        self._prefetch_bucket = zero.prefetch_bucket_size
        self._max_live = zero.max_live_parameters
        self._reuse_distance = zero.max_reuse_distance
        self._numels = [parameter.numel for parameter in trace.parameters]
        self._is_persistent = [parameter.is_persistent for parameter in trace.parameters]
        self._is_available = list(self._is_persistent)
        self._live: set[int] = set()  # those that are available and not persistent
        self._queue = [(number, step) for step, numbers in enumerate(trace.steps) for number in numbers]
        self._first_entry = list(accumulate(map(len, trace.steps), initial=0))  # by step
        self.reset_step()

    def reset_step(self) -> None:
        """Start a new forward, with a full fetch queue."""
        self._position = 0
        self._step = 0
        self._live_numel = 0
        self._fetched_for = [-1] * len(self._numels)  # by parameter, the last step it was fetched for

    def fetch(self, numbers: Sequence[int]) -> Fetch | None:
        """The parameters among `numbers` that are not fetched yet, or None if all are."""
        missing = tuple([number for number in sorted(numbers) if not self._is_available[number]])
        for number in missing:
            self._is_available[number] = True
            self._live.add(number)
            self._live_numel += self._numels[number]
        return Fetch(missing, self.group) if missing else None

    def prefetch(self, needed: Sequence[int]) -> Fetch | None:
        """Pop the parameters that the unit needs off the fetch queue, then fetch parameters of coming units
        within the budget, which the last may exceed. Ends the unit's step of the trace."""
        if needed:
            self._pop(needed)
        upcoming: list[int] = []
        if self._prefetch_bucket > 0:
            queue, fetched_for, position = self._queue, self._fetched_for, self._position
            budget = min(self._max_live - self._live_numel, self._prefetch_bucket)
            numel, end, is_on_gpu = 0, len(queue), self.store.is_on_gpu
            while position < end and numel < budget:
                number, step = queue[position]
                if not is_on_gpu and self.store.needs_read(number):
                    break  # to keep the order of fetches
                position += 1
                if step > fetched_for[number]:
                    fetched_for[number] = step
                if not self._is_available[number] and number not in upcoming:
                    upcoming.append(number)
                    numel += self._numels[number]
            self._position = position
        self._step += 1
        return self.fetch(upcoming) if upcoming else None

    def _pop(self, needed: Sequence[int]) -> None:
        """Pop the parameters of this step off the fetch queue, unless they were popped to be prefetched."""
        needed_now = {number for number in needed if self._fetched_for[number] < self._step}
        popped: set[int] = set()
        while self._position < len(self._queue) and len(popped) < len(needed_now):
            number, step = self._queue[self._position]
            self._position += 1
            self._fetched_for[number] = step
            popped.add(number)
        assert popped == needed_now, (
            f"step {self._step}: the trace has {popped}, the module needs {needed_now}"
        )

    def upcoming(self) -> Iterator[int]:
        """The parameters left in the fetch queue, in order."""
        for position in range(self._position, len(self._queue)):
            yield self._queue[position][0]

    @property
    def step(self) -> int:
        """The steps of the trace that have begun."""
        return self._step

    def release(self, step: int) -> list[int]:
        """The parameters to free now of the unit that was entered as the `step`-th: not persistent, not
        fetched for a later step, not used again within the reuse distance, not in use by the model itself.
        """
        trace = self.trace
        released = []
        for index, number in enumerate(trace.steps[step - 1]):
            if self._is_persistent[number] or self._fetched_for[number] > step:
                continue
            next_step = trace.next_use[step - 1][index]
            if self._is_available[number] and not self._is_kept(step - 1, next_step, number):
                self._drop(number)
                released.append(number)
        return released

    def _is_kept(self, step: int, next_step: int, number: int) -> bool:
        """Whether a parameter of a step is used again soon, at `next_step`, or by the model."""
        trace = self.trace
        is_soon = (
            next_step < len(trace.steps)
            and trace.traversed[next_step] - trace.traversed[step + 1] < self._reuse_distance
        )
        return is_soon or number in trace.external

    def _drop(self, number: int) -> None:
        self._is_available[number] = False
        self._live.discard(number)
        self._live_numel -= self._numels[number]

    def release_external(self) -> list[int]:
        """The parameters to free that the model itself has held since the start of its forward."""
        released = [number for number in self.trace.external if self._is_available[number]]
        released = [number for number in released if not self.trace.parameters[number].is_persistent]
        for number in released:
            self._drop(number)
        return released

    def release_persistent(self) -> None:
        """Release the persistent parameters too, which the next forward fetches."""
        for number, is_persistent in enumerate(self._is_persistent):
            if is_persistent:
                self._drop(number)

    # -- blocks as copies, see zsim.plan.hooks ------------------------------------------------------------

    def block_position(self, first: int, other_state: object) -> BlockPosition:
        """The position before a block whose first parameter is `first`. The next entry of the queue
        determines the steps that parameters were fetched for. `other_state` is the state outside of the
        coordinator.
        """
        queue_lead = self._position - self._first_entry[self._step]
        live = sorted([number - first for number in self._live])
        return BlockPosition(
            (queue_lead, self._live_numel, live, other_state), first, self._step, self._position
        )

    def repeat_count(self, before: BlockPosition, now: BlockPosition) -> int:
        """The repeat count of a block (see zsim.plan.hooks), as far as the steps and the entries of the queue
        are those of the block before.
        """
        period, shift, step = now.step - before.step, now.parameter - before.parameter, now.step
        first_unseen_step = max(step, self._queue[now.entry - 1][1] + 1) if now.entry else step
        entry, (lengths, numbers, kinds, step_of) = self._first_entry[step], self._entries
        block_entries = entry - self._first_entry[step - period]
        if block_entries == 0:
            return 0
        differs = (numbers[entry:] != numbers[entry - block_entries : -block_entries] + shift) | (
            kinds[entry:] != kinds[entry - block_entries : -block_entries]
        )
        has_other_length = lengths[step:] != lengths[step - period : -period]
        ends = *(step + np.flatnonzero(has_other_length)[:1]), *step_of[entry:][differs][:1], len(lengths)
        return max(0, int(min(ends)) - first_unseen_step) // period

    @cached_property
    def _entries(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The entries of each step (their number), and for each entry its parameter, its kind, and its step.
        Parameters that differ only in their names and are kept in the same way have the same kind.
        """
        trace, count = self.trace, len(self._queue)
        lengths = np.fromiter(map(len, trace.steps), np.int64, len(trace.steps))
        step_of = np.repeat(np.arange(len(lengths)), lengths)
        numbers = np.fromiter(chain.from_iterable(trace.steps), np.int64, count)
        next_steps = np.fromiter(chain.from_iterable(trace.next_use), np.int64, count)
        kept_flags = np.fromiter(
            map(self._is_kept, step_of.tolist(), next_steps.tolist(), numbers.tolist()), bool, count
        )
        kinds: dict[tuple[object, ...], int] = {}
        parameter_kinds = [
            kinds.setdefault(
                (
                    parameter.shape,
                    parameter.numel,
                    parameter.is_persistent,
                    parameter.is_trained,
                    parameter.belongs_to,
                ),
                len(kinds),
            )
            for parameter in trace.parameters
        ]
        return lengths, numbers, 2 * np.array(parameter_kinds)[numbers] + kept_flags, step_of

    def skip(self, before: BlockPosition, now: BlockPosition, count: int) -> None:
        """`Hooks.skip`."""
        entry = now.entry + count * (now.entry - before.entry)
        for number, step in self._queue[now.entry : entry]:
            self._fetched_for[number] = step
        self._position, self._step = entry, now.step + count * (now.step - before.step)
        for number in self._live:
            self._is_available[number] = False
        self._live = {number + count * (now.parameter - before.parameter) for number in self._live}
        for number in self._live:
            self._is_available[number] = True
