"""The block `activation_checkpointing` of a JSON: where the inputs of checkpointed layers wait for backward.

Transcribed from DeepSpeed 0.19.8 `runtime/activation_checkpointing/checkpointing.py` and
`offload_activations.py`.

# [Note: one path or the other]
From 0.19.6 `cpu_checkpointing` copies on a stream of its own, to and from pinned memory, and the newest input
stays on the GPU. In earlier releases, and with `partition_activations` in every release, both copies are
pageable and block the host (`_get_cpu_offload_engine`).

# [Note: partitioned inputs]
`partition_activations` clones the rank's part of a layer's input before the layer's forward and empties the
input after it (`partition_activations`, `get_partitioned_activations_for_backward`). Backward fills a tensor
with zeros, copies the part into it and gathers it in place over the ranks that share the layer's products
(`gather_partitioned_activations`). Without such ranks the part is all of it, and only the clone is left.

# [Note: contiguous inputs]
`contiguous_memory_optimization` allocates the parts of all `number_checkpoints` layers with the first, and
copies the clone into its place. It writes a zero into every page of it first, at places that the host sends
to the GPU as a list of numbers, for which it waits. The first layer of backward drops the buffers, and with
them what no layer has used.
"""

from __future__ import annotations

from zsim.cost.kernels.update import fill_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.hooks import CheckpointStore
from zsim.plan.ops import Device
from zsim.plan.shared.checkpoints import HostCheckpoints, PartitionedCheckpoints
from zsim.plan.shared.host_side import HostSide
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Segment
from zsim.specs.strategy.parallelism import TENSOR, ParallelismConfig
from zsim.specs.strategy.training import CheckpointOffload

_PAGE_BYTES, _INDEX_BYTES = 4096, 8  # mmap.PAGESIZE of x86; int64
_BUFFERS = "contiguous checkpoints"


def make_checkpoints(stage: Stage, config: DeepSpeedConfig) -> CheckpointStore:
    """The store that the block asks for."""
    store = _unsynchronized(stage, config)
    if config.activation_checkpointing.synchronize_checkpoint_boundary:
        return SynchronizedCheckpoints(stage.builder, store)
    return store


def _unsynchronized(stage: Stage, config: DeepSpeedConfig) -> CheckpointStore:
    block = config.activation_checkpointing
    if block.partition_activations:
        return DeepSpeedPartitions(stage, config)
    if block.cpu_checkpointing:
        has_stream = config.release.copies_checkpoints_on_a_stream
        return HostCheckpoints(HostSide(stage.builder), "stream" if has_stream else "pageable")
    return CheckpointStore()


class SynchronizedCheckpoints(CheckpointStore):
    """`synchronize_checkpoint_boundary`: the host waits for the GPU before and after the forward of every
    checkpointed layer, and before and after its backward. `store` is what else becomes of the checkpoints.
    """

    def __init__(self, builder: PlanBuilder, store: CheckpointStore) -> None:
        self.builder, self.store = builder, store
        self.repeats = store.repeats

    def _synchronize(self, segment: Segment) -> None:
        if segment.is_checkpointed:
            self.builder.synchronize()
            self.builder.host(f"synchronized at checkpoint of {segment.name}", module=segment.name)

    def enter(self, segment: Segment) -> None:
        self._synchronize(segment)
        self.store.enter(segment)

    def save(self, segment: Segment) -> None:
        self.store.save(segment)
        self._synchronize(segment)

    def restore(self, segment: Segment) -> None:
        self._synchronize(segment)
        self.store.restore(segment)

    def drop(self, segment: Segment) -> None:
        self.store.drop(segment)
        self._synchronize(segment)


