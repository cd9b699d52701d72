"""DeepSpeed's `cpu_checkpointing`: the inputs of checkpointed layers wait in host memory for backward.

From 0.19.6 (`activation_checkpointing/offload_activations.py`) copies run on a stream of their own, through
pinned memory, and the newest input stays on the GPU; before, both copies block and are not pinned.
"""

from __future__ import annotations

from zsim.plan.builder import COMPUTE
from zsim.plan.parts.host_side import HostSide
from zsim.plan.step import CHECKPOINT
from zsim.plan.workload.workload import Segment
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

_STREAM = "checkpoints"


class CheckpointsInHostMemory:
    """Called around segments; does nothing without `cpu_checkpointing`."""

    def __init__(self, host: HostSide, config: DeepSpeedConfig) -> None:
        self.host = host
        self.is_on = config.activation_checkpointing.cpu_checkpointing
        self.is_asynchronous = config.release.copies_checkpoints_on_a_stream
        self._newest: Segment | None = None
        self._away: set[str] = set()

    def save(self, segment: Segment) -> None:
        """After a segment's forward."""
        if not self.is_on or not segment.is_checkpointed:
            return
        if not self.is_asynchronous:
            self._send(segment)
            return
        if self._newest is not None:
            self._send(self._newest)
        self._newest = segment

    def _send(self, segment: Segment) -> None:
        builder, size = self.host.builder, segment.checkpoint_bytes
        builder.allocate("activations", size, "host", is_pinned=self.is_asynchronous)
        self._away.add(segment.name)
        stream = COMPUTE
        if self.is_asynchronous:
            stream = _STREAM
            builder.wait_stream(_STREAM, COMPUTE)
        event = self.host.copy(
            f"checkpoint of {segment.name}", "d2h", size, stream,
            is_pinned=self.is_asynchronous, module=segment.name,
        )  # fmt: skip
        assert event is not None
        if self.is_asynchronous:
            builder.free_when_done("activations", size, event, owner=segment.name + CHECKPOINT)
        else:
            builder.host(f"copied checkpoint of {segment.name}")
            builder.free("activations", size, owner=segment.name + CHECKPOINT)

    def restore(self, segment: Segment) -> None:
        """Before a segment is computed again."""
        if segment.name not in self._away:
            if self._newest is not None and self._newest.name == segment.name:
                self._newest = None
            return
        builder, size = self.host.builder, segment.checkpoint_bytes
        builder.allocate("activations", size, owner=segment.name + CHECKPOINT)
        stream = _STREAM if self.is_asynchronous else COMPUTE
        event = self.host.copy(
            f"checkpoint of {segment.name}", "h2d", size, stream,
            is_pinned=self.is_asynchronous, module=segment.name,
        )  # fmt: skip
        builder.stream_wait(COMPUTE, event)

    def drop(self, segment: Segment) -> None:
        """After a segment's backward."""
        if segment.name in self._away:
            self._away.remove(segment.name)
            size, pinned = segment.checkpoint_bytes, self.is_asynchronous
            self.host.builder.free("activations", size, "host", is_pinned=pinned)

    def finish(self) -> None:
        assert not self._away, f"checkpoints left in host memory: {sorted(self._away)}"
