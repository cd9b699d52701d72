"""A program's ops and memory changes field by field, for passes that need a few fields of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from zsim.arrays import Bools, Ints
from zsim.plan.ops import ActionRepeat, Category, Device, MemoryChange, Phase, Program, Work


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
        return list(map(tuple.__new__, itertools.repeat(MemoryChange), zip(*self, strict=True)))


class UnrolledChanges(Sequence[MemoryChange]):
    """The memory changes of a program with repeats. `changes` has those of repeats as their sources have
    them. Each of `repeats` has the op that stands for each op from before its source.
    """

    def __init__(
        self, changes: Sequence[MemoryChange], repeats: Sequence[tuple[ActionRepeat, Mapping[int, int]]]
    ) -> None:
        self._changes, self._repeats = tuple(changes), tuple(repeats)

    def origins(self) -> Ints:
        """By change, the change that it repeats. A change that repeats none is its own."""
        origins = np.arange(len(self))
        for repeat, _ in self._repeats:
            origins[repeat.change : repeat.change + repeat.num_changes] = np.arange(
                repeat.source_change, repeat.source_change + repeat.num_changes
            )
        return origins

    def counts(self) -> Ints:
        """How often each change is made: 0 for a repeat, and for others once and in every repeat."""
        counts = np.ones(len(self), dtype=np.int64)
        for repeat, _ in self._repeats:
            counts[repeat.source_change : repeat.source_change + repeat.num_changes] += 1
            counts[repeat.change : repeat.change + repeat.num_changes] = 0
        return counts

    @cached_property
    def columns(self) -> MemoryColumns:
        """The changes field by field."""
        columns = MemoryColumns(*zip(*self._changes, strict=True))
        op, until, micro_batch = list(columns.op), list(columns.until), list(columns.micro_batch)
        protected: dict[int, list[int]] = {}  # by source: its frees of protected memory
        tied_to_batch: dict[int, list[int]] = {}  # by source: its changes of memory per micro-batch
        for repeat, renumbered in self._repeats:
            source, first, shift = repeat.source_change, repeat.change, repeat.op - repeat.source_op
            end = source + repeat.num_changes
            op[first : first + repeat.num_changes] = [number + shift for number in op[source:end]]
            if source not in tied_to_batch:
                protected[source] = [index for index in range(source, end) if until[index] >= 0]
                tied_to_batch[source] = [index for index in range(source, end) if micro_batch[index] >= 0]
            for index in protected[source]:
                last_use = until[index]
                until[index - source + first] = (
                    last_use + shift if last_use >= repeat.source_op else renumbered[last_use]
                )
            if len(tied_to_batch[source]) == repeat.num_changes:
                micro_batch[first : first + repeat.num_changes] = [repeat.micro_batch] * repeat.num_changes
            else:
                for index in tied_to_batch[source]:
                    micro_batch[index - source + first] = repeat.micro_batch
        return columns._replace(op=tuple(op), until=tuple(until), micro_batch=tuple(micro_batch))

    @cached_property
    def _rows(self) -> list[MemoryChange]:
        return self.columns.rows()

    def __len__(self) -> int:
        return len(self._changes)

    @overload
    def __getitem__(self, index: int) -> MemoryChange: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MemoryChange]: ...
    def __getitem__(self, index: int | slice) -> MemoryChange | Sequence[MemoryChange]:
        return self._rows[index]

    def __iter__(self) -> Iterator[MemoryChange]:
        return iter(self._rows)

    def __eq__(self, changes: object) -> bool:
        return isinstance(changes, Sequence) and list(self) == list(changes)

    def __hash__(self) -> int:
        return hash((len(self), self._changes[:1]))


def op_columns(program: Program) -> OpColumns:
    """The fields of a program's ops, for `Program.memoize`."""
    return OpColumns(*zip(*program.ops, strict=True))


def op_origins(program: Program) -> Ints:
    """By op, the op that it repeats. An op that repeats none is its own. For `Program.memoize`."""
    origins = np.arange(len(program.ops))
    for repeat in program.repeats:
        origins[repeat.op : repeat.op + repeat.num_ops] = np.arange(
            repeat.source_op, repeat.source_op + repeat.num_ops
        )
    return origins


def original_ops(program: Program) -> list[int]:
    """The ops that repeat none, for `Program.memoize`."""
    origins = program.memoize(op_origins)
    numbers: list[int] = np.flatnonzero(origins == np.arange(len(origins))).tolist()
    return numbers


def unroll(program: Program, values: Sequence[int] | Ints) -> Ints:
    """Values by op, given those of the program's `original_ops`."""
    column = np.zeros(len(program.ops), dtype=np.int64)
    column[program.memoize(original_ops)] = values
    unrolled: Ints = column[program.memoize(op_origins)]
    return unrolled


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
    if isinstance(program.memory, UnrolledChanges):
        return program.memory.columns
    return MemoryColumns(*zip(*program.memory, strict=True))


def change_origins(program: Program) -> Ints:
    """By memory change, the change that it repeats, for `Program.memoize`. See `UnrolledChanges.origins`."""
    if isinstance(program.memory, UnrolledChanges):
        return program.memory.origins()
    return np.arange(len(program.memory))
