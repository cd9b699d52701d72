"""PyTorch FSDP1 (`FullyShardedDataParallel`), as torch 2.13 runs it.

Transcribed from `torch/distributed/fsdp/_runtime_utils.py` and `_flat_param.py`. Method names follow theirs.
Each wrapped module has one flat parameter, sharded evenly over the ranks, and its gradient is a flat tensor
too.

# [Note: when a flat gradient is done]
Unsharding in forward splits the flat parameter into views, and the backward of that split concatenates the
flat gradient. Autograd runs the newest nodes first, so the backward of the split runs when backward passes
the point in forward where the split was made: the unit's entry, or, with `forward_prefetch`, from torch 2.0
on the entry of the previous unit. The root's split comes last, even if its last parameter had its gradient
long before.

# [Note: the free-event queue]
The rate limiter (`limit_all_gathers`) bounds how far the host runs ahead of the GPU. The host blocks before
an all-gather when two or more freed flat parameters are queued, until the event of the oldest free has
happened. The queue outlives the step: a step starts with the events that the previous step left, all long
past. So the queue is replayed after the step is issued, from the length that a step leaves unchanged. (In a
plain step of blocks that is four, so that in forward block i waits for block i - 3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from zsim.cost.optimizers import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.fsdp1.reduce import (
    UNSHARD,
    VIEWS,
    Fsdp1OffloadedShards,
    Fsdp1UnitGradient,
    GradientReducer,
    check_accumulation,
)
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp1.wrapping import FlatUnit, make_flat_units
from zsim.frameworks.torch.moments import FsdpHooks, sharded_moments
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.framework_hooks import FrozenStorage
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.ops import Memory, Op
from zsim.plan.shared.optimizer import clip_gradients, lazy_states, paged_states, update
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.strategy.training import TrainingConfig

_MAX_INFLIGHT_ALL_GATHERS = 2  # torch/distributed/fsdp/_limiter_utils.py
_STEPS_TO_STEADY = 8

PRE_UNSHARD = "pre_unshard"
_RESHARDS_AFTER_FORWARD = ("FULL_SHARD", "HYBRID_SHARD")


@dataclass
class _Handle:
    """The state that FlatParamHandle keeps of one unit."""

    is_unsharded: bool = False
    is_prefetched: bool = False
    needs_pre_forward_unshard: bool = False
    needs_pre_backward_unshard: bool = False
    is_in_backward: bool = False
    post_forward_index: int = -1


class Fsdp1Schedule(Hooks):
    """FSDP1's hooks for all units of a model. `offload` is the host memory of offloaded shards.

    Raises InputError for an unknown wrapping, for hybrid sharding in groups of one rank, and for an
    offloading that loses gradients.
    """

    def __init__(self, stage: Stage, strategy: Fsdp1Config) -> None:
        super().__init__(stage)
        self.workload, self.training = stage.workload, stage.training
        self.strategy = strategy
        training = stage.training
        if strategy.cpu_offload:
            check_accumulation(strategy, training)
        shard_size = _shard_size(strategy, stage.ranks)
        self.shard = stage.group("shard", shard_size) if shard_size > 1 else None
        replicate = None
        if "HYBRID" in strategy.sharding_strategy or shard_size == 1:
            replicate = stage.group("replicate", stage.ranks // shard_size, shard_size)
        self.is_sharded = shard_size > 1
        # Up to torch 1.13 a shard is copied even into the type that it already has, if `MixedPrecision` names
        # the type, as composer's always does.
        self.units = make_flat_units(stage.workload, strategy, shard_size, training.stored_dtype)
        self.handles = {unit.path: _Handle() for unit in self.units}
        self.offload: Fsdp1OffloadedShards | None = None
        if strategy.cpu_offload:
            self.offload = Fsdp1OffloadedShards(stage.builder, self.units, training)
        self.reducer = GradientReducer(stage.builder, strategy, self.shard, replicate, self.offload)
        self.gradients = {unit.path: Fsdp1UnitGradient() for unit in self.units}
        self._owner = {name: unit for unit in self.units for name in unit.owners}
        self._trained = [unit.trained_shard_numel for unit in self.units if unit.trainable_numel]
        self._unfinished: dict[str, FlatUnit] = {}  # units whose post-backward has not run
        self._root = next((unit for unit in self.units if unit.is_root), None)
        self._units_by_first_call: dict[str, list[FlatUnit]] = {}
        self._units_by_last_call: dict[str, list[FlatUnit]] = {}
        # by micro-batch and the path of the unit that was entered
        self._units_split_at_entry: dict[tuple[int, str], list[FlatUnit]] = {}
        self._micro_batch = 0
        for unit in self.units:
            if not unit.is_root:
                self._units_by_first_call.setdefault(unit.first, []).append(unit)
                self._units_by_last_call.setdefault(unit.last, []).append(unit)
        self._next_forward = dict(zip((unit.path for unit in self.units), self.units[1:], strict=False))
        self._post_forward_order: list[FlatUnit] = []
        self._tied_bytes = 0
        self.limiter = RateLimiter()
        self._is_syncing = True

    def resident(self) -> list[Memory]:
        """Shards of the flat parameters in the stored type, and the optimizer's states."""
        shards = sum(unit.stored_shard_bytes for unit in self.units)
        scales = sum(unit.scale_bytes for unit in self.units)
        tensors = UpdatedTensor.flat(self._trained)
        states = lazy_states(self.training, tensors)
        resident = [Memory("parameters", shards + scales), states]
        resident += paged_states(self.training, tensors)
        if self.offload is not None:
            return self.offload.resident(states)
        return [memory for memory in resident if memory.bytes]

    # -- unshard and reshard ----------------------------------------------------------------------------

    def _unshard(self, unit: FlatUnit) -> None:
        """_unshard. An offloaded shard is first copied to the GPU, and freed after the cast, or without a
        cast after the gather."""
        if self.offload is None:
            self._gather(unit)
            return
        was_unsharded = self.handles[unit.path].is_unsharded
        last_use = self.offload.bring(unit, PRE_UNSHARD)
        self.builder.wait_stream(UNSHARD, PRE_UNSHARD)
        self._gather(unit)
        if self.is_sharded and not unit.types.casts_shards and not was_unsharded:
            gathered = self.builder.record(UNSHARD)
            assert gathered is not None
            last_use = gathered
        self.offload.drop(unit, last_use)

    def _gather(self, unit: FlatUnit) -> None:
        """Cast the shard on the pre-unshard stream, pass the rate limiter, all-gather on the unshard
        stream."""
        handle, builder = self.handles[unit.path], self.builder
        needs_unshard = self.is_sharded and not handle.is_unsharded
        low_shard = unit.shard_numel * unit.types.param_bytes if unit.types.casts_shards else 0
        if needs_unshard or not self.is_sharded:
            hooks = "fsdp1_unshard" if builder.phase == "backward" else "fsdp1_forward"
            builder.host(f"unshard {unit.name}", overhead=hooks, module=unit.path)
            views = "fsdp1_view" if self.strategy.use_orig_params else "fsdp1_flat_view"
            builder.host(f"views {unit.name}", overhead=views, module=unit.path, events=unit.num_parameters)
            if self.strategy.use_orig_params:
                builder.host(f"unit views {unit.name}", overhead="fsdp1_unit_views", module=unit.path)
            if low_shard:
                builder.allocate("buffers", low_shard, owner=unit.name)
                kernels = move_kernels(unit.types.stored_bytes * unit.shard_numel, low_shard)
                builder.kernels(f"cast shard {unit.name}", kernels, stream=PRE_UNSHARD, module=unit.path)
                builder.wait_stream(UNSHARD, PRE_UNSHARD)
        if self.strategy.limit_all_gathers:
            self.limiter.log_all_gather(len(builder.ops))
        if needs_unshard:
            assert self.shard is not None
            full = unit.padded_numel * unit.types.param_bytes
            builder.allocate("buffers", full, owner=unit.name)
            event = builder.collective(
                "all_gather", full, unit.types.param, self.shard.name, stream=UNSHARD,
                name=f"all_gather {unit.name}", module=unit.path,
            )  # fmt: skip
            builder.free_when_done("buffers", low_shard, event, owner=unit.name)
            handle.is_unsharded = True

    def _reshard(self, unit: FlatUnit, stream: str, *, frees: bool) -> None:
        """_reshard: memory of the unshard stream is free at once if that stream is current, else when
        `stream` has used it."""
        handle, builder = self.handles[unit.path], self.builder
        done = builder.record(stream)
        assert done is not None
        if frees and handle.is_unsharded:
            full = unit.padded_numel * unit.types.param_bytes
            if stream == UNSHARD:
                builder.free("buffers", full, owner=unit.name)
            else:
                builder.free_when_done("buffers", full, done, owner=unit.name)
            handle.is_unsharded = False
        if frees and self.strategy.limit_all_gathers:
            self.limiter.log_free(done)
        if not self.is_sharded and unit.types.casts_shards:
            cast_bytes = unit.shard_numel * unit.types.param_bytes
            builder.free_when_done("buffers", cast_bytes, done, owner=unit.name)
        handle.is_prefetched = False

    def _wait_for_unshard(self) -> None:
        if not self.is_sharded:  # no op on the unshard stream carries its wait for the cast
            self.builder.wait_stream(COMPUTE, PRE_UNSHARD)
        self.builder.wait_stream(COMPUTE, UNSHARD)

    def _prefetch(self, unit: FlatUnit) -> None:
        self._unshard(unit)
        self.handles[unit.path].is_prefetched = True

    # -- forward ----------------------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        """_root_pre_forward."""
        self._micro_batch = micro_batch
        for handle in self.handles.values():
            handle.needs_pre_forward_unshard = self.strategy.forward_prefetch
            handle.is_prefetched = False
        self.builder.wait_stream(UNSHARD, COMPUTE)
        self.builder.wait_stream(PRE_UNSHARD, COMPUTE)
        if self._root is not None:
            self._pre_forward(self._root)

    def pre_module(self, call: ModuleCall) -> None:
        """Pre-forward hooks of the units entered here, outer first. In backward, pre-backward hooks of the
        units that end here.
        """
        if self.builder.phase == "backward":
            for unit in self._units_by_last_call.get(call.name, ()):
                self._pre_backward(unit)
        else:
            for unit in self._units_by_first_call.get(call.name, ()):
                self._pre_forward(unit)

    def post_module(self, call: ModuleCall) -> None:
        if self.builder.phase == "backward":
            for unit in reversed(self._units_by_first_call.get(call.name, ())):
                self._finish_gradients(unit)
        else:
            for unit in reversed(self._units_by_last_call.get(call.name, ())):
                self._post_forward(unit)

    def end_forward(self) -> None:
        if self._root is not None:
            self._post_forward(self._root)

    def forget_forward(self) -> None:
        self._post_forward_order = []
        for handle in self.handles.values():
            handle.is_in_backward = handle.is_prefetched = handle.needs_pre_backward_unshard = False
            handle.post_forward_index = -1

    def keep_gathered(self) -> list[Memory]:
        is_kept = self.strategy.sharding_strategy not in _RESHARDS_AFTER_FORWARD
        unsharded = [unit for unit in self.units if self.is_sharded and (is_kept or unit.is_root)]
        for unit in unsharded:
            self.handles[unit.path].is_unsharded = True
        return [Memory("buffers", sum(unit.padded_numel * unit.types.param_bytes for unit in unsharded))]

    def _pre_forward(self, unit: FlatUnit) -> None:
        """_pre_forward with _pre_forward_unshard, skipped when the unit is recomputed in its backward."""
        handle = self.handles[unit.path]
        if handle.is_in_backward:
            return
        if not handle.is_prefetched:
            self._unshard(unit)
            self._split_parameter(unit, unit)
        handle.needs_pre_forward_unshard = False
        self._wait_for_unshard()
        if self.strategy.forward_prefetch:
            target = self._next_forward.get(unit.path)
            if target is not None:
                target_handle = self.handles[target.path]
                if target_handle.needs_pre_forward_unshard and not target_handle.is_prefetched:
                    self._prefetch(target)
                    self._split_parameter(target, target if self.strategy.before_torch_2 else unit)

    def _split_parameter(self, unit: FlatUnit, entry_unit: FlatUnit) -> None:
        if self.builder.phase == "forward":
            self._units_split_at_entry.setdefault((self._micro_batch, entry_unit.path), []).append(unit)

    def _post_forward(self, unit: FlatUnit) -> None:
        handle = self.handles[unit.path]
        if handle.is_in_backward:
            return
        if handle.post_forward_index < 0:
            handle.post_forward_index = len(self._post_forward_order)
        self._post_forward_order.append(unit)
        frees = not unit.is_root and self.strategy.sharding_strategy in _RESHARDS_AFTER_FORWARD
        self._reshard(unit, COMPUTE, frees=frees and self.is_sharded)
        handle.needs_pre_backward_unshard = True

    # -- backward ---------------------------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._micro_batch = micro_batch
        self._is_syncing = is_last or not self.strategy.no_sync
        if self._root is not None:
            self._pre_backward(self._root)

    def pre_backward(self, segment: Segment) -> None:
        """A checkpointed block is recomputed when the gradient reaches the last module that saved a tensor.
        The pre-backward hooks of units that end at this module or after it have run by then.
        """
        if segment.is_checkpointed:
            saving = [number for number, call in enumerate(segment.calls) if call.work.saved_bytes]
            for call in reversed(segment.calls[saving[-1] :]):
                for unit in self._units_by_last_call.get(call.name, ()):
                    self._pre_backward(unit)

    def _pre_backward(self, unit: FlatUnit) -> None:
        """_pre_backward_hook, once per backward."""
        handle = self.handles[unit.path]
        if handle.is_in_backward:
            return
        handle.is_in_backward = True
        self._unfinished[unit.path] = unit
        if handle.needs_pre_backward_unshard:
            if not handle.is_prefetched:
                self._unshard(unit)
            self._wait_for_unshard()
        handle.needs_pre_backward_unshard = False
        if self.strategy.backward_prefetch == "BACKWARD_PRE":
            self._prefetch_backward(handle)

    def _prefetch_backward(self, handle: _Handle) -> None:
        """Prefetch the unit whose forward ended just before the forward of this unit."""
        if handle.post_forward_index > 0:
            target = self._post_forward_order[handle.post_forward_index - 1]
            target_handle = self.handles[target.path]
            if target_handle.needs_pre_backward_unshard and not target_handle.is_prefetched:
                self._prefetch(target)

    def gradient_ready(self, call: ModuleCall) -> None:
        """Allocate the gradients of the flat parameter's views, in its dtype. A tied head's gradient is held
        until the embedding's is ready."""
        builder = self.builder
        if call.borrowed_gradient_numel:
            self._tied_bytes = call.borrowed_numel * DTYPE_BYTES[self.strategy.param_dtype]
            builder.allocate("activations", self._tied_bytes)
        if not call.trainable_numel:
            return
        unit = self._owner[call.name]
        size = call.trainable_numel * unit.types.param_bytes
        builder.allocate("buffers", size, owner=VIEWS, stream=COMPUTE)
        if size == self._tied_bytes:
            builder.free("activations", size)
            self._tied_bytes = 0

    def _finish_gradients(self, entry_unit: FlatUnit) -> None:
        """Run the post-backward of the units split at the entry. See [Note: when a flat gradient is done]."""
        for unit in reversed(self._units_split_at_entry.get((self._micro_batch, entry_unit.path), ())):
            self._post_backward(unit)

    def _post_backward(self, unit: FlatUnit) -> None:
        """_post_backward_hook."""
        handle, gradient = self.handles[unit.path], self.gradients[unit.path]
        self._unfinished.pop(unit.path, None)
        if not unit.trainable_numel:  # _register_post_backward_reshard_only_hook
            self._reshard(unit, COMPUTE, frees=self.is_sharded)
            if self.strategy.backward_prefetch == "BACKWARD_POST":
                self._prefetch_backward(handle)
            return
        self.reducer.flatten(unit, gradient)
        is_heuristically_kept = (
            not self._is_syncing and self.strategy.sharding_strategy not in _RESHARDS_AFTER_FORWARD
        )
        frees = self.is_sharded and not is_heuristically_kept
        self._reshard(unit, self.reducer.split_stream, frees=frees)
        if self.strategy.backward_prefetch == "BACKWARD_POST":
            self._prefetch_backward(handle)
        if self._is_syncing:
            self.reducer.reduce(unit, gradient)

    def end_backward(self) -> None:
        """The root's gradient, then _post_backward_final_callback."""
        if self._root is not None:
            self._finish_gradients(self._root)
        for unit in list(self._unfinished.values()):  # their inputs have no gradient, and so no hook
            self._post_backward(unit)
        self._drop_unused()
        if self._is_syncing:
            self.reducer.wait()
        self.forget_forward()

    def _drop_unused(self) -> None:
        """Free units that were prefetched for a backward which they do not have."""
        for unit in self.units:
            handle = self.handles[unit.path]
            if handle.is_prefetched and not handle.is_in_backward:
                self._reshard(unit, COMPUTE, frees=self.is_sharded)

    # -- the end of the step ----------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        numels = self._trained
        if self.offload is not None:
            self.offload.step(self.shard.name if self.shard else None)
        else:
            sums = ((self.shard.name, 4),) if self.shard else ()
            clip_gradients(self.builder, self.training, numels, sums)
            update(self.builder, self.training, UpdatedTensor.flat(numels))
            trained_units = (unit for unit in self.units if unit.trainable_numel)
            self.builder.free("gradients", sum(unit.stored_shard_bytes for unit in trained_units))
        self.limiter.apply(self.builder.ops)

    def end_passes(self) -> None:
        self.limiter.apply(self.builder.ops)


