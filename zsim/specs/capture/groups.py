"""The operators of a recording by the site where they ran, with the tensors that each site keeps and passes.

# [Note: what passes]
Tensors that live during one direction only count at the site that made them, at the moment when those alive
together take most memory. A gradient that arrives from another site counts where it is last read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from zsim.operations.traced import Extent
from zsim.specs.capture.recording import ModuleRecording, Operator, Storage


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
    return tuple(_extent(recording.storages[number]) for number in numbers)


def _extent(storage: Storage) -> Extent:
    return make_extent(storage, storage.num_bytes // max(1, storage.item_bytes), storage.item_bytes)


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
