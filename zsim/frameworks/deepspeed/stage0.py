"""DeepSpeed without ZeRO, and its BF16_Optimizer: gradients all-reduced after backward.

`engine.buffered_allreduce_fallback` (DeepSpeed 0.19.8 `runtime/engine.py`): tensors are collected until they
exceed 5e8 elements, flattened, all-reduced on the default stream and copied back, without overlap.
`BF16_Optimizer` (`runtime/bf16_optimizer.py`) keeps fp32 gradients of the whole model on every rank, updates
the rank's 1/N of fp32 masters and moments, and all-gathers the bf16 weights. Routed experts that fewer ranks
have are reduced after all others, over these (`_reduce_expert_gradients`).
"""

from __future__ import annotations

from zsim.cost.kernels.update import accumulate_kernels, cast_kernels
from zsim.cost.optimizers import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.engine import DeepSpeedEngine
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.optimizer_groups import OptimizerGroup, optimizer_groups
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.builder import COMPUTE, move_kernels
from zsim.plan.ops import Group, Memory
from zsim.plan.shared.optimizer import parameter_bytes, partition_states, update
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.parallelism import EXPERT

_ELEMENTS_PER_BUFFER = 500_000_000


class Zero0Schedule(DeepSpeedEngine):
    """Hooks of DeepSpeed's engine without ZeRO, and of BF16_Optimizer."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        self.group = stage.group()
        workload = stage.workload
        self.gradient_bytes = DTYPE_BYTES[config.grad_accum_dtype]
        self.is_sharded = config.optimizer_wrapper == "bf16_optimizer"
        self.trained_numel = workload.model.trainable_numel
        self._groups = optimizer_groups(stage, self.group, workload.model.named_parameters())
        self._shards = [self._shard_numel(group) for group in self._groups]
        self.shard_numel = sum(self._shards)
        self._micro_batch, self._is_boundary = 0, True
        self._numels: list[int] = []
        self._expert_numels: list[int] = []

    def _shard_numel(self, group: OptimizerGroup) -> int:
        """Elements of a group that the rank updates."""
        return -(-group.numel // (2 * group.group.size)) * 2 if self.is_sharded else group.numel

    def resident(self) -> list[Memory]:
        config = self.config
        master = 0 if config.precision == "fp32" else DTYPE_BYTES[config.master_weights_dtype]
        moments = sum(
            sum(partition_states(self.training, shard, config.optimizer_states_dtype))
            for shard in self._shards
        )
        return [
            Memory("parameters", parameter_bytes(self.workload, config.param_dtype)),
            Memory("optimizer_states", self.shard_numel * master + moments),
            Memory("gradients", self.trained_numel * self.gradient_bytes if self.is_sharded else 0),
        ]

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._micro_batch, self._is_boundary = micro_batch, is_last and not schedule_manages_sharding
        self._numels, self._expert_numels = [], []

    def gradient_ready(self, call: ModuleCall) -> None:
        super().gradient_ready(call)
        builder, config = self.builder, self.config
        for parameter in call.trainable_parameters:
            numel = parameter.numel
            (self._expert_numels if parameter.rank_kind else self._numels).append(numel)
            if not self.is_sharded and self._micro_batch == 0:
                builder.allocate("gradients", numel * self.gradient_bytes)
                continue
            builder.allocate("buffers", numel * self.param_bytes)
            if self.is_sharded and self._micro_batch == 0:
                kernels = cast_kernels(numel, config.param_dtype, config.grad_accum_dtype)
            else:
                kernels = accumulate_kernels(numel, config.grad_accum_dtype, config.param_dtype)
            builder.kernels(f"accumulate {call.name}", kernels, module=call.name)
            builder.free("buffers", numel * self.param_bytes)

    def end_backward(self) -> None:
        if self._is_boundary:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """The pipeline engine's `_exec_reduce_tied_grads` and `_exec_reduce_grads`, or the end of the last
        backward."""
        self.sum_tied_gradient(self.config.grad_accum_dtype)
        self._reduce_all(self._numels, self.group)
        if self._expert_numels:
            self._reduce_all(self._expert_numels, self._groups[-1].group)

    def _reduce_all(self, numels: list[int], group: Group) -> None:
        if group.size == 1:
            return
        bucket: list[int] = []
        for numel in reversed(numels):  # order of registration, the reverse of backward
            bucket.append(numel)
            if sum(bucket) > _ELEMENTS_PER_BUFFER:
                self._reduce(bucket, group)
                bucket = []
        self._reduce(bucket, group)

    def _reduce(self, numels: list[int], group: Group) -> None:
        if not numels:
            return
        builder, config = self.builder, self.config
        gradient_bytes = sum(numels) * self.gradient_bytes
        size = sum(numels) * DTYPE_BYTES[config.communication_dtype]
        builder.allocate("buffers", size)
        builder.kernels(
            "flatten bucket",
            move_kernels(gradient_bytes, size, launches=len(numels)),
            overhead="deepspeed_reduce",
        )
        builder.collective("all_reduce", size, config.communication_dtype, group.name, stream=COMPUTE)
        builder.kernels("average bucket", move_kernels(size, size))
        builder.kernels("unflatten bucket", move_kernels(size, gradient_bytes, launches=len(numels)))
        builder.free("buffers", size)

    def optimizer_step(self) -> None:
        builder, config = self.builder, self.config
        self.check_overflow()
        expert_groups = [EXPERT] if EXPERT in builder.groups else []
        norm_groups = (
            expert_groups if self.is_sharded else []
        )  # FP16_Optimizer takes the norm of what the rank has
        compute_norm_and_clip(
            self.stage, config, [self.trained_numel], self.group.name, later_groups=norm_groups
        )
        is_low = config.precision != "fp32"
        needs_cast = is_low and config.grad_accum_dtype != config.master_weights_dtype
        cast = self.shard_numel * DTYPE_BYTES[config.master_weights_dtype] if needs_cast else 0
        builder.allocate("buffers", cast)
        if cast:
            kernels = cast_kernels(self.shard_numel, config.grad_accum_dtype, config.master_weights_dtype)
            builder.kernels("cast gradients", kernels)
        self.update_shards()
        builder.free("buffers", cast)
        for group, shard in zip(self._groups, self._shards, strict=True):
            if not self.is_sharded or group.group.size == 1:
                continue
            size = shard * group.group.size * self.param_bytes
            builder.collective(
                "all_gather",
                size,
                config.param_dtype,
                group.group.name,
                stream=COMPUTE,
                name="all_gather parameters",
            )
        if not self.is_sharded:
            builder.free("gradients", self.trained_numel * self.gradient_bytes)

    def check_overflow(self) -> None:
        """Look for infinities, and let the host wait for the answer."""
        later_groups = [EXPERT] if EXPERT in self.builder.groups else []
        named = self.workload.model.named_parameters()
        gradients = [parameter.numel for _, parameter in named if parameter.trainable]
        check_overflow(self.stage, self.config, gradients, self.group.name, later_groups=later_groups)

    def update_shards(self) -> None:
        """Update what the rank has of every group."""
        config = self.config
        update(
            self.builder,
            self.training,
            [UpdatedTensor((shard,)) for shard in self._shards],
            gradient_dtype=config.master_weights_dtype,
            state_dtype=config.optimizer_states_dtype,
            low_precision_copy=config.precision != "fp32",
        )
