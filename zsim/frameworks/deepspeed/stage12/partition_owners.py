"""The owners of the parts of a bucket of gradients, in stages 1 and 2.

DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`: the parameters are flattened in the order of registration,
or round-robin over the ranks (`_round_robin_reorder`), and every rank owns an equal contiguous part.
`average_tensor` cuts a bucket into slices of one owner each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple


class BucketCall(NamedTuple):
    """One collective of a bucket."""

    numel: int
    slices: int
    """The number of slices that its elements consist of."""
    group: str = ""
    """The group that it runs over."""


class FlatGroup:
    """Parameters (name -> elements, in the order of registration) flattened over the `world_size` ranks of
    `group`, round-robin if `is_round_robin`.
    """

    def __init__(
        self,
        numels: Mapping[str, int],
        world_size: int,
        shard_numel: int,
        *,
        is_round_robin: bool,
        group: str = "",
    ) -> None:
        names = list(numels)
        if is_round_robin:
            names = [name for rank in range(world_size) for name in names[rank::world_size]]
        starts = accumulate((numels[name] for name in names), initial=0)
        self.numels, self.shard_numel = numels, shard_numel
        self.world_size, self.group = world_size, group
        self.offsets = dict(zip(names, starts, strict=False))

    def slices(self, names: Iterable[str]) -> Iterator[tuple[int, int]]:
        """(owner, elements) of a bucket's slices in order. Adjacent parts of one owner are one slice."""
        owner, numel = -1, 0
        for name in names:
            start, stop = self.offsets[name], self.offsets[name] + self.numels[name]
            for rank in range(start // self.shard_numel, (stop - 1) // self.shard_numel + 1):
                part = min(stop, (rank + 1) * self.shard_numel) - max(start, rank * self.shard_numel)
                if rank != owner and numel:
                    yield owner, numel
                    numel = 0
                owner, numel = rank, numel + part
        if numel:
            yield owner, numel

    def count_slices(self, names: Iterable[str]) -> tuple[int, int]:
        """The number of a bucket's slices and their elements. There may be thousands of slices where
        thousands of ranks own parts of a small group.
        """
        last, count, elements = -1, 0, 0
        shard = self.shard_numel
        for name in names:
            numel = self.numels[name]
            if numel:
                start = self.offsets[name]
                first, owner = start // shard, (start + numel - 1) // shard
                count += owner - first + (first != last)
                last = owner
                elements += numel
        return count, elements

    def largest_overlap_numel(self) -> int:
        """Elements of all parameters that overlap with a rank's part, counted in full, on the rank with the
        most.
        """
        changes = self._overlap_changes(self.numels)
        return round(max(accumulate(changes[rank] for rank in sorted(changes)), default=0))

    def gradient_parts(self) -> list[int]:
        """Elements of each gradient of a part, alike, on the rank whose part overlaps with the most
        parameters: `averaged_gradients`."""
        count = round(max(self.overlap_per_rank(dict.fromkeys(self.numels, 1))))
        return [self.shard_numel // count] * count if count else []

    def overlap_per_rank(self, amounts: Mapping[str, float]) -> list[float]:
        """The `amounts` of all parameters that overlap with each rank's part."""
        changes = self._overlap_changes(amounts)
        return list(accumulate(changes.get(rank, 0.0) for rank in range(self.world_size + 1)))

    def _overlap_changes(self, amounts: Mapping[str, float]) -> dict[int, float]:
        """The difference of `overlap_per_rank` between each rank and the rank before, where it is not 0."""
        changes: dict[int, float] = {}
        for name, numel in self.numels.items():
            if numel:
                first = self.offsets[name] // self.shard_numel
                last = (self.offsets[name] + numel - 1) // self.shard_numel
                changes[first] = changes.get(first, 0.0) + amounts[name]
                changes[last + 1] = changes.get(last + 1, 0.0) - amounts[name]
        return changes

    def overlapping_parameters(self, rank: int) -> list[str]:
        """The parameters that overlap with a rank's part."""
        start, stop = rank * self.shard_numel, (rank + 1) * self.shard_numel
        offsets = self.offsets
        return [
            name
            for name, numel in self.numels.items()
            if offsets[name] < stop and offsets[name] + numel > start
        ]


class FlatGroups:
    """The flat groups of an optimizer, one or more. A bucket has parameters of several."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self.groups = groups
        self._group_index = {name: number for number, group in enumerate(groups) for name in group.numels}

    def slices(self, names: Iterable[str]) -> list[tuple[int, int, int]]:
        """(group, owner, elements) of a bucket's slices in order."""
        slices: list[tuple[int, int, int]] = []
        for number, run in groupby(names, key=self._group_index.__getitem__):
            slices += [(number, owner, numel) for owner, numel in self.groups[number].slices(run)]
        return slices

    def num_slices(self, names: Iterable[str]) -> int:
        """The number of a bucket's slices."""
        runs = groupby(names, key=self._group_index.__getitem__)
        return sum(self.groups[number].count_slices(run)[0] for number, run in runs)

    def all_reduces(self, names: Collection[str], bucket_numel: int) -> list[BucketCall]:
        """The calls of allreduce_and_scatter: the slices of the same ranks are collected until they exceed a
        bucket."""
        calls: dict[str, BucketCall] = {}
        for number, run in groupby(names, key=self._group_index.__getitem__):
            group = self.groups[number].group
            count, numel = self.groups[number].count_slices(run)
            previous = calls.get(group, BucketCall(0, 0))
            calls[group] = BucketCall(previous.numel + numel, previous.slices + count, group)
        if all(call.numel <= bucket_numel for call in calls.values()):
            return [call for call in calls.values() if call.numel]
        slices_per_group: dict[str, list[int]] = {}
        for number, _, numel in self.slices(names):
            slices_per_group.setdefault(self.groups[number].group, []).append(numel)
        return [
            call
            for group, slices in slices_per_group.items()
            for call in _split_into_calls(slices, bucket_numel, group)
        ]

    def reduces(self, names: Iterable[str], bucket_numel: int) -> list[BucketCall]:
        """The calls of allreduce_no_retain: as `all_reduces`, per owner, in the order of first slices."""
        slices_per_owner: dict[tuple[str, int], list[int]] = {}
        for number, owner, numel in self.slices(names):
            slices_per_owner.setdefault((self.groups[number].group, owner), []).append(numel)
        return [
            call
            for (group, _), slices in slices_per_owner.items()
            for call in _split_into_calls(slices, bucket_numel, group)
        ]


def _split_into_calls(slices: Sequence[int], bucket_numel: int, group: str) -> Iterator[BucketCall]:
    numel = count = 0
    for part in slices:
        numel, count = numel + part, count + 1
        if numel > bucket_numel:
            yield BucketCall(numel, count, group)
            numel = count = 0
    if numel:
        yield BucketCall(numel, count, group)
