"""Megatron-FSDP (`--use-megatron-fsdp`): its hooks around a stage, and its step.

Transcribed from Megatron-Core 0.16.1 core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py and
core/optimizer/distrib_optimizer.py.

# [Note: layers are units]
With "optim_grads_params" every layer is gathered before its forward, released after it, gathered again for
backward, and released after that. Embedding, last norm and head belong to no layer: once gathered they stay
until all gradients are reduced. Full recomputation keeps a layer for the backward that follows it. With less
sharding nothing is released: every module waits for its bucket once a step.

# [Note: when gradients are reduced]
Sharded gradients are reduced in every micro-batch, unsharded ones in the last, concurrently with backward if
asked for. At the end of each backward that reduces, computation waits for all reductions. Instances add their
shards up in the last micro-batch, on a stream of their own.

# [Note: the step]
Main weights are fp32 and updated as they are. Every parameter is then copied by itself to its range of the
parameters' buffer. The first gather of a step starts after the update. It is issued here at the beginning of
the step, which is the same position in a run.
"""

from __future__ import annotations

from zsim.cost.kernels.update import accumulate_kernels, fill_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.buffer import Fp8Weights, quantize_masters
from zsim.frameworks.megatron.fsdp.gathers import LEAST_UNIT, GradientReductions, ParameterGathers
from zsim.frameworks.megatron.fsdp.groups import ParameterGroup, Ranks, parameter_groups
from zsim.frameworks.megatron.host_time import (
    enter_block,
    enter_chunk,
    enter_experts,
    run_fsdp_hooks,
)
from zsim.frameworks.megatron.optimizer_step import update_parameters
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp
from zsim.operations.operation import Role
from zsim.plan.builder import move_kernels
from zsim.plan.hooks import BlockTimedHooks
from zsim.plan.ops import Memory
from zsim.plan.shared.optimizer import partition_states
from zsim.plan.shared.shared_gradients import TiedGradient, sum_partial_gradients, sum_tied_gradient
from zsim.plan.stage import WORLD, Stage
from zsim.plan.workload.workload import ModuleCall, Segment
from zsim.specs.model.spec import Parameter
from zsim.specs.strategy.parallelism import EXPERT_DATA

TIED = "tied head's gradient"
FORWARD, BACKWARD = 1, -1


