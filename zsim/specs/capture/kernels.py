"""Operators -> the kernels of a `TracedModule` op spec, and the memory traffic that a compiler would leave of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.operations.traced import Extent, TracedKernel, TracedModule
from zsim.specs.capture.groups import OperatorGroup, extent_of, make_extent
from zsim.specs.capture.recording import ModuleRecording, Operator, Product

_NOTHING = Extent()


def traced(recording: ModuleRecording, group: OperatorGroup, backward: Sequence[Operator]) -> TracedModule:
    """A group as it was recorded, with `backward` as its operators of backward."""
    return TracedModule(
        samples=recording.samples,
        forward=kernels(recording, group.forward),
        backward=kernels(recording, backward),
        saved=extent_of(recording, group.saved),
        transient_forward=extent_of(recording, group.passing_forward),
        transient_backward=extent_of(recording, group.passing_backward),
        forward_fused=_fused(recording, group.forward, is_kept=set(group.saved)),
        backward_fused=_fused(recording, backward, is_kept=set()),
    )


def kernels(recording: ModuleRecording, operators: Sequence[Operator]) -> tuple[TracedKernel, ...]:
    """The kernels of some operators."""
    return tuple(kernel for operator in operators for kernel in _kernels(recording, operator))


def _kernels(recording: ModuleRecording, operator: Operator) -> tuple[TracedKernel, ...]:
    memory = memory_of(recording, operator)
    grows = any(recording.storages[use.storage].grows for use in (*operator.reads, *operator.writes))
    if not operator.products:
        kind: Any = "embedding" if operator.name.startswith("embedding") else "elementwise"
        casts = operator.name == "_to_copy" and _is_precision_cast(recording, operator)
        return (TracedKernel(operator.name, kind, memory, grows=grows, casts=casts),)
    traced_kernels = []
    for number, product in enumerate(operator.products):
        extent = memory if number == 0 else _NOTHING  # both gradients of a convolution are one call
        if len(operator.products) == 2:
            extent = _half(memory)
        traced_kernels.append(_product(recording, operator, product, extent, grows))
    return tuple(traced_kernels)


def _product(
    recording: ModuleRecording, operator: Operator, product: Product, memory: Extent, grows: bool
) -> TracedKernel:
    kind: Any = "elementwise" if product.kind == "memory" else product.kind
    layout: Any = product.layout
    floats = [recording.storages[use.storage] for use in operator.reads]
    return TracedKernel(
        operator.name, kind, memory, product.flops, product.shape, product.scaled, layout,
        product.is_causal, grows, in_fp32=not any(storage.is_low for storage in floats),
    )  # fmt: skip


def _half(memory: Extent) -> Extent:
    return Extent(
        memory.elements // 2, memory.num_bytes // 2, memory.fixed_elements // 2, memory.fixed_bytes // 2
    )


def memory_of(recording: ModuleRecording, operator: Operator) -> Extent:
    """The memory traffic of an operator. Every tensor is read once, and every result is written once."""
    total = _NOTHING
    for use in (*operator.reads, *operator.writes):
        total = total.combine(make_extent(recording.storages[use.storage], use.numel, use.item_bytes))
    return total


def _is_precision_cast(recording: ModuleRecording, operator: Operator) -> bool:
    """Whether a copy is between the type that the training computes in and fp32."""
    kinds = {recording.storages[use.storage].is_low for use in (*operator.reads, *operator.writes)}
    sizes = {recording.storages[use.storage].item_bytes for use in (*operator.reads, *operator.writes)}
    return len(kinds) == 2 and max(sizes, default=0) == 4


def _fused(recording: ModuleRecording, operators: Sequence[Operator], *, is_kept: set[int]) -> Extent | None:
    """The memory traffic of the operators without products as one kernel, or None without such operators.

    The kernel reads what none of these operators made. It writes what is used after them.
    """
    memory_operators = [op for op in operators if not op.products]
    if not memory_operators:
        return None
    written_storages = {use.storage for op in memory_operators for use in op.writes}
    read_storages = {use.storage for op in memory_operators for use in op.reads}
    inside = {
        n
        for n in written_storages & read_storages
        if recording.storages[n].born is not None and n not in is_kept
    }
    inside = {n for n in inside if not _outlives(recording, n, operators)}
    total, seen = _NOTHING, set(inside)
    for operator in memory_operators:
        for use in (*operator.reads, *operator.writes):
            if use.storage not in seen:
                seen.add(use.storage)
                total = total.combine(make_extent(recording.storages[use.storage], use.numel, use.item_bytes))
    return total


def _outlives(recording: ModuleRecording, number: int, operators: Sequence[Operator]) -> bool:
    """Whether a storage is read after the last of the operators."""
    storage = recording.storages[number]
    return bool(storage.savers) and not all(
        recording.sites[site].path == recording.sites[operators[0].site].path for site in storage.savers
    )
