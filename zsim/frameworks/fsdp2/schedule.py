"""PyTorch FSDP2 (`fully_shard`) and HSDP, as torch 2.13 runs them.

Transcribed from `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py` and
`_fsdp_state.py`. Method names follow theirs. One group of parameters (`ParamGroup`) is all-gathered, and its
gradients reduce-scattered, as a whole. Every parameter is sharded on dim 0 and padded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from zsim.cost.memory import quantisation_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.offload import Fsdp2OffloadedShards
from zsim.frameworks.fsdp2.param_groups import (
    ParamGroup,
    ParamGroupGradient,
    ParamGroupState,
    dense_mesh,
    experts_mesh,
    make_param_groups,
)
from zsim.frameworks.fsdp2.reduce import GRADIENTS, Fsdp2Reducer
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.fsdp2.update import gathers_fp8, norm_sums, reduce_scales, update_param_groups
from zsim.frameworks.torch.moments import FsdpHooks, sharded_moments
from zsim.frameworks.torch.pipeline import TorchRuntime
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.ops import Memory
from zsim.plan.shared.optimizer import lazy_states, optimizer_tensors
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.strategy.parallelism import ParallelismConfig

COPY_IN, ALL_GATHER = "all_gather_copy_in", "all_gather"
TIED = "tied head's gradient"
_CASTS, _GATHERED, _PARAMETERS, _POST_FORWARD = "casts", "gathered", "parameters", "post-forward shard"


class Fsdp2Schedule(Hooks):
    """FSDPParamGroup's hooks for all groups of a model. `offload` is the host memory of shards."""

    def __init__(self, stage: Stage, strategy: Fsdp2Config) -> None:
        super().__init__(stage)
        self.strategy = strategy
        self.training = stage.training
        self.mesh = dense_mesh(stage, strategy)
        stored = self.training.stored_dtype
        self.offload = Fsdp2OffloadedShards(stage.builder, strategy, stored) if strategy.cpu_offload else None
        self.gathers_fp8 = gathers_fp8(strategy)
        self.param_bytes = 2 if self.gathers_fp8 else DTYPE_BYTES[strategy.param_dtype]
        self.expert_mesh = experts_mesh(stage, strategy)
        self.units = make_param_groups(stage, strategy, self.mesh, self.expert_mesh)
        self.states = {group.name: ParamGroupState() for group in self.units}
        self.gradients = {group.name: ParamGroupGradient() for group in self.units}
        self.reducer = Fsdp2Reducer(stage.builder, strategy, self.offload, self.training.stored_dtype)
        shard_shapes = [shard for group in self.units for shard in group.shard_shapes]
        self.updated = optimizer_tensors(stage.workload, shard_shapes)
        self._root = next((group for group in self.units if group.is_root), None)
        self._group_of_segment: dict[str, ParamGroup] = {
            segment: group for group in self.units for segment in group.segments
        }
        self._group_of_name = {group.name: group for group in self.units}
        inner_groups = [(group, *group.calls) for group in self.units if group.calls is not None]
        self._entries = {
            first: group for group, first, _ in inner_groups
        }  # by module, the group inside a block
        self._exits = {last: group for group, _, last in inner_groups}
        self._post_forward_order: list[ParamGroup] = []
        # group, bytes of its all-gather, copy-out event
        self._all_gather_state: tuple[ParamGroup, int, int] | None = None
        self._scheduled_unshards: list[ParamGroup] = []  # unsharded by the schedule, and not waited for yet
        self._is_syncing = self._reshards = self._all_reduces = True
        self._tied_bytes = 0
        self._keeps_post_forward = False  # no backward drops shards over the smaller groups

    def action_state(self, micro_batch: int) -> Hashable | None:
        """The groups that are gathered, their order, and the gradients that they have. None where an event of
        this action is waited for in another one, and with offloaded shards.
        """
        is_pending = self._all_gather_state or self._scheduled_unshards or self.reducer.is_pending
        if is_pending or self.offload is not None:
            return None
        states, gradients = self.states.values(), self.gradients.values()
        if any(state.has_event for state in states) or any(gradient.has_event for gradient in gradients):
            return None
        order = tuple(group.name for group in self._post_forward_order)
        gathered, reduced = (tuple(item.summary for item in items) for items in (states, gradients))
        return gathered, reduced, order, self._tied_bytes

    restores_action_state = True

    def restore_action_state(self, state: Any) -> None:
        gathered, reduced, order, self._tied_bytes = state
        for group_state, summary in zip(self.states.values(), gathered, strict=True):
            group_state.restore(summary)
        for gradient, summary in zip(self.gradients.values(), reduced, strict=True):
            gradient.restore(summary)
        self._post_forward_order = [self._group_of_name[name] for name in order]

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """The shards of the parameters and of the optimizer states on rank 0, which has the largest."""
        shard_bytes = sum(group.stored_shard_bytes for group in self.units)
        optimizer_states = lazy_states(self.training, self.updated)
        if self.strategy.offload_states:
            optimizer_states = Memory("optimizer_states", optimizer_states.bytes, "host", is_pinned=True)
        states = [Memory("parameters", shard_bytes), optimizer_states]
        scale_bytes = sum(
            quantisation_bytes(parameter) for group in self.units for parameter in group.parameters
        )
        states += [Memory("parameters", scale_bytes)] if scale_bytes else []
        leftover_bytes = sum(group.leftover_shard_bytes(self.strategy.param_dtype) for group in self.units)
        leftovers = [Memory("buffers", leftover_bytes)] if leftover_bytes else []
        return leftovers + (states if self.offload is None else self.offload.resident(states))

    # -- all-gather ---------------------------------------------------------------------------------------

    def _unshard(self, group: ParamGroup, copy_in_stream: str = COPY_IN) -> None:
        """FSDPParamGroup.unshard with foreach_all_gather, whose inputs are copied on `copy_in_stream`."""
        state, builder = self.states[group.name], self.builder
        if state.all_gather is not None or state.is_unsharded or group.is_plain:
            return
        if self.offload is not None and not state.is_sharded_post_forward:
            self.offload.bring(group, copy_in_stream)
        if state.reshard_event is not None:
            self._wait_all_gather_streams_on_event(state.reshard_event)
            state.reshard_event = None
        process_group = group.mesh.shard
        if state.is_sharded_post_forward:
            assert group.post_forward is not None
            process_group = group.post_forward
        ranks = process_group.size
        if ranks == 1:
            state.all_gather = -1
            state.all_gather_bytes = 0
            return
        gathered_bytes = self._unsharded_bytes(group)
        cast_sizes = () if state.is_sharded_post_forward else group.cast_bytes(self.strategy.param_dtype)
        cast_bytes = sum(cast_sizes)
        cast_read_bytes = cast_bytes * 4 // self.param_bytes  # from the fp32 shard into a new flat tensor
        if cast_bytes and self.gathers_fp8:
            cast_sizes = self._parameter_sizes(group, ranks)
            cast_bytes = sum(cast_sizes)
            cast_read_bytes = 4 * group.unsharded_numel // ranks
            cast_read_bytes += reduce_scales(builder, self.strategy, group, copy_in_stream)
        builder.allocate("buffers", cast_bytes, owner=group.name, part=_CASTS, tensors=cast_sizes)
        builder.allocate("buffers", gathered_bytes, owner=group.name, part=_GATHERED)
        shard_bytes = gathered_bytes // ranks
        kernels = move_kernels(
            cast_read_bytes + shard_bytes, cast_bytes + shard_bytes, launches=2 if cast_bytes else 1
        )
        builder.kernels(
            f"all_gather_copy_in {group.name}",
            kernels,
            stream=copy_in_stream,
            overhead="fsdp2_unshard",
            module=group.name,
        )
        builder.free("buffers", cast_bytes, owner=group.name, part=_CASTS)
        builder.wait_stream(ALL_GATHER, copy_in_stream)
        state.all_gather = builder.collective(
            "all_gather", gathered_bytes, self._all_gather_dtype(group), process_group.name,
            stream=ALL_GATHER,
            name=f"all_gather {group.name}", module=group.name,
        )  # fmt: skip
        state.all_gather_bytes = gathered_bytes

    def _wait_for_unshard(self, group: ParamGroup, *, is_scheduled: bool = False) -> None:
        """Copy the gathered tensor out into the parameters, on the compute stream."""
        state, builder = self.states[group.name], self.builder
        if state.all_gather is None:
            return
        is_forward = builder.phase in ("forward", "reference") and not is_scheduled
        if is_forward:
            self._release_all_gather_state()
        size = self._unsharded_bytes(group)
        builder.allocate(
            "buffers", size, owner=group.name, part=_PARAMETERS, tensors=self._parameter_sizes(group, 1)
        )
        if state.all_gather >= 0:
            builder.stream_wait(COMPUTE, state.all_gather)
        is_single_rank = state.all_gather < 0
        kernels = (
            group.single_rank_copies(self.strategy.param_dtype, size)
            if is_single_rank
            else group.copy_out_kernels(size)
        )
        overhead = "fsdp2_unshard" if is_single_rank else None
        copy_out = builder.kernels(
            f"all_gather_copy_out {group.name}", kernels, overhead=overhead, module=group.name
        )
        if is_forward and state.all_gather >= 0:
            self._all_gather_state = (group, state.all_gather_bytes, copy_out)
        else:
            self._wait_all_gather_streams_on_event(copy_out)
            builder.free("buffers", state.all_gather_bytes, owner=group.name, part=_GATHERED)
        if state.is_sharded_post_forward and not self._is_shard_resident(group):
            size = group.post_forward_shard_bytes(self.strategy.param_dtype)
            builder.free("buffers", size, owner=group.name, part=_POST_FORWARD)
        state.all_gather = None
        state.is_unsharded, state.is_sharded_post_forward = True, False

    def _is_shard_resident(self, group: ParamGroup) -> bool:
        """Whether a forward's shard over the smaller group is there until the next forward's."""
        return self._keeps_post_forward or not group.has_backward

    def _parameter_sizes(self, group: ParamGroup, ranks: int) -> tuple[int, ...]:
        """Bytes of each unsharded parameter, or of its shard on one of `ranks`."""
        sizes = group.gathered_bytes(self.strategy.param_dtype)
        return tuple(size // ranks for size in sizes if size)

    def _unsharded_bytes(self, group: ParamGroup) -> int:
        return sum(group.gathered_bytes(self.strategy.param_dtype))

    def _all_gather_dtype(self, group: ParamGroup) -> str:
        """Tensors of several types are gathered as bytes (`_get_all_gather_input_metadatas`)."""
        if not self.gathers_fp8:
            return self.strategy.param_dtype
        return "fp8" if group.num_in_fp8 else "bf16"

    def _release_all_gather_state(self) -> None:
        if self._all_gather_state is not None:
            group, size, event = self._all_gather_state
            self._wait_all_gather_streams_on_event(event)
            self.builder.free("buffers", size, owner=group.name, part=_GATHERED)
            self._all_gather_state = None

    def _wait_all_gather_streams_on_event(self, event: int | None) -> None:
        self.builder.stream_wait(COPY_IN, event)
        self.builder.stream_wait(ALL_GATHER, event)

    def _reshard(self, group: ParamGroup, *, after_forward: bool) -> None:
        state, builder = self.states[group.name], self.builder
        if after_forward and not group.reshards_after_forward:
            return
        if not state.is_unsharded:
            state.is_sharded_post_forward &= after_forward  # [Note: a shard that nothing gathers again]
            return
        if after_forward and group.post_forward is not None and group.post_forward.size > 1:
            # keep a shard over the smaller group, copied out of the unsharded parameter
            shard_bytes = group.post_forward_shard_bytes(self.strategy.param_dtype)
            builder.allocate("buffers", shard_bytes, owner=group.name, part=_POST_FORWARD)
            state.is_sharded_post_forward = True
            state.reshard_event = builder.kernels(
                f"reshard {group.name}", move_kernels(shard_bytes, shard_bytes), module=group.name
            )
            if self._is_shard_resident(group):  # the last forward's
                builder.free("buffers", shard_bytes, owner=group.name, part=_POST_FORWARD)
        builder.free("buffers", self._unsharded_bytes(group), owner=group.name, part=_PARAMETERS)
        state.is_unsharded = False

    # -- hooks ------------------------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        self._finish_unshard()
        self.builder.wait_stream(COPY_IN, COMPUTE)
        self.builder.wait_stream(ALL_GATHER, COMPUTE)
        if self._root is not None:
            self._pre_forward(self._root)

    def pre_forward(self, segment: Segment) -> None:
        group = self._group_of_segment.get(segment.name)
        if group is not None and not group.is_root and segment.name == group.segments[0]:
            self._pre_forward(group)

    def _pre_forward(self, group: ParamGroup) -> None:
        self._unshard(group)
        self._wait_for_unshard(group)
        self._prefetch(group.forward_prefetch)

    def _prefetch(self, names: tuple[str, ...] | None) -> None:
        for name in names or ():
            self._unshard(self._group_of_name[name])

    def pre_module(self, call: ModuleCall) -> None:
        """The hooks of a group inside a block. Recomputation runs that of forward, too."""
        if self.builder.phase == "backward":
            if call.name in self._exits:
                self._pre_backward(self._exits[call.name])
        elif call.name in self._entries:
            self._pre_forward(self._entries[call.name])

    def post_forward(self, segment: Segment) -> None:
        group = self._group_of_segment.get(segment.name)
        if group is not None and not group.is_root and segment.name == group.segments[-1]:
            self._post_forward(group)

    def _post_forward(self, group: ParamGroup) -> None:
        self.builder.host(f"post_forward {group.name}", module=group.name)
        self._reshard(group, after_forward=True)
        self.states[group.name].post_forward_indices.append(len(self._post_forward_order))
        self._post_forward_order.append(group)

    def end_forward(self) -> None:
        if self._root is not None:
            self._post_forward(self._root)
        self._release_all_gather_state()

    def forget_forward(self) -> None:
        self._post_forward_order = []
        for state in self.states.values():
            state.post_forward_indices.clear()

    def keep_gathered(self) -> list[Memory]:
        self._keeps_post_forward = True
        size = 0
        for group in self.units:
            if not group.reshards_after_forward:
                self.states[group.name].is_unsharded = True
                size += self._unsharded_bytes(group)
            elif group.post_forward is not None and group.post_forward.size > 1:
                self.states[group.name].is_sharded_post_forward = True
                size += group.post_forward_shard_bytes(self.strategy.param_dtype)
        return [Memory("buffers", size)]

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """Under a schedule that unshards, reshards and reduces, backward neither reshards nor reduces."""
        self._is_syncing = not schedule_manages_sharding and (is_last or not self.strategy.no_sync)
        self._all_reduces = is_last or not self.strategy.defers_all_reduce
        self._reshards = not schedule_manages_sharding
        self._finish_unshard()
        if self._root is not None and not self._root.ends_before_loss:
            self._pre_backward(self._root)

    def pre_backward(self, segment: Segment) -> None:
        group = self._group_of_segment.get(segment.name)
        if group is None or group.is_root or group.ends_before_loss:
            return
        if segment.name == group.segments[-1]:
            self._pre_backward(group)

    def post_module(self, call: ModuleCall) -> None:
        self._exit_inner_group(call)
        if call.module.role is Role.LOSS and self.builder.phase == "backward":
            group = self._group_of_segment.get(call.segment)
            if group is not None and group.ends_before_loss:
                self._pre_backward(group)

    def _exit_inner_group(self, call: ModuleCall) -> None:
        """The hooks after a group inside a block. Recomputed modules are not resharded."""
        if self.builder.phase in ("forward", "reference") and call.name in self._exits:
            self._post_forward(self._exits[call.name])
        elif self.builder.phase == "backward" and call.name in self._entries:
            self._post_backward(self._entries[call.name])

    def _pre_backward(self, group: ParamGroup) -> None:
        self._unshard(group)
        self._wait_for_unshard(group)
        if group.backward_prefetch is not None:
            self._prefetch(group.backward_prefetch)
            return
        indices = self.states[group.name].post_forward_indices
        index = indices.pop() if indices else 0
        if index > 0:
            self._unshard(self._post_forward_order[index - 1])

    def gradient_ready(self, call: ModuleCall) -> None:
        """Allocate unsharded gradients in the parameters' dtype. A tied head's waits for the embedding's."""
        builder = self.builder
        if call.borrowed_gradient_numel:
            self._tied_bytes = call.borrowed_numel * self.param_bytes
            builder.allocate("activations", self._tied_bytes, owner=TIED)
        if call.trainable_numel:
            size = call.trainable_numel * self.param_bytes
            group = self._group_of_call(call)
            if group.is_plain:
                self.reducer.keep(group, self.gradients[group.name], size)
                return
            builder.allocate("buffers", size, owner=group.name, part=GRADIENTS)
            self.gradients[group.name].unsharded_bytes += size
            if size == self._tied_bytes:
                builder.free("activations", size, owner=TIED)
                self._tied_bytes = 0

    def _group_of_call(self, call: ModuleCall) -> ParamGroup:
        """The group of a module's parameters."""
        if call.parameters and call.parameters[0].rank_kind:
            return self._group_of_name[call.name.rpartition(".")[0]]
        return self._group_of_segment[call.segment]

    def post_backward(self, segment: Segment) -> None:
        """The hook on a group's inputs. Groups whose inputs need no gradient end in `end_backward`."""
        group = self._group_of_segment.get(segment.name)
        if group is None or group.is_root or not group.has_differentiable_input:
            return
        if segment.name == group.segments[0]:
            self._post_backward(group)

    def end_backward(self) -> None:
        """The final callback: post-backward of groups without input hooks, then the wait for reductions."""
        for group in self.units:
            self.gradients[group.name].has_shard |= group.is_plain
            if group.is_root or not group.has_differentiable_input:
                self._post_backward(group)
        if self._reshards:
            self.forget_forward()
        self._drop_unused_gathers()
        if self._is_syncing:
            self._finalize()

    def _drop_unused_gathers(self) -> None:
        """finalize_backward: drop a gather that was prefetched for a group without a backward."""
        for group in self.units:
            state = self.states[group.name]
            if state.all_gather is None or not self._reshards:
                continue
            if state.all_gather >= 0:
                self.builder.stream_wait(COMPUTE, state.all_gather)
                self.builder.free("buffers", state.all_gather_bytes, owner=group.name, part=_GATHERED)
            state.all_gather = None

    def _finalize(self) -> None:
        self.reducer.wait(self.gradients)
        if self.offload is not None:
            self.offload.wait()

    def _post_backward(self, group: ParamGroup) -> None:
        gradient = self.gradients[group.name]
        if not group.trainable or group.is_plain:
            if self._reshards:
                self._reshard(group, after_forward=False)
            return
        self.reducer.accumulate(group, gradient, is_syncing=self._is_syncing)
        if self._is_syncing:
            self.reducer.sum_partial(group, gradient)
        if self._reshards:
            self._reshard(group, after_forward=False)
        if self._is_syncing:
            self.reducer.reduce(group, gradient, all_reduces=self._all_reduces)

    # -- actions of a pipeline's schedule ---------------------------------------------------------------

    def unshard(self) -> None:
        """`FSDPModule.unshard(async_op=True)` of every module: inputs are copied on the current stream."""
        for group in self.units:
            self._unshard(group, COMPUTE)
        self._scheduled_unshards = list(self.units)

    def _finish_unshard(self) -> None:
        """`UnshardHandle.wait` of the groups that the schedule has unsharded."""
        for group in self._scheduled_unshards:
            self._wait_for_unshard(group, is_scheduled=True)
        self._scheduled_unshards = []

    def reshard(self) -> None:
        for group in self.units:
            self._reshard(group, after_forward=False)

    def reduce_gradients(self) -> None:
        """perform_reduce_grad: post_backward of every group with resharding and reduction, then the final
        callback."""
        self._is_syncing = self._reshards = self._all_reduces = True
        for group in (group for group in self.units if not group.is_plain):
            self.reducer.sum_partial(group, self.gradients[group.name])
            self._reshard(group, after_forward=False)
            self.reducer.reduce(group, self.gradients[group.name])
        self.forget_forward()
        self._finalize()

    # -- optimizer ------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Clip and update the parameters of all stages of the rank."""
        groups = [group for chunk in self.stage_hooks for group in chunk.units]
        if self.offload is not None:
            self.offload.step(groups, self.training, norm_sums((self.mesh, self.expert_mesh), groups))
            return
        updated = [tensor for chunk in self.stage_hooks for tensor in chunk.updated]
        update_param_groups(self.stage, self.strategy, (self.mesh, self.expert_mesh), groups, updated)


def fsdp2_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """A full state dict all-gathers one DTensor at a time."""
    largest = max(parameter.numel for _, parameter in state.job.model.named_parameters())
    yield from sharded_moments(
        state, largest, "full_state_dict=True", "torch 2.13 distributed/checkpoint/state_dict.py"
    )


class Fsdp2Hooks(FsdpHooks[Fsdp2Config]):
    """The schedule of FSDP2, which offloads where its shards are on the host."""

    def make(self, stage: Stage, config: Fsdp2Config) -> Hooks:
        return Fsdp2Schedule(stage, config)

    def pipeline(self, config: Fsdp2Config, parallelism: ParallelismConfig) -> TorchRuntime:
        return TorchRuntime(parallelism, is_fsdp=True)

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp2_moments(state)


HOOKS = Fsdp2Hooks()
