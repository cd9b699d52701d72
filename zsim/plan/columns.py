"""A program's ops and memory changes field by field, for passes that need a few fields of all of them."""

from __future__ import annotations

from collections import defaultdict
from itertools import repeat
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools
from zsim.plan.ops import Category, Device, MemoryChange, Phase, Program, Work


class OpColumns(NamedTuple):
    """The fields of `Op`, each of all ops."""

    name: tuple[str, ...] = ()
    stream: tuple[str, ...] = ()
    work: tuple[Work | None, ...] = ()
    after: tuple[tuple[int, ...], ...] = ()
    host_waits: tuple[tuple[int, ...], ...] = ()
    launches: tuple[int, ...] = ()
    overhead: tuple[str | None, ...] = ()
    phase: tuple[Phase, ...] = ()
    module: tuple[str, ...] = ()
    events: tuple[int, ...] = ()


class MemoryColumns(NamedTuple):
    """The fields of `MemoryChange`, each of all changes."""

    op: tuple[int, ...] = ()
    category: tuple[Category, ...] = ()
    bytes: tuple[int, ...] = ()
    device: tuple[Device, ...] = ()
    until: tuple[int, ...] = ()
    is_pinned: tuple[bool, ...] = ()
    owner: tuple[str, ...] = ()
    tensors: tuple[tuple[int, ...], ...] = ()
    stream: tuple[str, ...] = ()
    part: tuple[str, ...] = ()
    micro_batch: tuple[int, ...] = ()

    def rows(self) -> list[MemoryChange]:
        """The changes, one after the other."""
        return list(map(tuple.__new__, repeat(MemoryChange), zip(*self, strict=True)))


def op_columns(program: Program) -> OpColumns:
    """The fields of a program's ops, for `Program.memoize`."""
    return OpColumns(*zip(*program.ops, strict=True))


def are_compute(program: Program) -> Bools:
    """Whether each op has work on the compute stream, for `Program.memoize`."""
    columns = program.memoize(op_columns)
    is_compute = [
        stream == "compute" and work is not None
        for stream, work in zip(columns.stream, columns.work, strict=True)
    ]
    return np.array(is_compute, dtype=np.bool_)


def memory_columns(program: Program) -> MemoryColumns:
    """The fields of a program's memory changes, for `Program.memoize`."""
    return MemoryColumns(*zip(*program.memory, strict=True))


Owner = tuple[Device, Category, str, str, int]
"""Whose memory it is: device, category, owner, part and micro-batch."""


def change_indices_per_owner(columns: MemoryColumns) -> dict[Owner, list[int]]:
    """The indices of each owner's changes, in order."""
    indices: defaultdict[Owner, list[int]] = defaultdict(list)
    owners = zip(
        columns.device, columns.category, columns.owner, columns.part, columns.micro_batch, strict=True
    )
    for index, owner in enumerate(owners):
        indices[owner].append(index)
    return dict(indices)


def owner_change_indices(program: Program) -> dict[Owner, list[int]]:
    """`change_indices_per_owner` of a program's memory changes, for `Program.memoize`."""
    return change_indices_per_owner(program.memoize(memory_columns))
