"""The files of a save, and the bytes that each rank copies, writes and reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zsim.arrays import Floats, Ints


class SavedFile(NamedTuple):
    """A file, or several of one size."""

    name: str
    rank: int
    parameters: int = 0
    optimizer_states: int = 0
    overhead: int = 0
    """Bytes that are no tensor's: pickles, archives' headers, padding of records."""
    copies: int = 1
    """The number of files of that size (`*` in the name)."""

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
class SavedFiles:
    """All files of one save, and what planning, writing and loading them involves."""

    format: str
    files: tuple[SavedFile, ...]
    staged: Ints
    """Bytes of states per rank, which an asynchronous save copies to the host first."""
    read: Ints
    """Bytes that each rank reads to load."""
    items: int = 0
    """Tensors and values that the planner on rank 0 gets from all ranks."""
    chunks: int = 0
    """Items that are left without copies."""
    gathered: tuple[int, ...] = ()
    """Bytes of every tensor that ranks gather before one of them writes."""
    read_once: bool = False
    """Rank 0 reads and broadcasts."""
    states: int = 0
    """Parameters whose states a rank finds and saves, the fullest rank's."""
    is_synced: bool = False
    """Files are forced to the store (fsync) before the commit."""
    read_items: int = 0
    """Items that the planner gets for a load (0: no planner)."""
    checked_items: int = 0
    """Items that every rank gets from all others and checks, in a save and in a load."""
    is_answered: bool = True
    """The planner sends plans back."""
    has_local_plan: bool = True
    """A copy on the node or in a peer's memory is planned and committed as a save to the store is. Without it
    a rank keeps what it would write, and gets the other states from its peers to load.
    """
    copied: Ints | None = None
    """Bytes per rank of files on the node's drives that are copied as they are, and copied back to load. None
    if there are none.
    """
    converted: tuple[SavedFile, ...] = ()
    """Files that one machine makes of the save before it is loaded. `read` is of these then."""
    conversion_workers: tuple[int, ...] = ()
    """The number of processes of each pass of that conversion."""
    is_copied_ahead: bool = False
    """A rank that training waits for copies tensors to the host while it writes earlier ones."""
    is_staged_by_item: bool = False
    """Every item is found and copied separately when an asynchronous save is staged."""
    is_committed_before_update: bool = False
    """An asynchronous save ends before the next update, which waits for it."""
    is_planned_at_once: bool = False
    """The training process plans and commits an asynchronous save before it goes on."""
    on_host: Ints | None = None
    """Bytes of `staged` that are states in host memory (offloaded ones). None if there are none."""

    @property
    def host_fractions(self) -> Floats:
        """The fraction of each rank's states that lives in host memory."""
        if self.on_host is None:
            return np.zeros(len(self.staged))
        return self.on_host / np.maximum(self.staged, 1)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def written_bytes(self) -> Ints:
        """Bytes per rank."""
        return self._sum_per_rank([file.bytes for file in self.files])

    def archived_bytes(self) -> Ints:
        """Bytes per rank that are made from tensors, not copied."""
        return self.written_bytes() if self.copied is None else self.written_bytes() - self.copied

    def metadata_bytes(self) -> Ints:
        """Bytes per rank of `.metadata`, which is no archive."""
        return self._sum_per_rank([file.bytes if file.is_metadata else 0 for file in self.files])

    def unarchived_bytes(self) -> Ints:
        """Bytes per rank that are read into tensors."""
        return self.read if self.copied is None else self.read - self.copied

    def num_files(self) -> Ints:
        """Files per rank."""
        return self._sum_per_rank([file.copies for file in self.files])

    def _sum_per_rank(self, amounts: list[int]) -> Ints:
        sums = np.zeros(len(self.staged), dtype=np.int64)
        np.add.at(sums, [file.rank for file in self.files], amounts)
        return sums


# -- Files that torch.save writes: the archive of one tensor to the byte, those of dictionaries about ------


# Of an archive of one tensor: what comes before the tensor's record, whose offset is a multiple of 64.
_TENSOR_OFFSET, _ALIGNMENT = 704, 64
_HEADER, _DESCRIPTOR, _DIRECTORY_ENTRY = 30, 16, 46
_ENDS = 56 + 20 + 22  # zip64 end record, its locator, end record
_EXTRA = 4  # of the padding's own header
_NAMES = ("data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "version",
          ".data/serialization_id")  # fmt: skip
_PREFIX = len("archive/")
_VERSION_BYTES, _SERIALIZATION_ID_BYTES = 2, 40
VALUE_BYTES = 1261  # an archive of a number, a truth value or None: the same records without a tensor's
# Pickle (name, storage, shape), the record's header, padding to 64 bytes and directory entry of a tensor; of
# one that shares its storage with others; and the rest of a file: recorded (traces/checkpoints/files.json),
# for names of some 40 letters.
_PER_TENSOR, _PER_VIEW, _PER_FILE = 300, 284, 1100


def archive_bytes(tensor_bytes: int) -> int:
    """Bytes of a torch.save archive of one tensor of `tensor_bytes`, below 4 GiB.

    A zip file without compression in which every record starts at a multiple of 64 bytes: torch 2.13
    caffe2/serialize/inline_container.cc (`PyTorchStreamWriter::writeRecord`, `getPadding`), whose pickle of
    any tensor fits before byte 256. Larger tensors take some 30 bytes more.
    """
    end = _TENSOR_OFFSET + (tensor_bytes + _DESCRIPTOR if tensor_bytes else 0)
    for name, size in (("version", _VERSION_BYTES), (".data/serialization_id", _SERIALIZATION_ID_BYTES)):
        start = end + _HEADER + _PREFIX + len(name) + _EXTRA
        end = -(-start // _ALIGNMENT) * _ALIGNMENT + size + _DESCRIPTOR
    return end + sum(_DIRECTORY_ENTRY + _PREFIX + len(name) for name in _NAMES) + _ENDS


class PickledFile:
    """Bytes of parameters and optimizer states in a file of `rank`. Its overhead is an estimate, on top of
    `base`.
    """

    def __init__(self, name: str, rank: int, base: int = _PER_FILE) -> None:
        self.name, self.rank = name, rank
        self.parameters = self.states = 0
        self._overhead = base

    def add_parameter(self, size: int, tensors: int = 1) -> None:
        """Add one buffer of `size` bytes that so many tensors are views of."""
        self.parameters += size
        self._overhead += _PER_TENSOR if tensors == 1 else _PER_VIEW * tensors

    def add_states(self, sizes: Iterable[int]) -> None:
        """Add tensors of the optimizer's."""
        for size in sizes:
            self.states += size
            self._overhead += _PER_TENSOR

    @property
    def tensors(self) -> int:
        return self.parameters + self.states

    def build(self) -> SavedFile:
        return SavedFile(self.name, self.rank, self.parameters, self.states, self._overhead)
