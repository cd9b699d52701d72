"""ZeRO as in its paper and in the reference engine in `validation/zero`: flat partitions.

A unit is a block, or the root (all other modules). Its parameters are in one flat tensor, padded to a
multiple of the number of ranks, of which rank r owns the r-th part. Stage 0 all-reduces a unit's gradients
when its backward has ended, stages 1 (last micro-batch only), 2 and 3 reduce-scatter them. Stages 1 and 2
gather a unit's parameters as soon as they are updated, stage 3 when they are needed. All collectives are
asynchronous. Sources: validation/zero (hooks.py, reduction.py, engine.py) and Rajbhandari et al. 2020,
sections 5 and 7.

A step of stages 1 and 2 waits for the gathers at its end, while the engine waits for them in the next
forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import optimizer_state_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.reference.offload import EngineUnit, ReferenceOffloadedShards, make_engine_units
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.ops import Category, Collective, CollectiveKind, Memory
from zsim.plan.shared.optimizer import clip_gradients
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment

COMMUNICATION = "communication"
# validation/zero/adamw.py: mul_, lerp_, mul_, addcmul_, sqrt, div, add_, addcdiv_; tensors read, written
_ADAMW_PASSES, _ADAMW_OPERATIONS = 12 + 8, 8


@dataclass
class _Bucket:
    """Units that are reduced together, and the event of their reduction."""

    units: list[EngineUnit]
    event: int | None


@dataclass
class _Reductions:
    """Units that wait for their reduction, and reductions in flight."""

    pending_units: list[EngineUnit] = field(default_factory=list)
    in_flight: deque[_Bucket] = field(default_factory=deque)


class ReferenceSchedule(Hooks):
    """The engine's hooks. `offload` is the memory of offloaded shards and states."""

    # hooks.py and reduction.py call with `async_op=True`
    asynchronous: ClassVar[frozenset[CollectiveKind]] = frozenset(
        {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    )

    def __init__(self, stage: Stage, strategy: ReferenceConfig) -> None:
        super().__init__(stage)
        self.workload, self.strategy, self.training = stage.workload, strategy, stage.training
        self.group = stage.group()
        self.world_size = self.group.size
        self.param_bytes = DTYPE_BYTES[strategy.param_dtype]
        self.reduce_bytes = DTYPE_BYTES[strategy.reduce_dtype]
        self.shards_parameters = strategy.stage == 3
        self.units = make_engine_units(stage.workload, self.world_size, strategy)
        self.offload: ReferenceOffloadedShards | None = None
        if strategy.parameter_place != "device" or strategy.optimizer_place != "device":
            self.offload = ReferenceOffloadedShards(stage, strategy, self.units, self.group)
        self.root = self.units[0]
        self._unit_of_segment = {segment: unit for unit in self.units for segment in unit.segments}
        self._reductions = _Reductions()
        self._is_first = self._is_last = True
        for unit in self.units:
            unit.is_gathered = not self.shards_parameters

    def resident(self) -> list[Memory]:
        """Parameters (stage 3: a shard), master weights unless the parameters are fp32, and both moments. All
        are padded.
        """
        numel = sum(unit.padded_numel for unit in self.units)
        owned_numel = sum(self._owned_numel(unit) for unit in self.units)
        moments = optimizer_state_bytes(self.training.optimizer)
        states = moments if self.param_bytes == 4 else moments + 4
        parameters = owned_numel if self.shards_parameters else numel
        resident = (
            Memory("parameters", self.param_bytes * parameters),
            Memory("optimizer_states", states * owned_numel),
        )
        return list(resident) if self.offload is None else self.offload.resident(*resident, owned_numel)

    def _owned_numel(self, unit: EngineUnit) -> int:
        return unit.padded_numel if self.strategy.stage == 0 else unit.padded_numel // self.world_size

    # -- gathering ------------------------------------------------------------------------------------

    def _start_gather(self, unit: EngineUnit) -> None:
        if unit.is_gathered or unit.gather_event is not None:
            return
        if self.offload is not None:
            self.offload.bring(unit)
        size = unit.padded_numel * self.param_bytes
        self.builder.allocate("buffers", size, owner=unit.name)
        unit.gather_event = self._collective("all_gather", size, self.strategy.param_dtype, unit.name)
        if self.offload is not None and unit.gather_event is not None:
            self.offload.drop(unit, unit.gather_event)

    def _gather(self, unit: EngineUnit) -> None:
        self._start_gather(unit)
        if unit.gather_event is not None:
            self.builder.stream_wait(COMPUTE, unit.gather_event)
            unit.gather_event, unit.is_gathered = None, True

    def _free(self, unit: EngineUnit) -> None:
        if self.shards_parameters:
            self._gather(unit)
            self.builder.free("buffers", unit.padded_numel * self.param_bytes, owner=unit.name)
            unit.is_gathered = False

    def _collective(self, kind: CollectiveKind, size: int, dtype: str, unit: str) -> int | None:
        if self.world_size == 1 and kind == "all_reduce":
            return None
        self.builder.wait_stream(COMMUNICATION, COMPUTE)
        if self.world_size == 1:
            kernels = move_kernels(size, size)
            return self.builder.kernels(f"{kind} {unit}", kernels, stream=COMMUNICATION, module=unit)
        if not self.strategy.emulates_reduce_scatter:
            return self.builder.collective(
                kind, size, dtype, self.group.name, stream=COMMUNICATION, name=f"{kind} {unit}", module=unit
            )
        # gloo has two threads per group (ProcessGroupGloo::Options): a reduction does not hold up a gather
        stream = f"{COMMUNICATION} {kind}"
        self.builder.wait_stream(stream, COMPUTE)
        work = Collective(kind, size, dtype, self.group.name)
        return self.builder.add(f"{kind} {unit}", stream, work, overhead="collective_call", module=unit)

    # -- forward and backward -------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        self._enter_unit(self.root)

    def _enter_unit(self, unit: EngineUnit) -> None:
        self._gather(unit)
        self._gather_ahead(self.units[self.units.index(unit) + 1 :])

    def _gather_ahead(self, next_units: Sequence[EngineUnit]) -> None:
        num_prefetched = self.strategy.prefetch
        for unit in next_units[:num_prefetched]:
            self._start_gather(unit)
        if self.offload is not None:
            for unit in next_units[num_prefetched : num_prefetched + 1]:
                self.offload.fetch_ahead(unit)

    def pre_forward(self, segment: Segment) -> None:
        unit = self._unit_of_segment[segment.name]
        if unit is not self.root:
            self._enter_unit(unit)

    def post_forward(self, segment: Segment) -> None:
        unit = self._unit_of_segment[segment.name]
        if unit is not self.root and not unit.is_kept:
            self._free(unit)

    def end_forward(self) -> None:
        if not self.root.is_kept:
            self._free(self.root)

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._is_first, self._is_last = micro_batch == 0, is_last
        self._gather(self.root)

    def pre_backward(self, segment: Segment) -> None:
        unit = self._unit_of_segment[segment.name]
        if unit is self.root:
            return
        self._gather(unit)
        self._gather_ahead(self.units[: self.units.index(unit)][::-1])

    def gradient_ready(self, call: ModuleCall) -> None:
        """Allocate autograd's gradients, which are copied to the unit's flat tensor when its backward has
        ended. A tied head's contribution is not counted separately.
        """
        size = call.numel * self.param_bytes
        unit = self._unit_of_segment[call.segment]
        self.builder.allocate("buffers", size, owner=unit.name)
        unit.autograd_bytes += size

    def post_backward(self, segment: Segment) -> None:
        unit = self._unit_of_segment[segment.name]
        if unit is not self.root:
            self._finish(unit)

    def end_backward(self) -> None:
        self._finish(self.root)
        if self._reductions.pending_units:
            self._reduce()
        while self._reductions.in_flight:
            self._collect()

    # -- reduction ------------------------------------------------------------------------------------

    def _finish(self, unit: EngineUnit) -> None:
        """Free the parameters, move the gradients into a flat tensor, reduce it when the bucket is full."""
        self._free(unit)
        builder, size = self.builder, unit.padded_numel * self.reduce_bytes
        is_kept = self.strategy.stage <= 1  # gradients stay until the step
        if not is_kept or self._is_first:
            builder.allocate("gradients" if is_kept else "buffers", size, owner=unit.name)
        accumulated_bytes = size if is_kept and not self._is_first else 0
        flatten_kernels = move_kernels(
            unit.autograd_bytes + accumulated_bytes, size, launches=unit.num_parameters
        )
        builder.kernels(f"take gradients {unit.name}", flatten_kernels, module=unit.name)
        builder.free("buffers", unit.autograd_bytes, owner=unit.name)
        unit.autograd_bytes = 0
        if is_kept and not self._is_last:
            return
        builder.kernels(f"divide gradients {unit.name}", move_kernels(size, size), module=unit.name)
        pending_units = self._reductions.pending_units
        pending_units.append(unit)
        if self._bytes(pending_units) >= self.strategy.bucket_bytes:
            self._reduce()

    def _bytes(self, units: Sequence[EngineUnit]) -> int:
        return sum(unit.padded_numel for unit in units) * self.reduce_bytes

    def _reduce(self) -> None:
        strategy, builder, reductions = self.strategy, self.builder, self._reductions
        while len(reductions.in_flight) >= strategy.max_reductions_in_flight:
            self._collect()
        units, reductions.pending_units = reductions.pending_units, []
        size, name = self._bytes(units), "+".join(unit.name for unit in units)
        if len(units) > 1:
            builder.allocate("buffers", size, owner=name)
            builder.kernels(f"join gradients {name}", move_kernels(size, size), module=name)
            for unit in units if strategy.stage >= 2 else ():
                builder.free("buffers", self._bytes([unit]), owner=unit.name)
        if strategy.stage == 0:
            event = self._collective("all_reduce", size, strategy.reduce_dtype, name)
        else:
            builder.allocate("buffers", size if strategy.emulates_reduce_scatter else 0, owner=name)
            for unit in units:
                part = self._bytes([unit]) // self.world_size
                builder.allocate(self._output_category(), part, owner=unit.name)
            event = self._collective("reduce_scatter", size, strategy.reduce_dtype, name)
        reductions.in_flight.append(_Bucket(units, event))

    def _collect(self) -> None:
        """Wait for the oldest bucket, and move each unit's part to where the stage keeps it."""
        builder, strategy = self.builder, self.strategy
        bucket = self._reductions.in_flight.popleft()
        name, size = "+".join(unit.name for unit in bucket.units), self._bytes(bucket.units)
        part = size // self.world_size
        builder.stream_wait(COMPUTE, bucket.event)
        if strategy.stage and strategy.emulates_reduce_scatter:
            builder.kernels(f"sum gradients {name}", move_kernels(size, part), module=name)
            builder.free("buffers", size, owner=name)
        if len(bucket.units) > 1:
            builder.free("buffers", size, owner=name)
        if len(bucket.units) == 1 and strategy.stage >= 2:
            builder.free("buffers", size, owner=name)
        self._keep(bucket.units, name, size, part)

    def _keep(self, units: Sequence[EngineUnit], name: str, size: int, part: int) -> None:
        """Move reduced gradients to where the stage keeps them."""
        builder, stage = self.builder, self.strategy.stage
        if self._has_offloaded_states:
            assert self.offload is not None
            for unit in units:
                self.offload.keep_gradient(
                    unit, self._owned_numel(unit), is_first=self._is_first or stage <= 1
                )
            if stage:
                self._free_parts(units)
        elif stage == 0:
            if len(units) > 1:
                builder.kernels(f"copy gradients {name}", move_kernels(size, size), module=name)
        elif stage == 1:
            builder.kernels(f"copy gradients {name}", move_kernels(part, part), module=name)
            self._free_parts(units)
        elif not self._is_first:
            builder.kernels(f"accumulate gradients {name}", move_kernels(2 * part, part), module=name)
            self._free_parts(units)

    @property
    def _has_offloaded_states(self) -> bool:
        return self.offload is not None and self.offload.states != "gpu"

    def _free_parts(self, units: Sequence[EngineUnit]) -> None:
        """Free the outputs of a reduce-scatter that are not the gradients themselves."""
        for unit in units:
            self.builder.free("buffers", self._bytes([unit]) // self.world_size, owner=unit.name)

    def _output_category(self) -> Category:
        """The category of a reduce-scatter's output: in stages 2 and 3 the first micro-batch's are the
        gradients."""
        is_kept = self.strategy.stage >= 2 and self._is_first and not self._has_offloaded_states
        return "gradients" if is_kept else "buffers"

    # -- the step -------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        stage, builder = self.strategy.stage, self.builder
        owned_numels = [self._owned_numel(unit) for unit in self.units]
        self._clip(owned_numels, self.group.name if stage else "")
        gathers = []
        for unit, numel in zip(self.units, owned_numels, strict=True):
            self._update(unit, numel)
            if stage in (1, 2):
                size = unit.padded_numel * self.param_bytes
                gathers.append(self._collective("all_gather", size, self.strategy.param_dtype, unit.name))
        for event in gathers:
            builder.stream_wait(COMPUTE, event)
        if gathers:
            builder.host_wait(gathers[-1])
        self._drop_gradients(owned_numels)

    def _clip(self, owned_numels: Sequence[int], group: str) -> None:
        """Clip the gradients. fp16 takes the norm in any case, to detect overflows and to unscale."""
        training = self.training
        if self._has_offloaded_states:
            assert self.offload is not None
            if self.offload.clip(owned_numels) and group and self.world_size > 1:
                self.builder.host_wait(self._collective("all_reduce", 4, "fp32", "gradient norm"))
            return
        if self.strategy.param_dtype == "fp16":
            training = replace(training, gradient_clipping=training.gradient_clipping or 1.0)
        clip_gradients(self.builder, training, owned_numels, ((group, 4),), dtype=self.strategy.reduce_dtype)

    def _update(self, unit: EngineUnit, numel: int) -> None:
        """Update a unit on the device of its states, and copy its parameters to the device that keeps
        them."""
        if self.offload is None or not self._has_offloaded_states:
            self._update_on_device(unit, numel)
        else:
            self.offload.update(unit, numel)
        if self.offload is not None:
            self.offload.put(unit, numel)

    def _update_on_device(self, unit: EngineUnit, numel: int) -> None:
        """AdamW on the device. Temporaries: the root of the second moment and the quotient in fp32, and fp32
        gradients if they were reduced in 16 bits."""
        casts = self.reduce_bytes != 4
        temporary_bytes = (2 + casts) * 4 * numel
        size = float(4 * _ADAMW_PASSES * numel)
        adamw = Kernel("optimizer", 0.0, size, "fp32", (), launches=_ADAMW_OPERATIONS)
        kernels = (*move_kernels(self.reduce_bytes * numel, 4 * numel), adamw) if casts else (adamw,)
        self.builder.allocate("buffers", temporary_bytes, owner=unit.name)
        self.builder.kernels(f"adamw {unit.name}", kernels, overhead="optimizer_step", module=unit.name)
        self.builder.free("buffers", temporary_bytes, owner=unit.name)
        if self.param_bytes != 4:
            copy_kernels = move_kernels(4 * numel, self.param_bytes * numel)
            self.builder.kernels(f"copy parameters {unit.name}", copy_kernels, module=unit.name)

    def _drop_gradients(self, owned_numels: Sequence[int]) -> None:
        if self.offload is not None:
            self.offload.finish_writes()
        if not self._has_offloaded_states or self.strategy.stage <= 1:  # gradients on the device
            for unit, numel in zip(self.units, owned_numels, strict=True):
                gradient_numel = numel if self.strategy.stage >= 2 else unit.padded_numel
                self.builder.free("gradients", gradient_numel * self.reduce_bytes, owner=unit.name)
        if self.offload is not None and self._has_offloaded_states:
            self.offload.drop_gradients(owned_numels)


class ReferenceHooks(FrameworkHooks[ReferenceConfig]):
    """The schedule of the reference engine, which offloads what is not on the device."""

    def make(self, stage: Stage, config: ReferenceConfig) -> Hooks:
        return ReferenceSchedule(stage, config)

    def is_offloaded(self, config: ReferenceConfig) -> bool:
        return config.optimizer_place != "device" or config.parameter_place != "device"


HOOKS = ReferenceHooks()
