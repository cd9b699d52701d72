"""ZeRO stages 1 and 2 with the optimizer on the CPU: ZeRO-Offload.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`.

# [Note: the slice of a bucket]
A rank owns a contiguous part of the flat parameters, so in reality it copies much during a few buckets and
nothing during the others. In this plan all ranks do the same: every rank copies 1/N of every bucket, as with
`round_robin_gradients`. Without that option the rank that owns the first layers, whose gradients come last,
copies its whole part after the last bucket: later than in this plan by at most the time of its 4 bytes per
element over one PCIe link.

# [Note: the delayed parameter update]
In ZeRO-Offload's section 5.2 the CPU updates with the gradients of the previous step while the GPU runs
forward and backward. At the end of the step the new gradients are in host memory, and the new weights are
copied to the GPU. The gradients being read and the gradients that arrive are in two buffers. No DeepSpeed
release implements it (DeepSpeed issue 1260).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels, norm_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.drive_files import drive_access
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide
from zsim.plan.shared.optimizer import partition_states
from zsim.plan.stage import Stage


class Zero12OffloadedStates:
    """Keeps a rank's gradients, masters and moments in host memory. They are `shard_numel` elements of the
    parameters `numels` (name -> elements).
    """

    def __init__(
        self, stage: Stage, config: DeepSpeedConfig, shard_numel: int, numels: Mapping[str, int]
    ) -> None:
        assert config.zero.offload_optimizer is not None
        self.stage = stage
        self.builder, self.workload, self.training = stage.builder, stage.workload, stage.training
        self.config, self.shard_numel, self._numels = config, shard_numel, numels
        self.host = HostSide(stage.builder, drive_access(config.aio))
        self.is_pinned = config.zero.offload_optimizer.pin_memory
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.master_bytes = DTYPE_BYTES[config.master_weights_dtype]
        self.is_compact = (
            config.release.sums_fp32_on_gpu
            and config.grad_accum_dtype == "fp32"
            and config.param_dtype != "fp32"
        )
        self._updated: int | None = None  # event of the update with the gradients of the previous step
        self._reduced_numel = 0  # elements reduced in this backward, of which the rank owns 1/N
        self._last_copy: int | None = None

    def resident(self, parameters: Memory, casts: tuple[int, ...]) -> list[Memory]:
        """Weights on the GPU, and masters, moments, gradients and the 16-bit buffer in host memory. 16-bit
        masters have gradients in 16 bits, which are the sums as well. `casts` are the bytes of tensors that
        were on the GPU while the masters were created.
        """
        config, largest = self.config, max(self._numels.values())
        is_summed = self.training.gradient_accumulation_steps > 1 and config.master_weights_dtype == "fp32"
        sums = self.shard_numel * self.param_bytes if is_summed and not self.is_compact else 0
        masters = self.shard_numel * self.master_bytes
        gradients = masters * (2 if config.delayed_parameter_update else 1)
        moments = partition_states(self.training, self.shard_numel, config.optimizer_states_dtype)
        return [
            parameters,
            Memory("buffers", 0, leftovers=casts),
            Memory("gradients", self.shard_numel * 4 if self.is_compact else 0),
            Memory("buffers", largest * self.param_bytes),
            Memory("optimizer_states", masters, "host", self.is_pinned),
            Memory("optimizer_states", sum(moments), "host"),
            Memory("gradients", gradients + sums, "host", self.is_pinned),
            Memory("buffers", (self.shard_numel + largest) * self.param_bytes, "host", self.is_pinned),
        ]

    # -- gradients --------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._reduced_numel = 0

    def _slice_numel(self, elements: int) -> int:
        """This rank's elements of a bucket. See [Note: the slice of a bucket]."""
        previous = self._reduced_numel * self.shard_numel // self.workload.model.trainable_numel
        self._reduced_numel += elements
        return self._reduced_numel * self.shard_numel // self.workload.model.trainable_numel - previous

    def keep_gradients(
        self, tensors: Sequence[str], elements: int, stream: str, *, micro_batch: int, is_boundary: bool
    ) -> int:
        """copy_grads_in_partition of a reduced bucket of `elements`: sums in host memory while accumulating,
        gradients in the masters' type at the boundary. Returns the last event on `stream`.
        """
        builder, dtype, master = self.builder, self.config.param_dtype, self.config.master_weights_dtype
        numel = self._slice_numel(elements)
        if self.is_compact:
            kernels = accumulate_kernels(numel, "fp32", dtype)
            builder.kernels("add to own gradients", kernels, stream=stream)
        elif micro_batch > 0 or not is_boundary:
            self._sum_in_host_memory(numel, stream, is_first=micro_batch == 0)
        if is_boundary:
            kernels = norm_kernels(numel, "fp32" if self.is_compact else dtype)
            norm_event = builder.kernels("norm, look for infinities", kernels, stream=stream)
            self.host.wait(norm_event, "read whether there are infinities")
            largest = min(numel, max(self._numels[name] for name in tensors))  # cast one by one
            summed = "fp32" if self.is_compact else dtype
            is_cast = summed != master
            cast_bytes = self.master_bytes * largest
            if is_cast:
                builder.allocate("buffers", cast_bytes)
                builder.kernels("cast own gradients", cast_kernels(numel, summed, master), stream=stream)
            self._last_copy = self.host.copy(
                f"{master} gradients to host", "d2h", self.master_bytes * numel, stream,
                is_pinned=self.is_pinned,
            )  # fmt: skip
            if is_cast and self._last_copy is not None:
                builder.free_when_done("buffers", cast_bytes, self._last_copy)
        last = builder.record(stream)
        assert last is not None
        return last

    def _sum_in_host_memory(self, numel: int, stream: str, *, is_first: bool) -> None:
        """async_accumulate_grad_in_cpu_via_gpu, which first waits for the previous copy."""
        self.builder.host_wait(self._last_copy)
        size, pinned = numel * self.param_bytes, self.is_pinned
        if not is_first:
            self.host.copy("gradient sums", "h2d", size, stream, is_pinned=pinned)
            kernels = accumulate_kernels(numel, self.config.param_dtype, self.config.param_dtype)
            self.builder.kernels("add gradients", kernels, stream=stream)
        self._last_copy = self.host.copy("gradients to host", "d2h", size, stream, is_pinned=pinned)

    # -- step -------------------------------------------------------------------------------------------

    def start_delayed_update(self) -> None:
        """Start the update with the previous step's gradients. See [Note: the delayed parameter update]."""
        drives = drive_access(self.config.aio)
        self._updated = self._update(HostSide(self.builder, drives, runs_in_other_thread=True))

    def step(self, group: str) -> None:
        """Scale, update and cast on the CPU, and copy the rank's part of the weights to the GPU. Norm and
        overflow are reduced over `group`.
        """
        self.host.wait(self._last_copy, "wait for gradient copies")
        check_overflow(self.stage, self.config, [], group)
        compute_norm_and_clip(self.stage, self.config, [], group)
        if self.config.delayed_parameter_update:
            self.host.wait(self._updated, "wait for the update with the gradients before")
        else:
            self._update(self.host)
        size = self.shard_numel * self.param_bytes
        self.host.copy("weights to GPU", "h2d", size, COMPUTE, is_pinned=self.is_pinned)

    def _update(self, host: HostSide) -> int | None:
        """Scale, update and cast on the CPU, and return the last event."""
        numel, config, master = self.shard_numel, self.config, self.config.master_weights_dtype
        if config.gradient_clipping > 0 or config.precision == "fp16":
            host.scale("scale gradients", numel, master)
        host.optimizer(
            "optimizer step", numel, self.training.optimizer, dtype=master,
            state_dtype=config.optimizer_states_dtype,
        )  # fmt: skip
        return host.cast("cast weights", numel, master, config.param_dtype)
