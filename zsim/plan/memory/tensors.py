"""A plan's memory changes per tensor: each free paired with the tensors that it frees.

Plans allocate and free by category and owner, often several tensors at once. An allocator needs the block
that a free returns. So a free takes the newest tensor of its category, owner, part and micro-batch that has
its size, or the newest tensors that add up to it. An allocation that is freed in parts counts as several
tensors. (Micro-batches between forward and backward at once are freed in the order of a pipeline's schedule,
most often the oldest first.)

The bytes that a program holds follow the order of its host, without clock and allocator. See [Note: memory
follows the host] in zsim.plan.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zsim.arrays import Bools, Ints, factorize
from zsim.plan.builder import COMPUTE
from zsim.plan.columns import MemoryColumns, change_origins, memory_columns, op_columns
from zsim.plan.ops import CATEGORIES, Category, Device, Memory, MemoryChange, Plan, Program
from zsim.plan.passes.repeated_step import repeat_program


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


class _TensorMoves(NamedTuple):
    """The tensors of one owner and the changes that allocate or free them."""

    allocating_changes: Ints
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
        self.allocating_changes: list[int] = []
        self.tensors_per_change: list[Sequence[int]] = []

    def make(self, changes: Sequence[tuple[int, tuple[int, ...]]]) -> _TensorMoves:
        """Apply the `changes`: for each its bytes, and the bytes of its tensors if they are several."""
        sizes, tensors_per_change, live = self.bytes, self.tensors_per_change, list[int]()  # oldest first
        for index, (count, tensor_sizes) in enumerate(changes):
            if count <= 0:
                if live and sizes[live[-1]] == -count:
                    tensors_per_change.append((live.pop(),))
                else:
                    tensors_per_change.append(self._take(-count, live))
                continue
            new_tensors = range(len(sizes), len(sizes) + len(tensor_sizes)) if tensor_sizes else (len(sizes),)
            sizes += tensor_sizes or (count,)
            self.allocating_changes += [index] * len(new_tensors) if tensor_sizes else (index,)
            tensors_per_change.append(new_tensors)
            live += new_tensors
        lengths = list(map(len, tensors_per_change))
        tensors = np.fromiter(chain.from_iterable(tensors_per_change), np.int64, sum(lengths))
        return _TensorMoves(
            np.array(self.allocating_changes),
            np.array(sizes),
            np.repeat(np.arange(len(tensors_per_change)), lengths),
            tensors,
        )

    def _take(self, count: int, live: list[int]) -> list[int]:
        """Take `count` bytes out of the tensors `live` and return their numbers. If needed one tensor is
        split, and so is its allocation.
        """
        for index in range(len(live) - 1, -1, -1):
            if self.bytes[live[index]] == count:
                return [live.pop(index)]
        sizes = [self.bytes[tensor] for tensor in live]
        if sum(sizes) == count and 0 not in sizes:  # all of them, the newest first
            freed_tensors = live[::-1]
            live.clear()
            return freed_tensors
        freed_tensors = []
        while count > 0:
            assert live, f"{count} bytes are freed that were not allocated"
            fitting_indices = [index for index, tensor in enumerate(live) if self.bytes[tensor] <= count]
            exact_indices = [index for index in fitting_indices if self.bytes[live[index]] == count]
            if not fitting_indices:
                freed_tensors.append(self._split(live[-1], count))
                return freed_tensors
            freed_tensors.append(live.pop((exact_indices or fitting_indices)[-1]))
            count -= self.bytes[freed_tensors[-1]]
        return freed_tensors

    def _split(self, tensor: int, count: int) -> int:
        """Split `count` bytes off a tensor into a tensor of their own, which is allocated with it."""
        new_tensor, change = len(self.bytes), self.allocating_changes[tensor]
        self.bytes[tensor] -= count
        self.bytes.append(count)
        self.allocating_changes.append(change)
        self.tensors_per_change[change] = [*self.tensors_per_change[change], new_tensor]
        return new_tensor


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
    def from_changes(cls, rows: Sequence[TensorChange]) -> TensorColumns:
        """The columns of these changes."""
        streams = tuple(dict.fromkeys(row.stream for row in rows))
        numbers = [(*row[:3], streams.index(row.stream), row.until) for row in rows]
        op, tensor, count, stream, until = np.array(numbers, dtype=np.int64).reshape(-1, 5).T
        return cls(op, tensor, count, stream, until, streams)

    def select(self, mask: Bools) -> TensorColumns:
        """The changes for which `mask` is true."""
        op, tensor, count, stream, until = (column[mask] for column in self[:5])
        return TensorColumns(op, tensor, count, stream, until, self.streams)

    def concatenate(self, others: TensorColumns) -> TensorColumns:
        """These changes, followed by `others`."""
        streams = tuple(dict.fromkeys((*self.streams, *others.streams)))
        stream_indices = np.array([streams.index(name) for name in others.streams], dtype=np.int64)
        later = others._replace(stream=stream_indices[others.stream])
        pairs = zip(self[:5], later[:5], strict=True)
        op, tensor, count, stream, until = (np.concatenate(columns) for columns in pairs)
        return TensorColumns(op, tensor, count, stream, until, streams)

    def rows(self) -> list[TensorChange]:
        """The changes, one after the other."""
        op, tensor, count, stream, until = (column.tolist() for column in self[:5])
        names = [self.streams[index] for index in stream]
        return list(map(TensorChange, op, tensor, count, names, until))


def tensor_changes(program: Program) -> list[TensorChange]:
    """The program's changes of GPU memory, tensor by tensor, in the host's order."""
    return tensor_columns(program).rows()


def tensor_columns(program: Program, times: int = 1) -> TensorColumns:
    """The columns of `tensor_changes` of the program, repeated `times` times in a row (1 or 2).

    A block belongs to the stream that the next work is issued to: frameworks allocate just before they issue,
    inside `with torch.cuda.stream(...)`. Activations are allocated on the compute stream.
    """
    changes = program.memoize(_gpu_changes)
    change_indices, tensor, sizes = _match_tensors(changes)
    if times == 1:
        return _assign_streams(changes, change_indices, tensor, sizes, _next_streams(program, COMPUTE))
    if len(change_indices) != 2 * len(sizes):  # a tensor is not freed before the second time
        return tensor_columns(program.memoize(repeat_program))
    first_step = _assign_streams(
        changes, change_indices, tensor, sizes, _next_streams(program, _first_stream(program))
    )
    steady_step = _assign_streams(changes, change_indices, tensor, sizes, _next_streams(program, COMPUTE))
    count = len(program.ops)
    second_step = steady_step._replace(
        op=steady_step.op + count,
        tensor=steady_step.tensor + len(sizes),
        until=np.where(steady_step.until >= 0, steady_step.until + count, steady_step.until),
    )
    return first_step.concatenate(second_step)


class _Changes(NamedTuple):
    """A program's changes of GPU memory."""

    columns: MemoryColumns
    op: Ints
    until: Ints
    owner: Ints
    """Equal for changes of one category, owner, part and micro-batch."""
    kind: Ints
    """Equal for changes of the same bytes and tensors."""
    size: Ints
    stream: Ints
    """The index of the change's own stream in `streams`. -1: that of the next work."""
    streams: list[str]


