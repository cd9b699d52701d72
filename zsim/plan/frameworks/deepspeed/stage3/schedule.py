"""DeepSpeed ZeRO stage 3: parameters fetched module by module.

Transcribed from DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `partition_parameters.py`); the fetch order is
`zsim.plan.frameworks.deepspeed.stage3.coordinator`. This is the steady step: the first two, which only record
the trace and fetch nothing ahead, are not it.

# [Note: record_stream]
Gathered parameters and gradients are made on one stream and used on another; DeepSpeed tells the allocator
so with `record_stream`, and the block is not handed out again before that use has ended on the GPU.
"""

from __future__ import annotations

from zsim.cost.kernels.update import cast_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.deepspeed.norm_and_overflow import check_overflow, norm_and_sync
from zsim.plan.frameworks.deepspeed.stage3.coordinator import Coordinator, Fetch, trace_of
from zsim.plan.frameworks.deepspeed.stage3.early import EarlyGatherer
from zsim.plan.frameworks.deepspeed.stage3.gather import Gatherer
from zsim.plan.frameworks.deepspeed.stage3.gradients import MAX_EVENTS, Zero3Gradients
from zsim.plan.frameworks.deepspeed.stage3.module_order import ROOT
from zsim.plan.frameworks.deepspeed.zeropp.gather import (
    HPZ,
    QuantizedGatherer,
    SecondaryGatherer,
    SecondaryShards,
)
from zsim.plan.frameworks.deepspeed.zeropp.quantized_reduce import quantized_groups
from zsim.plan.ops import Group, Memory, Plan
from zsim.plan.parts.optimizer import update
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import ModuleCall, Segment, Workload
from zsim.specs.model.spec import Linear
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.training import Training


