"""Cuts the sites of a recording into segments: before the blocks, the blocks, between them, and after
them.
"""

from __future__ import annotations

from zsim.dataclass import dataclass
from zsim.errors import InputError
from zsim.specs.capture.recording import ModuleRecording


@dataclass(frozen=True, slots=True)
class CapturedSegment:
    """Consecutive sites of one block, or outside of all blocks."""

    path: str
    """The block, "" outside of all."""
    call: int
    """The block's call."""


def segments_of(
    recording: ModuleRecording, blocks: list[str], where: str
) -> tuple[list[CapturedSegment], dict[int, int]]:
    """The segments in the order of forward, and the number of each site's segment.

    Raises InputError for a block that runs more than once.
    """
    block_paths = set(blocks)
    segments: list[CapturedSegment] = []
    segment_numbers: dict[int, int] = {}
    call_per_path: dict[str, int] = {}
    for number, site in enumerate(recording.sites):
        path, call = _block_of(recording, site.call, block_paths)
        if not segments or (segments[-1].path, segments[-1].call) != (path, call):
            if path and call_per_path.setdefault(path, call) != call:
                raise InputError(
                    f"{where}: block '{path}' runs more than once in a forward, which zsim does not "
                    "simulate; "
                    "expected blocks that run once each"
                )
            segments.append(CapturedSegment(path, call))
        segment_numbers[number] = len(segments) - 1
    return segments, segment_numbers


def _block_of(recording: ModuleRecording, call: int, block_paths: set[str]) -> tuple[str, int]:
    """(the block around a call, that block's call), or ("", -1) outside of all blocks."""
    while call >= 0:
        if recording.calls[call].path in block_paths:
            return recording.calls[call].path, call
        call = recording.calls[call].parent
    return "", -1
