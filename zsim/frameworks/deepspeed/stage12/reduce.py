"""The reduction of a bucket of gradients in DeepSpeed's stages 1 and 2.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py` (reduce_ipg_grads, average_tensor,
allreduce_bucket) and, for releases before 0.12.4, from 0.12.3's average_tensor.

# [Note: slices of a bucket]
With `reduce_scatter` (the default) a bucket is cut where its gradients' owners change. By default the slices
are joined again and all-reduced together (`use_multi_rank_bucket_allreduce`), else every owner gets its
slices in one `reduce`. Before 0.12.4 every slice was reduced by itself, asynchronously. Without
`reduce_scatter` the bucket is all-reduced in place. Without `contiguous_gradients` there is no flat bucket:
its gradients are joined, all-reduced and copied back. torch's `_flatten_dense_tensors` copies nothing if
there is one tensor.

# [Note: the device is synchronized]
`allreduce_and_copy`, which reduces slices to owners and loose gradients, waits for the whole device before
every call if `overlap_comm` is on, so that the gradients of the previous call may be cleared.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import cast_kernels, cat_launches
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage12.partition_owners import FlatGroups
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.ops import CollectiveKind, Group


class BucketReducer:
    """Issues the calls of the buckets on `stream`. `flat` holds the owners of the parameters, and `group` is
    all data-parallel ranks.
    """

    def __init__(
        self, builder: PlanBuilder, config: DeepSpeedConfig, flat: FlatGroups, group: Group, stream: str
    ) -> None:
        self.builder, self.config, self.zero, self.flat = builder, config, config.zero, flat
        self.group, self.stream = group, stream
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.reduce_bytes = DTYPE_BYTES[config.communication_dtype]
        self._casts = config.communication_dtype != config.param_dtype
        self._reduces_slice_by_slice = config.release.reduces_slice_by_slice

    def reduce(self, names: Sequence[str], elements: int) -> None:
        """Reduce a bucket of `elements` of the parameters `names`. See [Note: slices of a bucket]."""
        zero = self.zero
        if self.group.size == 1:
            self._copy_local_slices(elements)
        elif not zero.contiguous_gradients:
            self._count_slices(len(names))
            self._all_reduce_joined(names, elements)
        elif not zero.reduce_scatter:
            self._call("all_reduce", elements, averages=True)
        else:
            self._average(elements, self.param_bytes)
            self._count_slices(self.flat.num_slices(names))
            if self._reduces_slice_by_slice and not zero.use_multi_rank_bucket_allreduce:
                self._reduce_slices([numel for _, _, numel in self.flat.slices(names)])
                return
            if zero.use_multi_rank_bucket_allreduce:
                for call in self.flat.all_reduces(names, zero.reduce_bucket_size):
                    self._call("all_reduce", call.numel, num_tensors=call.slices, group=call.group)
            else:
                self._reduce_to_owners(names)
            self._copy_local_slices(elements)

    def _all_reduce_joined(self, names: Sequence[str], elements: int) -> None:
        """buffered_reduce_fallback: join, all-reduce, and copy the sums back to the loose gradients."""
        self._synchronize()
        self._call("all_reduce", elements, num_tensors=len(names), averages=True)
        size = elements * self.reduce_bytes
        kernels = move_kernels(size, elements * self.param_bytes, launches=len(names))
        self.builder.kernels("copy gradients back", kernels, stream=self.stream)

    def _reduce_to_owners(self, names: Sequence[str]) -> None:
        """allreduce_no_retain with a rank: reduce to one owner after the other."""
        for call in self.flat.reduces(names, self.zero.reduce_bucket_size):
            self._synchronize()
            self._look_up_rank()
            self._call("reduce", call.numel, num_tensors=call.slices, group=call.group)

    def _reduce_slices(self, slices: Sequence[int]) -> None:
        """Before 0.12.4: cast all slices together, reduce each in place, cast back."""
        elements = sum(slices)
        cast = self._cast(elements)
        for numel in slices:
            self._look_up_rank()
            self._collective("reduce", numel, self.group.name)
        self._cast_back(elements, cast)

    def _call(
        self,
        kind: CollectiveKind,
        elements: int,
        *,
        num_tensors: int = 1,
        averages: bool = False,
        group: str = "",
    ) -> None:
        """allreduce_bucket and gradient_reduction_w_predivide: join, cast, average, reduce, cast back."""
        builder, joined_bytes = self.builder, 0
        if num_tensors > 1:
            joined_bytes = elements * self.param_bytes
            builder.allocate("buffers", joined_bytes)
            kernels = move_kernels(joined_bytes, joined_bytes, launches=cat_launches(num_tensors))
            builder.kernels("flatten bucket", kernels, stream=self.stream)
        cast = self._cast(elements)
        if averages:
            self._average(elements, self.reduce_bytes)
        self._collective(kind, elements, group or self.group.name)
        self._cast_back(elements, cast)
        builder.free("buffers", joined_bytes)

    def _cast(self, elements: int) -> int:
        """Cast to the communication type. Returns the bytes of the copy, 0 if gradients have that type."""
        if not self._casts:
            return 0
        config, size = self.config, elements * self.reduce_bytes
        self.builder.allocate("buffers", size)
        kernels = cast_kernels(elements, config.param_dtype, config.communication_dtype)
        self.builder.kernels("cast bucket", kernels, stream=self.stream)
        return size

    def _cast_back(self, elements: int, cast: int) -> None:
        if cast:
            kernels = cast_kernels(elements, self.config.communication_dtype, self.config.param_dtype)
            self.builder.kernels("cast bucket back", kernels, stream=self.stream)
            self.builder.free("buffers", cast)

    def _average(self, elements: int, element_bytes: int) -> None:
        size = elements * element_bytes
        self.builder.kernels("average bucket", move_kernels(size, size), stream=self.stream)

    def _collective(self, kind: CollectiveKind, elements: int, group: str) -> None:
        if self.builder.groups[group].size == 1:  # experts that no other rank has
            return
        size = elements * self.reduce_bytes
        self.builder.collective(kind, size, self.config.communication_dtype, group, stream=self.stream)

    def _copy_local_slices(self, elements: int) -> None:
        """Copy the rank's slices back into the bucket."""
        local_numel = elements // self.group.size
        kernels = move_kernels(local_numel * self.reduce_bytes, local_numel * self.param_bytes)
        self.builder.kernels("copy own slice", kernels, stream=self.stream)

    def _count_slices(self, count: int) -> None:
        self.builder.host("slice bucket", overhead="deepspeed_slice", events=count)

    def _look_up_rank(self) -> None:
        """Host time of torch's get_global_rank, which iterates over half of the group on average."""
        self.builder.host("rank of owner", overhead="rank_passed", events=max(self.group.size // 2, 1))

    def _synchronize(self) -> None:
        """Make the host wait for the device. See [Note: the device is synchronized]."""
        if self.zero.overlap_comm:
            self.builder.host_wait(self.builder.record(COMPUTE))
            self.builder.host_wait(self.builder.record(self.stream))
