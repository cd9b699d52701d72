"""The reduction of FSDP2's gradients: collect, reduce-scatter, all-reduce over replicas, accumulate.

Transcribed from `FSDPParamGroup.post_backward` and `foreach_reduce` of torch 2.13's
`torch/distributed/fsdp/_fully_shard/`.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.offload import Fsdp2OffloadedShards
from zsim.frameworks.fsdp2.param_groups import ParamGroup, ParamGroupGradient
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels

REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"
GRADIENTS, _INPUT = "gradients", "reduce-scatter's input"


class Fsdp2Reducer:
    """Reduces the gradients of all groups, with at most `reduce_scatter_max_input_buffers` inputs alive.
    `stored` is the type of the sharded parameters, and so of their gradients.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        strategy: Fsdp2Config,
        offload: Fsdp2OffloadedShards | None,
        stored: str = "fp32",
    ) -> None:
        self.builder = builder
        self.strategy = strategy
        self.offload = offload
        self.stored = stored
        self.reduce_bytes = DTYPE_BYTES[strategy.reduce_dtype]
        self._inputs: list[tuple[str, int, int]] = []  # (unit, bytes, the reduce-scatter's event)
        self._last_post_reduce: dict[str, int] = {}

    @property
    def is_pending(self) -> bool:
        """Whether a reduction is waited for."""
        return bool(self._inputs or self._last_post_reduce)

    def accumulate(self, group: ParamGroup, gradient: ParamGroupGradient, *, is_syncing: bool) -> None:
        """Add unsharded gradients up in the reduce dtype, as with `requires_gradient_sync=False`."""
        if is_syncing and not gradient.accumulated_bytes:
            return
        size = group.trainable_numel * self.reduce_bytes
        if not gradient.accumulated_bytes:
            self.builder.allocate("buffers", size, owner=group.name, part=GRADIENTS)
        read = gradient.unsharded_bytes + gradient.accumulated_bytes
        self.builder.kernels(
            f"accumulate gradients {group.name}",
            move_kernels(read, size, launches=len(group.trainable)),
            module=group.name,
        )
        self.builder.free("buffers", gradient.unsharded_bytes, owner=group.name, part=GRADIENTS)
        gradient.accumulated_bytes, gradient.unsharded_bytes = size, 0

    def keep(self, group: ParamGroup, gradient: ParamGroupGradient, size: int) -> None:
        """A gradient of plain parameters: autograd keeps the first and adds further ones to it."""
        if not gradient.has_shard:
            self.builder.allocate("gradients", size)
            return
        self.builder.kernels(
            f"accumulate gradients {group.name}", move_kernels(2 * size, size), module=group.name
        )

    def sum_partial(self, group: ParamGroup, gradient: ParamGroupGradient) -> None:
        """Sum the gradients of which each tensor-parallel rank has computed a part, one all-reduce per
        parameter on the compute stream (`FSDPParam._get_grad_inner_tensor`): in the parameters' type, or in
        the reduce dtype once gradients were accumulated."""
        dtype = self.strategy.reduce_dtype if gradient.accumulated_bytes else self.strategy.param_dtype
        dtype = "bf16" if dtype == "fp8" else dtype
        for parameter in group.trainable:
            if parameter.summed_over:
                self.builder.collective(
                    "all_reduce", parameter.numel * DTYPE_BYTES[dtype], dtype, parameter.summed_over,
                    stream=COMPUTE, name=f"all_reduce {parameter.name} of {group.name}", module=group.name,
                )  # fmt: skip

    def reduce(self, group: ParamGroup, gradient: ParamGroupGradient, *, all_reduces: bool = True) -> None:
        """foreach_reduce: copy-in on the compute stream, reduce-scatter, HSDP's all-reduce. Without
        `all_reduces` a replica keeps its sum (`_partial_reduce_output`).
        """
        builder = self.builder
        self._wait_for_earlier(group, gradient)
        full = group.reduced_numel * self.reduce_bytes
        shard, replicate = full // group.shard_size, group.mesh.replicate
        gradient_bytes = gradient.unsharded_bytes + gradient.accumulated_bytes
        builder.allocate("buffers", full, owner=group.name, part=_INPUT)
        builder.kernels(
            f"reduce_scatter_copy_in {group.name}",
            move_kernels(
                gradient_bytes * (2 if group.shard_dimension else 1),
                full * (2 if group.shard_dimension else 1),
            ),
            overhead="fsdp2_reduce",
            module=group.name,
        )
        builder.free("buffers", gradient_bytes, owner=group.name, part=GRADIENTS)
        gradient.unsharded_bytes = gradient.accumulated_bytes = 0
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)
        # The first reduced shard is the rank's gradient itself if it has its type; other shards are buffers.
        is_gradient = self.strategy.reduce_dtype == self.stored and not gradient.has_shard and all_reduces
        if is_gradient:
            builder.allocate("gradients", shard)
        else:
            builder.allocate("buffers", shard, owner=group.name)
        self._inputs.append((group.name, full, self._reduce_scatter(group, full)))
        stream = REDUCE_SCATTER
        self._add_partial(group, gradient, shard, all_reduces=all_reduces)
        if not all_reduces:
            last = builder.record(stream)
            assert last is not None
            gradient.post_reduce_event = self._last_post_reduce[stream] = last
            return
        if replicate is not None:
            stream = ALL_REDUCE
            builder.wait_stream(ALL_REDUCE, REDUCE_SCATTER)
            builder.collective(
                "all_reduce", shard, self.strategy.reduce_dtype, replicate.name, stream=ALL_REDUCE,
                name=f"all_reduce {group.name}", module=group.name,
            )  # fmt: skip
        gradient.post_reduce_event = self._finish(group, gradient, shard, stream)
        self._last_post_reduce[stream] = gradient.post_reduce_event

    def _add_partial(
        self, group: ParamGroup, gradient: ParamGroupGradient, shard: int, *, all_reduces: bool
    ) -> None:
        """Add the replica's sum of earlier micro-batches and the reduced shard, on the stream of the
        reduce-scatter: into the shard that is all-reduced next, or else into the sum.
        """
        builder = self.builder
        if not gradient.partial_bytes:
            gradient.partial_bytes = 0 if all_reduces else shard
            return
        name = f"accumulate partial gradients {group.name}"
        builder.kernels(name, move_kernels(2 * shard, shard), stream=REDUCE_SCATTER, module=group.name)
        builder.free("buffers", shard, owner=group.name)
        if all_reduces:
            gradient.partial_bytes = 0

    def wait(self, gradients: Mapping[str, ParamGroupGradient]) -> None:
        """Make the compute stream wait for all reductions at the end of backward, and free the buffers."""
        for event in self._last_post_reduce.values():
            self.builder.stream_wait(COMPUTE, event)
        self._last_post_reduce = {}
        for name, gradient in gradients.items():
            gradient.post_reduce_event = None
            self._free_all_reduce_buffer(name, gradient)
        for name, size, _event in self._inputs:
            self.builder.free("buffers", size, owner=name, part=_INPUT)
        self._inputs = []

    def _wait_for_earlier(self, group: ParamGroup, gradient: ParamGroupGradient) -> None:
        """Make backward wait for the oldest reduce-scatters before the next input is allocated."""
        while len(self._inputs) >= self.strategy.reduce_scatter_max_input_buffers:
            name, size, event = self._inputs.pop(0)
            self.builder.stream_wait(COMPUTE, event)
            self.builder.free("buffers", size, owner=name, part=_INPUT)
        self.builder.stream_wait(COMPUTE, gradient.post_reduce_event)
        self._free_all_reduce_buffer(group.name, gradient)

    def _free_all_reduce_buffer(self, group_name: str, gradient: ParamGroupGradient) -> None:
        self.builder.free("buffers", gradient.all_reduce_bytes, owner=group_name)
        gradient.all_reduce_bytes = 0

    def _reduce_scatter(self, group: ParamGroup, full: int) -> int:
        if group.shard_size == 1:
            return self.builder.kernels(
                f"copy gradients {group.name}",
                move_kernels(full, full),
                stream=REDUCE_SCATTER,
                module=group.name,
            )
        return self.builder.collective(
            "reduce_scatter", full, self.strategy.reduce_dtype, group.mesh.shard.name, stream=REDUCE_SCATTER,
            name=f"reduce_scatter {group.name}", module=group.name,
        )  # fmt: skip

    def _finish(self, group: ParamGroup, gradient: ParamGroupGradient, shard: int, stream: str) -> int:
        """Cast to the shards' type and accumulate on the stream of the last reduction, or copy to the host.
        Returns the last event.
        """
        builder = self.builder
        if self.offload is not None:
            return self.offload.keep_gradient(group, gradient, shard, stream)
        needs_cast = self.strategy.reduce_dtype != self.stored
        if not needs_cast and not gradient.has_shard:
            gradient.has_shard = True
            last = builder.record(stream)
            assert last is not None
            return last
        stored_bytes = shard // self.reduce_bytes * DTYPE_BYTES[self.stored]
        if needs_cast:
            if gradient.has_shard:
                builder.allocate("buffers", stored_bytes, owner=group.name)
            else:
                builder.allocate("gradients", stored_bytes)
        event = builder.kernels(
            f"accumulate gradient shard {group.name}",
            move_kernels(
                shard + (stored_bytes if gradient.has_shard else 0),
                stored_bytes,
                launches=len(group.trainable),
            ),
            stream=stream,
            module=group.name,
        )
        if group.mesh.replicate is not None:
            gradient.all_reduce_bytes = shard
        else:
            builder.free("buffers", shard, owner=group.name)
        if needs_cast and gradient.has_shard:
            builder.free("buffers", stored_bytes, owner=group.name)
        gradient.has_shard = True
        return event
