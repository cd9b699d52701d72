"""ZenFlow at stages 1 and 2: selected columns of gradients update on every GPU at once, the rest on the CPU.

Transcribed from DeepSpeed 0.19.6 `runtime/zenflow/zenflow_stage_1_and_2.py`, which is so since 0.19.4. Both
optimizers are in selective_optimizer.py.

# [Note: an interval of ZenFlow]
The engine overwrites `gradient_accumulation_steps` with `update_interval`, so that a step here is an interval
of so many iterations. Every iteration reduces its gradients and adds them to the sums in host memory, as
ZeRO-Offload does while it accumulates. After the reduction of a bucket its owners broadcast `topk_ratio` of
the columns of matrices and all of the vectors, and every rank updates them in its own 16-bit weights with
torch's AdamW, whose moments are in 16 bits and not sharded. In the last iteration it clones the selected
weights instead, and updates them after the CPU's part has come.

Without `overlap_step` the CPU updates then, as in ZeRO-Offload. With it another process updates with the sums
of the interval before, during this one, and copies its masters into a snapshot. The step waits for it, casts
the snapshot and copies it to the GPU, and hands the new sums over. With `overlap_comm` stage 1 does what
stage 2 does: it reduces in every iteration too (`reduce_ready_partitions_and_remove_grads`), and what other
ranks own lies in the bucket, which the end of backward lets go (`_clear_param_grad_only`). Choosing columns
anew, once an epoch or every `select_interval` iterations, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.errors import NotSimulatedError
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.selective_optimizer import OptimizerProcess, SelectiveOptimizer
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage12.offload import Zero12OffloadedStates
from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Memory
from zsim.plan.stage import Stage


class ZenFlowStates(Zero12OffloadedStates):
    """ZeRO-Offload's states, in two sets that take turns where the update overlaps."""

    def __init__(
        self, stage: Stage, config: DeepSpeedConfig, shard_numel: int, numels: Mapping[str, int]
    ) -> None:
        super().__init__(stage, config, shard_numel, numels)
        assert config.zero.zenflow is not None
        optimizer, pinned = stage.training.optimizer, self.is_pinned
        self.process = (
            OptimizerProcess(stage.builder, shard_numel, optimizer, is_pinned=pinned)
            if config.zero.zenflow.overlap_step
            else None
        )

    def resident(self, parameters: Memory, casts: tuple[int, ...]) -> list[Memory]:
        """Also the second set."""
        return [*super().resident(parameters, casts), *(self.process.memory() if self.process else [])]

    def step(self, group: str) -> None:
        if self.process is None:
            super().step(group)
            return
        self.host.wait(self._last_copy, "wait for gradient copies")
        check_overflow(self.stage, self.config, [], group)
        compute_norm_and_clip(self.stage, self.config, [], group)
        self.process.wait(self.host)
        self.host.cast("cast weights", self.shard_numel, "fp32", self.config.param_dtype)
        size = self.shard_numel * self.param_bytes
        self.host.copy("weights to GPU", "h2d", size, COMPUTE, is_pinned=False)

    def hand_over(self) -> None:
        """Scale the sums for the optimizer's process."""
        if self.process and (self.config.gradient_clipping > 0 or self.config.precision == "fp16"):
            self.host.scale("scale gradients", self.shard_numel)


class ZenFlowSchedule(Zero12Schedule):
    """Hooks of stages 1 and 2 with ZenFlow's selective optimizer. See [Note: an interval of ZenFlow]."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        assert config.zero.zenflow is not None
        if stage.parallelism.experts.ranks > 1:
            raise NotSimulatedError(
                f"{config.name}: zero_optimization.zenflow is not simulated with experts that other ranks "
                "have; expected parallelism.expert 1, or no zenflow"
            )
        if config.stage == 1 and config.grad_accum_dtype != config.param_dtype:
            raise NotSimulatedError(
                f"{config.name}: data_types.grad_accum_dtype: {config.grad_accum_dtype} is not simulated "
                f"with ZenFlow at stage 1, whose weights are {config.param_dtype}; expected the "
                "same, or stage 2"
            )
        super().__init__(stage, config)
        self.partitions_gradients = True
        self.zenflow = config.zero.zenflow
        self.selective = SelectiveOptimizer(stage.builder, config)

    def _make_offload(self) -> ZenFlowStates:
        self.states = ZenFlowStates(self.stage, self.config, self.shard_numel, self._numels)
        return self.states

    def _selected(self, name: str) -> int:
        """Selected elements of a parameter: whole columns, rounded down, or all of a vector."""
        shape, numel = self._shapes[name], self._numels[name]
        if len(shape) != 2:
            return numel
        columns = shape[1]
        return int(self.zenflow.topk_ratio * columns) * (numel // columns)

    def resident(self) -> list[Memory]:
        """Also the moments of the selected weights, on every GPU or (`offload`) in host memory."""
        return [*super().resident(), self.selective.moments(sum(map(self._selected, self._numels)))]

    def begin_step(self) -> None:
        if self.states.process:
            self.states.process.start()

    def _keep_slice(self, stream: str) -> int:
        """Broadcast and update the selected part of a bucket, then offload the rank's slice."""
        names, builder = self._tensors, self.builder
        selected = sum(map(self._selected, names))
        size = selected * self.param_bytes
        builder.allocate("buffers", size)
        slice_bytes = size // self.group.size
        builder.move("take selected gradients", slice_bytes, slice_bytes, len(names), stream=stream)
        if self.group.size > 1:
            calls = self._reducer.flat.reduces(names, self.zero.reduce_bucket_size)
            for call in calls:
                part = call.numel * selected // self._elements * self.param_bytes
                builder.collective(
                    "broadcast", part, self.config.param_dtype, call.group, stream=stream,
                    name="broadcast selected gradients",
                )  # fmt: skip
        builder.move("copy selected gradients", size, size, len(names), stream=stream)
        if self._is_boundary:
            builder.allocate("buffers", size)
            builder.move("keep selected weights", size, size, len(names), stream=stream)
        else:
            self.selective.update(selected, len(names), stream)
            last = builder.record(stream)
            assert last is not None
            builder.free_when_done("buffers", size, last)
        return super()._keep_slice(stream)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.states.hand_over()
        selected, num_tensors = sum(map(self._selected, self._numels)), len(self._numels)
        size = selected * self.param_bytes
        self.builder.move("put kept weights back", size, size, num_tensors)
        self.selective.update(selected, num_tensors, COMPUTE)
        self.builder.free("buffers", 2 * size)
