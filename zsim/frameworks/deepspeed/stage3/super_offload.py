"""SuperOffload: a worker process updates a sub-group as soon as its gradients are in host memory.

Transcribed from DeepSpeed 0.19.8 `runtime/superoffload/superoffload_stage3.py` and `superoffload_utils.py`,
which are so since 0.18.9 (arXiv 2509.21271). Gradients take the way of ZeRO-Offload. Once the last gradient
of a sub-group is partitioned, the host waits for the stream of reductions and queues the sub-group. The
worker copies the gradients into a pinned buffer and runs CPU-Adam, and the process of torch copies the result
onto its masters. The step then waits for the worker, takes norms, scales gradients all the same, and casts
the masters.

With `gradient_clipping` nothing is queued before the step, which needs the norm first
(`_step_with_clipping`). The worker's copies then come on top of ZeRO-Offload.

# [Note: the worker's cores]
`cpuadam_cores_perc` splits the cores between worker and torch. Memory bounds the update and the casts with
either part of a Grace's cores, so that the split has no effect here.
"""

from __future__ import annotations

from collections import Counter

from zsim.frameworks.deepspeed.norm_and_overflow import check_overflow, compute_norm_and_clip
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket
from zsim.frameworks.deepspeed.stage3.offload import Zero3OffloadedStates
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide


class SuperOffloadedStates(Zero3OffloadedStates):
    """ZeRO-3's offloaded states with SuperOffload's worker."""

    _partitioned: Counter[int]
    """Partitioned gradients of each sub-group, in this step."""
    _updated: int | None = None

    def resident(self) -> list[Memory]:
        """Also the worker's pinned buffer, of the largest sub-group's gradients."""
        largest = max(map(self.numel_of, range(len(self.groups))), default=0)
        return [*super().resident(), Memory("buffers", 4 * largest, "host", is_pinned=True)]

    def keep_gradients(self, bucket: GradientBucket, *, is_first: bool, is_boundary: bool) -> int:
        last = super().keep_gradients(bucket, is_first=is_first, is_boundary=is_boundary)
        if not is_boundary or self.config.gradient_clipping:
            return last
        for number in bucket.parameters:
            group = self._group_of[number]
            self._partitioned[group] += 1
            is_complete = self._partitioned[group] == len(self.groups[group])
            if is_complete and group >= self._num_gpu_groups:
                self.host.wait(last, f"queue sub-group {group}")
                worker = HostSide(self.builder, runs_in_other_thread=True)
                self._updated = self._update(worker, group)
        return last

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._partitioned, self._updated = Counter(), None

    def _update(self, worker: HostSide, group: int) -> int | None:
        """Copy the gradients, update, and copy the masters back."""
        numel = self.numel_of(group)
        worker.cast(f"copy gradients of sub-group {group}", numel, "fp32", "fp32")
        worker.optimizer(f"optimizer step of sub-group {group}", numel, self.training.optimizer)
        return worker.cast(f"copy masters of sub-group {group}", numel, "fp32", "fp32")

    def step(self, norm_group: str) -> None:
        """Wait for the worker, or let it update one sub-group after another if gradients are clipped. Then
        cast the masters.
        """
        self.host.wait(self._updated, "wait for the worker")
        check_overflow(self.stage, self.config, [], norm_group)
        for _ in self.groups:
            compute_norm_and_clip(self.stage, self.config, [], norm_group)
        for group in range(len(self.groups)):
            numel = self.numel_of(group)
            if group < self._num_gpu_groups:
                self.step_on_gpu(group, numel)
                continue
            self.host.scale(f"scale gradients of sub-group {group}", numel)
            if self.config.gradient_clipping:
                self._update(self.host, group)
            self.store.put_from_cpu(group)
