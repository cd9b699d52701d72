"""The reductions of Megatron-FSDP's gradients: reduced call by call concurrently with backward, with a bound
on the elements in flight.

Read in Megatron-Core 0.16.1 core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py
(`GradReducePipeline`, `gradient_reduce_preprocessing`) and megatron_fsdp.py (`_grad_acc`).

# [Note: whole gradients of a layer]
Sharded gradients are computed into a buffer of the group's whole gradients, which lives from the first of
them until their reduction has been waited for: when more than the suggested unit is on its way, with a double
buffer when a third layer needs one, and at the end of every backward. The reduced shard is a new tensor that
is added to the rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.fsdp.groups import ParameterGroup
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels

REDUCE_SCATTER, OUTER_REDUCE = "reduce_scatter", "outer_all_reduce"
_FULL_GRADIENTS = "whole gradients"


class GradientReductions:
    """GradReducePipeline. `capacity` is the number of elements that may be in flight. If `averages`, NCCL
    averages.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        groups: Sequence[ParameterGroup],
        strategy: MegatronFsdp,
        dtype: str,
        capacity: int,
        *,
        averages: bool,
    ) -> None:
        self.builder, self.strategy, self.dtype = builder, strategy, dtype
        self.capacity, self.averages = capacity, averages
        self.element_bytes = DTYPE_BYTES[dtype]
        self.groups = [group for group in groups if group.trainable]
        self._group_of = {name: group for group in self.groups for name in group.names}
        self._missing: dict[int, set[str]] = {}
        self._allocated_groups: set[int] = set()  # groups whose whole gradients are allocated
        self._queue: list[tuple[int, ParameterGroup]] = []
        self._outer: int | None = None

    def begin(self) -> None:
        """Expect the gradients of a backward."""
        self._missing = {group.number: set(group.names) for group in self.groups}

    def hold(self, name: str) -> None:
        """get_main_grad: allocate the unsharded gradients of the group of parameter `name`."""
        group = self._group_of.get(name)
        if group is None or not self._is_sharded(group) or group.number in self._allocated_groups:
            return
        self._wait_for_pool(group)
        self._allocated_groups.add(group.number)
        if not self._is_pooled(group):
            self.builder.allocate("buffers", self._bytes(group), owner=group.label, part=_FULL_GRADIENTS)

    def mark_ready(self, name: str, *, is_due: bool, is_last: bool) -> None:
        """A gradient is computed: reduce its call's groups if they are complete and `is_due`."""
        group = self._group_of.get(name)
        if group is None:
            return
        self._missing[group.number].discard(name)
        call = self._call(group)
        if is_due and not any(self._missing[member.number] for member in call):
            self._wait_for_capacity()
            self._reduce(call, is_last=is_last)

    def wait(self, max_in_flight: int = 0) -> None:
        """Wait until at most `max_in_flight` groups are in flight."""
        while len(self._queue) > max_in_flight:
            event, group = self._queue.pop(0)
            self.builder.stream_wait(COMPUTE, event)
            self._release(group)
        if not max_in_flight and self._outer is not None:
            self.builder.stream_wait(COMPUTE, self._outer)
            self._outer = None

    def reduce_all(self) -> None:
        """reduce_scatter_gradients: every buffer at once, after backward."""
        events = []
        for group in self.groups:
            if group.ranks.size == 1:
                continue
            self._scale(group, COMPUTE)
            events.append(self._collective([group], "reduce_scatter", REDUCE_SCATTER))
        for event in events:
            self.builder.stream_wait(COMPUTE, event)

    # -- parts ------------------------------------------------------------------------------------------

    def _call(self, group: ParameterGroup) -> list[ParameterGroup]:
        return [member for member in self.groups if member.shares_call_with(group)]

    def _is_sharded(self, group: ParameterGroup) -> bool:
        return self.strategy.shards_gradients and group.ranks.size > 1

    def _is_pooled(self, group: ParameterGroup) -> bool:
        return self.strategy.has_double_buffer and bool(group.unit)

    def _bytes(self, group: ParameterGroup) -> int:
        return group.numel * self.element_bytes

    def _release(self, group: ParameterGroup) -> None:
        if group.number in self._allocated_groups:
            self._allocated_groups.discard(group.number)
            if not self._is_pooled(group):
                self.builder.free("buffers", self._bytes(group), owner=group.label, part=_FULL_GRADIENTS)

    def _wait_for_capacity(self) -> None:
        in_flight_numel = sum(group.numel for _, group in self._queue)
        num_kept = len(self._queue)
        for _, group in self._queue:
            if in_flight_numel <= self.capacity:
                break
            in_flight_numel -= group.numel
            num_kept -= 1
        if num_kept < len(self._queue):
            self._wait_first(len(self._queue) - num_kept)

    def _wait_first(self, count: int) -> None:
        for _ in range(count):
            event, group = self._queue.pop(0)
            self.builder.stream_wait(COMPUTE, event)
            self._release(group)

    def _wait_for_pool(self, group: ParameterGroup) -> None:
        """_enforce_double_buffer_limit."""
        if not self._is_pooled(group):
            return
        units, num_kept = {group.unit}, len(self._queue)
        for _, queued_group in reversed(self._queue):
            units.add(queued_group.unit)
            if len(units - {""}) > 2:
                num_kept -= 1
        if num_kept < len(self._queue):
            self._wait_first(len(self._queue) - num_kept)

    def _scale(self, group: ParameterGroup, stream: str) -> None:
        """Scale before the sum, unless NCCL averages, or multiplies as it sums fp32."""
        nccl_scales = self.strategy.scales_in_nccl and self.dtype != "bf16"
        if not self.averages and not nccl_scales:
            size = self._bytes(group)
            self.builder.kernels(f"scale gradients {group.label}", move_kernels(size, size), stream=stream)

    def _collective(self, call: Sequence[ParameterGroup], kind: str, stream: str) -> int:
        size = sum(self._bytes(group) for group in call)
        name, group = call[0].label, call[0].ranks.shard.name
        if kind == "all_reduce":
            return self.builder.collective(
                "all_reduce", size, self.dtype, group, stream=stream, name=f"all_reduce {name}", module=name
            )
        return self.builder.collective(
            "reduce_scatter", size, self.dtype, group, stream=stream, name=f"reduce_scatter {name}",
            module=name,
        )  # fmt: skip

    def _reduce(self, call: Sequence[ParameterGroup], *, is_last: bool) -> None:
        """_bucket_group_gradient_reduce."""
        builder, ranks, name = self.builder, call[0].ranks, call[0].label
        self._wait_for_pool(call[0])
        builder.host(f"reduce {name}", overhead="ddp_bucket")
        builder.wait_stream(REDUCE_SCATTER, COMPUTE)
        if ranks.size > 1 or ranks.outer is not None:
            for group in call:
                self._scale(group, REDUCE_SCATTER)
        event = builder.record(COMPUTE)
        if ranks.size > 1:
            if self.strategy.shards_states:
                event = self._scatter(call)
            else:
                event = self._collective(call, "all_reduce", REDUCE_SCATTER)
        if is_last and ranks.outer is not None:
            event = self._reduce_outer(call)
        assert event is not None
        self._queue += [(event, group) for group in call]

    def _scatter(self, call: Sequence[ParameterGroup]) -> int:
        builder, name = self.builder, call[0].label
        shard = sum(group.shard_numel for group in call)
        size = 0 if self.strategy.has_double_buffer else shard * self.element_bytes
        builder.allocate("buffers", size, owner=name, part="reduced shard", stream=REDUCE_SCATTER)
        self._collective(call, "reduce_scatter", REDUCE_SCATTER)
        kernels = accumulate_kernels(shard, self.dtype, self.dtype)
        event = builder.kernels(f"add gradient shard {name}", kernels, stream=REDUCE_SCATTER, module=name)
        builder.free("buffers", size, owner=name, part="reduced shard")
        return event

    def _reduce_outer(self, call: Sequence[ParameterGroup]) -> int:
        """Sum the shards over the instances, or scatter their sums for the states that they share."""
        builder, name, outer = self.builder, call[0].label, call[0].ranks.outer
        assert outer is not None
        builder.wait_stream(OUTER_REDUCE, REDUCE_SCATTER)
        numel = sum(group.shard_numel if self._is_sharded(group) else group.numel for group in call)
        size = numel * self.element_bytes
        if self.strategy.outer_sharding == "optim":
            event = builder.collective(
                "reduce_scatter", size, self.dtype, outer.name, stream=OUTER_REDUCE,
                name=f"reduce_scatter shards of {name}", module=name,
            )  # fmt: skip
            part = size // outer.size
            event = builder.kernels(
                f"copy shard {name}", move_kernels(part, part), stream=OUTER_REDUCE, module=name
            )
        else:
            event = builder.collective(
                "all_reduce", size, self.dtype, outer.name, stream=OUTER_REDUCE,
                name=f"all_reduce shards of {name}", module=name,
            )  # fmt: skip
        self._outer = event
        return event
