"""The operators of a recording by the site where they ran, with the tensors that each site keeps and passes.

# [Note: what passes]
Tensors that live during one direction only count at the site that made them, at the moment when those alive
together take most memory. A gradient that arrives from another site counts where it is last read.

The operators become the kernels of a `TracedModule` op spec, with the memory traffic that a compiler would
leave of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zsim.operations.traced import Extent, TracedKernel, TracedModule
from zsim.specs.capture.recording import ModuleRecording, Operator, Product, Storage


@dataclass
class OperatorGroup:
    """The operators of one site."""

    site: int
    """Number of the site in `ModuleRecording.sites`."""
    path: str
    """Name of the module."""
    call: int
    """Number of the module's call in `ModuleRecording.calls`."""
    forward: list[Operator] = field(default_factory=list)
    backward: list[Operator] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    """Numbers of the storages that are kept for backward and count here."""
    passing_forward: list[int] = field(default_factory=list)
    """Numbers of the storages alive at the worst moment of forward, see [Note: what passes]."""
    passing_backward: list[int] = field(default_factory=list)
    """Numbers of the storages alive at the worst moment of backward, see [Note: what passes]."""

    @property
    def gradient_sums(self) -> list[Operator]:
        """The additions of gradients of one tensor that autograd makes after it."""
        return [operator for operator in self.backward if operator.sums_gradients]

    @property
    def module_backward(self) -> list[Operator]:
        """The operators of backward without those additions."""
        return [operator for operator in self.backward if not operator.sums_gradients]


def extent_of(recording: ModuleRecording, numbers: Iterable[int]) -> tuple[Extent, ...]:
    """The sizes of storages."""
    storages = (recording.storages[number] for number in numbers)
    return tuple(
        make_extent(storage, storage.num_bytes // max(1, storage.item_bytes), storage.item_bytes)
        for storage in storages
    )


def make_extent(storage: Storage, numel: int, item_bytes: int) -> Extent:
    """The memory of `numel` elements of a storage."""
    elements, num_bytes = (numel, 0) if storage.is_low else (0, numel * item_bytes)
    return Extent(elements, num_bytes) if storage.grows else Extent(0, 0, elements, num_bytes)


def groups_of(recording: ModuleRecording, segment_numbers: Mapping[int, int]) -> list[OperatorGroup]:
    """The groups in the order of forward. `segment_numbers` maps each site to its segment."""
    groups: dict[int, OperatorGroup] = {}
    for is_backward, operators in ((False, recording.forward), (True, recording.backward)):
        for operator in operators:
            site = recording.sites[operator.site]
            group = groups.setdefault(operator.site, OperatorGroup(operator.site, site.path, site.call))
            (group.backward if is_backward else group.forward).append(operator)
    for group in groups.values():
        group.backward = _merge_inner_sums(group.backward)
    _count_saved(recording, groups, segment_numbers)
    start = 0
    for operators in (recording.forward, recording.backward):
        _count_passing(recording, groups, operators, start)
        start += len(operators)
    return [groups[site_index] for site_index in sorted(groups)]


def _merge_inner_sums(operators: list[Operator]) -> list[Operator]:
    """The operators, where additions of gradients that a later one of them reads are no longer marked as
    such.
    """
    new_operators, read_storages = [], set()
    for operator in reversed(operators):
        is_inner = operator.sums_gradients and any(use.storage in read_storages for use in operator.writes)
        new_operators.append(replace(operator, sums_gradients=False) if is_inner else operator)
        if not new_operators[-1].sums_gradients:
            read_storages |= {use.storage for use in operator.reads}
    return new_operators[::-1]


def _count_saved(
    recording: ModuleRecording, groups: dict[int, OperatorGroup], segment_numbers: Mapping[int, int]
) -> None:
    """Count every storage that backward needs at one site.

    See [Note: counted once] in `zsim.specs.capture.recorder`. A storage that several segments need (the
    positions that all blocks read) counts where it was made.
    """
    for number, storage in enumerate(recording.storages):
        if not storage.savers or storage.parameter:
            continue
        readers = [site for site in storage.savers if site != storage.creator] or storage.savers
        is_shared = len({segment_numbers[site] for site in storage.savers}) > 1
        site = storage.creator if is_shared and storage.creator is not None else readers[0]
        counted_site = (
            site if site in groups else next((reader for reader in readers if reader in groups), None)
        )
        if counted_site is not None:
            groups[counted_site].saved.append(number)


def _count_passing(
    recording: ModuleRecording, groups: dict[int, OperatorGroup], operators: list[Operator], start: int
) -> None:
    is_backward = start > 0
    candidates: dict[int, list[int]] = {}
    counted = {number for group in groups.values() for number in group.saved}
    last_read: dict[int, int] = {}
    for operator in operators:
        for use in operator.reads:
            last_read[use.storage] = operator.site
    end = start + len(operators)
    for number, storage in enumerate(recording.storages):
        if storage.creator is None or storage.born is None or not start <= storage.born < end:
            continue
        if storage.is_gradient or storage.parameter or number in counted:
            continue
        candidates.setdefault(storage.creator, []).append(number)
        reader = last_read.get(number, storage.creator)
        if is_backward and reader != storage.creator:
            candidates.setdefault(reader, []).append(number)
    moments: dict[int, list[int]] = {}
    for offset, operator in enumerate(operators):
        moments.setdefault(operator.site, []).append(start + offset)
    for site, numbers in candidates.items():
        if site in groups:
            peak_storages = _peak_storages(recording, numbers, moments.get(site, []))
            group = groups[site]
            (group.passing_backward if is_backward else group.passing_forward).extend(peak_storages)


def _peak_storages(recording: ModuleRecording, numbers: list[int], moments: list[int]) -> list[int]:
    """The storages that are alive at the moment at which they take most memory."""
    peak: list[int] = []
    peak_bytes = -1
    for moment in moments:
        live_numbers = [number for number in numbers if _is_alive(recording.storages[number], moment)]
        size = sum(recording.storages[number].num_bytes for number in live_numbers)
        if size > peak_bytes:
            peak, peak_bytes = live_numbers, size
    return peak


def _is_alive(storage: Storage, moment: int) -> bool:
    assert storage.born is not None
    return storage.born <= moment and (storage.died is None or storage.died > moment)


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
