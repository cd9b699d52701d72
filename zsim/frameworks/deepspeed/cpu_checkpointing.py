"""DeepSpeed's `cpu_checkpointing`: the inputs of checkpointed layers stay in host memory until backward.

From 0.19.6 (`activation_checkpointing/offload_activations.py`) copies run on a separate stream, to and from
pinned memory, and the newest input stays on the GPU. In earlier releases both copies are pageable and block
the host.
"""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE
from zsim.plan.shared.host_side import HostSide
from zsim.plan.walk import CHECKPOINT
from zsim.plan.workload.workload import Segment

_STREAM = "checkpoints"


class HostCheckpoints:
    """Offloads activation checkpoints. It is called around the segments of each micro-batch."""

    def __init__(self, host: HostSide, config: DeepSpeedConfig) -> None:
        self.host = host
        self.is_asynchronous = config.release.copies_checkpoints_on_a_stream
        self._newest: tuple[Segment, int] | None = None  # and its micro-batch
        self._offloaded: set[tuple[str, int]] = set()  # segments' names and micro-batches

    def save(self, segment: Segment) -> None:
        """Copy a segment's checkpoint to host memory, after its forward."""
        if not segment.is_checkpointed:
            return
        newest = segment, self.host.builder.micro_batch
        if not self.is_asynchronous:
            self._send(*newest)
            return
        if self._newest is not None:
            self._send(*self._newest)
        self._newest = newest

    def _send(self, segment: Segment, micro_batch: int) -> None:
        builder, size = self.host.builder, segment.checkpoint_bytes
        builder.allocate("activations", size, "host", is_pinned=self.is_asynchronous, micro_batch=micro_batch)
        self._offloaded.add((segment.name, micro_batch))
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
            builder.free_when_done(
                "activations", size, event, owner=segment.name + CHECKPOINT, micro_batch=micro_batch
            )
        else:
            builder.host(f"copied checkpoint of {segment.name}")
            builder.free("activations", size, owner=segment.name + CHECKPOINT, micro_batch=micro_batch)

    def restore(self, segment: Segment) -> None:
        """Copy a segment's checkpoint to the GPU, before the segment is recomputed."""
        builder, size = self.host.builder, segment.checkpoint_bytes
        micro_batch = builder.micro_batch
        if (segment.name, micro_batch) not in self._offloaded:
            if self._newest == (segment, micro_batch):
                self._newest = None
            return
        builder.allocate("activations", size, owner=segment.name + CHECKPOINT, micro_batch=micro_batch)
        stream = _STREAM if self.is_asynchronous else COMPUTE
        event = self.host.copy(
            f"checkpoint of {segment.name}", "h2d", size, stream,
            is_pinned=self.is_asynchronous, module=segment.name,
        )  # fmt: skip
        builder.stream_wait(COMPUTE, event)

    def drop(self, segment: Segment) -> None:
        """Free a segment's checkpoint in host memory, after its backward."""
        builder, size = self.host.builder, segment.checkpoint_bytes
        micro_batch, pinned = builder.micro_batch, self.is_asynchronous
        if (segment.name, micro_batch) in self._offloaded:
            self._offloaded.remove((segment.name, micro_batch))
            builder.free("activations", size, "host", is_pinned=pinned, micro_batch=micro_batch)
