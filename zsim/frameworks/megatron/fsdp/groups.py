"""Megatron-FSDP's groups of parameters, each one buffer.

Read in Megatron-Core 0.16.1 core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py
(`_get_parameter_groups`, `build_data_parallel_buffer_index`).

# [Note: what is a group]
Parameters of one layer, type, kind (routed experts or not) and trainability are a group. If parameters are
not sharded no layer is a unit, and embedding, last norm and head never are: these are one group, at the
position of its first parameter, cut into buckets of a suggested size. So the head's bucket comes after the
embedding's, before all layers. Groups of one layer and kind are gathered and reduced in one call.

# [Note: rows that stay whole]
A shard ends between two rows of every tensor in its group: the buffer's length is a multiple of the ranks
times the least common multiple of row lengths. Tensors whose length is no multiple of it leave a gap, into
which the next such tensor's remainder and smaller tensors are put.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, lcm, prod

from zsim.operations.operation import Role
from zsim.plan.ops import Group
from zsim.plan.workload.workload import Workload
from zsim.specs.model.spec import Parameter


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a group of parameters."""

    shard: Group
    """The ranks that share its gathers and reductions."""
    gather: Group
    """The same ranks on the gathers' communicator."""
    outer: Group | None
    """The ranks of other instances with the same shard, None without."""
    num_owners: int
    """The number of ranks that share its optimizer states."""

    @property
    def size(self) -> int:
        return self.shard.size


@dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters, which has one buffer."""

    number: int
    unit: str
    """Its layer, "" for parameters outside of layers."""
    is_expert: bool
    in_fp8: bool
    trainable: bool
    names: tuple[str, ...]
    numel: int
    """Elements with padding."""
    pieces: tuple[int, ...]
    """Elements of each tensor that the first owner updates."""
    ranks: Ranks = field(compare=False)

    @property
    def label(self) -> str:
        """The name of the call that gathers and reduces it."""
        return f"{self.unit or f'parameters {self.number}'}{' experts' if self.is_expert else ''}"

    def shares_call_with(self, group: ParameterGroup) -> bool:
        """Whether both are gathered and reduced together."""
        is_same_unit = bool(self.unit) and (self.unit, self.is_expert) == (group.unit, group.is_expert)
        return is_same_unit or self.number == group.number

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks.size

    @property
    def owned_numel(self) -> int:
        return self.numel // self.ranks.num_owners


@dataclass(frozen=True, slots=True)
class _NamedParameter:
    name: str
    parameter: Parameter
    unit: str
    is_expert: bool
    in_fp8: bool

    @property
    def key(self) -> tuple[bool, bool, bool, str]:
        return self.in_fp8, self.is_expert, self.parameter.trainable, self.unit

    @property
    def tensors(self) -> list[tuple[int, ...]]:
        """Shapes: every routed expert has tensors of its own."""
        shape = self.parameter.shape or (1,)
        return [shape[1:]] * shape[0] if len(shape) == 3 else [shape]


def parameter_groups(
    workload: Workload,
    *,
    has_units: bool,
    bucket_size: int | None,
    keeps_fp8: bool,
    is_padded: bool,
    dense: Ranks,
    experts: Ranks,
) -> list[ParameterGroup]:
    """The groups of a stage's parameters, in the order of gathers. See [Note: what is a group]. With
    `keeps_fp8`, weights of fp8 products are parameters in fp8.
    """
    members_per_key: dict[tuple[bool, bool, bool, str], list[_NamedParameter]] = {}
    for entry in _named_parameters(workload, has_units=has_units, keeps_fp8=keeps_fp8):
        members_per_key.setdefault(entry.key, []).append(entry)
    groups: list[ParameterGroup] = []
    for key, members in members_per_key.items():
        for bucket in [members] if key[3] else _buckets(members, bucket_size):
            ranks = experts if key[1] else dense
            groups.append(_group(len(groups), bucket, ranks, is_padded=is_padded))
    return groups


def _named_parameters(workload: Workload, *, has_units: bool, keeps_fp8: bool) -> list[_NamedParameter]:
    entries = []
    for segment in workload.segments:
        unit = segment.name if has_units and segment.kind == "block" else ""
        for call in segment.calls:
            is_expert = call.module.role is Role.EXPERT_PRODUCT
            entries += [
                _NamedParameter(
                    call.parameter_name(parameter), parameter, unit, is_expert, keeps_fp8 and parameter.in_fp8
                )
                for parameter in call.parameters
            ]
    return entries


def _buckets(named: Sequence[_NamedParameter], bucket_size: int | None) -> list[list[_NamedParameter]]:
    """Runs of parameters, each closed once it holds `bucket_size` elements."""
    if bucket_size is None:
        return [list(named)]
    buckets: list[list[_NamedParameter]] = [[]]
    for entry in named:
        if sum(member.parameter.numel for member in buckets[-1]) >= bucket_size:
            buckets.append([])
        buckets[-1].append(entry)
    return buckets


def _group(number: int, named: Sequence[_NamedParameter], ranks: Ranks, *, is_padded: bool) -> ParameterGroup:
    shapes = {f"{entry.name} {index}": shape for entry in named for index, shape in enumerate(entry.tensors)}
    rows = row_multiple(list(shapes.values()))
    ranges, length = arrange_rows(shapes, rows)
    divisor = ranks.num_owners * rows if is_padded else 1
    numel = ceil(length / divisor) * divisor
    owned_numel = numel // ranks.num_owners
    pieces = [min(end, owned_numel) - start for start, end in ranges.values() if start < owned_numel]
    first = named[0]
    return ParameterGroup(
        number,
        first.unit,
        first.is_expert,
        first.in_fp8,
        first.parameter.trainable,
        tuple(entry.name for entry in named),
        numel,
        tuple(pieces),
        ranks,
    )


def row_multiple(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements at multiples of which every tensor's rows end, tensors shorter than it left out."""
    multiple = 1
    for shape in sorted(shapes, key=lambda shape: prod(shape[1:]), reverse=True):
        row, numel = prod(shape[1:]), prod(shape)
        multiple = row if multiple == 1 else multiple
        is_aligned = multiple % row == 0 and numel % multiple == 0
        if not (row == multiple or is_aligned or numel < multiple):
            multiple = lcm(multiple, row)
    return multiple


def arrange_rows(
    shapes: Mapping[str, tuple[int, ...]], multiple: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """First element and end of every tensor, and the length of all. See [Note: rows that stay whole]."""
    numels = {name: prod(shape) for name, shape in shapes.items()}
    small = [name for name, numel in numels.items() if numel < multiple]
    large = [name for name, numel in numels.items() if numel >= multiple]
    ranges: dict[str, tuple[int, int]] = {}
    length = 0

    def assign_range(name: str, start: int) -> None:
        ranges[name] = start, start + numels[name]

    while large:
        name = large.pop(0)
        assign_range(name, length)
        overhang = numels[name] % multiple
        gap, length = length + numels[name], length + ceil(numels[name] / multiple) * multiple
        if not overhang:
            continue
        space = multiple - overhang
        for candidate in large:
            remainder = numels[candidate] % multiple
            if remainder and overhang + remainder <= multiple:
                large.remove(candidate)
                assign_range(candidate, length - remainder)
                space -= remainder
                length += numels[candidate] // multiple * multiple
                break
        for candidate in list(small):
            if numels[candidate] <= space:
                small.remove(candidate)
                assign_range(candidate, gap)
                gap, space = gap + numels[candidate], space - numels[candidate]
    for name in small:
        assign_range(name, length)
        length += numels[name]
    return ranges, length
