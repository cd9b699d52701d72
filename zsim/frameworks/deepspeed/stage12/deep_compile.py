"""DeepSpeed ZeRO stages 1 and 2 under DeepCompile, whose compiled backward reduces gradients.

Transcribed from DeepSpeed 0.19.6 `compile/init_z1_and_2.py`, `csrc/compile/z1.cpp` and `z2.cpp`. Gradients
are copied into one of two buckets on a stream of their own, as at stage 3 (see [Note: a compiled reduction]
of `zsim.frameworks.deepspeed.stage3.deep_compile`). A bucket is all-reduced whole, in one group of NCCL
calls, and each rank copies its slice into its partition's gradients. Stage 1 sums whole gradients of
micro-batches and reduces with the last. Stage 2 reduces those of every micro-batch.
"""

from __future__ import annotations

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Memory
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.model.spec import Parameter

REDUCE, COPY = "reduce", "gradient_copy"


class DeepCompileZero12Schedule(Zero12Schedule):
    """Stages 1 and 2 whose reductions are operators of backward's graph. See the module's note."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        assert config.deep_compile is not None
        self._bucket_events: list[int | None] = [None] * config.deep_compile.num_buckets
        self._kept_bytes = 0  # gradients that the bucket's copies have read

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the buckets, which are as large as the largest gradient."""
        numel = max(self.zero.reduce_bucket_size, *self._numels.values())
        return len(self._bucket_events) * numel * self.param_bytes

    def resident(self) -> list[Memory]:
        states = [*super().resident(), Memory("buffers", self.bucket_bytes)]
        if self.partitions_gradients:
            states.append(Memory("gradients", self._partition_gradient_bytes))
        return states

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """Stage 1 allocates the partition's gradients before the last backward, stage 2 keeps them."""
        self._micro_batch, self._is_boundary = micro_batch, is_last
        if is_last and not self.partitions_gradients:
            self.builder.allocate("gradients", self._partition_gradient_bytes)

    def _free_partition_gradients(self) -> None:
        if not self.partitions_gradients:
            self.builder.free("gradients", self._partition_gradient_bytes)

    def gradient_ready(self, call: ModuleCall) -> None:
        for parameter in reversed(call.trainable_parameters):
            self._reduce_gradient(call, parameter)

    def _reduce_gradient(self, call: ModuleCall, parameter: Parameter) -> None:
        """`reduceGrad`: add to the gradient of earlier micro-batches, or copy into the bucket."""
        builder, size = self.builder, parameter.numel * self.param_bytes
        is_summed = not self.partitions_gradients and self._micro_batch > 0
        is_kept = not self.partitions_gradients and not is_summed
        builder.allocate("gradients" if is_kept else "buffers", size, stream=COMPUTE)
        if is_summed:
            kernels = accumulate_kernels(parameter.numel, self.config.param_dtype, self.config.param_dtype)
            builder.kernels(f"accumulate {call.name}", kernels, module=call.name)
            builder.free("buffers", size)
        if not self.partitions_gradients and not self._is_boundary:
            return
        if self._elements and self._elements + parameter.numel > self.zero.reduce_bucket_size:
            self._reduce()
        builder.stream_wait(COMPUTE, self._bucket_events[0])
        builder.wait_stream(COPY, COMPUTE)
        builder.move(f"bucket {call.name}", size, size, stream=COPY, module=call.name)
        self._kept_bytes += size
        self._elements += parameter.numel
        self._tensors.append(call.parameter_name(parameter))

    def _reduce(self) -> None:
        """`flushReduceBucket`."""
        builder, config = self.builder, self.config
        if not self._elements:
            return
        builder.wait_stream(REDUCE, COPY)
        ranks = self.group.size
        if ranks > 1:
            size = self._elements * self.param_bytes
            builder.collective("all_reduce", size, config.param_dtype, self.group.name, stream=REDUCE)
        slices = self._elements // ranks
        read, written = slices * self.param_bytes, slices * DTYPE_BYTES[config.grad_accum_dtype]
        if self.partitions_gradients and self._micro_batch > 0:
            read += written
        builder.move("keep own slices", read, written, len(self._tensors), stream=REDUCE)
        self._bucket_events = [*self._bucket_events[1:], builder.record(REDUCE)]
        builder.wait_stream(COMPUTE, COPY)
        builder.free("buffers" if self.partitions_gradients else "gradients", self._kept_bytes)
        self._kept_bytes, self._elements, self._tensors = 0, 0, []

    def end_backward(self) -> None:
        """`endBackward`: the host waits for the last reduction."""
        self._reduce()
        self.builder.host_wait(self.builder.record(REDUCE))
        self.builder.host("end of backward")
