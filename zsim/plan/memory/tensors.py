"""A plan's memory changes per tensor: each free paired with the tensors that it frees.

Plans allocate and free by category and owner, often several tensors at once. An allocator needs the block
that a free returns. So a free takes the newest tensor of its category, owner, part and micro-batch that has
its size, or the newest tensors that add up to it. An allocation that is freed in parts counts as several
tensors. (Micro-batches between forward and backward at once are freed in the order of a pipeline's schedule,
most often the oldest first.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from zsim.arrays import Bools, Ints
from zsim.plan.builder import COMPUTE
from zsim.plan.columns import (
    MemoryColumns,
    Owner,
    memory_columns,
    op_columns,
    owned_changes,
    places_of_owners,
)
from zsim.plan.ops import Program
from zsim.plan.passes.twice import program_twice


class TensorChange(NamedTuple):
    """One tensor is allocated with `bytes` on `stream`, or freed if `bytes` is 0, just before the host issues
    `op`.
    """

    op: int
    tensor: int
    """The tensor's number."""
    bytes: int
    stream: str = COMPUTE
    until: int = -1
    """The op that must end before the block can be reused, -1 if there is none."""


class _Moves(NamedTuple):
    """The tensors of one owner and the changes that allocate or free them."""

    made: Ints
    """The change that allocates each tensor."""
    sizes: Ints
    """Bytes of each tensor."""
    changes: Ints
    """The change of each pair of a change and a tensor that it allocates or frees."""
    tensors: Ints
    """The tensor of each of these pairs."""


