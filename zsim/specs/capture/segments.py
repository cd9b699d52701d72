"""Cuts the sites of a recording into segments: before the blocks, the blocks, between them, and after
them.
"""

from __future__ import annotations

from zsim.dataclass import dataclass
from zsim.errors import InputError
from zsim.specs.capture.recording import ModuleRecording


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive sites of one block, or outside of all blocks."""

    path: str
    """The block, "" outside of all."""
    call: int
    """The block's call."""


def stretches_of(
    recording: ModuleRecording, blocks: list[str], where: str
) -> tuple[list[Stretch], dict[int, int]]:
    """The segments in the order of forward, and the number of each site's segment.

    Raises InputError for a block that runs more than once.
    """
    wanted = set(blocks)
    found: list[Stretch] = []
    number_of: dict[int, int] = {}
    seen: dict[str, int] = {}
    for number, place in enumerate(recording.places):
        path, call = _block_of(recording, place.call, wanted)
        if not found or (found[-1].path, found[-1].call) != (path, call):
            if path and seen.setdefault(path, call) != call:
                raise InputError(
                    f"{where}: block '{path}' runs more than once in a forward, which zsim does not "
                    "simulate; "
                    "expected blocks that run once each"
                )
            found.append(Stretch(path, call))
        number_of[number] = len(found) - 1
    return found, number_of


def _block_of(recording: ModuleRecording, call: int, wanted: set[str]) -> tuple[str, int]:
    """(the block around a call, that block's call), or ("", -1) outside of all blocks."""
    while call >= 0:
        if recording.calls[call].path in wanted:
            return recording.calls[call].path, call
        call = recording.calls[call].parent
    return "", -1
