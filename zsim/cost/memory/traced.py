"""Tensors of captured modules that autograd was seen to keep, and those that lived in one direction only."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.traced import part_of
from zsim.specs.model.traced import Extent, Traced

Sizes = tuple[int, ...]


def kept_by_traced(work: Traced, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor kept from forward to backward."""
    return _sizes(work, work.saved, shape, options)


def made_by_traced(work: Traced, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during forward only, the output included. Compiled, it is the largest
    alone.
    """
    return _fused(_sizes(work, work.passing_forward, shape, options), options)


def passing_by_traced(work: Traced, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during backward only. Compiled, they are the two largest."""
    return _fused(_sizes(work, work.passing_backward, shape, options), options, most=2)


def _sizes(work: Traced, extents: Iterable[Extent], shape: BatchShape, options: WorkOptions) -> Sizes:
    part = part_of(work, shape)
    sizes = (extent.of(part, options.activation_bytes) for extent in extents)
    return tuple(size for size in sizes if size)


def _fused(sizes: Sizes, options: WorkOptions, most: int = 1) -> Sizes:
    return tuple(sorted(sizes, reverse=True)[:most]) if options.compile else sizes