class _Tensors:
    """The tensors of one owner's memory, numbered in the order of their allocation.

    Each tensor has its `bytes` and its change in `allocating_changes`. `tensors_per_change` holds the tensors
    that each change allocates or frees. A tensor that is freed in parts counts as several, which are numbered
    after all others.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.made: list[int] = []
        self.moved: list[Sequence[int]] = []

    def make(self, changes: Sequence[tuple[int, tuple[int, ...]]]) -> _Moves:
        """Apply the `changes`: for each its bytes, and the bytes of its tensors if they are several."""
        sizes, moved, live = self.bytes, self.moved, list[int]()  # oldest first
        for place, (count, parts) in enumerate(changes):
            if count <= 0:
                if live and sizes[live[-1]] == -count:
                    moved.append((live.pop(),))
                else:
                    moved.append(self._take(-count, live))
                continue
            made = range(len(sizes), len(sizes) + len(parts)) if parts else (len(sizes),)
            sizes += parts or (count,)
            self.made += [place] * len(made) if parts else (place,)
            moved.append(made)
            live += made
        lengths = list(map(len, moved))
        tensors = np.fromiter(chain.from_iterable(moved), np.int64, sum(lengths))
        return _Moves(
            np.array(self.made), np.array(sizes), np.repeat(np.arange(len(moved)), lengths), tensors
        )

    def _take(self, count: int, live: list[int]) -> list[int]:
        """Take `count` bytes out of the tensors `live` and return their numbers. If needed one tensor is
        split, and so is its allocation.
        """
        for place in range(len(live) - 1, -1, -1):
            if self.bytes[live[place]] == count:
                return [live.pop(place)]
        sizes = [self.bytes[tensor] for tensor in live]
        if sum(sizes) == count and 0 not in sizes:  # all of them, the newest first
            taken = live[::-1]
            live.clear()
            return taken
        taken = []
        while count > 0:
            assert live, f"{count} bytes are freed that were not allocated"
            fits = [place for place, tensor in enumerate(live) if self.bytes[tensor] <= count]
            exact = [place for place in fits if self.bytes[live[place]] == count]
            if not fits:
                taken.append(self._split(live[-1], count))
                return taken
            taken.append(live.pop((exact or fits)[-1]))
            count -= self.bytes[taken[-1]]
        return taken

    def _split(self, whole: int, count: int) -> int:
        """Split `count` bytes off a tensor into a tensor of their own, which is allocated with it."""
        part, place = len(self.bytes), self.made[whole]
        self.bytes[whole] -= count
        self.bytes.append(count)
        self.made.append(place)
        self.moved[place] = [*self.moved[place], part]
        return part


class TensorColumns(NamedTuple):
    """The fields of `TensorChange`, each as a column over all changes. `stream` is an index into `streams`,
    not a name.
    """

    op: Ints
    tensor: Ints
    bytes: Ints
    stream: Ints
    until: Ints
    streams: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[TensorChange]) -> TensorColumns:
        """The columns of these changes."""
        streams = tuple(dict.fromkeys(row.stream for row in rows))
        numbers = [(*row[:3], streams.index(row.stream), row.until) for row in rows]
        op, tensor, count, stream, until = np.array(numbers, dtype=np.int64).reshape(-1, 5).T
        return cls(op, tensor, count, stream, until, streams)

    def taken(self, where: Bools) -> TensorColumns:
        """The changes for which `mask` is true."""
        op, tensor, count, stream, until = (column[where] for column in self[:5])
        return TensorColumns(op, tensor, count, stream, until, self.streams)

    def followed_by(self, others: TensorColumns) -> TensorColumns:
        """These changes, followed by `others`."""
        streams = tuple(dict.fromkeys((*self.streams, *others.streams)))
        place_of = np.array([streams.index(name) for name in others.streams], dtype=np.int64)
        later = others._replace(stream=place_of[others.stream])
        pairs = zip(self[:5], later[:5], strict=True)
        op, tensor, count, stream, until = (np.concatenate(both) for both in pairs)
        return TensorColumns(op, tensor, count, stream, until, streams)

    def rows(self) -> list[TensorChange]:
        """The changes, one after the other."""
        op, tensor, count, stream, until = (column.tolist() for column in self[:5])
        names = [self.streams[place] for place in stream]
        return list(map(TensorChange, op, tensor, count, names, until))


def tensor_changes(program: Program) -> list[TensorChange]:
    """The program's changes of GPU memory, tensor by tensor, in the host's order."""
    return tensor_columns(program).rows()


def tensor_columns(program: Program, times: int = 1) -> TensorColumns:
    """The columns of `tensor_changes` of the program, repeated `times` times in a row (1 or 2).

    A block belongs to the stream that the next work is issued to: frameworks allocate just before they issue,
    inside `with torch.cuda.stream(...)`. Activations are allocated on the compute stream.
    """
    columns, owned = program.once(memory_columns), program.once(owned_changes)
    if any(device != "gpu" for device, *_ in owned):
        on_gpu = [change for change in program.memory if change.device == "gpu"]
        columns = MemoryColumns(*zip(*on_gpu, strict=True))
        owned = places_of_owners(columns)
    place, tensor, sizes = _moved(columns, owned)
    if times == 1:
        return _with_streams(columns, place, tensor, sizes, _next_streams(program, COMPUTE))
    if len(place) != 2 * len(sizes):  # a tensor is not freed before the second time
        return tensor_columns(program.once(program_twice))
    before = _with_streams(columns, place, tensor, sizes, _next_streams(program, _first_stream(program)))
    after = _with_streams(columns, place, tensor, sizes, _next_streams(program, COMPUTE))
    count = len(program.ops)
    again = after._replace(
        op=after.op + count,
        tensor=after.tensor + len(sizes),
        until=np.where(after.until >= 0, after.until + count, after.until),
    )
    return before.followed_by(again)


def _with_streams(
    columns: MemoryColumns, place: Ints, tensor: Ints, sizes: Ints, next_streams: Sequence[str]
) -> TensorColumns:
    """The changes at `change_indices` with each `tensor`. Their streams are `next_streams` by op, unless the
    changes name their own.
    """
    streams = [
        COMPUTE if category == "activations" else own or next_streams[op]
        for op, category, own in zip(columns.op, columns.category, columns.stream, strict=True)
    ]
    place_of = {stream: place for place, stream in enumerate(dict.fromkeys(streams))}
    stream_of = map(place_of.__getitem__, streams)
    ops, counts, untils, of_streams = (
        np.fromiter(column, np.int64, len(streams))[place]
        for column in (columns.op, columns.bytes, columns.until, stream_of)
    )
    held = np.where(counts > 0, sizes[tensor], 0)
    return TensorColumns(ops, tensor, held, of_streams, untils, tuple(place_of))


def _moved(columns: MemoryColumns, owned: Mapping[Owner, Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """The index of each change with each tensor that it allocates or frees, and the bytes of the tensors.
    `changes_per_owner` holds the indices of each owner's changes.

    Owners whose changes are identical (of equal blocks) have identical tensors, which are matched once for
    all of them.
    """
    changes = list(zip(columns.bytes, columns.tensors, strict=True))
    alike: dict[tuple[tuple[int, tuple[int, ...]], ...], list[Sequence[int]]] = {}
    for places in owned.values():
        alike.setdefault(tuple([changes[place] for place in places]), []).append(places)
    parts, first = [(np.zeros(0, dtype=np.int64),) * 4], 0
    for own_changes, owners in alike.items():
        moves, where = _Tensors().make(own_changes), np.array(owners)
        firsts = first + len(moves.sizes) * np.arange(len(owners))
        first += len(moves.sizes) * len(owners)
        tensors = firsts[:, None] + moves.tensors
        made, moved = where[:, moves.made], where[:, moves.changes]
        parts.append((made.ravel(), np.tile(moves.sizes, len(owners)), moved.ravel(), tensors.ravel()))
    made, sizes, moved, tensors = map(np.concatenate, zip(*parts, strict=True))
    order, by_age = np.argsort(moved, kind="stable"), np.argsort(made, kind="stable")
    number = np.empty_like(by_age)
    number[by_age] = np.arange(len(by_age))
    return moved[order], number[tensors[order]], sizes[by_age]


def _first_stream(program: Program) -> str:
    """The stream of the first work that the host issues."""
    columns = program.once(op_columns)
    issued = zip(columns.stream, columns.work, strict=True)
    return next((stream for stream, work in issued if work is not None), COMPUTE)


def _next_streams(program: Program, at_end: str) -> list[str]:
    """Per op, the stream of the next work that the host issues. After the last work it is `final_stream`."""
    columns, next_stream = program.once(op_columns), at_end
    streams = [next_stream]
    for stream, work in zip(reversed(columns.stream), reversed(columns.work), strict=True):
        if work is not None:
            next_stream = stream
        streams.append(next_stream)
    streams.reverse()
    return streams
