"""DeepSpeed ZeRO stage 3: parameters fetched module by module.

Transcribed from DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `partition_parameters.py`); the fetch order is
`zsim.plan.zero3_fetch`. This is the steady step: the first two, which only record the trace and fetch
nothing ahead, are not it.

# [Note: record_stream]
Gathered parameters and gradients are made on one stream and used on another; DeepSpeed tells the allocator
so with `record_stream`, and the block is not handed out again before that use has ended on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.cost.update_work import accumulate_kernels, cast_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder, moves
from zsim.plan.deepspeed_step import check_overflow, norm_and_sync
from zsim.plan.ops import CollectiveKind, Group, Memory, Plan
from zsim.plan.optimizer import update
from zsim.plan.step import Hooks, walk_step
from zsim.plan.workload import ModuleCall, Workload
from zsim.plan.zero3_fetch import ROOT, Coordinator, Fetch, trace_of
from zsim.specs.importers.deepspeed import DeepSpeedConfig
from zsim.specs.model import Linear
from zsim.specs.strategy import DTYPE_BYTES, Training

_MAX_EVENTS = 2  # fetches and reductions that may be under way before the host blocks


@dataclass(slots=True)
class GradientBucket:
    """Gradients collected for the next reduction: padded shards, elements, and loose gradients' bytes."""

    elements: int = 0
    shard_elements: int = 0
    loose_bytes: int = 0
    parameters: list[int] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)