class MegatronFsdpSchedule(BlockTimedHooks):
    """MegatronFSDP's hooks. See the module's notes."""

    def __init__(self, stage: Stage, strategy: MegatronConfig) -> None:
        super().__init__(stage)
        assert strategy.fsdp is not None
        self.strategy, self.fsdp, self.training = strategy, strategy.fsdp, stage.training
        self.param_bytes = DTYPE_BYTES[strategy.param_dtype]
        self.grad_bytes = DTYPE_BYTES[strategy.grad_dtype]
        self.fp8_weights = Fp8Weights(
            stage.workload.model, self.training, is_primary=strategy.fp8_param_gather
        )
        dense = _ranks(stage, strategy, is_expert=False)
        self.dense_group = dense.shard.name
        self.groups = parameter_groups(
            stage.workload,
            has_units=self.fsdp.shards_parameters,
            bucket_size=self.fsdp.bucket_size if stage.number == 0 else None,
            keeps_fp8=strategy.fp8_param_gather and self.training.precision == "fp8",
            is_padded=self.fsdp.shards_states,
            dense=dense,
            experts=_ranks(stage, strategy, is_expert=True) if _has_experts(stage) else dense,
        )
        self._group_of = {name: group for group in self.groups for name in group.names}
        unit_size = _unit_size(self.fsdp, self.groups)
        self.gathers = ParameterGathers(
            stage.builder, self.groups, self.fsdp, self.training.fp8, strategy.param_dtype, self.param_bytes,
            prefetch_numel=unit_size // 2,
        )  # fmt: skip
        self.reductions = GradientReductions(
            stage.builder, self.groups, self.fsdp, strategy.grad_dtype, unit_size,
            averages=strategy.average_in_collective,
        )  # fmt: skip
        self._unit: str | None = None  # the layer whose backward is running
        self._is_last = True
        self._tied = TiedGradient(self.builder, strategy.param_dtype, TIED)

    # -- sizes ------------------------------------------------------------------------------------------

    def resident(self) -> list[Memory]:
        """Parameters and gradients (or the rank's shards of them), fp32 main weights, the moments, which the
        first update allocates, and the two buffers of layers.
        """
        fsdp, trained_groups = self.fsdp, [group for group in self.groups if group.trainable]
        parameters = sum(
            self.gathers.group_bytes(group)
            * (2 if self.gathers.has_columns(group) else 1)
            // (group.ranks.size if fsdp.shards_parameters else 1)
            for group in self.groups
        )
        gradient_numel = sum(
            group.shard_numel if fsdp.shards_gradients else group.numel for group in trained_groups
        )
        main_weights_numel = sum(
            group.owned_numel if fsdp.shards_states else group.numel for group in trained_groups
        )
        sizes = tuple(
            size for numel in self.own_numels for size in partition_states(self.training, numel, "fp32")
        )
        buffers = self._pool_bytes + (0 if self.fp8_weights.is_primary else self.fp8_weights.copy_bytes)
        if fsdp.keeps_transposes:
            buffers += sum(group.numel for group in self.groups if self.gathers.has_transposes(group))
        return [
            Memory("parameters", parameters),
            Memory("gradients", gradient_numel * self.grad_bytes),
            Memory("optimizer_states", 4 * main_weights_numel),
            Memory("optimizer_states", sum(sizes), lazy_tensors=sizes),
            *([Memory("buffers", buffers)] if buffers else []),
        ]

    @property
    def own_numels(self) -> list[int]:
        """Elements of each tensor that the first rank updates."""
        return [piece for group in self.groups if group.trainable for piece in group.pieces]

    @property
    def _pool_bytes(self) -> int:
        """Two buffers of a layer's parameters and of its gradients."""
        if not self.fsdp.has_double_buffer:
            return 0
        first = next((group.unit for group in self.groups if group.unit), "")
        units = [group for group in self.groups if first and group.unit == first and group.ranks.size > 1]
        columns = sum(group.numel for group in units if self.gathers.has_columns(group))
        gathered = sum(self.gathers.group_bytes(group) for group in units) + columns
        return 2 * (gathered + sum(group.numel * self.grad_bytes for group in units if group.trainable))

    # -- step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """start_param_sync of the last step, then zero_grad_buffer."""
        self.gathers.is_first_micro_batch = True
        if self.fsdp.shards_states and self.fsdp.overlaps_parameters:
            self.gathers.gather(self.groups[:1], prefetch=FORWARD)
        numels = (
            group.shard_numel if self.fsdp.shards_gradients else group.numel
            for group in self.groups
            if group.trainable
        )
        self.builder.kernels("zero gradients", fill_kernels(sum(numels) * self.grad_bytes))

    def finish_gradients(self) -> None:
        """`finalize_model_grads`, on the shards that the optimizer sees."""
        for chunk in self.stage_hooks:
            chunk.finish_reductions()
        shards = self.num_state_owners if self.fsdp.shards_states else 1
        sum_partial_gradients(self.builder, self.stage_hooks, "fp32", shards)
        for chunk in self.stage_hooks:
            sum_tied_gradient(chunk.stage, "fp32", shards)

    @property
    def num_state_owners(self) -> int:
        """Number of ranks that share the states of dense parameters."""
        return next((group.ranks.num_owners for group in self.groups if not group.is_expert), 1)

    def finish_reductions(self) -> None:
        """finish_grad_sync."""
        if self.fsdp.overlaps_gradients:
            self.reductions.wait()
        else:
            self.reductions.reduce_all()
        if self.fsdp.overlaps_parameters:
            self.gathers.reset()

    def optimizer_step(self) -> None:
        """Update, then copy the main weights into the parameters. See [Note: the step]."""
        numels = [numel for chunk in self.stage_hooks for numel in chunk.own_numels]
        groups = [WORLD] if WORLD in self.builder.groups else [self.dense_group]
        update_parameters(self.builder, self.strategy, self.training, numels, groups, copies_back=False)
        if self.strategy.skips_update:
            return
        if self.strategy.fp8_param_gather:
            weights = [chunk.fp8_weights for chunk in self.stage_hooks]
            quantize_masters(self.builder, self.training, weights, self.num_state_owners, self.dense_group)
        if self.strategy.param_dtype != "fp32" or self.fsdp.shards_states:
            numel = sum(numels)
            copies = move_kernels(4 * numel, self.param_bytes * numel, launches=len(numels))
            self.builder.kernels("copy main weights", copies)
        for chunk in self.stage_hooks:
            chunk.finish_update()

    def finish_update(self) -> None:
        """start_param_sync without overlap: gather every bucket, and wait."""
        if self.fsdp.shards_states and not self.fsdp.overlaps_parameters:
            self.gathers.reset()
            for group in self.groups:
                self.gathers.gather([group])
            self.gathers.wait(self.groups)

    # -- forward ----------------------------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None:
        enter_chunk(self.builder, self.strategy, self.stage.parallelism)

    def pre_forward(self, segment: Segment) -> None:
        enter_block(self.builder, self.strategy, self.stage.parallelism, segment, 1)
        self._run_hooks(segment, is_backward=False)
        unit = self._unit_groups(segment)
        self.gathers.gather(unit, prefetch=FORWARD)
        self.gathers.wait(unit)

    def pre_module(self, call: ModuleCall) -> None:
        """The hooks before modules outside of layers, and the layer's hook before its backward."""
        enter_experts(self.builder, self.strategy, self.stage.parallelism, call)
        groups = self._groups_of(call)
        if self.builder.phase == "backward":
            self._enter_backward(groups)
            for parameter in call.trainable_parameters:
                self.reductions.hold(call.parameter_name(parameter))
        elif self.fsdp.shards_states:
            root_groups = [group for group in groups if not group.unit]
            prefetch = FORWARD if self.builder.phase == "forward" else 0
            self.gathers.gather(root_groups, prefetch=prefetch)
            self.gathers.wait(root_groups)

    def post_forward(self, segment: Segment) -> None:
        self.gathers.release(self._unit_groups(segment), is_backward=False)

    def _run_hooks(self, segment: Segment, *, is_backward: bool) -> None:
        """Host time where layers are sharded, as it was timed."""
        if self.fsdp.shards_parameters and self.strategy.host_events.block is not None:
            run_fsdp_hooks(self.builder, segment, is_backward=is_backward)

    def _unit_groups(self, segment: Segment) -> list[ParameterGroup]:
        return [group for group in self.groups if group.unit == segment.name]

    def _groups_of(self, call: ModuleCall) -> list[ParameterGroup]:
        named = (self._group_of[call.parameter_name(parameter)] for parameter in call.parameters)
        return list({group.number: group for group in named}.values())

    # -- backward ---------------------------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._is_last = is_last
        enter_chunk(self.builder, self.strategy, self.stage.parallelism)
        self.gathers.mark_units_releasable()
        self.reductions.begin()

    def pre_backward(self, segment: Segment) -> None:
        """A layer that is recomputed as a whole is gathered without a look ahead."""
        passes = 2 if segment.is_checkpointed else 1
        enter_block(self.builder, self.strategy, self.stage.parallelism, segment, passes)
        if segment.is_checkpointed:
            self._run_hooks(segment, is_backward=False)
        self._run_hooks(segment, is_backward=True)
        self._unit = None
        if segment.is_checkpointed and not segment.num_before_recomputation:
            unit = self._unit_groups(segment)
            self.gathers.gather(unit)
            self.gathers.wait(unit)

    def _enter_backward(self, groups: list[ParameterGroup]) -> None:
        """_pre_backward_param_unshard, once for a layer."""
        name = next((group.unit for group in groups if group.unit), None)
        if name is None or name == self._unit:
            return
        self._unit = name
        unit = [group for group in self.groups if group.unit == name]
        self.gathers.release(unit, is_backward=False, is_lazy=True)
        self.gathers.gather(unit, prefetch=BACKWARD, is_backward=True)
        self.gathers.wait(unit, is_backward=True)

    def gradient_ready(self, call: ModuleCall) -> None:
        if call.borrowed_gradient_numel and not self.strategy.fuses_accumulation:
            self._tied.add(call, call.borrowed_gradient_numel)
        fsdp = self.fsdp
        is_due = fsdp.shards_gradients or (fsdp.overlaps_gradients and self._is_last)
        for parameter in reversed(call.trainable_parameters):
            self._keep_gradient(call, parameter)
            name = call.parameter_name(parameter)
            self.reductions.mark_ready(name, is_due=is_due, is_last=self._is_last)

    def _keep_gradient(self, call: ModuleCall, parameter: Parameter) -> None:
        """_grad_acc: copy a gradient into the whole gradients, or add it to them, if its product has not."""
        builder, strategy = self.builder, self.strategy
        is_weight = call.module.role in (Role.PRODUCT, Role.EXPERT_PRODUCT) and parameter.name == "weight"
        if strategy.fuses_accumulation and is_weight:
            return
        numel, size = parameter.numel, parameter.numel * self.param_bytes
        self._tied.finish(call, numel)
        kernels = accumulate_kernels(numel, strategy.grad_dtype, strategy.param_dtype)
        if self.fsdp.shards_gradients:
            kernels = move_kernels(size, numel * self.grad_bytes)
        builder.allocate("buffers", size)
        builder.kernels(
            f"add gradient {call.name}", kernels, overhead="megatron_gradient_hook", module=call.name
        )
        builder.free("buffers", size)

    def post_backward(self, segment: Segment) -> None:
        """_post_backward_release_module."""
        self.gathers.release(self._unit_groups(segment), is_backward=True)

    def end_backward(self) -> None:
        """_root_post_backward: wait for the reductions of this micro-batch."""
        self.reductions.wait()
        self.gathers.is_first_micro_batch = False

    # -- actions of a pipeline's schedule ---------------------------------------------------------------

    def unshard(self) -> None:
        """start_param_sync of a chunk, where the interleaved schedule says."""
        if self.fsdp.shards_states:
            self.gathers.gather(self.groups[:1], prefetch=FORWARD)


