"""DeepSpeed ZeRO stage 3: parameters fetched module by module.

Transcribed from DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `partition_parameters.py`). The fetch order is in
coordinator.py. The plan is of a steady step: the first two steps record the trace and do not prefetch.

# [Note: record_stream]
Gathered parameters and gradients are allocated on one stream and used on another. DeepSpeed tells the
allocator with `record_stream`, and the block is not reused before its use has ended on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from zsim.cost.kernels.update import cast_kernels
from zsim.cost.memory import quantisation_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.muon import momentum_dtype, muon_shapes, orthogonalise_sub_group
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.coordinator import Coordinator, Fetch
from zsim.frameworks.deepspeed.stage3.gather import Gatherer
from zsim.frameworks.deepspeed.stage3.gradients import MAX_EVENTS, Zero3Gradients
from zsim.frameworks.deepspeed.stage3.module_order import ROOT
from zsim.frameworks.deepspeed.stage3.synchronized_gather import SynchronizedGatherer, drop_trace
from zsim.frameworks.deepspeed.zeropp.gather import QuantizedGatherer, SecondaryShards
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE
from zsim.plan.hooks import BlockPosition, CheckpointStore
from zsim.plan.ops import CollectiveKind, Memory
from zsim.plan.shared.optimizer import partition_states
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.strategy.parallelism import EXPERT, EXPERT_DATA


class Zero3Schedule(Zero3Gradients):
    """DeepSpeedZeRoOffload's module hooks and DeepSpeedZeroOptimizer_Stage3's step."""

    # partition_parameters.py, `_dist_allgather_fn` with async_op=True
    asynchronous: ClassVar[frozenset[CollectiveKind]] = frozenset({"all_gather"})

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        zero = drop_trace(config.zero) if config.fetches_one_by_one else config.zero
        self.coordinator = Coordinator(self.trace, zero, self.store, self.group.name)
        self.gather_stream = "fetch" if self.zero.overlap_comm else COMPUTE
        self.secondary = self._make_secondary()
        self.gatherer = self._make_gatherer()
        self._in_flight: dict[int, Fetch] = {}
        self._fetch_events: list[int] = []
        self._entered_at: dict[str, int] = {}  # steps of the trace, by module
        self._entered: tuple[str, ...] = ()  # in backward of a block, before its recomputation
        self._trailing: tuple[str, ...] = ()  # at the end of its recomputation
        # by unit and micro-batch, bytes of released weights that autograd still holds
        self._autograd_bytes: dict[tuple[str, int], int] = {}
        self._checkpointed = {segment.name: segment.is_checkpointed for segment in stage.workload.segments}
        # Nothing but gathers and reductions of parameters on GPUs, whose state `block_position` knows.
        self._supports_copies = (
            type(self) is Zero3Schedule
            and type(self.gatherer) is Gatherer
            and self.world_size > 1
            and self.store.is_on_gpu
            and stage.parallelism.style != AUTOTP
            and (self.secondary, self.quantized, self.offload) == (None, None, None)
        )

    def _make_secondary(self) -> SecondaryShards | None:
        size = min(self.zero.zero_hpz_partition_size, self.stage.ranks)
        if size <= 1 or self.world_size == 1:
            return None
        group = self.stage.group("hpz", size)
        return SecondaryShards(self.store, size, group)

    def _make_gatherer(self) -> Gatherer:
        arguments = self.builder, self.trace, self.config, self.gather_stream, self.group
        if self.config.fetches_one_by_one:
            return SynchronizedGatherer(*arguments)
        kind = QuantizedGatherer if self.zero.zero_quantized_weights else Gatherer
        return kind(*arguments, None if self.secondary is None else self.secondary.split)

    # -- sizes ------------------------------------------------------------------------------------------

    @property
    def shard_numel(self) -> int:
        return sum(parameter.shard_numel for parameter in self.trace.parameters)

    def resident(self) -> list[Memory]:
        """Shards, persistent gathered parameters, masters, moments, gradient shards and
        the bucket. With ZeRO++ also secondary shards and LoCo's errors.
        """
        shard, config = self.shard_numel, self.config
        # Also where parameters have the masters' type: 0.18.2 and later would share them (#7651), but compare
        # a torch.device with a name, which are never equal (recorded: traces/gloo/deepspeed3-*).
        master = DTYPE_BYTES[config.master_weights_dtype]
        moments = sum(
            self._group_numel(group) * DTYPE_BYTES[momentum_dtype(config)]
            if number < self.num_matrix_groups
            else sum(partition_states(self.training, self._group_numel(group), config.optimizer_states_dtype))
            for number, group in enumerate(self.sub_groups)
        )
        trained_numel = sum(parameter.trained_shard_numel for parameter in self.trace.parameters)
        states = [
            Memory("gradients", trained_numel * DTYPE_BYTES[config.grad_accum_dtype]),
            Memory("optimizer_states", trained_numel * master + moments),
        ]
        scales = sum(quantisation_bytes(parameter) for _, parameter in self.workload.model.named_parameters())
        states += [Memory("parameters", scales)] if scales else []
        buffers = [Memory("buffers", self._persistent_bytes), Memory("buffers", self.bucket_bytes)]
        copies = self.secondary.resident() if self.secondary else []
        errors = self.quantized.resident() if self.quantized else []
        if self.offload is None and self.store.is_on_gpu:
            return [Memory("parameters", shard * self.param_bytes), *states, *buffers, *copies, *errors]
        states = states if self.offload is None else self.offload.resident()
        return [*buffers, *errors, *self.store.resident(), *copies, *states]

    @property
    def _persistent_bytes(self) -> int:
        """Bytes of the gathered persistent parameters."""
        parameters = self.trace.parameters if self.world_size > 1 else ()
        return sum(p.padded_numel for p in parameters if p.is_persistent) * self.param_bytes

    def keep_gathered(self) -> list[Memory]:
        """Persistent parameters, and the secondary shards of all others, which no step drops."""
        copies = [] if self.secondary is None else self.secondary.keep_all()
        return [Memory("buffers", self._persistent_bytes), *copies]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the flat buffers that gradients are collected in."""
        return self.zero.reduce_bucket_size * self.reduce_bytes if self.zero.contiguous_gradients else 0

    @property
    def startup_bytes(self) -> int:
        """Bytes of all weights of a model that was built without `deepspeed.zero.Init` and is moved to the
        GPU unsharded, else 0 (DeepSpeed 0.19.8 engine.py, `_configure_distributed_model`).
        """
        return 0 if self.config.zero_init else self.workload.numel * self.param_bytes

    # -- fetch ------------------------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        self.coordinator.reset_step()
        if micro_batch == 0 and self.gather_stream != COMPUTE:
            self.builder.wait_stream(self.gather_stream, COMPUTE)
        self._enter(ROOT, "")

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        super().begin_backward(
            micro_batch, is_last=is_last, schedule_manages_sharding=schedule_manages_sharding
        )
        self._enter(ROOT, "")

    def pre_backward(self, segment: Segment) -> None:
        """Enter the modules before a recomputation. See [Note: checkpoints and hooks] of module_order.py."""
        hooked, is_recomputed = self.trace.hooked, segment.is_checkpointed
        self._entered = hooked.modules_before_recompute(segment) if is_recomputed else ()
        self._trailing = hooked.modules_after_recompute(segment) if is_recomputed else ()
        for module in self._entered:
            self._enter(module, segment.name)

    def pre_module(self, call: ModuleCall) -> None:
        """Enter the modules that begin here."""
        hooked, phase = self.trace.hooked, self.builder.phase
        modules: Iterable[str]
        if phase == "backward":
            modules = hooked.backward.get(call.name, ())
            if modules and self._entered:
                modules = [module for module in modules if module not in self._entered]
            if self._trailing:
                modules, self._trailing = (*self._trailing, *modules), ()
        elif phase == "recompute":
            modules = hooked.recomputed_modules(call)
        else:
            modules = hooked.forward.get(call.name, ())
        for module in modules:
            self._enter(module, call.name)

    def _enter(self, entered_module: str, module: str) -> None:
        """PartitionedParameterCoordinator.fetch_sub_module. The host time of modules without parameters is
        counted with the modules inside them."""
        builder, numbers = self.builder, self.trace.parameters_per_unit.get(entered_module, ())
        if numbers:
            overhead = f"deepspeed_fetch{self.config.release.module_hooks}"
            builder.host(f"fetch {entered_module or 'the model'}", overhead=overhead, module=module)
            self._gather(self.coordinator.fetch(numbers))
            for number in numbers:
                self._wait_for(number)
        if self.gather_stream != COMPUTE:
            builder.join(COMPUTE, self.gather_stream)
        prefetch = self.coordinator.prefetch(numbers)
        self._entered_at[entered_module] = self.coordinator.step
        if prefetch is not None:
            self._gather(prefetch)
        if not self.store.is_on_gpu:
            self.store.read_ahead(self._in_flight, self.coordinator.upcoming())

    def _gather(self, fetch: Fetch | None) -> None:
        """Issue a fetch's collectives. Their outputs are allocated now."""
        if fetch is None:
            return
        if self.world_size == 1:
            self.store.bring(fetch.parameters, self.gather_stream)
            for number in fetch.parameters:
                size = self.trace.parameters[number].numel * self.param_bytes
                self.builder.allocate("buffers", size, stream=self.gather_stream)
            return
        for part in self.gatherer.split_fetch(fetch):
            if self.secondary is None or not self.secondary.bring(part, self.gather_stream):
                self.store.bring(part.parameters, self.gather_stream)
            self.gatherer.start(part)
            for number in part.parameters:
                self._in_flight[number] = part

    def _wait_for(self, number: int) -> None:
        """AllGatherHandle.wait: throttle the host, and finish the gather of a parameter."""
        part = self._in_flight.get(number)
        if part is None:
            return
        if len(self._fetch_events) > MAX_EVENTS:
            self.builder.host_wait(self._fetch_events.pop(0))
        for member in part.parameters:
            del self._in_flight[member]
        self._fetch_events.append(self.gatherer.finish(part))

    def post_module(self, call: ModuleCall) -> None:
        """PartitionedParameterCoordinator.release_sub_module, where a unit ends.

        See [Note: record_stream], and [Note: weights that autograd holds] of fetch_trace.py.
        """
        builder, is_backward = self.builder, self.builder.phase == "backward"
        unit = (self.trace.first if is_backward else self.trace.last).get(call.name)
        if unit is None or (builder.phase == "recompute" and unit == call.segment):
            return
        micro_batch = builder.micro_batch
        overhead = f"deepspeed_release{self.config.release.module_hooks}"
        builder.host(f"release {unit or 'the model'}", overhead=overhead, module=call.name)
        released = self.coordinator.release(self._entered_at.get(unit, self.coordinator.step))
        self.store.release(released)
        if self.secondary is not None:
            self.secondary.keep(released)
        last = builder.record(COMPUTE)
        assert last is not None
        size = self._gathered_bytes(released) if released else 0
        saved = 0 if is_backward else self._gathered_bytes(self._held_weights(call, released))
        if saved:
            self._autograd_bytes[unit, micro_batch] = self._autograd_bytes.get((unit, micro_batch), 0) + saved
        builder.free_when_done("buffers", size - saved, last)
        if is_backward and self._autograd_bytes:
            builder.free_when_done("buffers", self._autograd_bytes.pop((unit, micro_batch), 0), last)

    def _held_weights(self, call: ModuleCall, released: list[int]) -> list[int]:
        """The weights released in forward whose memory autograd keeps."""
        if self.training.forward_only or not call.module.has_backward or self._discards(call):
            return []
        if call.module.role is Role.PRODUCT and not self.zero.memory_efficient_linear:
            return released
        return [number for number in released if number in self.trace.viewed]

    def _gathered_bytes(self, numbers: list[int]) -> int:
        if self.world_size == 1:
            return sum(self.trace.parameters[number].numel for number in numbers) * self.param_bytes
        return sum([self.gatherer.gathered_bytes(number) for number in numbers])

    def _discards(self, call: ModuleCall) -> bool:
        """Whether this forward runs without autograd, to be recomputed later."""
        return self.builder.phase == "forward" and self._checkpointed.get(call.segment, False)

    def end_forward(self) -> None:
        super().end_forward()
        if self.training.forward_only:
            self._release_external()

    def end_backward(self) -> None:
        """Release the parameters of the model itself, then issue the last reduction."""
        self._release_external()
        super().end_backward()

    def _release_external(self) -> None:
        released = self.coordinator.release_external()
        self.store.release(released)
        if self.secondary is not None:
            self.secondary.keep(released)
        self.builder.free("buffers", self._gathered_bytes(released))

    # -- blocks as copies -------------------------------------------------------------------------------

    def block_position(self, segment: Segment) -> BlockPosition | None:
        names = (call.parameter_name(call.parameters[0]) for call in segment.calls if call.parameters)
        if (
            not self._supports_copies
            or type(self.checkpoints) is not CheckpointStore
            or self._autograd_bytes
            or self._trailing
            or (name := next(names, None)) is None
        ):
            return None
        first, now, bucket = self._number_of[name], len(self.builder.ops), self._bucket
        in_flight = [
            ([number - first for number in part.parameters], part.group)
            for part in dict.fromkeys(self._in_flight.values())
        ]
        events = [[event - now for event in events] for events in (self._fetch_events, self._reduce_events)]
        relative_bucket = replace(bucket, parameters=[number - first for number in bucket.parameters])
        return self.coordinator.block_position(
            first, (in_flight, events, relative_bucket, self.gatherer.pending_parts(first))
        )

    def repeat_count(self, start: BlockPosition, end: BlockPosition) -> int:
        return self.coordinator.repeat_count(start, end)

    def skip(self, start: BlockPosition, end: BlockPosition, count: int, num_ops: int) -> None:
        shift = count * (end.parameter - start.parameter)
        self.coordinator.skip(start, end, count)
        self.gatherer.skip(shift, num_ops)
        self._in_flight = {
            number + shift: Fetch(numbers, part.group)
            for part in dict.fromkeys(self._in_flight.values())
            for numbers in [tuple([number + shift for number in part.parameters])]
            for number in part.parameters
        }
        self._fetch_events = [event + num_ops for event in self._fetch_events]
        self._reduce_events = [event + num_ops for event in self._reduce_events]
        self._bucket.parameters = [number + shift for number in self._bucket.parameters]

    # -- step -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        self._partition_all()
        if self.offload is None:
            self._step_on_gpu()
        else:
            self.offload.step(self.group.name)
        self._gather_persistent()
        if self.secondary is not None:
            self.secondary.drop()

    def _group_numel(self, group: Iterable[int]) -> int:
        """This rank's elements of a sub-group."""
        return sum(self.trace.parameters[number].shard_numel for number in group)

    def _step_on_gpu(self) -> None:
        """Update one sub-group after the other, and move its new weights to their devices."""
        builder, config = self.builder, self.config
        shards = [parameter.shard_numel for parameter in self.trace.parameters if parameter.is_trained]
        check_overflow(self.stage, config, shards, self.group.name)
        shapes = muon_shapes(self.stage.workload.model, config) if self.num_matrix_groups else {}
        for group in self.sub_groups[: self.num_matrix_groups]:
            parameters = [self.trace.parameters[number] for number in group]
            orthogonalise_sub_group(builder, config, parameters, shapes, self.group.name, self.world_size)
        self._norm(shards)
        for number, group in enumerate(self.sub_groups):
            numel = self._group_numel(group)
            needs_cast = config.grad_accum_dtype != config.master_weights_dtype
            cast = numel * DTYPE_BYTES[config.master_weights_dtype] if needs_cast else 0
            builder.allocate("buffers", cast)
            if cast:
                kernels = cast_kernels(numel, config.grad_accum_dtype, config.master_weights_dtype)
                builder.kernels(f"cast gradients of sub-group {number}", kernels)
            name = f"optimizer step of sub-group {number}"
            self.step_partition(numel, name, has_matrices=number < self.num_matrix_groups)
            builder.free("buffers", cast)
            self.store.put_from_gpu(number)

    def _norm(self, shards: list[int]) -> None:
        """A sum for every sub-group. Those of experts are summed over the ranks that share them, then over
        those that share the layer's (`get_grad_norm_direct`).
        """
        parameters = self.trace.parameters
        num_expert_groups = sum(bool(parameters[group[0]].belongs_to) for group in self.sub_groups if group)
        compute_norm_and_clip(
            self.stage,
            self.config,
            shards,
            self.group.name,
            num_groups=len(self.sub_groups) - num_expert_groups,
            later_groups=[name for name in (EXPERT_DATA, EXPERT) if name in self.builder.groups]
            * num_expert_groups,
        )

    def _partition_all(self) -> None:
        """_partition_all_parameters: release the persistent parameters, which are still gathered."""
        if self.secondary is not None:
            parameters = enumerate(self.trace.parameters)
            self.secondary.keep(number for number, parameter in parameters if parameter.is_persistent)

    def _gather_persistent(self) -> None:
        """Gather the persistent parameters, one all-gather each (`_allgather_params_coalesced`, which does
        not coalesce since at least DeepSpeed 0.10). Then make the host wait for the GPU.
        """
        if self.world_size == 1:
            return
        self.store.bring_persistent()
        persistent_parameters = [parameter for parameter in self.trace.parameters if parameter.is_persistent]
        for parameter in persistent_parameters:
            group = parameter.belongs_to or self.group.name
            if self.builder.groups[group].size == 1:
                continue
            self.builder.collective(
                "all_gather", parameter.padded_numel * self.param_bytes, self.config.param_dtype,
                group, stream=COMPUTE, name=f"all_gather {parameter.name}", module=parameter.name,
            )  # fmt: skip
        if persistent_parameters:
            self.builder.host_wait(self.builder.record(COMPUTE))
