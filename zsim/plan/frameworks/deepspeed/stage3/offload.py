"""ZeRO-3 with parameters, optimizer states or checkpoints off the GPU: ZeRO-Offload and ZeRO-Infinity.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage3.py` and `partition_parameters.py`.

# [Note: blocking shard copies]
A gather first copies the rank's own shards to the GPU with `.to(device)`, which is not `non_blocking`: the
host waits for the copy, and for all gathers before it on the same stream, even for pinned memory. So a
prefetch overlaps with the kernels issued before it and never with those of its own module.

# [Note: three copies of a gradient]
A reduced shard goes to the accumulation buffer in host memory and straight back ("to speed up the next few
operations"); at the boundary it goes to the host once more, in fp32. Later micro-batches bring the running
sum to the GPU, add, and take it back.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels, norm_kernels, scale_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.deepspeed.cpu_checkpointing import CheckpointsInHostMemory
from zsim.plan.frameworks.deepspeed.norm_and_overflow import check_overflow, norm_and_sync
from zsim.plan.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.plan.frameworks.deepspeed.stage3.gradients import GradientBucket
from zsim.plan.frameworks.deepspeed.stage3.homes import parameter_homes
from zsim.plan.frameworks.deepspeed.stage3.parameter_swapper import ParameterSwapper
from zsim.plan.frameworks.deepspeed.stage3.schedule import Zero3Schedule, zero3_groups
from zsim.plan.frameworks.deepspeed.stage3.state_swapper import StateSwapper, swapped_group
from zsim.plan.ops import Memory, Plan
from zsim.plan.parts.host_side import HostSide, aligned_numel
from zsim.plan.parts.optimizer import update
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Segment, Workload
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.training import Training


class OffloadedZero3Schedule(Zero3Schedule):
    """DeepSpeedZeroOptimizer_Stage3 with `offload_param`, `offload_optimizer` or `cpu_checkpointing`.

    `keeps_sums`: 16-bit gradients have an accumulation buffer in host memory, as in all releases that zsim
    reads; the ZeRO-Infinity paper's had none.
    """

    keeps_sums = True

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
        self.groups = self.sub_groups()
        self.homes = parameter_homes(self.trace.parameters, self.groups, config)
        self.checkpoints = CheckpointsInHostMemory(self.host, config)
        self.offload = self.zero.offload_optimizer
        self._swapper: ParameterSwapper | None = None
        if self.zero.offload_param is not None and self.zero.offload_param.device == "nvme":
            self._swapper = ParameterSwapper(self.host, self.coordinator, self.homes, config)
        self.num_states = 1 + self.workload.optimizer_state_bytes // 4
        self._group_of = {number: index for index, group in enumerate(self.groups) for number in group}
        self._first_on_cpu = len(self.groups)
        if self.offload is not None:
            self._first_on_cpu = int((1 - self.offload.ratio) * len(self.groups))
            self._note_idle_ratio(self.offload.ratio)
        self._states = self._make_state_swapper()
        self._is_boundary = True
        self._accum_bytes = DTYPE_BYTES[config.grad_accum_dtype]

    def _note_idle_ratio(self, ratio: float) -> None:
        """The ratio is of whole sub-groups, and what is left to the GPU is rounded down."""
        if ratio == 1 or self._first_on_cpu > 0:
            return
        count = len(self.groups)
        self.builder.notes.append(
            f"{self.config.name}: zero_optimization.offload_optimizer.ratio: no effect: {1 - ratio:g} of "
            f"{count} sub-group{'s' if count > 1 else ''}, rounded down, is none that the GPU steps; a "
            f"smaller sub_group_size than {self.zero.sub_group_size:,} makes more of them"
        )

    def _make_state_swapper(self) -> StateSwapper | None:
        if self.offload is None or self.offload.device != "nvme":
            return None
        found = [
            swapped_group(index, [self.trace.parameters[number].shard_numel for number in group], self.config)
            for index, group in enumerate(self.groups)
        ]
        groups = [group for group in found if group is not None]
        return StateSwapper(self.host, groups, self.config, self.num_states) if groups else None

    # -- sizes ------------------------------------------------------------------------------------------

    def numel_of(self, group: int) -> int:
        """This rank's elements of a sub-group."""
        return sum(self.trace.parameters[number].shard_numel for number in self.groups[group])

    def is_swapped(self, group: int) -> bool:
        """Whether a sub-group's optimizer states are on NVMe."""
        return self._states is not None and group in self._states.groups

    def resident(self) -> list[Memory]:
        """As without offload, with each piece at its home; pinned buffers are `buffers` of the host."""
        kept = [memory for memory in super().resident() if memory.category == "buffers"]
        kept += self.homes.memory(self.trace.parameters, self.param_bytes)
        kept += self.secondary.resident() if self.secondary else []
        accumulated = self.shard_numel * self._accum_bytes
        if self.offload is None:
            kept += [m for m in super().resident() if m.category in ("gradients", "optimizer_states")]
            return kept
        pinned = self.offload.pin_memory
        kept.append(Memory("gradients", accumulated if self.keeps_sums else 0, "host", pinned))
        on_gpu = sum(self.numel_of(group) for group in range(self._first_on_cpu))
        in_memory = sum(
            self.numel_of(group)
            for group in range(self._first_on_cpu, len(self.groups))
            if not self.is_swapped(group)
        )
        kept += [
            Memory("gradients", 4 * on_gpu),
            Memory("optimizer_states", 4 * self.num_states * on_gpu),
            Memory("gradients", 4 * in_memory, "host", pinned),
            Memory("optimizer_states", 4 * self.num_states * in_memory, "host"),
        ]
        return kept + (self._states.memory(4) if self._states else [])

    # -- fetch ------------------------------------------------------------------------------------------

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        super().begin_micro_batch(number, is_last=is_last)
        self._is_boundary = is_last

    def _bring(self, fetch: Fetch) -> None:
        """Read the shards from NVMe, copy them to the GPU; see [Note: blocking shard copies]."""
        if self._swapper is not None:
            self._swapper.ensure(fetch.parameters)
        parameters = [
            self.trace.parameters[number] for number in fetch.parameters if self.homes.comes_over_pcie(number)
        ]
        size = sum(parameter.shard_numel for parameter in parameters) * self.param_bytes
        if not size:
            return
        is_alone = self.world_size == 1  # the copy is the parameter, and does not block
        if not is_alone:
            self.builder.allocate("buffers", size)
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        event = self.host.copy(
            f"shard of {parameters[0].name}{more}", "h2d", size, self.gather_stream,
            is_blocking=not is_alone, module=parameters[0].name,
        )  # fmt: skip
        if not is_alone:
            assert event is not None
            self.builder.host(f"copied {parameters[0].name}")
            self.builder.free_when_done("buffers", size, event)

    def _prefetched(self) -> None:
        if self._swapper is not None and self.zero.prefetch_bucket_size > 0:
            self._swapper.prefetch(self._in_flight)

    def _released(self, numbers: list[int]) -> None:
        if self._swapper is not None:
            self._swapper.release(numbers)

    # -- activation checkpoints -------------------------------------------------------------------------

    def after_forward(self, segment: Segment) -> None:
        self.checkpoints.save(segment)

    def before_backward(self, segment: Segment) -> None:
        self.checkpoints.restore(segment)
        super().before_backward(segment)

    def after_backward(self, segment: Segment) -> None:
        self.checkpoints.drop(segment)

    # -- gradients --------------------------------------------------------------------------------------

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """partition_grads: to the host and back, and at the boundary on in fp32; see [Note: three copies of a
        gradient]."""
        if self.offload is None:
            return super()._keep_shards(bucket)
        builder, stream, config = self.builder, self.reduce_stream, self.config
        size = bucket.shard_elements * self._accum_bytes
        pinned = self.offload.pin_memory
        if not self.keeps_sums:
            assert self.training.gradient_accumulation_steps == 1
            builder.allocate("buffers", size)
        elif self._micro_batch == 0:
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
        if self._is_boundary:
            self._to_optimizer(bucket)
        last = builder.record(stream)
        assert last is not None
        builder.free_when_done("buffers", size, last)
        return last

    def _to_optimizer(self, bucket: GradientBucket) -> None:
        """_offload_grad_partition_at_boundary: the norm, the cast, and to where the optimizer wants it."""
        builder, stream = self.builder, self.reduce_stream
        dtype, numel = self.config.grad_accum_dtype, bucket.shard_elements
        builder.kernels("gradient norms", norm_kernels(numel, dtype, bucket.num_tensors), stream=stream)
        builder.allocate("buffers", 4 * numel)
        builder.kernels("cast gradients", cast_kernels(numel, dtype, "fp32"), stream=stream)
        in_memory = 0
        for number in bucket.parameters:
            group, shard = self._group_of[number], self.trace.parameters[number].shard_numel
            if self.is_swapped(group):
                self._swap_gradient(number)
            elif group >= self._first_on_cpu:
                in_memory += shard
        assert self.offload is not None
        self.host.copy(
            "fp32 gradients to host", "d2h", 4 * in_memory, stream, is_pinned=self.offload.pin_memory
        )
        last = builder.record(stream)
        assert last is not None
        builder.free_when_done("buffers", 4 * numel, last)

    def _swap_gradient(self, number: int) -> None:
        """Into a pinned buffer, with a copy that blocks; small pieces stay on the GPU until the step."""
        parameter = self.trace.parameters[number]
        piece = swapped_group(0, [parameter.shard_numel], self.config)
        swapped = piece.swapped_numel if piece else 0
        self.builder.allocate("buffers", 4 * (parameter.shard_numel - swapped))
        if swapped:
            assert self._states is not None
            self._states.write_gradient(swapped, parameter.name)
            self.host.copy(
                f"gradient of {parameter.name}", "d2h", 4 * swapped, self.reduce_stream, is_blocking=True
            )
            self.builder.host("copied a gradient")

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """One sub-group after another: read, scale, update, write back the 16-bit weights, write."""
        self._partition_all()
        if self.offload is None:
            self._step_on_gpu()
            self._post_step()
            return
        check_overflow(self.builder, self.config, [])
        for _ in self.groups:
            norm_and_sync(self.builder, self.config, [])
        for group in range(len(self.groups)):
            numel = self.numel_of(group)
            if self.is_swapped(group):
                self._read_states(group)
            if group < self._first_on_cpu:
                self.builder.kernels(f"scale gradients of sub-group {group}", scale_kernels(numel))
                self._update_on_gpu(group)
                self._weights_from_gpu(group)
            else:
                self.host.scale(f"scale gradients of sub-group {group}", numel)
                self.host.optimizer(f"optimizer step of sub-group {group}", numel, self.training.optimizer)
                self._weights_from_cpu(group)
            if self.is_swapped(group):
                assert self._states is not None
                self._states.write(group)
        self._bring_persistent()
        self._post_step()

    def _read_states(self, group: int) -> None:
        assert self._states is not None
        self._states.read(group)
        loose = 4 * self._states.groups[group].loose_numel
        self.host.copy(f"loose gradients of sub-group {group}", "d2h", loose, COMPUTE, is_blocking=True)
        self.builder.free("buffers", loose)

    def _step_on_gpu(self) -> None:
        """Optimizer states on the GPU, 16-bit weights elsewhere."""
        shards = [parameter.shard_numel for parameter in self.trace.parameters]
        check_overflow(self.builder, self.config, shards)
        norm_and_sync(self.builder, self.config, shards, num_groups=len(self.groups))
        for group in range(len(self.groups)):
            self._update_on_gpu(group)
            self._weights_from_gpu(group)

    def _update_on_gpu(self, group: int) -> None:
        numel, config = self.numel_of(group), self.config
        cast = 4 * numel if self.offload is None and config.grad_accum_dtype != "fp32" else 0
        self.builder.allocate("buffers", cast)
        if cast:
            kernels = cast_kernels(numel, config.grad_accum_dtype, "fp32")
            self.builder.kernels(f"cast gradients of sub-group {group}", kernels)
        training = self.training
        if self.offload is not None:  # the "backup optimizer" for the GPU's part is torch.optim.AdamW
            training = replace(training, optimizer_implementation="foreach")
        update(
            self.builder, training, [numel], gradient_dtype="fp32", state_dtype="fp32",
            low_precision_copy=config.precision != "fp32", name=f"optimizer step of sub-group {group}",
        )  # fmt: skip
        self.builder.free("buffers", cast)

    def _split(self, group: int) -> dict[str, int]:
        """This rank's elements of a sub-group by the home of its 16-bit weights."""
        numels = {"gpu": 0, "host": 0, "nvme": 0}
        for number in self.groups[group]:
            numels[self.homes.of[number]] += self.trace.parameters[number].shard_numel
        return numels

    def _weights_from_gpu(self, group: int) -> None:
        """The new 16-bit weights, made by the GPU, to their home."""
        numels = self._split(group)
        away = (numels["host"] + numels["nvme"]) * self.param_bytes
        self.host.copy(f"weights of sub-group {group}", "d2h", away, COMPUTE, is_blocking=True)
        self._write_weights(group)

    def _weights_from_cpu(self, group: int) -> None:
        """The new 16-bit weights, cast by the CPU into memory that is not pinned when they go to the GPU."""
        numels, dtype = self._split(group), self.config.param_dtype
        numel = self.numel_of(group)
        if dtype != "fp32" or not numels["gpu"]:
            self.host.cast(f"cast weights of sub-group {group}", numel, "fp32", dtype)
        self.host.copy(
            f"weights of sub-group {group}", "h2d", numels["gpu"] * self.param_bytes, COMPUTE, is_pinned=False
        )
        self._write_weights(group)

    def _write_weights(self, group: int) -> None:
        """swap_out_partitioned_params: one submission, waited for."""
        size = sum(
            self._file_bytes(number) for number in self.groups[group] if self.homes.of[number] == "nvme"
        )
        event = self.host.write(f"write weights of sub-group {group}", size)
        self.host.wait(event, f"wait for weights of sub-group {group}")

    def _file_bytes(self, number: int) -> int:
        shard = self.trace.parameters[number].shard_numel
        return aligned_numel(shard, self.param_bytes, self.config.aio) * self.param_bytes

    def _bring_persistent(self) -> None:
        persistent = [
            number
            for number, parameter in enumerate(self.trace.parameters)
            if parameter.is_persistent and self.homes.of[number] != "gpu"
        ]
        size = sum(self.trace.parameters[number].shard_numel for number in persistent) * self.param_bytes
        if self.world_size > 1:
            self.host.copy("shards of persistent parameters", "h2d", size, COMPUTE, is_blocking=True)


def offloaded_zero3_plan(
    workload: Workload, config: DeepSpeedConfig, training: Training, world_size: int
) -> Plan:
    """One steady step of ZeRO-3 with something off the GPU."""
    builder = PlanBuilder(zero3_groups(config, world_size))
    schedule = OffloadedZero3Schedule(builder, workload, config, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    schedule.checkpoints.finish()
    return builder.finish("deepspeed", world_size, schedule.resident())
