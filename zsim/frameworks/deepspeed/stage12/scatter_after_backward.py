"""DeepSpeed's first stage 1: whole gradients are reduce-scattered after backward, in calls of a bucket each.

Transcribed from DeepSpeed 0.3.8 `runtime/zero/stage1.py` (FP16_DeepSpeedZeroOptimizer_Stage1) and
`runtime/utils.py`. Pull request 1042 of 0.4 replaced it by what stage 2 does.

# [Note: sub-partitions]
The flat parameters are cut into intervals of about `reduce_bucket_size` elements, and each interval into a
part for every rank. At the end of the last backward every rank copies all gradients into the parts of all
ranks, tensor by tensor. Each interval is one reduce-scatter of a list of parts, which torch copies into one
tensor, and one all-gather in the step, from which it copies the parts. The reduced part is copied back into
the gradients of the parameters that it covers.

The host waits for the sum of every gradient, to look for infinities, and once more for its norm
(`CheckOverflow.has_overflow_serial`, `get_grad_norm`): of all gradients, of which a rank's part alone is
reduced.
"""

from __future__ import annotations

from zsim.cost.kernels.update import cast_kernels, norm_kernels, scale_kernels
from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow
from zsim.frameworks.deepspeed.optimizer_groups import OptimizerGroup
from zsim.frameworks.deepspeed.stage12.partition_owners import FlatGroup
from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.plan.builder import COMPUTE, read_scalar


class ScatterAfterBackwardSchedule(Zero12Schedule):
    """Hooks of the first stage 1. See [Note: sub-partitions]."""

    def _flatten(self, group: OptimizerGroup) -> FlatGroup:
        """Padded to whole intervals (`flatten_dense_tensors_sub_partition_aligned`)."""
        ranks = group.group.size
        shard = sum(self._interval_numels(group.numel, ranks))
        return FlatGroup(group.numels, ranks, shard, is_round_robin=False, group=group.group.name)

    def _interval_numels(self, numel: int, ranks: int) -> list[int]:
        """A rank's elements of each interval of a group of `numel`: of a bucket, or of larger ones where one
        interval less takes less padding (`best_max_elems_per_comm`).
        """
        bucket, shard = self.zero.reduce_bucket_size, -(-numel // ranks)
        num_full = numel // bucket
        if num_full:
            increase = -(-numel // (ranks * num_full))
            bucket += increase if -numel % bucket > increase else 0
        largest = bucket // ranks
        return [shard] if shard <= largest else [largest] * -(-shard // largest)

    @property
    def _num_buffers(self) -> int:
        return 0

    @property
    def _copies_parts(self) -> bool:
        return True

    def _slice_parameters(self, ranks: int) -> None:
        """The parts were cut when the optimizer was made."""

    @property
    def _reduces_in_backward(self) -> bool:
        return False

    def end_backward(self) -> None:
        """`reduce_scatter_gradients`, at the boundary."""
        if self._is_boundary:
            for flat in self._flats:
                self._scatter(flat)

    def _scatter(self, flat: FlatGroup) -> None:
        builder, ranks, dtype = self.builder, flat.world_size, self.config.param_dtype
        size, num_tensors = flat.shard_numel * ranks * self.param_bytes, len(flat.numels)
        intervals = self._gather_sizes(flat)
        num_parts = num_tensors + ranks * len(intervals)
        builder.allocate("buffers", size)
        builder.move(
            "copy gradients into parts", size, size, ranks * len(intervals),
            overhead="deepspeed_part", events=num_parts,
        )  # fmt: skip
        for numel in intervals:
            part = numel * self.param_bytes
            if ranks > 1:
                builder.allocate("buffers", part * ranks)
                builder.move("join parts", part * ranks, part * ranks, ranks)
                builder.collective("reduce_scatter", part * ranks, dtype, flat.group, stream=COMPUTE)
                builder.free("buffers", part * ranks)
            builder.move("average own part", part, part)
        shard = flat.shard_numel * self.param_bytes
        builder.move("copy own part to gradients", 2 * shard, 2 * shard, 2 * -(-num_tensors // ranks))
        builder.free("buffers", size)

    def optimizer_step(self) -> None:
        builder, config, shard = self.builder, self.config, self.shard_numel
        gradients = list(self._numels.values())
        check_overflow(self.stage, config, gradients, self.group.name)
        for numel in gradients:
            builder.kernels("gradient norm", norm_kernels(numel, config.param_dtype))
            builder.host_wait(builder.record(COMPUTE))
            builder.host("read norm of gradient")
        read_scalar(builder, "gradient norm", "fp32", self.stage.norm_groups())
        shard_bytes, size = shard * self.param_bytes, sum(gradients) * self.param_bytes
        builder.free("gradients", size - shard_bytes)
        builder.allocate("buffers", 2 * 4 * shard)
        builder.kernels("cast own gradients", cast_kernels(shard, config.param_dtype, "fp32"))
        builder.move("flatten own gradients", 4 * shard, 4 * shard)
        builder.free("buffers", 4 * shard)
        builder.free("gradients", shard_bytes)
        builder.kernels("scale gradients", scale_kernels(shard))
        self.step_partition(shard, has_matrices=False)
        builder.free("buffers", 4 * shard)
        self._gather_parameters()

    def _gather_sizes(self, flat: FlatGroup) -> list[int]:
        return self._interval_numels(sum(flat.numels.values()), flat.world_size)
