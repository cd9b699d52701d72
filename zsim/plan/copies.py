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
from zsim.plan.hooks import BeforeBlock, Hooks
from zsim.plan.ops import MemoryChange, Op
from zsim.plan.workload.workload import ModuleCall, Segment


class _Start(NamedTuple):
    """The state of the builder before a segment, with the numbers of ops and memory changes, and the position
    of the hooks.
    """

    segment: Segment
    state: tuple[object, ...]
    place: BeforeBlock | None
    num_ops: int
    num_changes: int


def to_walk(hooks: Hooks, segments: Sequence[Segment]) -> Iterator[Segment]:
    """The segments that must be walked, each before the next is taken from the iterator. All others are
    issued as copies, see [Note: a block as a copy].
    """
    builder, number = hooks.builder, 0
    last: _Start | None = None
    while number < len(segments):
        segment, state, place = segments[number], builder.state(), None
        if last is not None and last.state == state and segment.kind == "block":
            place = hooks.place(segment)  # asked only where the builder's state has come back
        now = _Start(segment, state, place, len(builder.ops), len(builder.memory))
        if last is not None and place is not None and last.place is not None:
            most = hooks.num_alike(last.place, place) if last.place.state == place.state else 0
            count = _num_alike(last.segment, segments[number : number + most])
            if count:
                _copy(builder, last, now, count)
                hooks.skip(last.place, place, count, count * (now.num_ops - last.num_ops))
                number, last = number + count, None
                continue
        last = now
        yield segment
        number += 1


def _num_alike(segment: Segment, others: Sequence[Segment]) -> int:
    """The number of `others` that continue the sequence of `segment` and the first of them."""
    prefix, number = _numbered(segment.name)
    step = _numbered(others[0].name)[1] - number if others else 0
    for count, other in enumerate(others):
        if _numbered(other.name) != (prefix, number + (count + 1) * step) or not _are_alike(segment, other):
            return count
    return len(others)


def _numbered(name: str) -> tuple[str, int]:
    """The list of blocks, and the block's number in it: ("model.layers", 17)."""
    prefix, _, number = name.rpartition(".")
    return (prefix, int(number)) if number.isdigit() else (name, 0)


def _are_alike(one: Segment, other: Segment) -> bool:
    """Whether two blocks are of the same modules with the same work."""
    if one.reruns or other.reruns or one.group or other.group:
        return False
    return _outline(one) == _outline(other) and all(
        a.module is b.module and a.work is b.work
        for a, b in zip(_all_calls(one), _all_calls(other), strict=True)
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


def _copy(builder: PlanBuilder, start: _Start, end: _Start, count: int) -> None:
    """Issue the ops and changes between `start` and `end` again, for the `count` blocks after it."""
    ops, changes = builder.ops[start.num_ops :], builder.memory[start.num_changes :]
    prefix, number = _numbered(start.segment.name)
    step, length, new = _numbered(end.segment.name)[1] - number, len(ops), tuple.__new__
    block = re.compile(rf"(?<![\w.]){re.escape(prefix)}\.(\d+)(?!\w)")
    names = {text for op in ops for text in (op.name, op.module)} | {change.owner for change in changes}
    parts = [(name, *block.split(name, maxsplit=1)) for name in names]
    in_blocks = [
        (name, before, int(of), after) for name, before, *rest in parts if rest for of, after in [rest]
    ]
    own = {name: name for name in names}
    for place in range(1, count + 1):
        later, further = place * length, place * step
        own |= {name: f"{before}{prefix}.{of + further}{after}" for name, before, of, after in in_blocks}
        builder.ops += [
            new(Op, (own[name], stream, work, after and tuple([other + later for other in after]),
                     waits and tuple([other + later for other in waits]), launches, overhead, phase,
                     own[module], events))
            for name, stream, work, after, waits, launches, overhead, phase, module, events in ops
        ]  # fmt: skip
        builder.memory += [
            new(MemoryChange, (op + later, category, size, device, until + later if until >= 0 else until,
                               is_pinned, own[owner], tensors, stream, part, micro_batch))
            for op, category, size, device, until, is_pinned, owner, tensors, stream, part, micro_batch
            in changes
        ]  # fmt: skip
    builder.skip(count * length)