class Zero3Schedule(Hooks):
    """DeepSpeedZeRoOffload's module hooks and DeepSpeedZeroOptimizer_Stage3's gradient hooks."""

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        config: DeepSpeedConfig,
        training: Training,
        world_size: int,
    ) -> None:
        super().__init__(builder)
        self.config, self.zero, self.training = config, config.zero, training
        self.workload, self.world_size = workload, world_size
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.reduce_bytes = DTYPE_BYTES[config.communication_dtype]
        self.trace = trace_of(workload, config.zero, world_size)
        self.coordinator = Coordinator(self.trace, config.zero)
        is_overlapped = self.zero.overlap_comm
        self.gather_stream = "all_gather" if is_overlapped else COMPUTE
        self.reduce_stream = "reduce_scatter" if is_overlapped else COMPUTE
        self._in_flight: dict[int, Fetch] = {}
        self._gather_ops: dict[int, int] = {}  # id of a fetch -> its collective
        self._fetch_events: list[int] = []
        self._reduce_events: list[int] = []
        self._bucket = GradientBucket()
        self._numbers = {p.name: number for number, p in enumerate(self.trace.parameters)}
        self._micro_batch = 0
        self._held: dict[str, int] = {}  # bytes of released weights that autograd still holds
        self._checkpointed = {segment.name: segment.is_checkpointed for segment in workload.segments}

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def shard_numel(self) -> int:
        return sum(parameter.shard_numel for parameter in self.trace.parameters)

    def resident(self) -> list[Memory]:
        """Shards, kept gathered parameters, fp32 masters and moments, gradient shards, the bucket."""
        shard, config = self.shard_numel, self.config
        persistent = sum(p.padded_numel for p in self.trace.parameters if p.is_persistent)
        master = DTYPE_BYTES[config.master_weights_dtype]
        if self.config.precision == "fp32":
            master = 0  # the fp32 shard is the model's own
        moments = self.workload.optimizer_state_bytes // 4 * DTYPE_BYTES[config.optimizer_states_dtype]
        bucket = self.zero.reduce_bucket_size * self.reduce_bytes if self.zero.contiguous_gradients else 0
        gathered = persistent * self.param_bytes if self.world_size > 1 else 0
        return [
            Memory("parameters", shard * self.param_bytes),
            Memory("gradients", shard * DTYPE_BYTES[config.grad_accum_dtype]),
            Memory("optimizer_states", shard * (master + moments)),
            Memory("buffers", gathered),
            Memory("buffers", bucket),
        ]

    # -- fetch ------------------------------------------------------------------------------------------

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        self._micro_batch = number
        self.coordinator.reset_step()
        if number == 0 and self.gather_stream != COMPUTE:
            self.builder.wait_stream(self.gather_stream, COMPUTE)
        self._fetch_external()

    def begin_backward(self) -> None:
        self._fetch_external()

    def _fetch_external(self) -> None:
        """The hooks of the model itself; see [Note: external parameters] of zero3_fetch."""
        if self.trace.external:
            self._fetch(ROOT, "")

    def before_module(self, call: ModuleCall) -> None:
        """PartitionedParameterCoordinator.fetch_sub_module, where a unit begins."""
        begins = self.trace.last if self.builder.phase == "backward" else self.trace.first
        unit = begins.get(call.name)
        if unit is not None:
            self._fetch(unit, call.name)

    def _fetch(self, unit: str, module: str) -> None:
        builder = self.builder
        builder.host(f"fetch {unit}", overhead="deepspeed_fetch", module=module)
        self._gather(self.coordinator.fetch_needed(unit))
        for number in self.trace.by_unit[unit]:
            self._wait_for(number)
        if self.gather_stream != COMPUTE:
            builder.wait_stream(COMPUTE, self.gather_stream)
        self._gather(self.coordinator.prefetch(unit))
        self._prefetched()

    def _prefetched(self) -> None:
        """After the fetches of a module; for shards that come from further away."""

    def _bring(self, fetch: Fetch) -> None:
        """Before a gather; for shards that are not on the GPU."""

    def _gather(self, fetch: Fetch | None) -> None:
        """One all-gather per fetch, or one per parameter; the tensors are allocated now."""
        if fetch is None:
            return
        if self.world_size == 1:
            self._bring(fetch)
            for number in fetch.parameters:
                self.builder.allocate("buffers", self.trace.parameters[number].numel * self.param_bytes)
            return
        is_single = self.zero.allgather_sequential or len(fetch.parameters) == 1
        parts = [Fetch((number,)) for number in fetch.parameters] if is_single else [fetch]
        for part in parts:
            self._bring(part)
            numel = sum(self.trace.parameters[number].padded_numel for number in part.parameters)
            self.builder.allocate("buffers", numel * self.param_bytes)
            name = self.trace.parameters[part.parameters[0]].name
            more = f" and {len(part.parameters) - 1} more" if len(part.parameters) > 1 else ""
            uses_all_reduce = self.zero.use_all_reduce_for_fetch_params
            kind: CollectiveKind = "all_reduce" if uses_all_reduce else "all_gather"
            self._gather_ops[id(part)] = self.builder.collective(
                kind,
                numel * self.param_bytes,
                self.config.param_dtype,
                "world",
                stream=self.gather_stream,
                name=f"{kind} {name}{more}",
                module=name,
            )
            for number in part.parameters:
                self._in_flight[number] = part

    def _wait_for(self, number: int) -> None:
        """AllGatherHandle.wait: throttle the host, and cut a shared tensor into its parameters."""
        part = self._in_flight.get(number)
        if part is None:
            return
        if len(self._fetch_events) > _MAX_EVENTS:
            self.builder.host_wait(self._fetch_events.pop(0))
        for other in part.parameters:
            del self._in_flight[other]
        event = self._gather_ops.pop(id(part))
        if len(part.parameters) > 1:
            size = (
                sum(self.trace.parameters[other].padded_numel for other in part.parameters) * self.param_bytes
            )
            self.builder.allocate("buffers", size)
            event = self.builder.kernels(
                f"cut {self.trace.parameters[number].name}",
                moves(size, size, launches=len(part.parameters)),
                stream=self.gather_stream,
            )
            self.builder.free_when_done("buffers", size, event)
        self._fetch_events.append(event)

    def after_module(self, call: ModuleCall) -> None:
        """PartitionedParameterCoordinator.release_sub_module, where a unit ends; see [Note: record_stream].

        Without `memory_efficient_linear` autograd holds on to the gathered weights of linear layers until
        their backward, so releasing them in forward frees nothing.
        """
        builder, is_backward = self.builder, self.builder.phase == "backward"
        ends = self.trace.first if is_backward else self.trace.last
        unit = ends.get(call.name)
        if unit is None:
            return
        builder.host(f"release {unit}", overhead="deepspeed_release", module=call.name)
        last = builder.record(COMPUTE)
        assert last is not None
        holds = not self.zero.memory_efficient_linear and not is_backward and call.work.saved_bytes > 0
        released = self.coordinator.release()
        self._released(released)
        size = self._gathered_bytes(released)
        if holds and isinstance(call.module.work, Linear) and not self._discards(call):
            self._held[unit] = self._held.get(unit, 0) + size
        else:
            builder.free_when_done("buffers", size, last)
        if is_backward:
            builder.free_when_done("buffers", self._held.pop(unit, 0), last)

    def _gathered_bytes(self, numbers: list[int]) -> int:
        parameters = [self.trace.parameters[number] for number in numbers]
        whole = sum(p.padded_numel if self.world_size > 1 else p.numel for p in parameters)
        return whole * self.param_bytes

    def _released(self, numbers: list[int]) -> None:
        """Parameters that are given back now; for shards that come from further away."""

    def _discards(self, call: ModuleCall) -> bool:
        """Whether this forward runs without autograd, to be repeated later."""
        return self.builder.phase == "forward" and self._checkpointed.get(call.segment, False)

    # -- gradients --------------------------------------------------------------------------------------

    def gradient_ready(self, call: ModuleCall) -> None:
        for parameter in reversed(call.parameters):
            self._add_gradient(self._numbers[f"{call.name}.{parameter.name}"], call.name)

    def _add_gradient(self, number: int, name: str) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads and __add_grad_to_ipg_bucket."""
        builder, bucket, zero = self.builder, self._bucket, self.zero
        numel = self.trace.parameters[number].numel
        size = numel * self.param_bytes
        builder.allocate("buffers", size)
        if bucket.elements and bucket.elements + numel > zero.reduce_bucket_size:
            self._reduce()
            bucket = self._bucket
        builder.host(f"gradient of {name}", overhead="deepspeed_gradient_hook", module=name)
        if self.reduce_stream != COMPUTE:
            builder.wait_stream(self.reduce_stream, COMPUTE)
        if zero.contiguous_gradients and bucket.elements + numel <= zero.reduce_bucket_size:
            copied = builder.kernels(
                f"bucket {name}",
                moves(size, numel * self.reduce_bytes),
                stream=self.reduce_stream,
                module=name,
            )
            builder.free_when_done("buffers", size, copied)
        else:
            bucket.loose_bytes += size
        bucket.elements += numel
        bucket.shard_elements += self.trace.parameters[number].shard_numel
        bucket.parameters.append(number)

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads: reduce-scatter the bucket, add the shard to the gradients."""
        builder, bucket, config, stream = self.builder, self._bucket, self.config, self.reduce_stream
        if not bucket.elements:
            return
        if len(self._reduce_events) > _MAX_EVENTS:
            builder.host_wait(self._reduce_events.pop(0))
        builder.host("reduce bucket", overhead="deepspeed_reduce")
        if self.zero.enable_sanity_checks and self.world_size > 1:
            size = 8 * bucket.num_tensors  # parameter ids, compared with rank 0's on the host
            check = builder.collective("broadcast", size, "int64", "world", stream=stream)
            builder.host_wait(check)
        whole = bucket.shard_elements * self.world_size * self.reduce_bytes
        keeps_buffer = (
            self.zero.contiguous_gradients
            and bucket.elements <= self.zero.reduce_bucket_size
            and not self.zero.reduce_scatter
        )
        if self.world_size > 1 and keeps_buffer:
            whole = 0
            size = bucket.elements * self.reduce_bytes
            builder.kernels("average bucket", moves(size, size), stream=stream)
            builder.collective("all_reduce", size, config.communication_dtype, "world", stream=stream)
        elif self.world_size > 1:
            size = whole
            if bucket.num_tensors == 1 and bucket.elements % self.world_size == 0:
                whole = 0  # one tensor that divides evenly is reduced where it lies
            else:
                builder.allocate("buffers", whole)
                builder.kernels(
                    "flatten bucket", moves(size, size, launches=bucket.num_tensors), stream=stream
                )
            builder.kernels("average bucket", moves(size, size), stream=stream)
            builder.collective("reduce_scatter", size, config.communication_dtype, "world", stream=stream)
        else:
            whole = 0
        done = self._keep_shards(bucket)
        builder.free_when_done("buffers", whole + bucket.loose_bytes, done)
        self._reduce_events.append(done)
        self._bucket = GradientBucket()

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """partition_grads: copy the reduced shards into the rank's gradients, or add them."""
        config = self.config
        if self._micro_batch == 0:
            size = bucket.shard_elements * DTYPE_BYTES[config.grad_accum_dtype]
            kernels = moves(bucket.shard_elements * self.reduce_bytes, size, launches=bucket.num_tensors)
        else:
            kernels = accumulate_kernels(
                bucket.shard_elements, config.grad_accum_dtype, config.communication_dtype
            )
        return self.builder.kernels("partition gradients", kernels, stream=self.reduce_stream)

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue: the last bucket, then the host waits for it."""
        released = self.coordinator.release_external()
        self._released(released)
        self.builder.free("buffers", self._gathered_bytes(released))
        self._reduce()
        self.builder.host_wait(self.builder.record(self.reduce_stream))
        self.builder.host("end of backward")
        self._reduce_events = []

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, config = self.builder, self.config
        shards = [parameter.shard_numel for parameter in self.trace.parameters]
        check_overflow(builder, config, shards)
        norm_and_sync(builder, config, shards)
        for number, group in enumerate(self.sub_groups()):
            numel = sum(self.trace.parameters[index].shard_numel for index in group)
            needs_cast = config.grad_accum_dtype != config.master_weights_dtype
            cast = numel * DTYPE_BYTES[config.master_weights_dtype] if needs_cast else 0
            builder.allocate("buffers", cast)
            if cast:
                kernels = cast_kernels(numel, config.grad_accum_dtype, config.master_weights_dtype)
                builder.kernels(f"cast gradients of sub-group {number}", kernels)
            update(
                builder,
                self.training,
                [numel],
                gradient_dtype=config.master_weights_dtype,
                state_dtype=config.optimizer_states_dtype,
                low_precision_copy=config.precision != "fp32",
                name=f"optimizer step of sub-group {number}",
            )
            builder.free("buffers", cast)
        self._gather_persistent()

    def sub_groups(self) -> list[list[int]]:
        """Parameters in order, a new sub-group once the local elements reach `sub_group_size`."""
        groups: list[list[int]] = [[]]
        total = 0
        for number, parameter in enumerate(self.trace.parameters):
            if total >= self.zero.sub_group_size:
                groups.append([])
                total = 0
            groups[-1].append(number)
            total += parameter.shard_numel
        return groups

    def _gather_persistent(self) -> None:
        """_post_step: one all-gather of everything that stays gathered."""
        numel = sum(p.padded_numel for p in self.trace.parameters if p.is_persistent)
        if numel and self.world_size > 1:
            self.builder.collective(
                "all_gather", numel * self.param_bytes, self.config.param_dtype, "world", stream=COMPUTE,
                name="all_gather persistent parameters",
            )  # fmt: skip


def zero3_plan(workload: Workload, config: DeepSpeedConfig, training: Training, world_size: int) -> Plan:
    """One steady step of ZeRO stage 3."""
    builder = PlanBuilder([Group("world", world_size)])
    schedule = Zero3Schedule(builder, workload, config, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("deepspeed", world_size, schedule.resident())
