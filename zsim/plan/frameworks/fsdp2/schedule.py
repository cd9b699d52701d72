"""PyTorch FSDP2 (`fully_shard`) and HSDP, as torch 2.13 runs them.

Transcribed from `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py` and
`_fsdp_state.py`. Method names follow theirs. One group of parameters (`ParamGroup`) is all-gathered, and its
gradients reduce-scattered, as a whole. Every parameter is sharded on dim 0 and padded.
"""

from __future__ import annotations

from zsim.cost.memory.adapters import quantisation_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, moves
from zsim.plan.frameworks.fsdp2.meshes import dense_mesh, experts_mesh
from zsim.plan.frameworks.fsdp2.offload import Fsdp2Home
from zsim.plan.frameworks.fsdp2.reduce import GRADIENTS, Fsdp2Reducer
from zsim.plan.frameworks.fsdp2.scales import agree_on_scales, gathers_fp8
from zsim.plan.frameworks.fsdp2.states import Fsdp2UnitGradient, ParamGroupState
from zsim.plan.frameworks.fsdp2.units import ParamGroup, make_param_groups
from zsim.plan.frameworks.fsdp2.update import norm_sums, update_units
from zsim.plan.hooks import Hooks
from zsim.plan.ops import Memory
from zsim.plan.parts.optimizer import lazy_states, updated_in_blocks
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.spec import Loss
from zsim.specs.strategy.frameworks import Fsdp2

COPY_IN, ALL_GATHER = "all_gather_copy_in", "all_gather"
TIED = "tied head's gradient"
_CASTS, _GATHERED, _PARAMETERS, _POST_FORWARD = "casts", "gathered", "parameters", "post-forward shard"


