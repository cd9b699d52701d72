"""DeepSpeed's swapper of optimizer states: read a sub-group, update it on the CPU, write it back.

Transcribed from DeepSpeed 0.19.8 `swap_tensor/partitioned_optimizer_swapper.py`,
`pipelined_optimizer_swapper.py` and `async_swapper.py`. All pinned buffers are as large as the largest
sub-group. A sub-group takes one buffer per state and one for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zsim.errors import InputError
from zsim.frameworks.deepspeed.drive_files import aligned_numel, swap_floor_bytes
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide


@dataclass(frozen=True, slots=True)
class SwappedGroup:
    """A sub-group on NVMe."""

    number: int
    numel: int
    """Elements per state."""
    aligned_numel: int
    swapped_numel: int
    """Elements of its gradients that are on NVMe too."""
    loose_numel: int
    """Elements of its gradients (pieces below the floor, and remainders of alignment) that stay on the GPU
    until the step.
    """


@dataclass(frozen=True, slots=True)
class _Read:
    group: int
    event: int | None


class StateSwapper:
    """The pinned buffers, and the reads and writes in flight."""

    def __init__(
        self, host: HostSide, groups: Sequence[SwappedGroup], config: DeepSpeedConfig, num_states: int
    ) -> None:
        offload = config.zero.offload_optimizer
        assert offload is not None
        self.host, self.config, self.offload = host, config, offload
        self.groups = {group.number: group for group in groups}
        self.num_states = num_states
        self.largest = max(group.aligned_numel for group in groups)
        self._next_group = {group.number: next_group.number for group, next_group in pairwise(groups)}
        self._num_free = offload.buffer_count
        self._pending_read: _Read | None = None
        self._pending_write: int | None = None  # event of a write that the host has not waited for
        self._is_pipelined = offload.pipeline_read or offload.pipeline_write
        self._filled = 0  # elements in the buffer that collects gradients
        self._is_filling = False
        self._num_written = 0  # buffers of gradients being written
        self._writes: list[int] = []

    def memory(self, element_bytes: int) -> list[Memory]:
        """The states and gradients on NVMe, and the pinned buffers in host memory."""
        states = sum(group.aligned_numel for group in self.groups.values()) * self.num_states
        gradients = sum(group.swapped_numel for group in self.groups.values())
        return [
            Memory("optimizer_states", states * element_bytes, "nvme"),
            Memory("gradients", gradients * element_bytes, "nvme"),
            Memory(
                "buffers", self.offload.buffer_count * self.largest * element_bytes, "host", is_pinned=True
            ),
        ]

    # -- gradients, in backward -------------------------------------------------------------------------

    def write_gradient(self, numel: int, name: str) -> None:
        """Account for a piece that is copied into the current buffer. A full buffer is written, and if no
        buffer is left the host waits for all writes.
        """
        if self._is_filling and self._filled + numel > self.largest:
            self._submit(name)
            if self._num_written == self.offload.buffer_count:
                self._finish_writes()
        self._is_filling = True
        self._filled += numel

    def _submit(self, name: str) -> None:
        event = self.host.write(f"write gradients up to {name}", 4 * self._filled)
        if event is not None:
            self._writes.append(event)
        self._num_written += 1
        self._filled, self._is_filling = 0, False

    def _finish_writes(self) -> None:
        for event in self._writes:
            self.host.builder.host_wait(event)
        self._writes, self._num_written = [], 0
        self.host.builder.host("wait for gradient writes")

    def flush_gradients(self) -> None:
        """Write the last buffer and wait for all writes, before the first sub-group is read."""
        if self._is_filling:
            self._submit("the last")
        if self._num_written:
            self._finish_writes()

    # -- states, in the step ----------------------------------------------------------------------------

    def read(self, number: int) -> None:
        """Read a sub-group and wait for it. With `pipeline_read`, start to read the next sub-group."""
        self.flush_gradients()
        group = self.groups[number]
        if self._pending_read is not None:
            assert self._pending_read.group == number
            read, self._pending_read = self._pending_read, None
        else:
            read = self._start_read(group)
        self.host.wait(read.event, f"wait for states of sub-group {number}")
        if not self._is_pipelined and group.swapped_numel:
            event = self.host.read(f"read gradients of sub-group {number}", 4 * group.swapped_numel)
            self.host.wait(event, f"wait for gradients of sub-group {number}")
        next_group = self._next_group.get(number)
        if self.offload.pipeline_read and next_group is not None:
            self._pending_read = self._start_read(self.groups[next_group])

    def _start_read(self, group: SwappedGroup) -> _Read:
        num_needed = self.num_states + 1
        if num_needed > self._num_free:
            num_used = self.offload.buffer_count - self._num_free
            raise InputError(
                f"{self.config.name}: zero_optimization.offload_optimizer.buffer_count: found "
                f"{self.offload.buffer_count}, but sub-group {group.number} needs {num_needed} buffers while "
                f"{num_used} are taken; expected at least {num_used + num_needed}"
            )
        self._num_free -= num_needed
        size = 4 * group.aligned_numel * self.num_states
        if self._is_pipelined:
            size += 4 * group.swapped_numel
        return _Read(group.number, self.host.read(f"read states of sub-group {group.number}", size))

    def write(self, number: int) -> None:
        """Write the states back and wait, unless `pipeline_write` lets the next sub-group start meanwhile."""
        group = self.groups[number]
        if self._pending_write is not None:
            self.host.wait(self._pending_write, "wait for the write before")
            self._pending_write = None
            self._num_free += self.num_states + 1
        size = 4 * group.aligned_numel * self.num_states
        event = self.host.write(f"write states of sub-group {number}", size)
        if self.offload.pipeline_write and number in self._next_group:
            self._pending_write = event
            return
        self.host.wait(event, f"wait for write of sub-group {number}")
        self._num_free += self.num_states + 1


def swapped_group(number: int, shard_numels: Sequence[int], config: DeepSpeedConfig) -> SwappedGroup | None:
    """The sub-group on NVMe. None if it is below the swap floor and stays in host memory."""
    numel, floor = sum(shard_numels), swap_floor_bytes(config.aio)
    if 4 * numel < floor:
        return None
    alignment = aligned_numel(1, 4, config.aio)
    swapped = sum(shard // alignment * alignment for shard in shard_numels if 4 * shard >= floor)
    return SwappedGroup(number, numel, aligned_numel(numel, 4, config.aio), swapped, numel - swapped)
