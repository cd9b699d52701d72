"""ZeRO stages 1 and 2 with the optimizer on the CPU: ZeRO-Offload.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`.

# [Note: the slice of a bucket]
A rank owns a contiguous stretch of the flat parameters, so in reality it copies much during a few buckets
and nothing during the others. Ranks stand for each other here: every one copies its share of every bucket,
as it would with `round_robin_gradients`. Without, the rank that owns the first layers, whose gradients come
last, copies its whole slice after the last bucket: later than here by at most its 4 bytes per element over
one PCIe link.

# [Note: the delayed parameter update]
ZeRO-Offload's section 5.2 lets the CPU update with the gradients of the step before while the GPU runs
forward and backward, and exchanges both at the end: gradients are in host memory by then, new weights go to
the GPU. The gradients that are read and those that arrive are two buffers. No DeepSpeed release has it
(DeepSpeed issue 1260).
"""

from __future__ import annotations

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels, norm_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.deepspeed.cpu_checkpointing import CheckpointsInHostMemory
from zsim.plan.frameworks.deepspeed.norm_and_overflow import check_overflow, norm_and_sync
from zsim.plan.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.plan.ops import Group, Memory, Plan
from zsim.plan.parts.host_side import HostSide
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Segment, Workload
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.training import Training


class OffloadedZero12Schedule(Zero12Schedule):
    """DeepSpeedZeroOptimizer with `offload_optimizer` or `cpu_checkpointing`."""

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        config: DeepSpeedConfig,
        training: Training,
        world_size: int,
    ) -> None:
        super().__init__(builder, workload, config, training, world_size)
        self.host = HostSide(builder, config.aio)
        self.checkpoints = CheckpointsInHostMemory(self.host, config)
        self.offload = self.zero.offload_optimizer
        self.is_compact = (
            config.release.sums_fp32_on_gpu
            and config.grad_accum_dtype == "fp32"
            and config.param_dtype != "fp32"
        )
        self.delays = config.delayed_parameter_update
        self._updated: int | None = None
        self._seen = 0  # elements of this backward, to share out the own slice
        self._last_copy: int | None = None

    def begin_step(self) -> None:
        """See [Note: the delayed parameter update]."""
        if self.delays:
            self._updated = self._update(HostSide(self.builder, self.config.aio, is_elsewhere=True))

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """Weights on the GPU; masters, moments, fp32 gradients and the 16-bit buffer in host memory."""
        if self.offload is None:
            return super().resident()
        pinned = self.offload.pin_memory
        segments = self.workload.segments
        largest = max(parameter.numel for segment in segments for parameter in segment.parameters)
        is_summed = self.training.gradient_accumulation_steps > 1
        sums = self.shard_numel * self.param_bytes if is_summed and not self.is_compact else 0
        compact = self.shard_numel * 4 if self.is_compact else 0
        gradients = self.shard_numel * (8 if self.delays else 4)
        return [
            self._flat_parameters(),
            Memory("buffers", 0, leftovers=self._casts() if self._release.clones_shards_on_gpu else ()),
            Memory("gradients", compact),
            Memory("buffers", largest * self.param_bytes),
            Memory("optimizer_states", 4 * self.shard_numel, "host", pinned),
            Memory("optimizer_states", self.shard_numel * self.workload.optimizer_state_bytes, "host"),
            Memory("gradients", gradients + sums, "host", pinned),
            Memory("buffers", (self.shard_numel + largest) * self.param_bytes, "host", pinned),
        ]

    # -- activation checkpoints -------------------------------------------------------------------------

    def after_forward(self, segment: Segment) -> None:
        self.checkpoints.save(segment)

    def before_backward(self, segment: Segment) -> None:
        self.checkpoints.restore(segment)

    def after_backward(self, segment: Segment) -> None:
        self.checkpoints.drop(segment)

    # -- gradients --------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        super().begin_backward()
        self._seen = 0

    def _slice_numel(self) -> int:
        """This rank's elements of the bucket; see [Note: the slice of a bucket]."""
        before = self._seen * self.shard_numel // self.workload.numel
        self._seen += self._elements
        return self._seen * self.shard_numel // self.workload.numel - before

    def _keep_slice(self, stream: str) -> int:
        """copy_grads_in_partition: sums in host memory while accumulating, fp32 gradients at the boundary."""
        if self.offload is None:
            return super()._keep_slice(stream)
        builder, numel, dtype = self.builder, self._slice_numel(), self.config.param_dtype
        if self.is_compact:
            kernels = accumulate_kernels(numel, "fp32", dtype)
            builder.kernels("add to own gradients", kernels, stream=stream)
        elif self._micro_batch > 0 or not self._is_boundary:
            self._sum_in_host_memory(numel, stream)
        if self._is_boundary:
            kernels = norm_kernels(numel, "fp32" if self.is_compact else dtype)
            checked = builder.kernels("norm, look for infinities", kernels, stream=stream)
            self.host.wait(checked, "read whether there are infinities")
            passing = 4 * min(numel, max(self._numels[name] for name in self._tensors))  # one by one
            if not self.is_compact:
                builder.allocate("buffers", passing)
                builder.kernels("cast own gradients", cast_kernels(numel, dtype, "fp32"), stream=stream)
            self._last_copy = self.host.copy(
                "fp32 gradients to host", "d2h", 4 * numel, stream, is_pinned=self.offload.pin_memory
            )
            if not self.is_compact and self._last_copy is not None:
                builder.free_when_done("buffers", passing, self._last_copy)
        last = builder.record(stream)
        assert last is not None
        return last

    def _sum_in_host_memory(self, numel: int, stream: str) -> None:
        """async_accumulate_grad_in_cpu_via_gpu, which first waits for the copies before."""
        assert self.offload is not None
        self.builder.host_wait(self._last_copy)
        size, pinned = numel * self.param_bytes, self.offload.pin_memory
        if self._micro_batch > 0:
            self.host.copy("gradient sums", "h2d", size, stream, is_pinned=pinned)
            kernels = accumulate_kernels(numel, self.config.param_dtype, self.config.param_dtype)
            self.builder.kernels("add gradients", kernels, stream=stream)
        self._last_copy = self.host.copy("gradients to host", "d2h", size, stream, is_pinned=pinned)

    def _own_gradients(self) -> None:
        if self.offload is None:
            super()._own_gradients()

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Scale, update and cast on the CPU, copy the own slice of the weights back, gather."""
        if self.offload is None:
            super().optimizer_step()
            return
        self.host.wait(self._last_copy, "wait for gradient copies")
        check_overflow(self.builder, self.config, [])
        norm_and_sync(self.builder, self.config, [])
        if self.delays:
            self.host.wait(self._updated, "wait for the update with the gradients before")
        else:
            self._update(self.host)
        size = self.shard_numel * self.param_bytes
        self.host.copy("weights to GPU", "h2d", size, COMPUTE, is_pinned=self.offload.pin_memory)
        if self.world_size > 1:
            self._gather_parameters()

    def _update(self, host: HostSide) -> int | None:
        """Scale, update and cast on the CPU; the event of the last."""
        numel, config = self.shard_numel, self.config
        if config.gradient_clipping > 0 or config.precision == "fp16":
            host.scale("scale gradients", numel)
        host.optimizer("optimizer step", numel, self.training.optimizer)
        return host.cast("cast weights", numel, "fp32", config.param_dtype)


def offloaded_zero12_plan(
    workload: Workload, config: DeepSpeedConfig, training: Training, world_size: int
) -> Plan:
    """One step of ZeRO stage 1 or 2 with something off the GPU."""
    builder = PlanBuilder([Group.regular("world", world_size)])
    schedule = OffloadedZero12Schedule(builder, workload, config, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    schedule.checkpoints.finish()
    return builder.finish("deepspeed", world_size, schedule.resident())
