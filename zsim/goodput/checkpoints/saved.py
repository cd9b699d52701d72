"""The files of a save, and the bytes that each rank copies, writes and reads."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints
from zsim.dataclass import dataclass

COLUMNS = ("file", "rank", "parameters_bytes", "optimizer_states_bytes", "overhead_bytes", "bytes")


class SavedFile(NamedTuple):
    """A file. `overhead`: bytes that are no tensor's: pickles, archives' headers, padding of records;
    `copies`: so many files of that size in all (`*` in the name)."""

    name: str
    rank: int
    parameters: int = 0
    optimizer_states: int = 0
    overhead: int = 0
    copies: int = 1

    @property
    def tensors(self) -> int:
        """Bytes of tensors."""
        return self.parameters + self.optimizer_states

    @property
    def bytes(self) -> int:
        return self.tensors + self.overhead

    @property
    def is_metadata(self) -> bool:
        """Whether it is a planner's list of who wrote what."""
        return self.name.endswith(".metadata")


@dataclass(frozen=True)
class Saved:
    """All files of one save. `staged`: bytes of states per rank, which an asynchronous save copies to the
    host first; `read`: bytes that each rank reads to load. `items`: tensors and values that the planner on
    rank 0 gets from all ranks together, `chunks` those that are left without copies, `read_items` those that
    it gets for a load (0: no planner); `is_answered`: it sends plans back. `checked_items`: that every rank
    gets from all others and checks, in a save and in a load. `has_local_plan`: a copy on the node or in a
    peer's memory is planned and committed as a save to the store is; without it a rank keeps what it would
    write, and gets the rest from its peers to load.
    `gathered`: bytes of every tensor that ranks gather before one of them writes; `read_once`: rank 0 reads
    and broadcasts. `states`: parameters whose states a rank finds and saves, the fullest rank's;
    `is_synced`: files are forced to the store (fsync) before the commit. `copied`: bytes per rank of files on
    the node's drives that are copied as they are, and copied back to load; None: none. `converted`: files
    that one machine makes of the save before it is loaded; `read` is of these then. `on_host`: of `staged`,
    bytes of states that live in host memory (offloaded ones); None: none."""

    format: str
    files: tuple[SavedFile, ...]
    staged: Ints
    read: Ints
    items: int = 0
    chunks: int = 0
    gathered: tuple[int, ...] = ()
    read_once: bool = False
    states: int = 0
    is_synced: bool = False
    read_items: int = 0
    checked_items: int = 0
    is_answered: bool = True
    has_local_plan: bool = True
    copied: Ints | None = None
    converted: tuple[SavedFile, ...] = ()
    on_host: Ints | None = None

    @property
    def host_fractions(self) -> Floats:
        """The fraction of each rank's states that lives in host memory."""
        if self.on_host is None:
            return np.zeros(len(self.staged))
        return self.on_host / np.maximum(self.staged, 1)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def loaded_files(self) -> tuple[SavedFile, ...]:
        """The files that a load reads: those that the save is converted to, where it is."""
        return self.converted or self.files

    @cached_property
    def categories(self) -> dict[str, int]:
        """Bytes by category."""
        return {
            "parameters": sum(file.parameters for file in self.files),
            "optimizer_states": sum(file.optimizer_states for file in self.files),
            "overhead": sum(file.overhead for file in self.files),
        }

    def written(self) -> Ints:
        """Bytes per rank."""
        return self._by_rank([file.bytes for file in self.files])

    def archived(self) -> Ints:
        """Bytes per rank that are made from tensors, not copied."""
        return self.written() if self.copied is None else self.written() - self.copied

    def metadata(self) -> Ints:
        """Bytes per rank of `.metadata`, which is no archive."""
        return self._by_rank([file.bytes if file.is_metadata else 0 for file in self.files])

    def unarchived(self) -> Ints:
        """Bytes per rank that are read into tensors."""
        return self.read if self.copied is None else self.read - self.copied

    def num_files(self) -> Ints:
        """Files per rank."""
        return self._by_rank([file.copies for file in self.files])

    def _by_rank(self, amounts: list[int]) -> Ints:
        found = np.zeros(len(self.staged), dtype=np.int64)
        np.add.at(found, [file.rank for file in self.files], amounts)
        return found

    def rows(self) -> list[tuple[str | int, ...]]:
        """`checkpoint_files.csv`: a row per file, under `COLUMNS`."""
        return [
            (file.name, file.rank, file.parameters, file.optimizer_states, file.overhead, file.bytes)
            for file in self.files
        ]