class DeepSpeedPartitions(PartitionedCheckpoints):
    """`partition_activations`, on the GPU or in host memory, by itself or in contiguous buffers. See the
    module's notes.
    """

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(
            stage.builder, stage.workload, TENSOR, stage.parallelism.tensor, copies_first=True, clears=True
        )
        block = config.activation_checkpointing
        self.host = HostSide(stage.builder)
        self.device: Device = "host" if block.cpu_checkpointing else "gpu"
        self.capacity = block.number_checkpoints if block.contiguous_memory_optimization else None
        self._num_used = 0  # of the contiguous buffers
        self.repeats = self.capacity is None

    def enter(self, segment: Segment) -> None:
        super().enter(segment)
        if not (segment.is_checkpointed and segment.input_bytes):
            return
        builder, name, part = self.builder, segment.name, self.part_bytes(segment.input_bytes)
        if self.capacity is not None:
            self._enter_buffer(name, part, self.capacity)
        elif self.device == "host":
            builder.allocate("activations", part, "host", micro_batch=builder.micro_batch)
        if self.device == "host":
            self.host.copy(f"checkpoint of {name}", "d2h", part, COMPUTE, is_pinned=False, module=name)
            builder.host(f"copied checkpoint of {name}")
        elif self.capacity is not None:
            builder.kernels(f"checkpoint of {name} into its buffer", move_kernels(part, part), module=name)
        if self.device == "host" or self.capacity is not None:
            super().free_part(name, part)

    def _enter_buffer(self, name: str, part: int, capacity: int) -> None:
        """Allocate all buffers with the first one, and write into every page of this one."""
        builder = self.builder
        if self._num_used == 0:
            builder.allocate(
                "activations", capacity * part, self.device, owner=_BUFFERS, tensors=(part,) * capacity
            )
        self._num_used += 1
        num_pages = -(-part // _PAGE_BYTES)
        zeros, label = num_pages * DTYPE_BYTES[self.dtype], f"pages of the buffer of {name}"
        if self.device == "host":
            self.host.fill(label, zeros)
        else:
            self.host.copy(label, "h2d", num_pages * _INDEX_BYTES, COMPUTE, is_pinned=False, module=name)
            builder.kernels(label, fill_kernels(zeros), module=name)

    def restore(self, segment: Segment) -> None:
        if not segment.recomputed:
            return
        builder, name, part = self.builder, segment.name, self.part_bytes(segment.input_bytes)
        if self.capacity is not None and self._num_used:
            num_unused, self._num_used = self.capacity - self._num_used, 0
            builder.free("activations", num_unused * part, self.device, owner=_BUFFERS)
        if self.device == "host":
            self.allocate_part(name, part)
            self.host.copy(f"checkpoint of {name}", "h2d", part, COMPUTE, is_pinned=False, module=name)
            if self.capacity is None:
                builder.free("activations", part, "host", micro_batch=builder.micro_batch)
            else:
                builder.free("activations", part, "host", owner=_BUFFERS)
        super().restore(segment)

    def free_part(self, name: str, part: int) -> None:
        """Free the part on the GPU, where it lies."""
        if self.device == "gpu" and self.capacity is not None:
            self.builder.free("activations", part, owner=_BUFFERS)
        else:
            super().free_part(name, part)


def check_checkpoints(config: DeepSpeedConfig, parallelism: ParallelismConfig, num_layers: int) -> list[str]:
    """Notes about the block with `num_layers` checkpointed layers, after checks of it, some of which
    DeepSpeed makes (`configure`).

    Raises InputError for what DeepSpeed refuses, fails at or computes wrongly, NotSimulatedError for buffers
    that several micro-batches of a pipeline share.
    """
    block, where = config.activation_checkpointing, f"{config.name}: activation_checkpointing"
    if block.contiguous_memory_optimization:
        if not block.partition_activations:
            raise InputError(
                f"{where}.contiguous_memory_optimization: found true without partition_activations, which "
                "DeepSpeed asks for; expected partition_activations true"
            )
        if block.number_checkpoints is None:
            raise InputError(
                f"{where}.number_checkpoints: missing with contiguous_memory_optimization; expected the "
                f"number of checkpointed layers, {num_layers}"
            )
        if parallelism.pipeline > 1:
            raise NotSimulatedError(
                f"{where}.contiguous_memory_optimization: not simulated with pipeline parallelism, whose "
                "micro-batches share the buffers; expected false"
            )
        if block.number_checkpoints < num_layers:
            raise InputError(
                f"{where}.number_checkpoints: found {block.number_checkpoints}, and the model has "
                f"{num_layers} checkpointed layers, so that DeepSpeed runs out of buffers; expected "
                f"{num_layers}"
            )
    if block.partition_activations and parallelism.tensor > 1 and parallelism.sequence_parallel:
        raise InputError(
            f"{where}.partition_activations: found true with sequence parallelism, whose ranks hold "
            "different tokens, of which DeepSpeed would gather a mixture; expected false"
        )
    if block.partition_activations and parallelism.tensor == 1 and num_layers:
        return [
            f"{where}.partition_activations: no effect but a copy of every checkpoint, as no ranks share "
            "layers (parallelism.tensor is 1)"
        ]
    return []


def refuse_two_offloads(config: DeepSpeedConfig, offload: CheckpointOffload | None) -> None:
    """Raises InputError where both `[training]` and the block say where checkpoints are kept."""
    block = config.activation_checkpointing
    for key in ("cpu_checkpointing", "partition_activations"):
        if offload is not None and getattr(block, key):
            raise InputError(
                f"training.checkpoint_offload: found '{offload}', and {config.name} says "
                f"activation_checkpointing.{key}, which is another way; expected one of them"
            )
