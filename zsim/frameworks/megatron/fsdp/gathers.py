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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
