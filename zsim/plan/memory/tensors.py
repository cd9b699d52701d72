"""A plan's memory changes per tensor: each free paired with the tensors that it frees.

Plans allocate and free by category and owner, often several tensors at once. An allocator needs the block
that a free returns. So a free takes the newest tensor of its category, owner, part and micro-batch that has
its size, or the newest tensors that add up to it; an allocation that is freed in parts counts as several
tensors. (Micro-batches between forward and backward at once are freed in the order of a pipeline's schedule,
most often the oldest first.)
"""

from __future__ import annotations

from typing import NamedTuple

from zsim.dataclass import dataclass
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Program


class TensorChange(NamedTuple):
    """Just before the host issues `op`, tensor number `tensor` is allocated with `bytes` on `stream`, or,
    with 0 bytes, freed; `until`: the op that must end before its block can be reused (-1: none)."""

    op: int
    tensor: int
    bytes: int
    stream: str = COMPUTE
    until: int = -1


@dataclass(eq=False, slots=True)
class _Tensor:
    """A live tensor; `place`: the index of the change that allocated it."""

    place: int
    bytes: int
    number: int = -1


def tensor_changes(program: Program) -> list[TensorChange]:
    """The program's changes of GPU memory, tensor by tensor, in the host's order.

    A block belongs to the stream that the next work is issued to: frameworks allocate just before they issue,
    inside `with torch.cuda.stream(...)`; activations are allocated on the compute stream.
    """
    changes = [change for change in program.memory if change.device == "gpu"]
    live: dict[tuple[str, str, str, int], list[_Tensor]] = {}  # oldest first
    moved: list[list[_Tensor]] = []  # by change: the tensors that it allocates or frees
    for place, change in enumerate(changes):
        _, category, count, _, _, _, owner, sizes, _, part, micro_batch = change
        key = category, owner, part, micro_batch
        tensors = live.get(key)
        if tensors is None:
            tensors = live[key] = []
        if count > 0:
            made = [_Tensor(place, size) for size in sizes] if sizes else [_Tensor(place, count)]
            moved.append(made)
            tensors += made
        elif tensors and tensors[-1].bytes == -count:
            moved.append([tensors.pop()])
        else:
            moved.append(_take(-count, tensors, moved))
    streams = _next_streams(program)
    rows: list[tuple[int, int, int, str, int]] = []
    number = 0
    for change, tensors in zip(changes, moved, strict=True):
        op, until = change[0], change[4]
        stream = COMPUTE if change[1] == "activations" else change[8] or streams[op]
        if change[2] > 0:
            for tensor in tensors:
                tensor.number = number
                rows.append((op, number, tensor.bytes, stream, until))
                number += 1
        elif len(tensors) == 1:
            rows.append((op, tensors[0].number, 0, stream, until))
        else:
            rows += [(op, tensor.number, 0, stream, until) for tensor in tensors]
    return list(map(TensorChange._make, rows))


def _take(count: int, tensors: list[_Tensor], moved: list[list[_Tensor]]) -> list[_Tensor]:
    """Take `count` bytes out of `tensors` and return them; if needed one tensor is split, and so is its
    allocation in `moved`."""
    sizes = [tensor.bytes for tensor in tensors]
    if sum(sizes) == count and 0 not in sizes:  # all of them, the newest first
        taken = tensors[::-1]
        tensors.clear()
        return taken
    taken = []
    while count > 0:
        assert tensors, f"{count} bytes are freed that were not allocated"
        fits = [place for place, tensor in enumerate(tensors) if tensor.bytes <= count]
        exact = [place for place in fits if tensors[place].bytes == count]
        if not fits:
            whole = tensors[-1]
            whole.bytes -= count
            taken.append(_Tensor(whole.place, count))
            moved[whole.place].append(taken[-1])
            return taken
        taken.append(tensors.pop((exact or fits)[-1]))
        count -= taken[-1].bytes
    return taken


def _next_streams(program: Program) -> list[str]:
    """Per op, the stream of the next work that the host issues."""
    streams = [COMPUTE] * (len(program.ops) + 1)
    for number in range(len(program.ops) - 1, -1, -1):
        op = program.ops[number]
        streams[number] = op.stream if op.work is not None else streams[number + 1]
    return streams
