"""The tensors that the bytes of a module are made of: the sizes that an allocator is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """Bytes of each tensor of a module."""

    saved: Sizes = ()
    """Tensors kept from forward to backward."""
    forward: Sizes = ()
    """Temporaries of forward."""
    backward: Sizes = ()
    """Temporaries of backward."""


def remove_bytes(sizes: Sizes, count: int) -> Sizes:
    """The tensors that remain of `sizes` after removing `count` bytes: full tensors first, the largest before
    the others, and the remaining bytes from the sum.
    """
    remaining = list(sizes)
    for size in sorted(sizes, reverse=True):
        if size <= count:
            remaining.remove(size)
            count -= size
    return split_into_tensors(max(0, sum(remaining) - count), remaining)


def split_into_tensors(count: int, sizes: Iterable[int]) -> Sizes:
    """`count` bytes cut into tensors of `sizes`, as far as they fit. The remaining bytes are one more
    tensor.
    """
    pieces = []
    for size in sizes:
        if 0 < size <= count:
            pieces.append(size)
            count -= size
    return (*pieces, count) if count else tuple(pieces)
