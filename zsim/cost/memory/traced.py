"""Tensors of captured modules that autograd was seen to keep, and those that lived in one direction only."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.traced import sample_ratio
from zsim.specs.model.traced import Extent, TracedModule

Sizes = tuple[int, ...]


def traced_saved_tensors(work: TracedModule, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor kept from forward to backward."""
    return _sizes(work, work.saved, shape, options)


def traced_forward_tensors(work: TracedModule, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during forward only, the output included. Compiled, it is the largest
    alone.
    """
    return _largest_if_compiled(_sizes(work, work.transient_forward, shape, options), options)


def traced_backward_tensors(work: TracedModule, shape: BatchShape, options: WorkOptions) -> Sizes:
    """Bytes of each tensor that lives during backward only. Compiled, they are the two largest."""
    return _largest_if_compiled(_sizes(work, work.transient_backward, shape, options), options, max_tensors=2)


def _sizes(work: TracedModule, extents: Iterable[Extent], shape: BatchShape, options: WorkOptions) -> Sizes:
    part = sample_ratio(work, shape)
    sizes = (extent.total_bytes(part, options.activation_bytes) for extent in extents)
    return tuple(size for size in sizes if size)


def _largest_if_compiled(sizes: Sizes, options: WorkOptions, max_tensors: int = 1) -> Sizes:
    return tuple(sorted(sizes, reverse=True)[:max_tensors]) if options.compile else sizes
