"""Blocks that do what the block before them did.

# [Note: a block as a copy]
A model's equal blocks issue the same ops in the same order if they start from the same state. The state is
the builder's events and waits, and what a framework's hooks know (what is gathered, what is in a bucket), all
counted from the block. A block that ends in the state in which it began is walked once. The blocks after it
are copies of its ops and memory changes, with later numbers and their own names, for as many blocks as the
hooks see the same ahead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zsim.plan.builder import PlanBuilder
from zsim.plan.hooks import BlockPosition, Hooks
from zsim.plan.ops import MemoryChange, Op
from zsim.plan.workload.workload import ModuleCall, Segment


class _BlockStart(NamedTuple):
    """The state of the builder before a segment, with the numbers of ops and memory changes, and the position
    of the hooks.
    """

    segment: Segment
    state: tuple[object, ...]
    position: BlockPosition | None
    num_ops: int
    num_changes: int


def segments_to_walk(hooks: Hooks, segments: Sequence[Segment]) -> Iterator[Segment]:
    """The segments that must be walked, each before the next is taken from the iterator. All others are
    issued as copies, see [Note: a block as a copy].
    """
    builder, number = hooks.builder, 0
    last: _BlockStart | None = None
    while number < len(segments):
        segment, state, position = segments[number], builder.state(), None
        if last is not None and last.state == state and segment.kind == "block":
            position = hooks.block_position(segment)  # asked only where the builder's state has come back
        start = _BlockStart(segment, state, position, len(builder.ops), len(builder.memory))
        if last is not None and position is not None and last.position is not None:
            max_copies = (
                hooks.repeat_count(last.position, position) if last.position.state == position.state else 0
            )
            count = _num_repeats(last.segment, segments[number : number + max_copies])
            if count:
                _copy(builder, last, start, count)
                hooks.skip(last.position, position, count, count * (start.num_ops - last.num_ops))
                number, last = number + count, None
                continue
        last = start
        yield segment
        number += 1


def _num_repeats(segment: Segment, followers: Sequence[Segment]) -> int:
    """The number of `followers` that continue the sequence of `segment` and the first of them."""
    prefix, number = _list_and_index(segment.name)
    step = _list_and_index(followers[0].name)[1] - number if followers else 0
    for count, follower in enumerate(followers):
        if _list_and_index(follower.name) != (prefix, number + (count + 1) * step) or not _are_identical(
            segment, follower
        ):
            return count
    return len(followers)


def _list_and_index(name: str) -> tuple[str, int]:
    """The list of blocks, and the block's number in it: ("model.layers", 17)."""
    prefix, _, number = name.rpartition(".")
    return (prefix, int(number)) if number.isdigit() else (name, 0)


def _are_identical(first: Segment, second: Segment) -> bool:
    """Whether two blocks are of the same modules with the same work."""
    if first.reruns or second.reruns or first.group or second.group:
        return False
    return _outline(first) == _outline(second) and all(
        a.module is b.module and a.work is b.work
        for a, b in zip(_all_calls(first), _all_calls(second), strict=True)
    )


def _outline(segment: Segment) -> tuple[object, ...]:
    return (
        segment.kind,
        len(segment.calls),
        len(segment.recomputed),
        segment.is_checkpointed,
        segment.stops_at is None,
        segment.input_bytes,
        segment.output_bytes,
        segment.freed_bytes,
        segment.num_before_recomputation,
    )


def _all_calls(segment: Segment) -> tuple[ModuleCall, ...]:
    stop = () if segment.stops_at is None else (segment.stops_at,)
    return (*segment.calls, *segment.recomputed, *stop)


def _copy(builder: PlanBuilder, start: _BlockStart, end: _BlockStart, count: int) -> None:
    """Issue the ops and changes between `start` and `end` again, for the `count` blocks after it."""
    ops, changes = builder.ops[start.num_ops :], builder.memory[start.num_changes :]
    prefix, number = _list_and_index(start.segment.name)
    step, length, new_tuple = _list_and_index(end.segment.name)[1] - number, len(ops), tuple.__new__
    block = re.compile(rf"(?<![\w.]){re.escape(prefix)}\.(\d+)(?!\w)")
    names = {text for op in ops for text in (op.name, op.module)} | {change.owner for change in changes}
    split_names = [(name, *block.split(name, maxsplit=1)) for name in names]
    block_names = [
        (name, name_start, int(block_index), name_end)
        for name, name_start, *index_and_end in split_names
        if index_and_end
        for block_index, name_end in [index_and_end]
    ]
    new_name = {name: name for name in names}
    for repeat in range(1, count + 1):
        op_shift, index_shift = repeat * length, repeat * step
        new_name |= {
            name: f"{name_start}{prefix}.{block_index + index_shift}{name_end}"
            for name, name_start, block_index, name_end in block_names
        }
        builder.ops += [
            new_tuple(Op, (new_name[name], stream, work,
                           after and tuple([predecessor + op_shift for predecessor in after]),
                           waits and tuple([predecessor + op_shift for predecessor in waits]),
                           launches, overhead, phase,
                           new_name[module], events))
            for name, stream, work, after, waits, launches, overhead, phase, module, events in ops
        ]  # fmt: skip
        builder.memory += [
            new_tuple(MemoryChange, (op + op_shift, category, size, device,
                                     until + op_shift if until >= 0 else until, is_pinned, new_name[owner],
                                     tensors, stream, part, micro_batch))
            for op, category, size, device, until, is_pinned, owner, tensors, stream, part, micro_batch
            in changes
        ]  # fmt: skip
    builder.skip(count * length)
