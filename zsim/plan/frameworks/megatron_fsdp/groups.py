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
from dataclasses import field
from math import ceil, lcm, prod

from zsim.dataclass import dataclass
from zsim.plan.ops import Group
from zsim.plan.workload.workload import Workload
from zsim.specs.model.experts import GroupedLinear
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
    owners: int
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

    def is_one_call_with(self, other: ParameterGroup) -> bool:
        """Whether both are gathered and reduced together."""
        is_one_unit = bool(self.unit) and (self.unit, self.is_expert) == (other.unit, other.is_expert)
        return is_one_unit or self.number == other.number

    @property
    def shard_numel(self) -> int:
        return self.numel // self.ranks.size

    @property
    def owned_numel(self) -> int:
        return self.numel // self.ranks.owners


@dataclass(frozen=True, slots=True)
class _Named:
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
    by_key: dict[tuple[bool, bool, bool, str], list[_Named]] = {}
    for one in _named(workload, has_units=has_units, keeps_fp8=keeps_fp8):
        by_key.setdefault(one.key, []).append(one)
    found: list[ParameterGroup] = []
    for key, named in by_key.items():
        for part in [named] if key[3] else _buckets(named, bucket_size):
            ranks = experts if key[1] else dense
            found.append(_group(len(found), part, ranks, is_padded=is_padded))
    return found


def _named(workload: Workload, *, has_units: bool, keeps_fp8: bool) -> list[_Named]:
    found = []
    for segment in workload.segments:
        unit = segment.name if has_units and segment.kind == "block" else ""
        for call in segment.calls:
            is_expert = isinstance(call.module.work, GroupedLinear)
            found += [
                _Named(call.parameter_name(one), one, unit, is_expert, keeps_fp8 and one.in_fp8)
                for one in call.parameters
            ]
    return found


def _buckets(named: Sequence[_Named], bucket_size: int | None) -> list[list[_Named]]:
    """Runs of parameters, each closed once it holds `bucket_size` elements."""
    if bucket_size is None:
        return [list(named)]
    parts: list[list[_Named]] = [[]]
    for one in named:
        if sum(other.parameter.numel for other in parts[-1]) >= bucket_size:
            parts.append([])
        parts[-1].append(one)
    return parts


def _group(number: int, named: Sequence[_Named], ranks: Ranks, *, is_padded: bool) -> ParameterGroup:
    shapes = {f"{one.name} {place}": shape for one in named for place, shape in enumerate(one.tensors)}
    rows = row_multiple(list(shapes.values()))
    places, length = lay_out_rows(shapes, rows)
    divisor = ranks.owners * rows if is_padded else 1
    numel = ceil(length / divisor) * divisor
    owned = numel // ranks.owners
    pieces = [min(end, owned) - start for start, end in places.values() if start < owned]
    first = named[0]
    return ParameterGroup(
        number,
        first.unit,
        first.is_expert,
        first.in_fp8,
        first.parameter.trainable,
        tuple(one.name for one in named),
        numel,
        tuple(pieces),
        ranks,
    )


def row_multiple(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements at multiples of which every tensor's rows end, tensors shorter than it left out."""
    multiple = 1
    for shape in sorted(shapes, key=lambda one: prod(one[1:]), reverse=True):
        row, numel = prod(shape[1:]), prod(shape)
        multiple = row if multiple == 1 else multiple
        is_whole = multiple % row == 0 and numel % multiple == 0
        if not (row == multiple or is_whole or numel < multiple):
            multiple = lcm(multiple, row)
    return multiple


def lay_out_rows(
    shapes: Mapping[str, tuple[int, ...]], multiple: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """First element and end of every tensor, and the length of all. See [Note: rows that stay whole]."""
    numels = {name: prod(shape) for name, shape in shapes.items()}
    small = [name for name, numel in numels.items() if numel < multiple]
    large = [name for name, numel in numels.items() if numel >= multiple]
    places: dict[str, tuple[int, int]] = {}
    length = 0

    def place(name: str, start: int) -> None:
        places[name] = start, start + numels[name]

    while large:
        name = large.pop(0)
        place(name, length)
        rest = numels[name] % multiple
        gap, length = length + numels[name], length + ceil(numels[name] / multiple) * multiple
        if not rest:
            continue
        space = multiple - rest
        for other in large:
            remainder = numels[other] % multiple
            if remainder and rest + remainder <= multiple:
                large.remove(other)
                place(other, length - remainder)
                space -= remainder
                length += numels[other] // multiple * multiple
                break
        for other in list(small):
            if numels[other] <= space:
                small.remove(other)
                place(other, gap)
                gap, space = gap + numels[other], space - numels[other]
    for name in small:
        place(name, length)
        length += numels[name]
    return places, length
