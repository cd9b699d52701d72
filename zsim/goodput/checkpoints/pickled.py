"""Files that torch.save writes: the archive of one tensor to the byte, those of dictionaries about."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.goodput.checkpoints.saved import SavedFile

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