def _shard_size(strategy: Fsdp1Config, world_size: int) -> int:
    """The number of ranks that a flat parameter is sharded over."""
    shard_size = 1 if strategy.sharding_strategy == "NO_SHARD" else world_size // strategy.replicate
    if "HYBRID" in strategy.sharding_strategy and shard_size == 1 and world_size > 1:
        raise InputError(
            f"strategy.replicate: found {strategy.replicate} on {world_size} GPUs, which leaves one rank to "
            "a shard group, and FSDP1 then shares no gradients; expected fewer replicas, or NO_SHARD"
        )
    return shard_size


class RateLimiter:
    """Collects frees and all-gathers in host order. See [Note: the free-event queue]."""

    def __init__(self) -> None:
        self._log: list[tuple[bool, int]] = []  # (True, event of a free) or (False, number of the next op)

    def log_free(self, event: int) -> None:
        """Log that a flat parameter is free once `event` has happened."""
        self._log.append((True, event))

    def log_all_gather(self, next_op: int) -> None:
        """Log that the host may have to block before it issues op number `next_op`."""
        self._log.append((False, next_op))

    def apply(self, ops: list[Op]) -> None:
        """Add the host's waits to `ops`."""
        queue: list[int | None] = [None] * self._steady_length()
        for is_free, number in self._log:
            if is_free:
                queue.append(number)
            elif len(queue) >= _MAX_INFLIGHT_ALL_GATHERS:
                event = queue.pop(0)
                if event is not None:
                    ops[number] = ops[number]._replace(host_waits=(*ops[number].host_waits, event))

    def _steady_length(self) -> int:
        """The length of the queue at the start of a step that ends with the same length."""
        length = 0
        for _step in range(_STEPS_TO_STEADY):
            initial_length = length
            for is_free, _number in self._log:
                if is_free:
                    length += 1
                elif length >= _MAX_INFLIGHT_ALL_GATHERS:
                    length -= 1
            if length == initial_length:
                break
        return length


def fsdp1_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """A full state dict unshards one FSDP unit at a time, a block or everything outside of the blocks."""
    model = state.job.model
    largest = max([model.numel_outside_blocks, *(block.numel for block in model.unique_blocks)])
    yield from sharded_moments(
        state, largest, "a FULL_STATE_DICT", "torch 2.13 distributed/fsdp/_state_dict_utils.py"
    )


class Fsdp1Hooks(FsdpHooks[Fsdp1Config]):
    """The schedule of FSDP1, which offloads where its shards are on the host."""

    pages_optimizer_states = True

    def make(self, stage: Stage, config: Fsdp1Config) -> Hooks:
        return Fsdp1Schedule(stage, config)

    def frozen_storage(self, config: Fsdp1Config, training: TrainingConfig, ranks: int) -> FrozenStorage:
        storage = super().frozen_storage(config, training, ranks)
        return replace(storage, shards=1) if config.sharding_strategy == "NO_SHARD" else storage

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp1_moments(state)


HOOKS = Fsdp1Hooks()