def _gpu_changes(program: Program) -> _Changes:
    """The changes of GPU memory, for `Program.memoize`. What repeats is looked at once."""
    columns, origins = program.memoize(memory_columns), program.memoize(change_origins)
    if columns.device.count("gpu") < len(columns.device):
        gpu_changes = [change for change in program.memory if change.device == "gpu"]
        columns = MemoryColumns(*zip(*gpu_changes, strict=True)) if gpu_changes else MemoryColumns()
        origins = np.arange(len(gpu_changes))
    count = len(origins)
    is_original = origins == np.arange(count)
    mask = is_original.tolist()

    def unroll(values: Ints) -> Ints:
        column = np.zeros(count, dtype=np.int64)
        column[is_original] = values
        unrolled: Ints = column[origins]
        return unrolled

    def indices(column: Sequence[Any]) -> tuple[list[Any], Ints]:
        return factorize(list(compress(column, mask)))

    categories, category_of = indices(columns.category)
    owners, owner_of = indices(columns.owner)
    parts, part_of = indices(columns.part)
    sizes, size_of = indices(columns.bytes)
    tensors, tensors_of = indices(columns.tensors)
    streams, stream_of = indices(columns.stream)
    own_streams, streams = streams, list(dict.fromkeys([COMPUTE, *streams]))
    stream_of = np.array([streams.index(stream) for stream in own_streams], dtype=np.int64)[stream_of]
    if "" in streams:
        stream_of[stream_of == streams.index("")] = -1
    if "activations" in categories:
        stream_of[category_of == categories.index("activations")] = 0
    micro_batch = np.fromiter(columns.micro_batch, np.int64, count)
    owner_of = (category_of * len(owners) + owner_of) * len(parts) + part_of
    return _Changes(
        columns,
        np.fromiter(columns.op, np.int64, count),
        np.fromiter(columns.until, np.int64, count),
        unroll(owner_of) * (micro_batch.max(initial=-1) + 2) + micro_batch + 1,
        unroll(size_of * len(tensors) + tensors_of),
        unroll(np.array(sizes, dtype=np.int64)[size_of]),
        unroll(stream_of),
        streams,
    )


