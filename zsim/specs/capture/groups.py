"""The operators of a recording by the site where they ran, with the tensors that each site keeps and passes.

# [Note: what passes]
Tensors that live during one direction only count at the site that made them, at the moment when those alive
together take most memory. A gradient that arrives from another site counts where it is last read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from zsim.dataclass import dataclass
from zsim.specs.capture.recording import ModuleRecording, Operator, Storage
from zsim.specs.model.traced import Extent


@dataclass
class PlaceWork:
    """The operators of one site."""

    place: int
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
    def sums(self) -> list[Operator]:
        """The additions of gradients of one tensor that autograd makes after it."""
        return [one for one in self.backward if one.sums_gradients]

    @property
    def own_backward(self) -> list[Operator]:
        """The operators of backward without those additions."""
        return [one for one in self.backward if not one.sums_gradients]


def extent_of(recording: ModuleRecording, numbers: Iterable[int]) -> tuple[Extent, ...]:
    """The sizes of storages."""
    return tuple(_extent(recording.storages[number]) for number in numbers)


def _extent(storage: Storage) -> Extent:
    return amount(storage, storage.num_bytes // max(1, storage.item_bytes), storage.item_bytes)


def amount(storage: Storage, numel: int, item_bytes: int) -> Extent:
    """The memory of `numel` elements of a storage."""
    elements, num_bytes = (numel, 0) if storage.is_low else (0, numel * item_bytes)
    return Extent(elements, num_bytes) if storage.grows else Extent(0, 0, elements, num_bytes)


def groups_of(recording: ModuleRecording, segment_of: Mapping[int, int]) -> list[PlaceWork]:
    """The groups in the order of forward. `segment_numbers` maps each site to its segment."""
    found: dict[int, PlaceWork] = {}
    for is_backward, operators in ((False, recording.forward), (True, recording.backward)):
        for operator in operators:
            place = recording.places[operator.place]
            group = found.setdefault(operator.place, PlaceWork(operator.place, place.path, place.call))
            (group.backward if is_backward else group.forward).append(operator)
    for group in found.values():
        group.backward = _with_inner_sums(group.backward)
    _count_saved(recording, found, segment_of)
    start = 0
    for operators in (recording.forward, recording.backward):
        _count_passing(recording, found, operators, start)
        start += len(operators)
    return [found[place] for place in sorted(found)]


def _with_inner_sums(operators: list[Operator]) -> list[Operator]:
    """The operators, where additions of gradients that a later one of them reads are no longer marked as
    such.
    """
    found, read = [], set()
    for operator in reversed(operators):
        is_inner = operator.sums_gradients and any(use.storage in read for use in operator.writes)
        found.append(replace(operator, sums_gradients=False) if is_inner else operator)
        if not found[-1].sums_gradients:
            read |= {use.storage for use in operator.reads}
    return found[::-1]


def _count_saved(
    recording: ModuleRecording, found: dict[int, PlaceWork], segment_of: Mapping[int, int]
) -> None:
    """Count every storage that backward needs at one site.

    See [Note: counted once] in `zsim.specs.capture.recorder`. A storage that several segments need (the
    positions that all blocks read) counts where it was made.
    """
    for number, storage in enumerate(recording.storages):
        if not storage.savers or storage.parameter:
            continue
        readers = [place for place in storage.savers if place != storage.creator] or storage.savers
        several = len({segment_of[place] for place in storage.savers}) > 1
        place = storage.creator if several and storage.creator is not None else readers[0]
        at = place if place in found else next((one for one in readers if one in found), None)
        if at is not None:
            found[at].saved.append(number)


def _count_passing(
    recording: ModuleRecording, found: dict[int, PlaceWork], operators: list[Operator], start: int
) -> None:
    is_backward = start > 0
    made: dict[int, list[int]] = {}
    counted = {number for group in found.values() for number in group.saved}
    last_read: dict[int, int] = {}
    for operator in operators:
        for use in operator.reads:
            last_read[use.storage] = operator.place
    end = start + len(operators)
    for number, storage in enumerate(recording.storages):
        if storage.creator is None or storage.born is None or not start <= storage.born < end:
            continue
        if storage.is_gradient or storage.parameter or number in counted:
            continue
        made.setdefault(storage.creator, []).append(number)
        reader = last_read.get(number, storage.creator)
        if is_backward and reader != storage.creator:
            made.setdefault(reader, []).append(number)
    moments: dict[int, list[int]] = {}
    for offset, operator in enumerate(operators):
        moments.setdefault(operator.place, []).append(start + offset)
    for place, numbers in made.items():
        if place in found:
            worst = _worst(recording, numbers, moments.get(place, []))
            group = found[place]
            (group.passing_backward if is_backward else group.passing_forward).extend(worst)


def _worst(recording: ModuleRecording, numbers: list[int], moments: list[int]) -> list[int]:
    """The storages that are alive at the moment at which they take most memory."""
    best: list[int] = []
    most = -1
    for moment in moments:
        alive = [number for number in numbers if _lives(recording.storages[number], moment)]
        size = sum(recording.storages[number].num_bytes for number in alive)
        if size > most:
            best, most = alive, size
    return best


def _lives(storage: Storage, moment: int) -> bool:
    assert storage.born is not None
    return storage.born <= moment and (storage.died is None or storage.died > moment)
