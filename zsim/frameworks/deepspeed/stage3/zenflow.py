"""ZenFlow at stage 3: every rank updates selected columns of its own shards at once, the CPU the rest.

Transcribed from DeepSpeed 0.19.6 `runtime/zenflow/engine_stage3.py`, `runtime/zero/stage3.py`,
`runtime/zero/parameter_offload.py` and `ops/adam/zenflow_torch_adam.py` (`ZenFlowSelectiveAdamW_stage3`),
which are so since 0.19.4. An interval is that of stages 1 and 2, see [Note: an interval of ZenFlow] of
stage12/zenflow.py. What differs:

- Matrices are stored transposed, so that a column is contiguous, and cut like that. Autograd copies the
  gradient of a matrix once more, into the layout of its weight (`clone_obey_contract` of torch's
  `accumulate_grad.h`).
- A rank selects among the columns that are whole in its shard, and updates its own shard: nothing is sent.
  Every rank is taken to have an equal part of what is selected.
- `zenflow_backward_epilogue` releases persistent parameters too, at the end of every backward, so that later
  iterations gather them in forward.
"""

from __future__ import annotations

import numpy as np

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.selective_optimizer import OptimizerProcess, SelectiveOptimizer
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket
from zsim.frameworks.deepspeed.stage3.fetch_trace import ZeroParameter
from zsim.frameworks.deepspeed.stage3.offload import Zero3OffloadedStates
from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Memory
from zsim.plan.stage import Stage


class ZenFlow3States(Zero3OffloadedStates):
    """ZeRO-3's offloaded states, in two sets that take turns where the update overlaps."""

    process: OptimizerProcess | None = None

    def start_update(self) -> None:
        """Start the update with the sums of the interval before."""
        assert self.config.zero.zenflow is not None
        if self.config.zero.zenflow.overlap_step:
            self.process = self._make_process()
            self.process.start()

    def _make_process(self) -> OptimizerProcess:
        numel = sum(map(self.numel_of, range(len(self.groups))))
        return OptimizerProcess(
            self.builder, numel, self.training.optimizer, is_pinned=self.offload.pin_memory
        )

    def resident(self) -> list[Memory]:
        """Also the second set."""
        assert self.config.zero.zenflow is not None
        second = self._make_process().memory() if self.config.zero.zenflow.overlap_step else []
        return [*super().resident(), *second]

    def step(self, norm_group: str) -> None:
        if self.process is None:
            super().step(norm_group)
            return
        check_overflow(self.stage, self.config, [], norm_group)
        for _ in self.groups:
            compute_norm_and_clip(self.stage, self.config, [], norm_group)
        self.process.wait(self.host)
        for group in range(len(self.groups)):
            self.store.put_from_cpu(group)

    def hand_over(self) -> None:
        """`zenflow_cpu_optimizer_overlap_step`: scale the sums for the optimizer's process."""
        if self.process is not None:
            self.host.scale("scale gradients", self.process.numel)