def _assign_streams(
    changes: _Changes, change_indices: Ints, tensor: Ints, sizes: Ints, next_streams: Sequence[str]
) -> TensorColumns:
    """The changes at `change_indices` with each `tensor`. Their streams are `next_streams` by op, unless the
    changes name their own.
    """
    all_streams = [*changes.streams, *dict.fromkeys(next_streams)]
    numbers = {stream: all_streams.index(stream) for stream in all_streams}
    next_numbers = np.fromiter(map(numbers.__getitem__, next_streams), np.int64, len(next_streams))
    stream_of = np.where(changes.stream >= 0, changes.stream, next_numbers[changes.op])
    used, first = np.unique(stream_of, return_index=True)
    used = used[np.argsort(first)]  # in the order in which they come first
    new_index = np.zeros(len(all_streams), dtype=np.int64)
    new_index[used] = np.arange(len(used))
    return TensorColumns(
        changes.op[change_indices],
        tensor,
        np.where(changes.size[change_indices] > 0, sizes[tensor], 0),
        new_index[stream_of][change_indices],
        changes.until[change_indices],
        tuple(all_streams[number] for number in used.tolist()),
    )


def _match_tensors(changes: _Changes) -> tuple[Ints, Ints, Ints]:
    """The index of each change with each tensor that it allocates or frees, and the bytes of the tensors.

    Owners whose changes are identical (of equal blocks and micro-batches) have identical tensors, which are
    matched once for all of them.
    """
    by_owner = np.argsort(changes.owner, kind="stable")
    is_first = np.diff(changes.owner[by_owner], prepend=-1) != 0
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], len(by_owner))
    kinds = changes.kind[by_owner]
    data, width = kinds.tobytes(), kinds.itemsize
    starts_per_changes: dict[bytes, list[int]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        starts_per_changes.setdefault(data[width * start : width * end], []).append(start)
    pieces, first = [(np.zeros(0, dtype=np.int64),) * 4], 0
    for owner_kinds, owner_starts in starts_per_changes.items():
        count = len(owner_kinds) // width
        first_indices = by_owner[owner_starts[0] : owner_starts[0] + count].tolist()
        owner_changes = [
            (changes.columns.bytes[index], changes.columns.tensors[index]) for index in first_indices
        ]
        moves = _Tensors().make(owner_changes)
        owner_indices = by_owner[np.array(owner_starts)[:, None] + np.arange(count)]
        first_tensors = first + len(moves.sizes) * np.arange(len(owner_starts))
        first += len(moves.sizes) * len(owner_starts)
        tensors = first_tensors[:, None] + moves.tensors
        allocating_changes, change_indices = (
            owner_indices[:, moves.allocating_changes],
            owner_indices[:, moves.changes],
        )
        pieces.append(
            (
                allocating_changes.ravel(),
                np.tile(moves.sizes, len(owner_starts)),
                change_indices.ravel(),
                tensors.ravel(),
            )
        )
    allocating_changes, sizes, change_indices, tensors = map(np.concatenate, zip(*pieces, strict=True))
    order, age_order = (
        np.argsort(change_indices, kind="stable"),
        np.argsort(allocating_changes, kind="stable"),
    )
    number = np.empty_like(age_order)
    number[age_order] = np.arange(len(age_order))
    return change_indices[order], number[tensors[order]], sizes[age_order]


def _first_stream(program: Program) -> str:
    """The stream of the first work that the host issues."""
    columns = program.memoize(op_columns)
    pairs = zip(columns.stream, columns.work, strict=True)
    return next((stream for stream, work in pairs if work is not None), COMPUTE)


def _next_streams(program: Program, final_stream: str) -> list[str]:
    """Per op, the stream of the next work that the host issues. After the last work it is `final_stream`."""
    columns, next_stream = program.memoize(op_columns), final_stream
    streams = [next_stream]
    for stream, work in zip(reversed(columns.stream), reversed(columns.work), strict=True):
        if work is not None:
            next_stream = stream
        streams.append(next_stream)
    streams.reverse()
    return streams


MemoryKey = tuple[Category, str]  # a category, and its owner ("" for shared pools)
_Key = TypeVar("_Key", bound=Hashable)


def select_device(device: Device, *sequences: Iterable[Memory | MemoryChange]) -> list[Memory | MemoryChange]:
    """The memory and changes of `sequences` that are on `device`, in order."""
    return [change for sequence in sequences for change in sequence if change.device == device]


def bytes_per_key(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Bytes of each key after all of `changes`, which include the resident memory."""
    levels: dict[_Key, int] = {}
    for change in changes:
        name = key(change)
        levels[name] = levels.get(name, 0) + change.bytes
    return levels


def peak_bytes_per_key(
    changes: Iterable[Memory | MemoryChange], key: Callable[[Memory | MemoryChange], _Key]
) -> dict[_Key, int]:
    """Maximum bytes of each key over `changes` in order. Keys that never exceed 0 are left out."""
    levels: dict[_Key, int] = {}
    highest: dict[_Key, int] = {}
    for change in changes:
        name = key(change)
        level = levels[name] = levels.get(name, 0) + change.bytes
        if level > highest.get(name, 0):
            highest[name] = level
    return highest


def category_of(change: Memory | MemoryChange) -> Category:
    return change.category


def memory_key(change: Memory | MemoryChange) -> MemoryKey:
    """Category and owner of a change. Resident memory has owner ""."""
    return change.category, change.owner if isinstance(change, MemoryChange) else ""


def device_peaks(program: Program) -> dict[Device, int]:
    """Maximum bytes of a rank on each device over the step. Devices that hold nothing are left out."""
    columns, resident = program.memoize(memory_columns), program.resident
    devices = [*(memory.device for memory in resident), *columns.device]
    counts = [*(memory.bytes for memory in resident), *columns.bytes]
    unique_devices = dict.fromkeys(devices)
    if len(unique_devices) == 1:
        peaks = {device: _highest(counts) for device in unique_devices}
    else:
        changes = list(zip(devices, counts, strict=True))
        peaks = {
            device: _highest([count for other_device, count in changes if other_device == device])
            for device in unique_devices
        }
    return {device: peak for device, peak in peaks.items() if peak > 0}


def pinned_peak(program: Program) -> int:
    """Maximum page-locked bytes of a rank over the step."""
    columns = program.memoize(memory_columns)
    pinned = [memory.bytes for memory in program.resident if memory.is_pinned]
    return _highest(chain(pinned, compress(columns.bytes, columns.is_pinned)))


def _highest(changes: Iterable[int]) -> int:
    """Maximum of the running sum of `changes`, at least 0."""
    return max(accumulate(changes, initial=0))


def fullest_program(plan: Plan) -> Program:
    """The program whose ranks have the highest GPU maximum over the step, the first of several equal ones."""
    if len(plan.programs) == 1:
        return plan.programs[0]
    return max(plan.programs, key=lambda program: device_peaks(program).get("gpu", 0))


def plan_peaks(plan: Plan) -> dict[str, int]:
    """Each category's maximum bytes on the fullest GPU over the step, and the maximum of their sum."""
    program = fullest_program(plan)
    changes = select_device("gpu", program.resident, program.memory)
    total = peak_bytes_per_key(changes, lambda _: "total")
    return {**dict.fromkeys((*CATEGORIES, "total"), 0), **peak_bytes_per_key(changes, category_of), **total}


def bytes_at_peak(plan: Plan) -> dict[str, int]:
    """Bytes of each category on the fullest GPU at the time of its maximum."""
    program = fullest_program(plan)
    changes = select_device("gpu", program.resident, program.memory)
    totals = list(accumulate(change.bytes for change in changes))
    end = totals.index(max(totals)) + 1 if totals else 0
    return {**dict.fromkeys(CATEGORIES, 0), **bytes_per_key(changes[:end], category_of)}


def resident_bytes_by_category(plan: Plan) -> dict[str, int]:
    """Bytes of each category that the fullest GPU has between two steps."""
    resident = select_device("gpu", fullest_program(plan).resident)
    return {**dict.fromkeys(CATEGORIES, 0), **bytes_per_key(resident, category_of)}


def bytes_before_update(plan: Plan, device: Device = "gpu") -> dict[str, int]:
    """Bytes of the fullest rank on `device` by category, after the last backward and before the optimizer's
    first op."""
    program = fullest_program(plan)
    end = next(number for number, op in enumerate(program.ops) if op.phase == "optimizer")
    earlier_changes = [
        change
        for change in program.memory
        if change.op < end or (change.op == end and change.bytes < 0)  # freed before the op is issued
    ]
    return {
        **dict.fromkeys(CATEGORIES, 0),
        **bytes_per_key(select_device(device, program.resident, earlier_changes), category_of),
    }