class Fsdp2Schedule(Hooks):
    """FSDPParamGroup's hooks for all groups of a model. `offload` is the host memory of shards."""

    def __init__(self, stage: Stage, strategy: Fsdp2) -> None:
        super().__init__(stage)
        self.strategy = strategy
        self.training = stage.training
        self.mesh = dense_mesh(stage, strategy)
        self.home = Fsdp2Home(stage.builder, strategy) if strategy.cpu_offload else None
        self.gathers_fp8 = gathers_fp8(strategy)
        self.param_bytes = 2 if self.gathers_fp8 else DTYPE_BYTES[strategy.param_dtype]
        self.experts = experts_mesh(stage, strategy)
        self.units = make_param_groups(stage, strategy, self.mesh, self.experts)
        self.states = {unit.name: ParamGroupState() for unit in self.units}
        self.gradients = {unit.name: Fsdp2UnitGradient() for unit in self.units}
        self.reducer = Fsdp2Reducer(stage.builder, strategy, self.home, self.training.stored_dtype)
        parts = [part for unit in self.units for part in unit.parameter_parts]
        self.updated = updated_in_blocks(stage.workload, parts)
        self._root = next((unit for unit in self.units if unit.is_root), None)
        self._by_segment: dict[str, ParamGroup] = {
            segment: unit for unit in self.units for segment in unit.segments
        }
        self._by_name = {unit.name: unit for unit in self.units}
        inner = [(unit, *unit.calls) for unit in self.units if unit.calls is not None]
        self._enters = {first: unit for unit, first, _ in inner}  # by module, the group inside a block
        self._leaves = {last: unit for unit, _, last in inner}
        self._post_forward_order: list[ParamGroup] = []
        # group, bytes of its all-gather, copy-out event
        self._pending_copy_out: tuple[ParamGroup, int, int] | None = None
        self._unsharding: list[ParamGroup] = []  # unsharded by the schedule, and not waited for yet
        self._is_syncing = self._reshards = True
        self._tied_bytes = 0

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """The shards of the parameters and of the optimizer states on rank 0, which has the largest."""
        shards = sum(unit.stored_shard_bytes for unit in self.units)
        states = [Memory("parameters", shards), lazy_states(self.training, self.updated)]
        scales = sum(quantisation_bytes(one) for unit in self.units for one in unit.parameters)
        states += [Memory("parameters", scales)] if scales else []
        left = sum(unit.left_shard_bytes(self.strategy.param_dtype) for unit in self.units)
        here = [Memory("buffers", left)] if left else []
        return here + (states if self.home is None else self.home.resident(states))

    # -- all-gather ---------------------------------------------------------------------------------------

    def _unshard(self, unit: ParamGroup, copy_in: str = COPY_IN) -> None:
        """FSDPParamGroup.unshard with foreach_all_gather, whose inputs are copied on stream `copy_in`."""
        state, builder = self.states[unit.name], self.builder
        if state.all_gather is not None or state.is_unsharded:
            return
        if self.home is not None and not state.is_sharded_post_forward:
            self.home.bring(unit, copy_in)
        if state.reshard_event is not None:
            self._gather_streams_wait(state.reshard_event)
            state.reshard_event = None
        group = unit.mesh.shard
        if state.is_sharded_post_forward:
            assert unit.post_forward is not None
            group = unit.post_forward
        ranks = group.size
        if ranks == 1:
            state.all_gather = -1
            state.all_gather_bytes = 0
            return
        full = self._unsharded_bytes(unit)
        casts = () if state.is_sharded_post_forward else unit.cast_bytes(self.strategy.param_dtype)
        cast = sum(casts)
        cast_reads = cast * 4 // self.param_bytes  # from the fp32 shard into a new flat tensor
        if cast and self.gathers_fp8:
            casts = self._parts(unit, ranks)
            cast = sum(casts)
            cast_reads = 4 * unit.unsharded_numel // ranks
            cast_reads += agree_on_scales(builder, self.strategy, unit, copy_in)
        builder.allocate("buffers", cast, owner=unit.name, part=_CASTS, tensors=casts)
        builder.allocate("buffers", full, owner=unit.name, part=_GATHERED)
        shard = full // ranks
        kernels = moves(cast_reads + shard, cast + shard, launches=2 if cast else 1)
        builder.kernels(
            f"all_gather_copy_in {unit.name}",
            kernels,
            stream=copy_in,
            overhead="fsdp2_unshard",
            module=unit.name,
        )
        builder.free("buffers", cast, owner=unit.name, part=_CASTS)
        builder.wait_stream(ALL_GATHER, copy_in)
        state.all_gather = builder.collective(
            "all_gather", full, self._gathered_dtype(unit), group.name, stream=ALL_GATHER,
            name=f"all_gather {unit.name}", module=unit.name,
        )  # fmt: skip
        state.all_gather_bytes = full

    def _wait_for_unshard(self, unit: ParamGroup, *, is_told: bool = False) -> None:
        """Copy the gathered tensor out into the parameters, on the compute stream."""
        state, builder = self.states[unit.name], self.builder
        if state.all_gather is None:
            return
        in_forward = builder.phase == "forward" and not is_told
        if in_forward:
            self._release_previous_gather()
        size = self._unsharded_bytes(unit)
        builder.allocate("buffers", size, owner=unit.name, part=_PARAMETERS, tensors=self._parts(unit, 1))
        if state.all_gather >= 0:
            builder.stream_wait(COMPUTE, state.all_gather)
        is_alone = state.all_gather < 0
        kernels = unit.own_copies(self.strategy.param_dtype, size) if is_alone else unit.copies_out(size)
        overhead = "fsdp2_unshard" if is_alone else None
        copy_out = builder.kernels(
            f"all_gather_copy_out {unit.name}", kernels, overhead=overhead, module=unit.name
        )
        if in_forward and state.all_gather >= 0:
            self._pending_copy_out = (unit, state.all_gather_bytes, copy_out)
        else:
            self._gather_streams_wait(copy_out)
            builder.free("buffers", state.all_gather_bytes, owner=unit.name, part=_GATHERED)
        if state.is_sharded_post_forward:
            size = unit.post_forward_shard_bytes(self.strategy.param_dtype)
            builder.free("buffers", size, owner=unit.name, part=_POST_FORWARD)
        state.all_gather = None
        state.is_unsharded, state.is_sharded_post_forward = True, False

    def _parts(self, unit: ParamGroup, ranks: int) -> tuple[int, ...]:
        """Bytes of each unsharded parameter, or of its shard on one of `ranks`."""
        sizes = unit.gathered_bytes(self.strategy.param_dtype)
        return tuple(size // ranks for size in sizes if size)

    def _unsharded_bytes(self, unit: ParamGroup) -> int:
        return sum(unit.gathered_bytes(self.strategy.param_dtype))

    def _gathered_dtype(self, unit: ParamGroup) -> str:
        """Tensors of several types are gathered as bytes (`_get_all_gather_input_metadatas`)."""
        if not self.gathers_fp8:
            return self.strategy.param_dtype
        return "fp8" if unit.num_in_fp8 else "bf16"

    def _release_previous_gather(self) -> None:
        if self._pending_copy_out is not None:
            unit, size, event = self._pending_copy_out
            self._gather_streams_wait(event)
            self.builder.free("buffers", size, owner=unit.name, part=_GATHERED)
            self._pending_copy_out = None

    def _gather_streams_wait(self, event: int | None) -> None:
        self.builder.stream_wait(COPY_IN, event)
        self.builder.stream_wait(ALL_GATHER, event)

    def _reshard(self, unit: ParamGroup, *, after_forward: bool) -> None:
        state, builder = self.states[unit.name], self.builder
        if after_forward and not unit.reshards_after_forward:
            return
        if not state.is_unsharded:
            state.is_sharded_post_forward &= after_forward  # [Note: a shard that nothing gathers again]
            return
        if after_forward and unit.post_forward is not None and unit.post_forward.size > 1:
            # keep a shard over the smaller group, copied out of the unsharded parameter
            shard = unit.post_forward_shard_bytes(self.strategy.param_dtype)
            builder.allocate("buffers", shard, owner=unit.name, part=_POST_FORWARD)
            state.is_sharded_post_forward = True
            state.reshard_event = builder.kernels(
                f"reshard {unit.name}", moves(shard, shard), module=unit.name
            )
            if not unit.has_backward:  # the last forward's
                builder.free("buffers", shard, owner=unit.name, part=_POST_FORWARD)
        builder.free("buffers", self._unsharded_bytes(unit), owner=unit.name, part=_PARAMETERS)
        state.is_unsharded = False

    # -- hooks ------------------------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        self._finish_unshard()
        self.builder.wait_stream(COPY_IN, COMPUTE)
        self.builder.wait_stream(ALL_GATHER, COMPUTE)
        if self._root is not None:
            self._pre_forward(self._root)

    def before_forward(self, segment: Segment) -> None:
        unit = self._by_segment.get(segment.name)
        if unit is not None and not unit.is_root and segment.name == unit.segments[0]:
            self._pre_forward(unit)

    def _pre_forward(self, unit: ParamGroup) -> None:
        self._unshard(unit)
        self._wait_for_unshard(unit)
        self._prefetch(unit.forward_prefetch)

    def _prefetch(self, names: tuple[str, ...] | None) -> None:
        for name in names or ():
            self._unshard(self._by_name[name])

    def before_module(self, call: ModuleCall) -> None:
        """The hooks of a group inside a block. Recomputation runs that of forward, too."""
        if self.builder.phase == "backward":
            if call.name in self._leaves:
                self._pre_backward(self._leaves[call.name])
        elif call.name in self._enters:
            self._pre_forward(self._enters[call.name])

    def after_forward(self, segment: Segment) -> None:
        unit = self._by_segment.get(segment.name)
        if unit is not None and not unit.is_root and segment.name == unit.segments[-1]:
            self._post_forward(unit)

    def _post_forward(self, unit: ParamGroup) -> None:
        self.builder.host(f"post_forward {unit.name}", module=unit.name)
        self._reshard(unit, after_forward=True)
        self.states[unit.name].post_forward_indices.append(len(self._post_forward_order))
        self._post_forward_order.append(unit)

    def end_forward(self) -> None:
        if self._root is not None:
            self._post_forward(self._root)
        self._release_previous_gather()

    def begin_backward(self, micro_batch: int, *, is_last: bool, is_told: bool) -> None:
        """Under a schedule that unshards, reshards and reduces, backward neither reshards nor reduces."""
        self._is_syncing = not is_told and (is_last or not self.strategy.no_sync)
        self._reshards = not is_told
        self._finish_unshard()
        if self._root is not None and not self._root.ends_before_loss:
            self._pre_backward(self._root)

    def before_backward(self, segment: Segment) -> None:
        unit = self._by_segment.get(segment.name)
        if unit is None or unit.is_root or unit.ends_before_loss:
            return
        if segment.name == unit.segments[-1]:
            self._pre_backward(unit)

    def after_module(self, call: ModuleCall) -> None:
        self._leave_inner(call)
        if isinstance(call.module.work, Loss) and self.builder.phase == "backward":
            unit = self._by_segment.get(call.segment)
            if unit is not None and unit.ends_before_loss:
                self._pre_backward(unit)

    def _leave_inner(self, call: ModuleCall) -> None:
        """The hooks after a group inside a block. Recomputed modules are not resharded."""
        if self.builder.phase == "forward" and call.name in self._leaves:
            self._post_forward(self._leaves[call.name])
        elif self.builder.phase == "backward" and call.name in self._enters:
            self._post_backward(self._enters[call.name])

    def _pre_backward(self, unit: ParamGroup) -> None:
        self._unshard(unit)
        self._wait_for_unshard(unit)
        if unit.backward_prefetch is not None:
            self._prefetch(unit.backward_prefetch)
            return
        indices = self.states[unit.name].post_forward_indices
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
            unit = self._unit_of(call)
            builder.allocate("buffers", size, owner=unit.name, part=GRADIENTS)
            self.gradients[unit.name].unsharded_bytes += size
            if size == self._tied_bytes:
                builder.free("activations", size, owner=TIED)
                self._tied_bytes = 0

    def _unit_of(self, call: ModuleCall) -> ParamGroup:
        """The group of a module's parameters."""
        if call.parameters and call.parameters[0].belongs_to:
            return self._by_name[call.name.rpartition(".")[0]]
        return self._by_segment[call.segment]

    def after_backward(self, segment: Segment) -> None:
        """The hook on a group's inputs. Groups whose inputs need no gradient end in `end_backward`."""
        unit = self._by_segment.get(segment.name)
        if unit is None or unit.is_root or not unit.has_differentiable_input:
            return
        if segment.name == unit.segments[0]:
            self._post_backward(unit)

    def end_backward(self) -> None:
        """The final callback: post-backward of groups without input hooks, then the wait for reductions."""
        for unit in self.units:
            if unit.is_root or not unit.has_differentiable_input:
                self._post_backward(unit)
        if self._reshards:
            self._post_forward_order = []
            for unit in self.units:
                self.states[unit.name].post_forward_indices.clear()
        self._drop_unused()
        if self._is_syncing:
            self._finalize()

    def _drop_unused(self) -> None:
        """finalize_backward: drop a gather that was prefetched for a group without a backward."""
        for unit in self.units:
            state = self.states[unit.name]
            if state.all_gather is None or not self._reshards:
                continue
            if state.all_gather >= 0:
                self.builder.stream_wait(COMPUTE, state.all_gather)
                self.builder.free("buffers", state.all_gather_bytes, owner=unit.name, part=_GATHERED)
            state.all_gather = None

    def _finalize(self) -> None:
        self.reducer.wait(self.gradients)
        if self.home is not None:
            self.home.wait()

    def _post_backward(self, unit: ParamGroup) -> None:
        gradient = self.gradients[unit.name]
        if not unit.trainable:
            if self._reshards:
                self._reshard(unit, after_forward=False)
            return
        self.reducer.accumulate(unit, gradient, is_syncing=self._is_syncing)
        if self._is_syncing:
            self.reducer.sum_partial(unit, gradient)
        if self._reshards:
            self._reshard(unit, after_forward=False)
        if self._is_syncing:
            self.reducer.reduce(unit, gradient)

    # -- actions of a pipeline's schedule ---------------------------------------------------------------

    def unshard(self) -> None:
        """`FSDPModule.unshard(async_op=True)` of every module: inputs are copied on the current stream."""
        for unit in self.units:
            self._unshard(unit, COMPUTE)
        self._unsharding = list(self.units)

    def _finish_unshard(self) -> None:
        """`UnshardHandle.wait` of the groups that the schedule has unsharded."""
        for unit in self._unsharding:
            self._wait_for_unshard(unit, is_told=True)
        self._unsharding = []

    def reshard(self) -> None:
        for unit in self.units:
            self._reshard(unit, after_forward=False)

    def reduce_gradients(self) -> None:
        """perform_reduce_grad: post_backward of every group with resharding and reduction, then the final
        callback."""
        self._is_syncing = self._reshards = True
        for unit in self.units:
            self.reducer.sum_partial(unit, self.gradients[unit.name])
            self._reshard(unit, after_forward=False)
            self.reducer.reduce(unit, self.gradients[unit.name])
        self._post_forward_order = []
        self._finalize()

    # -- optimizer ------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Clip and update the parameters of all stages of the rank."""
        units = [unit for chunk in self.chunks for unit in chunk.units]
        if self.home is not None:
            self.home.step(units, self.training, norm_sums((self.mesh, self.experts), units))
            return
        updated = [one for chunk in self.chunks for one in chunk.updated]
        update_units(self.stage, self.strategy, (self.mesh, self.experts), units, updated)