class ZenFlow3Schedule(Zero3Schedule):
    """Hooks of stage 3 with ZenFlow's selective optimizer. See the module's notes."""

    offloaded_states = ZenFlow3States

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage, config)
        assert isinstance(self.offload, ZenFlow3States)
        self.states = self.offload
        self.selective = SelectiveOptimizer(stage.builder, config)
        _check(stage, config, self.trace.parameters)
        assert config.zero.zenflow is not None
        ratio = config.zero.zenflow.topk_ratio
        self._selected = [
            selected_elements(parameter, self.world_size, ratio) for parameter in self.trace.parameters
        ]
        self._persistent = [
            parameter.padded_numel * self.param_bytes
            for parameter in self.trace.parameters
            if parameter.is_persistent and self.world_size > 1
        ]

    def resident(self) -> list[Memory]:
        """Also the moments of the selected weights. Persistent parameters are allocated by the step."""
        gathered = Memory("buffers", sum(self._persistent))
        memories = super().resident()
        memories.remove(gathered)
        return [*memories, self.selective.moments(sum(self._selected))]

    def begin_step(self) -> None:
        self.states.start_update()
        for size in self._persistent:
            self.builder.allocate("buffers", size, stream=COMPUTE)

    def _add_gradient(self, number: int, name: str) -> None:
        parameter = self.trace.parameters[number]
        if len(parameter.shape) == 2:
            size = parameter.numel * self.param_bytes
            self.builder.allocate("buffers", size)
            self.builder.move(f"transpose gradient of {name}", size, size, module=name)
            self.builder.free("buffers", size)
        super()._add_gradient(number, name)

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """`_process_selected_fp32_groups_grad`: take the selected part of the reduced shards, and update it
        at once, or in the last iteration keep its weights for the step. Then offload the shards.
        """
        builder, stream, count = self.builder, self.reduce_stream, bucket.num_tensors
        selected = sum(self._selected[number] for number in bucket.parameters)
        size = selected * self.param_bytes
        builder.allocate("buffers", size)
        builder.move("take selected gradients", 2 * size, 2 * size, 2 * count, stream=stream)
        if not self._is_boundary:
            self.selective.update(selected, count, stream)
            last = builder.record(stream)
            assert last is not None
            builder.free_when_done("buffers", size, last)
            return super()._keep_shards(bucket)
        builder.allocate("buffers", size)
        builder.move("keep selected weights", 2 * size, 2 * size, 2 * count, stream=stream)
        if self.selective.is_offloaded:
            copy = self.selective.host.copy("kept weights to host", "d2h", size, stream, is_blocking=True)
            assert copy is not None
            builder.free_when_done("buffers", size, copy)
        return super()._keep_shards(bucket)

    def end_backward(self) -> None:
        super().end_backward()
        if self._is_boundary or not self._persistent:
            return
        self.coordinator.release_persistent()
        for size in self._persistent:
            self.builder.free("buffers", size)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.states.hand_over()
        selected = sum(self._selected)
        count = sum(parameter.is_trained for parameter in self.trace.parameters)
        size = selected * self.param_bytes
        if self.selective.is_offloaded:
            self.builder.allocate("buffers", size)
            self.selective.host.copy("kept weights back", "h2d", size, COMPUTE)
        self.builder.move("put kept weights back", size, size, count)
        self.selective.update(selected, count, COMPUTE)
        self.builder.free("buffers", 2 * size)
        for persistent in self._persistent:
            self.builder.free("buffers", persistent)


def selected_elements(parameter: ZeroParameter, ranks: int, ratio: float) -> int:
    """A rank's selected elements: all of a vector's shard, and of a matrix `ratio` of the columns that are
    whole in a shard, rounded down, at least one, in equal parts for the ranks. 0 where no shard has a whole
    column, and of what is frozen.
    """
    if len(parameter.shape) != 2 or not parameter.is_trained:
        return parameter.trained_shard_numel
    length = parameter.shape[0]
    starts = np.minimum(np.arange(ranks) * parameter.shard_numel, parameter.numel)
    ends = np.minimum(starts + parameter.shard_numel, parameter.numel)
    columns = int(np.maximum(ends // length - -(-starts // length), 0).sum())
    return max(1, int(ratio * columns)) * length // ranks if columns else 0


def _check(stage: Stage, config: DeepSpeedConfig, parameters: tuple[ZeroParameter, ...]) -> None:
    """Raises InputError for what fails in DeepSpeed, and NotSimulatedError."""
    where = f"{config.name}: zero_optimization.zenflow"
    if stage.parallelism.experts.ranks > 1:
        raise NotSimulatedError(
            f"{where} is not simulated with experts that other ranks have; expected parallelism.expert 1, or "
            "no zenflow"
        )
    if config.zero_init:
        raise InputError(
            "strategy.zero_init: found true with ZenFlow at stage 3, which transposes weights before they "
            "are cut and so takes those that deepspeed.zero.Init has cut the wrong way round; expected false"
        )
    assert config.zero.zenflow is not None
    for parameter in parameters:
        if len(parameter.shape) > 2:
            raise InputError(
                f"{where}: {parameter.name} has {len(parameter.shape)} dimensions, which DeepSpeed's "
                "transposition at stage 3 refuses; expected stage 2, or no zenflow"
            )
        ranks = parameter.padded_numel // parameter.shard_numel
        if parameter.is_trained and not selected_elements(parameter, ranks, config.zero.zenflow.topk_ratio):
            raise InputError(
                f"{where}: {parameter.name}: no shard of {parameter.shard_numel:,} elements has a whole "
                f"column of {parameter.shape[0]:,}, of which DeepSpeed then selects none and fails; expected "
                "fewer GPUs, or stage 2"
            )