def _has_experts(stage: Stage) -> bool:
    calls = (call for segment in stage.workload.segments for call in segment.calls)
    return any(call.module.role is Role.EXPERT_PRODUCT for call in calls)


def _ranks(stage: Stage, strategy: MegatronConfig, *, is_expert: bool) -> Ranks:
    """The ranks that share dense parameters, or routed experts, which have a communicator of their own."""
    assert strategy.fsdp is not None
    replicas = strategy.optimizer_instances
    expert_ranks = stage.experts if is_expert else None
    num_ranks = stage.ranks if expert_ranks is None else expert_ranks.size
    size = num_ranks // replicas
    num_owners = num_ranks if strategy.fsdp.outer_sharding == "optim" else size
    outer = None
    if expert_ranks is not None:
        shard = stage.expert_group(size=size)
        if replicas > 1:
            outer = stage.expert_group("expert_replicate", replicas, size)
        return Ranks(shard, shard, outer, num_owners)
    shard = stage.group(EXPERT_DATA if is_expert else "data", size)
    if replicas > 1:
        outer = stage.group("expert_replicate" if is_expert else "replicate", replicas, size)
    gather = shard
    has_gather_communicator = strategy.fsdp.has_gather_group and strategy.fsdp.outer_sharding != "optim"
    if has_gather_communicator and not is_expert:
        gather = stage.group("gather", size)
    return Ranks(shard, gather, outer, num_owners)


def _unit_size(strategy: MegatronFsdp, groups: list[ParameterGroup]) -> int:
    """suggested_communication_unit_size."""
    if strategy.unit_size is not None:
        return strategy.unit_size
    if not strategy.shards_parameters:
        return max(LEAST_UNIT, strategy.bucket_size or 0)
    units = {group.unit for group in groups if group.unit}
    numel = sum(group.numel for group in groups if group.unit)
    return max(LEAST_UNIT, numel // max(len(units), 1) * 2)
