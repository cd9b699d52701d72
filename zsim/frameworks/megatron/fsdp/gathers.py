"""The gathers of Megatron-FSDP's parameters: their order, how far they are ahead, and when parameters are
released.

Read in Megatron-Core 0.16.1 core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py
(`AllGatherPipeline`, `FixedPoolAllocator`) and megatron_fsdp.py.

# [Note: how far ahead]
Groups are gathered in their order in forward, backwards in backward, until half of the suggested
communication unit is ahead of those that are needed. Gathered ones count. With a double buffer it is no more
than two layers. The unit is a billion elements, or two layers if they are larger.

# [Note: mxfp8 twice]
A weight that is kept in mxfp8 is gathered along its rows for forward, and along its columns, from a buffer of
its own, for backward. Other 8-bit weights are transposed after the gather, and the copies released with the
layer.

# [Note: reductions]
Gradients are reduced call by call concurrently with backward, with a bound on the elements in flight. Read in
Megatron-Core 0.16.1 core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py (`GradReducePipeline`,
`gradient_reduce_preprocessing`) and megatron_fsdp.py (`_grad_acc`).

# [Note: whole gradients of a layer]
Sharded gradients are computed into a buffer of the group's whole gradients, which lives from the first of
them until their reduction has been waited for: when more than the suggested unit is on its way, with a double
buffer when a third layer needs one, and at the end of every backward. The reduced shard is a new tensor that
is added to the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.fsdp.groups import ParameterGroup
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.specs.strategy.fp8 import Fp8

ALL_GATHER, OUTER_GATHER = "all_gather", "outer_all_gather"
LEAST_UNIT = 1_000_000_000  # elements
_BUFFER, _TRANSPOSED = "gathered", "transposed"
GatherKey = tuple[int, bool]  # group, and whether along columns


class ParameterGathers:
    """AllGatherPipeline. `element_bytes` is the size of parameters that are not in fp8, and `prefetch_numel`
    the number of elements to gather ahead.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        groups: Sequence[ParameterGroup],
        strategy: MegatronFsdp,
        recipe: Fp8,
        dtype: str,
        element_bytes: int,
        prefetch_numel: int,
    ) -> None:
        self.builder, self.groups, self.strategy, self.recipe = builder, groups, strategy, recipe
        self.dtype, self.element_bytes, self.prefetch_numel = dtype, element_bytes, prefetch_numel
        self.is_first_micro_batch = True
        self._events: dict[GatherKey, int] = {}  # on their way
        self._ready: set[GatherKey] = set()
        self._releasable: dict[GatherKey, None] = {}
        self._transposed: set[int] = set()
        self._calls: dict[int, list[ParameterGroup]] = {
            group.number: [member for member in groups if member.shares_call_with(group)] for group in groups
        }

    # -- sizes ------------------------------------------------------------------------------------------

    def group_bytes(self, group: ParameterGroup) -> int:
        """Bytes of a group's parameters in one direction."""
        return group.numel * (1 if group.in_fp8 else self.element_bytes)

    def has_columns(self, group: ParameterGroup) -> bool:
        return group.in_fp8 and self.recipe.recipe == "mxfp8"

    def _key(self, group: ParameterGroup, *, is_backward: bool) -> GatherKey:
        return group.number, is_backward and self.has_columns(group)

    # -- gathers ----------------------------------------------------------------------------------------

    def gather(
        self, needed: Iterable[ParameterGroup], *, prefetch: int = 0, is_backward: bool = False
    ) -> None:
        """all_gather_params. `prefetch` is 1 to gather following groups too, -1 for preceding ones, and 0 for
        none.
        """
        numbers = sorted({group.number for group in needed})
        if not numbers:
            return
        for number in numbers:
            self._releasable.pop(self._key(self.groups[number], is_backward=is_backward), None)
        if prefetch:
            numbers = self._add_prefetched(numbers, prefetch)
        missing = [
            number
            for number in numbers
            if not self._is_started(self._key(self.groups[number], is_backward=is_backward))
        ]
        while missing:
            call = [member.number for member in self._calls[missing[0]] if member.number in missing]
            missing = [number for number in missing if number not in call]
            self._issue([self.groups[number] for number in call], is_backward=is_backward)

    def _is_started(self, key: GatherKey) -> bool:
        return key in self._events or key in self._ready

    def _add_prefetched(self, numbers: list[int], step: int) -> list[int]:
        needed_numel = sum(self.groups[number].numel for number in numbers)
        units = {self.groups[number].unit for number in numbers if self.groups[number].unit}
        chosen = set(numbers)
        while True:
            next_number = min(chosen) if step > 0 else max(chosen)
            while next_number in chosen:
                next_number += step
            if not 0 <= next_number < len(self.groups):
                break
            if sum(self.groups[number].numel for number in chosen) - needed_numel >= self.prefetch_numel:
                break
            units.add(self.groups[next_number].unit)
            if self.strategy.has_double_buffer and len(units) > 2:
                break
            chosen |= {member.number for member in self._calls[next_number]}
        return sorted(chosen)

    def _issue(self, call: Sequence[ParameterGroup], *, is_backward: bool) -> None:
        builder, ranks = self.builder, call[0].ranks
        keys = [self._key(group, is_backward=is_backward) for group in call]
        self._recycle()
        name = call[0].label
        size = sum(self.group_bytes(group) for group in call)
        dtype = "fp8" if any(group.in_fp8 for group in call) else self.dtype
        if ranks.size == 1:
            self._ready |= set(keys)
            return
        if self.strategy.outer_sharding == "optim" and self.is_first_micro_batch and ranks.outer is not None:
            builder.wait_stream(OUTER_GATHER, COMPUTE)
            builder.collective(
                "all_gather", size // ranks.size, dtype, ranks.outer.name, stream=OUTER_GATHER,
                name=f"all_gather shards of {name}", module=name,
            )  # fmt: skip
            builder.wait_stream(ALL_GATHER, OUTER_GATHER)
        builder.wait_stream(ALL_GATHER, COMPUTE)
        self._allocate(call, name)
        builder.host(f"gather {name}", overhead="ddp_bucket")
        event = builder.collective(
            "all_gather", size, dtype, ranks.gather.name, stream=ALL_GATHER, name=f"all_gather {name}",
            module=name,
        )  # fmt: skip
        self._events |= dict.fromkeys(keys, event)

    def _allocate(self, call: Sequence[ParameterGroup], name: str) -> None:
        if not self.strategy.shards_parameters:
            return
        for group in call:
            if not (self.strategy.has_double_buffer and group.unit):
                size = self.group_bytes(group)
                self.builder.allocate(
                    "buffers", size, owner=name, part=f"{_BUFFER} {group.number}", stream=ALL_GATHER
                )

    def wait(self, needed: Iterable[ParameterGroup], *, is_backward: bool = False) -> None:
        """wait_bucket_ready. In backward it also makes the transposed copies of 8-bit weights."""
        for group in needed:
            key = self._key(group, is_backward=is_backward)
            event = self._events.pop(key, None)
            if event is not None:
                self.builder.stream_wait(COMPUTE, event)
                self._ready.add(key)
            if is_backward and self.has_transposes(group):
                self._transpose(group)

    def has_transposes(self, group: ParameterGroup) -> bool:
        """Whether a layer's 8-bit weights are transposed for its backward (`fp8_create_transpose_cache`)."""
        return group.in_fp8 and self.recipe.has_one_scale and self.strategy.shards_parameters

    def _transpose(self, group: ParameterGroup) -> None:
        """Copies that are kept are made once a step."""
        keeps_copies = self.strategy.keeps_transposes
        if group.number in self._transposed or (keeps_copies and not self.is_first_micro_batch):
            return
        self._transposed.add(group.number)
        if not keeps_copies:
            self.builder.allocate("buffers", group.numel, owner=group.unit, part=_TRANSPOSED)
        copies = move_kernels(group.numel, group.numel, launches=len(group.names))
        self.builder.kernels(f"transpose weights {group.unit}", copies, module=group.unit)

    # -- release ----------------------------------------------------------------------------------------

    def release(self, groups: Iterable[ParameterGroup], *, is_backward: bool, is_lazy: bool = False) -> None:
        """release_bucket. If `is_lazy`, the groups are released before the next gather, unless they are
        needed until then.
        """
        for group in groups:
            key = self._key(group, is_backward=is_backward)
            if not self._is_started(key):
                continue
            if is_lazy:
                self._releasable[key] = None
            else:
                self._free(key)
            if not is_lazy and group.number in self._transposed:
                self._transposed.discard(group.number)
                if not self.strategy.keeps_transposes:
                    self.builder.free("buffers", group.numel, owner=group.unit, part=_TRANSPOSED)

    def mark_units_releasable(self) -> None:
        """_root_pre_backward: gathered parameters of layers may be released before the next gather."""
        for group in self.groups:
            if group.unit:
                self._releasable[group.number, False] = None

    def reset(self) -> None:
        """Wait for all gathers, and release everything."""
        for key in [*self._events, *self._ready]:
            self._free(key)
        self._releasable = {}

    def _recycle(self) -> None:
        for key in list(self._releasable):
            self._free(key)
        self._releasable = {}

    def _free(self, key: GatherKey) -> None:
        event = self._events.pop(key, None)
        if event is not None:
            self.builder.stream_wait(COMPUTE, event)
        elif key not in self._ready:
            return
        self._ready.discard(key)
        group = self.groups[key[0]]
        is_pooled = self.strategy.has_double_buffer and bool(group.unit)
        if self.strategy.shards_parameters and group.ranks.size > 1 and not is_pooled:
            size = self.group_bytes(group)
            self.builder.free("buffers", size, owner=group.label, part=f"{_BUFFER} {group.number}")


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
