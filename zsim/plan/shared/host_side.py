"""Offloaded work of a host program: copies over PCIe, work on the CPU, drive reads and writes.

Copies run on the stream that issues them, as in CUDA. CPU work blocks the host thread that does it. Drive I/O
is asynchronous until the host waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.update import OptimizerImplementation, update_bytes
from zsim.cost.rates.offload import cast_bytes, scale_bytes
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Copy, DriveIo, HostWork

CPU, READ, WRITE = "cpu", "nvme_read", "nvme_write"


@dataclass(frozen=True, slots=True)
class DriveAccess:
    """How a framework reads and writes the drives: the settings of every `DriveIo`."""

    block_bytes: int
    queue_depth: int
    threads: int


class HostSide:
    """Issues offloaded work to a plan. If `runs_in_other_thread`, CPU work is done by another thread, and the
    issuing thread does not wait for it.
    """

    def __init__(
        self, builder: PlanBuilder, drives: DriveAccess | None = None, *, runs_in_other_thread: bool = False
    ) -> None:
        self.builder = builder
        self.drives = drives
        self.runs_in_other_thread = runs_in_other_thread

    def copy(
        self,
        name: str,
        direction: Literal["h2d", "d2h"],
        size: int,
        stream: str,
        *,
        is_pinned: bool = True,
        is_blocking: bool = False,
        module: str = "",
    ) -> int | None:
        """Copy `size` bytes on `stream` and return the copy's event. The host waits if the copy is blocking
        or not pinned.
        """
        if size <= 0:
            return self.builder.record(stream)
        event = self.builder.copy(name, Copy(direction, size, is_pinned), stream=stream, module=module)
        if is_blocking or not is_pinned:
            self.builder.host_wait(event)
        return event

    def _work(self, name: str, work: HostWork) -> int | None:
        """Issue CPU work and return its event (None without work). The host waits for it unless another
        thread does it.
        """
        if work.bytes <= 0:
            return None
        event = self.builder.add(name, CPU, work)
        if not self.runs_in_other_thread:
            self.builder.host_wait(event)
        return event

    def scale(self, name: str, numel: int, dtype: str = "fp32") -> int | None:
        """Multiply values in place."""
        return self._work(name, HostWork("copy", scale_bytes(numel, dtype), numel))

    def fill(self, name: str, size: int) -> int | None:
        """Write `size` bytes of host memory."""
        return self._work(name, HostWork("copy", size))

    def cast(self, name: str, numel: int, from_dtype: str, to_dtype: str) -> int | None:
        """Copy `numel` elements from one type to another."""
        return self._work(name, HostWork("copy", cast_bytes(numel, from_dtype, to_dtype), numel))

    def optimizer(
        self,
        name: str,
        numel: int,
        optimizer: str,
        implementation: OptimizerImplementation = "fused",
        dtype: str = "fp32",
        state_dtype: str | None = None,
    ) -> int | None:
        """The update on the CPU of weights whose gradients are of their `dtype`. States are too, as torch's
        optimizers have them, without a `state_dtype`. DeepSpeed's CPU-Adam is as fused as torch's.
        """
        size = update_bytes(numel, optimizer, implementation, dtype, state_dtype or dtype, dtype)
        return self._work(name, HostWork("optimizer", size, numel))

    def read(self, name: str, size: int, *, module: str = "", is_direct: bool = False) -> int | None:
        """Start reading `size` bytes and return the event to wait for."""
        return self._io(name, "read", size, module, is_direct=is_direct)

    def write(self, name: str, size: int, *, module: str = "") -> int | None:
        """Start writing `size` bytes and return the event to wait for."""
        return self._io(name, "write", size, module)

    def _io(
        self,
        name: str,
        direction: Literal["read", "write"],
        size: int,
        module: str,
        *,
        is_direct: bool = False,
    ) -> int | None:
        if size <= 0:
            return None
        drives = self.drives
        assert drives is not None
        work = DriveIo(direction, size, drives.block_bytes, drives.queue_depth, drives.threads, is_direct)
        return self.builder.add(name, READ if direction == "read" else WRITE, work, module=module)

    def wait(self, event: int | None, name: str) -> None:
        """Make the host wait for `event`."""
        if event is not None:
            self.builder.host_wait(event)
            self.builder.host(name)