class Zero3Schedule(Zero3Gradients):
    """DeepSpeedZeRoOffload's module hooks and DeepSpeedZeroOptimizer_Stage3's step."""

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        config: DeepSpeedConfig,
        training: Training,
        world_size: int,
    ) -> None:
        super().__init__(builder, trace_of(workload, config.zero, world_size), config, world_size)
        self.workload, self.training = workload, training
        self.coordinator = Coordinator(self.trace, config.zero)
        self.gather_stream = "all_gather" if self.zero.overlap_comm else COMPUTE
        self.secondary = self._make_secondary()
        self.gatherer = self._make_gatherer()
        self._in_flight: dict[int, Fetch] = {}
        self._fetch_events: list[int] = []
        self._entered: tuple[str, ...] = ()  # for the backward of a block, before it ran again
        self._trailing: tuple[str, ...] = ()  # at the end of running again
        self._held: dict[str, int] = {}  # bytes of released weights that autograd still holds
        self._checkpointed = {segment.name: segment.is_checkpointed for segment in workload.segments}

    def _make_secondary(self) -> SecondaryShards | None:
        size = min(self.zero.zero_hpz_partition_size, self.config.world_size)
        if size <= 1 or self.world_size == 1:
            return None
        is_read = HPZ in self.builder.groups
        return SecondaryShards(self.builder, self.trace, self.config, size, is_read=is_read)

    def _make_gatherer(self) -> Gatherer:
        if self.config.fetches_one_by_one:
            return EarlyGatherer(
                self.builder, self.trace, self.config, self.gather_stream, self.reduce_stream
            )
        kind = QuantizedGatherer if self.zero.zero_quantized_weights else SecondaryGatherer
        return kind(self.builder, self.trace, self.config, self.gather_stream, self.secondary)

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def shard_numel(self) -> int:
        return sum(parameter.shard_numel for parameter in self.trace.parameters)

    def resident(self) -> list[Memory]:
        """Shards, kept gathered parameters, masters (of fp32 weights too) and moments, gradient shards, the
        bucket."""
        shard, config = self.shard_numel, self.config
        persistent = sum(p.padded_numel for p in self.trace.parameters if p.is_persistent)
        master = DTYPE_BYTES[config.master_weights_dtype]
        moments = self.workload.optimizer_state_bytes // 4 * DTYPE_BYTES[config.optimizer_states_dtype]
        bucket = self.zero.reduce_bucket_size * self.reduce_bytes if self.zero.contiguous_gradients else 0
        gathered = persistent * self.param_bytes if self.world_size > 1 else 0
        return [
            Memory("parameters", shard * self.param_bytes),
            Memory("gradients", shard * DTYPE_BYTES[config.grad_accum_dtype]),
            Memory("optimizer_states", shard * (master + moments)),
            Memory("buffers", gathered),
            Memory("buffers", bucket),
            *(self.secondary.resident() if self.secondary else []),
            *(self.quantized.resident() if self.quantized else []),
        ]

    # -- fetch ------------------------------------------------------------------------------------------

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        self._micro_batch = number
        self.coordinator.reset_step()
        if number == 0 and self.gather_stream != COMPUTE:
            self.builder.wait_stream(self.gather_stream, COMPUTE)
        self._enter(ROOT, "")

    def begin_backward(self) -> None:
        self._enter(ROOT, "")

    def before_backward(self, segment: Segment) -> None:
        """[Note: checkpoints and hooks] of zero3_hooks"""
        hooked, is_again = self.trace.hooked, segment.is_checkpointed
        self._entered = hooked.before_recompute(segment) if is_again else ()
        self._trailing = hooked.after_recompute(segment) if is_again else ()
        for module in self._entered:
            self._enter(module, segment.name)

    def before_module(self, call: ModuleCall) -> None:
        """Enter the modules that begin here."""
        hooked = self.trace.hooked
        if self.builder.phase == "backward":
            modules = tuple(m for m in hooked.backward.get(call.name, ()) if m not in self._entered)
            modules, self._trailing = (*self._trailing, *modules), ()
        elif self.builder.phase == "recompute":
            modules = hooked.recomputed(call)
        else:
            modules = hooked.forward.get(call.name, ())
        for module in modules:
            self._enter(module, call.name)

    def _enter(self, entered: str, module: str) -> None:
        """PartitionedParameterCoordinator.fetch_sub_module. The host's time of modules that hold nothing is
        counted with those inside them."""
        builder, numbers = self.builder, self.trace.by_unit.get(entered, ())
        if numbers:
            builder.host(f"fetch {entered or 'the model'}", overhead="deepspeed_fetch", module=module)
        self._gather(self.coordinator.fetch_needed(entered))
        for number in numbers:
            self._wait_for(number)
        if self.gather_stream != COMPUTE:
            builder.wait_stream(COMPUTE, self.gather_stream)
        self._gather(self.coordinator.prefetch(entered))
        self._prefetched()

    def _prefetched(self) -> None:
        """After the fetches of a module; for shards that come from further away."""

    def _bring(self, fetch: Fetch) -> None:
        """Before a gather; for shards that are not on the GPU."""

    def _gather(self, fetch: Fetch | None) -> None:
        """The fetch's collectives; what they put out is allocated now."""
        if fetch is None:
            return
        if self.world_size == 1:
            self._bring(fetch)
            for number in fetch.parameters:
                self.builder.allocate("buffers", self.trace.parameters[number].numel * self.param_bytes)
            return
        for part in self.gatherer.parts(fetch):
            self._bring(part)
            self.gatherer.start(part)
            for number in part.parameters:
                self._in_flight[number] = part

    def _wait_for(self, number: int) -> None:
        """AllGatherHandle.wait: throttle the host, and make the parameters usable."""
        part = self._in_flight.get(number)
        if part is None:
            return
        if len(self._fetch_events) > MAX_EVENTS:
            self.builder.host_wait(self._fetch_events.pop(0))
        for other in part.parameters:
            del self._in_flight[other]
        self._fetch_events.append(self.gatherer.finish(part))

    def after_module(self, call: ModuleCall) -> None:
        """PartitionedParameterCoordinator.release_sub_module, where a unit ends; see [Note: record_stream].

        Without `memory_efficient_linear` autograd holds on to the gathered weights of linear layers until
        their backward, so releasing them in forward frees nothing.
        """
        builder, is_backward = self.builder, self.builder.phase == "backward"
        ends = self.trace.first if is_backward else self.trace.last
        unit = ends.get(call.name)
        if unit is None or (builder.phase == "recompute" and unit == call.segment):
            return
        builder.host(f"release {unit or 'the model'}", overhead="deepspeed_release", module=call.name)
        holds = not self.zero.memory_efficient_linear and not is_backward
        released = self.coordinator.release()
        self._released(released)
        if self.secondary is not None:
            self.secondary.store(released)
        last = builder.record(COMPUTE)
        assert last is not None
        size = self._gathered_bytes(released)
        if holds and isinstance(call.module.work, Linear) and not self._discards(call):
            self._held[unit] = self._held.get(unit, 0) + size
        else:
            builder.free_when_done("buffers", size, last)
        if is_backward:
            builder.free_when_done("buffers", self._held.pop(unit, 0), last)

    def _gathered_bytes(self, numbers: list[int]) -> int:
        if self.world_size == 1:
            return sum(self.trace.parameters[number].numel for number in numbers) * self.param_bytes
        return sum(self.gatherer.gathered_bytes(number) for number in numbers)

    def _released(self, numbers: list[int]) -> None:
        """Parameters that are given back now; for shards that come from further away."""

    def _discards(self, call: ModuleCall) -> bool:
        """Whether this forward runs without autograd, to be repeated later."""
        return self.builder.phase == "forward" and self._checkpointed.get(call.segment, False)

    def end_backward(self) -> None:
        """The model itself lets go of its parameters; then the last reduction."""
        released = self.coordinator.release_external()
        self._released(released)
        if self.secondary is not None:
            self.secondary.store(released)
        self.builder.free("buffers", self._gathered_bytes(released))
        super().end_backward()

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        builder, config = self.builder, self.config
        shards = [parameter.shard_numel for parameter in self.trace.parameters]
        self._partition_all()
        check_overflow(builder, config, shards, self.shard_group)
        norm_and_sync(builder, config, shards, self.shard_group, num_groups=len(self.sub_groups()))
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
        self._post_step()

    def _partition_all(self) -> None:
        """_partition_all_parameters: what is still gathered, the persistent parameters, is released too."""
        if self.secondary is not None:
            parameters = enumerate(self.trace.parameters)
            self.secondary.store(number for number, parameter in parameters if parameter.is_persistent)

    def _post_step(self) -> None:
        self._gather_persistent()
        if self.secondary is not None:
            self.secondary.drop()

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
        """What stays gathered, one all-gather per parameter (`_allgather_params_coalesced`, which coalesces
        nothing since DeepSpeed 0.10 at the least); then the host waits for the GPU."""
        if self.world_size == 1:
            return
        persistent = [parameter for parameter in self.trace.parameters if parameter.is_persistent]
        for parameter in persistent:
            self.builder.collective(
                "all_gather", parameter.padded_numel * self.param_bytes, self.config.param_dtype,
                self.shard_group, stream=COMPUTE, name=f"all_gather {parameter.name}", module=parameter.name,
            )  # fmt: skip
        if persistent:
            self.builder.host_wait(self.builder.record(COMPUTE))


def zero3_groups(config: DeepSpeedConfig, world_size: int) -> list[Group]:
    """All ranks, and the groups of ZeRO++ that are in use."""
    groups = [Group.regular("world", world_size)]
    hpz = min(config.zero.zero_hpz_partition_size, world_size)
    if hpz > 1:
        groups.append(Group.regular(HPZ, world_size, hpz))
    if config.zero.zero_quantized_gradients and world_size > config.gpus_per_node:
        groups += quantized_groups(config)
    return groups


def zero3_plan(workload: Workload, config: DeepSpeedConfig, training: Training, world_size: int) -> Plan:
    """One steady step of ZeRO stage 3."""
    builder = PlanBuilder(zero3_groups(config, world_size))
    schedule = Zero3Schedule(builder, workload, config, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("deepspeed", world_size, schedule.resident())
