"""ZeRO-3 with optimizer states off the GPU: ZeRO-Offload and ZeRO-Infinity.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage3.py`.

# [Note: three copies of a gradient]
A reduced shard is copied to the accumulation buffer in host memory and straight back ("to speed up the next
few operations"). At the boundary it is copied to the host once more, in fp32. Later micro-batches copy the
running sum to the GPU, add, and copy it back.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels, norm_kernels, scale_kernels
from zsim.cost.optimizers import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.drive_files import drive_access
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket
from zsim.frameworks.deepspeed.stage3.parameter_store import ParameterStore
from zsim.frameworks.deepspeed.stage3.state_swapper import StateSwapper, swapped_group
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide
from zsim.plan.shared.optimizer import update
from zsim.plan.stage import Stage
from zsim.specs.strategy.optimizers import optimizer_of


class Zero3OffloadedStates:
    """Keeps masters, moments and gradients of a `ratio` of the sub-groups in host memory or on NVMe. The
    first sub-groups stay on the GPU. Gradients are reduced on `stream`.

    16-bit gradients have an accumulation buffer in host memory, as in all releases that zsim reads, unless
    `host_gradient_sums` is off. In the ZeRO-Infinity paper they have none.
    """

    def __init__(
        self,
        stage: Stage,
        config: DeepSpeedConfig,
        store: ParameterStore,
        stream: str,
        *,
        ratio: float,
    ) -> None:
        assert config.zero.offload_optimizer is not None
        self.stage = stage
        self.builder, self.training, self.config = stage.builder, stage.training, config
        self.store, self.stream, self.keeps_sums = store, stream, config.host_gradient_sums
        self.parameters, self.groups = store.trace.parameters, store.groups
        self.host = HostSide(stage.builder, drive_access(config.aio))
        self.offload = config.zero.offload_optimizer
        self.num_states = 1 + (optimizer_of(stage.training.optimizer).moments or 0)
        self._group_of = {number: index for index, group in enumerate(self.groups) for number in group}
        self._num_gpu_groups = int((1 - ratio) * len(self.groups))
        self._note_idle_ratio(ratio)
        self._state_swapper = self._make_state_swapper()
        self._accum_bytes = DTYPE_BYTES[config.grad_accum_dtype]
        self._master_bytes = DTYPE_BYTES[config.master_weights_dtype]

    def _note_idle_ratio(self, ratio: float) -> None:
        """Add a note if the ratio has no effect: the GPU's number of whole sub-groups is rounded down to
        0."""
        if ratio == 1 or self._num_gpu_groups > 0:
            return
        count = len(self.groups)
        self.builder.notes.append(
            f"{self.config.name}: zero_optimization.offload_optimizer.ratio: no effect: {1 - ratio:g} of "
            f"{count} sub-group{'s' if count > 1 else ''}, rounded down, is none that the GPU steps; a "
            f"smaller sub_group_size than {self.config.zero.sub_group_size:,} makes more of them"
        )

    def _make_state_swapper(self) -> StateSwapper | None:
        if self.offload.device != "nvme":
            return None
        candidates = [
            swapped_group(index, [self.parameters[number].shard_numel for number in group], self.config)
            for index, group in enumerate(self.groups)
        ]
        groups = [group for group in candidates if group is not None]
        return StateSwapper(self.host, groups, self.config, self.num_states) if groups else None

    # -- sizes ------------------------------------------------------------------------------------------

    def numel_of(self, group: int) -> int:
        """This rank's elements of a sub-group."""
        return sum(self.parameters[number].shard_numel for number in self.groups[group])

    def is_swapped(self, group: int) -> bool:
        """Whether a sub-group's optimizer states are on NVMe."""
        return self._state_swapper is not None and group in self._state_swapper.groups

    def resident(self) -> list[Memory]:
        """Gradients and optimizer states by device. The pinned buffers are `buffers` of the host."""
        pinned, master = self.offload.pin_memory, self._master_bytes
        states = master + (self.num_states - 1) * DTYPE_BYTES[self.config.optimizer_states_dtype]
        sums = sum(parameter.trained_shard_numel for parameter in self.parameters) * self._accum_bytes
        gpu_numel = sum(self.numel_of(group) for group in range(self._num_gpu_groups))
        host_numel = sum(
            self.numel_of(group)
            for group in range(self._num_gpu_groups, len(self.groups))
            if not self.is_swapped(group)
        )
        return [
            Memory("gradients", sums if self.keeps_sums else 0, "host", pinned),
            Memory("gradients", master * gpu_numel),
            Memory("optimizer_states", master * self.num_states * gpu_numel),
            Memory("gradients", master * host_numel, "host", pinned),
            Memory("optimizer_states", states * host_numel, "host"),
            *(self._state_swapper.memory(4) if self._state_swapper else []),
        ]

    # -- gradients --------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step's first backward begins."""

    def keep_gradients(self, bucket: GradientBucket, *, is_first: bool, is_boundary: bool) -> int:
        """partition_grads: copy the reduced shards to the host and back, and at the boundary once more in
        fp32. See [Note: three copies of a gradient]. Returns the last event.
        """
        builder, stream, config = self.builder, self.stream, self.config
        size = bucket.shard_elements * self._accum_bytes
        pinned = self.offload.pin_memory
        if not self.keeps_sums:
            assert self.training.gradient_accumulation_steps == 1
            builder.allocate("buffers", size)
        elif is_first:
            self.host.copy("gradients to host", "d2h", size, stream, is_pinned=pinned)
            builder.allocate("buffers", size)
            self.host.copy("gradients back", "h2d", size, stream, is_pinned=pinned)
        else:
            builder.allocate("buffers", size)
            self.host.copy("gradient sums", "h2d", size, stream, is_pinned=pinned)
            kernels = accumulate_kernels(
                bucket.shard_elements, config.grad_accum_dtype, config.communication_dtype
            )
            builder.kernels("add gradients", kernels, stream=stream)
            self.host.copy("gradients to host", "d2h", size, stream, is_pinned=pinned)
        if is_boundary:
            self._copy_to_optimizer(bucket)
        last = builder.record(stream)
        assert last is not None
        builder.free_when_done("buffers", size, last)
        return last

    def _copy_to_optimizer(self, bucket: GradientBucket) -> None:
        """_offload_grad_partition_at_boundary: take the norm, cast, and copy to the optimizer's device."""
        builder, stream, element_bytes = self.builder, self.stream, self._master_bytes
        dtype, numel = self.config.grad_accum_dtype, bucket.shard_elements
        master = self.config.master_weights_dtype
        builder.kernels("gradient norms", norm_kernels(numel, dtype, bucket.num_tensors), stream=stream)
        is_cast = dtype != master
        if is_cast:
            builder.allocate("buffers", element_bytes * numel)
            builder.kernels("cast gradients", cast_kernels(numel, dtype, master), stream=stream)
        host_numel = 0
        for number in bucket.parameters:
            group, shard = self._group_of[number], self.parameters[number].shard_numel
            if self.is_swapped(group):
                self._swap_gradient(number)
            elif group >= self._num_gpu_groups:
                host_numel += shard
        self.host.copy(
            f"{master} gradients to host", "d2h", element_bytes * host_numel, stream,
            is_pinned=self.offload.pin_memory,
        )  # fmt: skip
        last = builder.record(stream)
        assert last is not None
        if is_cast:
            builder.free_when_done("buffers", element_bytes * numel, last)

    def _swap_gradient(self, number: int) -> None:
        """Copy a gradient into a pinned buffer, blocking. Small pieces stay on the GPU until the step."""
        parameter = self.parameters[number]
        piece = swapped_group(0, [parameter.shard_numel], self.config)
        swapped = piece.swapped_numel if piece else 0
        self.builder.allocate("buffers", 4 * (parameter.shard_numel - swapped))
        if swapped:
            assert self._state_swapper is not None
            self._state_swapper.write_gradient(swapped, parameter.name)
            self.host.copy(f"gradient of {parameter.name}", "d2h", 4 * swapped, self.stream, is_blocking=True)
            self.builder.host("copied a gradient")

    # -- step -------------------------------------------------------------------------------------------

    def step(self, norm_group: str) -> None:
        """Update one sub-group after another: read, scale, update, write back the 16-bit weights, write. Norm
        and overflow are reduced over `norm_group`.
        """
        config, master = self.config, self.config.master_weights_dtype
        check_overflow(self.stage, config, [], norm_group)
        for _ in self.groups:
            compute_norm_and_clip(self.stage, config, [], norm_group)
        for group in range(len(self.groups)):
            numel = self.numel_of(group)
            if self.is_swapped(group):
                self._read_states(group)
            if group < self._num_gpu_groups:
                self.step_on_gpu(group, numel)
            else:
                self.host.scale(f"scale gradients of sub-group {group}", numel, master)
                self.host.optimizer(
                    f"optimizer step of sub-group {group}", numel, self.training.optimizer, dtype=master,
                    state_dtype=config.optimizer_states_dtype,
                )  # fmt: skip
                self.store.put_from_cpu(group)
            if self.is_swapped(group):
                assert self._state_swapper is not None
                self._state_swapper.write(group)

    def _read_states(self, group: int) -> None:
        assert self._state_swapper is not None
        self._state_swapper.read(group)
        loose = 4 * self._state_swapper.groups[group].loose_numel
        self.host.copy(f"loose gradients of sub-group {group}", "d2h", loose, COMPUTE, is_blocking=True)
        self.builder.free("buffers", loose)

    def step_on_gpu(self, group: int, numel: int) -> None:
        """Scale and update a sub-group on the GPU with DeepSpeed's "backup optimizer", torch.optim.AdamW."""
        master = self.config.master_weights_dtype
        self.builder.kernels(f"scale gradients of sub-group {group}", scale_kernels(numel, master))
        training = replace(self.training, optimizer_implementation="foreach")
        update(
            self.builder, training, [UpdatedTensor((numel,))], gradient_dtype=master, state_dtype=master,
            low_precision_copy=self.config.precision != "fp32", name=f"optimizer step of sub-group {group}",
        )  # fmt: skip
        self.store.put_from_gpu(group)
