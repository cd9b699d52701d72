"""Checkpoints: the inputs of checkpointed blocks between their forward and their backward.

# [Note: partitioned checkpoints]
Tensor-parallel ranks hold the same input of a block. Each may keep 1/t of it and gather the whole before it
runs the block again (Rajbhandari et al. 2020, "ZeRO", section 6.1, P_a). It takes an all-gather per block and
micro-batch, in line.

# [Note: checkpoints in host memory]
Three ways to copy a checkpoint out and back are in use. "pageable": tensors of ordinary host memory, so that
the host waits for both copies. "pinned": torch's `save_on_cpu(pin_memory=True)`, which issues both on the
compute stream (torch 2.13 autograd/graph.py). "stream": a stream of their own, pinned memory, and the newest
checkpoint stays on the GPU.
"""

from __future__ import annotations

from zsim.cost.kernels.shapes import WorkOptions
from zsim.cost.kernels.update import fill_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.hooks import CheckpointStore
from zsim.plan.shared.host_side import HostSide
from zsim.plan.workload.workload import Segment, Workload
from zsim.specs.strategy.training import CheckpointOffload

CHECKPOINT = " checkpoint"  # suffix of the block's name
_STREAM = "checkpoints"
_PARTITION = "partition"


class HostCheckpoints(CheckpointStore):
    """Checkpoints in host memory. See [Note: checkpoints in host memory]."""

    repeats = False

    def __init__(self, host: HostSide, copies: CheckpointOffload) -> None:
        self.host = host
        self.copies = copies
        self.is_asynchronous = copies == "stream"
        self.is_pinned = copies != "pageable"
        self._newest: tuple[Segment, int] | None = None  # and its micro-batch
        self._offloaded: set[tuple[str, int]] = set()  # segments' names and micro-batches

    def save(self, segment: Segment) -> None:
        """Copy a segment's checkpoint to host memory."""
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
        builder.allocate("activations", size, "host", is_pinned=self.is_pinned, micro_batch=micro_batch)
        self._offloaded.add((segment.name, micro_batch))
        stream = COMPUTE
        if self.is_asynchronous:
            stream = _STREAM
            builder.wait_stream(_STREAM, COMPUTE)
        event = self.host.copy(
            f"checkpoint of {segment.name}", "d2h", size, stream,
            is_pinned=self.is_pinned, module=segment.name,
        )  # fmt: skip
        assert event is not None
        if self.is_asynchronous:
            builder.free_when_done(
                "activations", size, event, owner=segment.name + CHECKPOINT, micro_batch=micro_batch
            )
        else:
            if not self.is_pinned:
                builder.host(f"copied checkpoint of {segment.name}")
            builder.free("activations", size, owner=segment.name + CHECKPOINT, micro_batch=micro_batch)

    def restore(self, segment: Segment) -> None:
        """Copy a segment's checkpoint to the GPU."""
        builder, size = self.host.builder, segment.checkpoint_bytes
        micro_batch = builder.micro_batch
        if (segment.name, micro_batch) not in self._offloaded:
            if self._newest == (segment, micro_batch):
                self._newest = None
            return
        builder.allocate("activations", size, owner=segment.name + CHECKPOINT, micro_batch=micro_batch)
        event = self.host.copy(
            f"checkpoint of {segment.name}", "h2d", size, _STREAM if self.is_asynchronous else COMPUTE,
            is_pinned=self.is_pinned, module=segment.name,
        )  # fmt: skip
        builder.stream_wait(COMPUTE, event)

    def drop(self, segment: Segment) -> None:
        """Free a segment's checkpoint in host memory."""
        builder, size = self.host.builder, segment.checkpoint_bytes
        micro_batch = builder.micro_batch
        if (segment.name, micro_batch) in self._offloaded:
            self._offloaded.remove((segment.name, micro_batch))
            builder.free("activations", size, "host", is_pinned=self.is_pinned, micro_batch=micro_batch)


class PartitionedCheckpoints(CheckpointStore):
    """Checkpoints of which each of `ranks` tensor-parallel ranks, `group`, keeps a part. See [Note:
    partitioned checkpoints].

    The part is a copy made after the block's forward, or before it with `copies_first`. The whole is gathered
    into a new tensor, which is filled with zeros first with `clears`. Blocks that share a checkpoint share
    the part. It depends on nothing but the segment, so that micro-batches may be repeated.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        group: str,
        ranks: int,
        *,
        copies_first: bool = False,
        clears: bool = False,
    ) -> None:
        self.builder, self.group, self.ranks = builder, group, ranks
        options = WorkOptions.of(workload.training)
        self.dtype = "fp32" if options.stream_bytes == DTYPE_BYTES["fp32"] else options.kernel_dtype
        self.copies_first, self.clears = copies_first, clears
        self._sizes = {segment.name: segment.input_bytes for segment in workload.segments}

    def part_bytes(self, size: int) -> int:
        """Bytes of a rank's part of a checkpoint."""
        return size // self.ranks

    def _checkpoint(self, segment: Segment) -> tuple[str, int]:
        """The block whose input the segment's checkpoint is, and the input's bytes. 0 for a block that
        recomputation does not begin behind."""
        first = segment.group or segment.name
        return first, self._sizes[first] if segment.recomputed else 0

    def _copy_part(self, name: str, size: int) -> None:
        part = self.part_bytes(size)
        self.allocate_part(name, part)
        self.builder.kernels(f"part of checkpoint of {name}", move_kernels(part, part), module=name)

    def allocate_part(self, name: str, part: int) -> None:
        """Allocate a rank's part of the checkpoint of block `name`."""
        self.builder.allocate(
            "activations",
            part,
            owner=name + CHECKPOINT,
            part=_PARTITION,
            micro_batch=self.builder.micro_batch,
        )

    def free_part(self, name: str, part: int) -> None:
        """Free a rank's part of the checkpoint of block `name`."""
        self.builder.free(
            "activations",
            part,
            owner=name + CHECKPOINT,
            part=_PARTITION,
            micro_batch=self.builder.micro_batch,
        )

    def enter(self, segment: Segment) -> None:
        if self.copies_first and segment.is_checkpointed and segment.input_bytes:
            self._copy_part(segment.name, segment.input_bytes)

    def save(self, segment: Segment) -> None:
        """Free the whole checkpoint, of which a part is kept."""
        name, size = self._checkpoint(segment)
        if not size:
            return
        if not self.copies_first:
            self._copy_part(name, size)
        self.builder.free("activations", size, owner=name + CHECKPOINT, micro_batch=self.builder.micro_batch)

    def restore(self, segment: Segment) -> None:
        """Gather the whole checkpoint."""
        name, size = self._checkpoint(segment)
        if not size:
            return
        builder, part = self.builder, self.part_bytes(size)
        builder.allocate("activations", size, owner=name + CHECKPOINT, micro_batch=builder.micro_batch)
        if self.ranks > 1:
            if self.clears:
                kernels = (*fill_kernels(size), *move_kernels(part, part))
                builder.kernels(f"tensor for checkpoint of {name}", kernels, module=name)
            builder.collective(
                "all_gather", size, self.dtype, self.group, stream=COMPUTE,
                name=f"all_gather checkpoint of {name}", module=name,
            )  # fmt: skip
        self.free_part(name, part)
