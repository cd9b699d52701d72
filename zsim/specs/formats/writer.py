"""The files of other programs that zsim writes: what a program's writer answers about a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zsim.specs.experiment.job import Job


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A program's file for a job, or the reason why it cannot express the job."""

    name: str
    text: str = ""
    reason: str | None = None
    notes: tuple[str, ...] = ()
    """What the user of the file must know or do."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `[strategy]` by which an experiment beside the file names it."""


class ProgramWriter:
    """Writes jobs as a program's files.

    `WRITER` in the module `write` of the program's folder. The answers here are those of a program without a
    file that zsim writes.
    """

    def write(self, job: Job) -> ProgramFile | None:
        """The file, or the reason why there is none. None for a job that is not the program's at all."""
        return None

    def script_notes(self, job: Job) -> Iterable[str]:
        """Things that the training script must do under this program, since its file cannot say them."""
        return ()

    def release_notes(self, job: Job) -> Iterable[str]:
        """Releases that the job needs and no file names."""
        return ()
