"""Files that are read and written past the page cache, in the background.

O_DIRECT requires sizes, offsets and addresses in multiples of 4096, so every section of a file is padded and
every buffer is an anonymous memory map. On a file system without O_DIRECT the files work all the same
(`Drive.is_direct` tells)."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from validation.tracing import Tracer

BLOCK = 4096


def padded(num_bytes: int) -> int:
    """The size rounded up to a multiple of a block."""
    return -(-num_bytes // BLOCK) * BLOCK


class Buffer:
    """Page-aligned memory with tensor views, and the last file operation that used it."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # private to the process: counted by its limits
        self.memory = mmap.mmap(-1, max(BLOCK, padded(num_bytes)), flags=flags)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.pending: Future[None] | None = None

    def view(self, start: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A view of `numel` elements from byte `start` on."""
        return self.bytes[start : start + numel * dtype.itemsize].view(dtype)

    def settle(self) -> None:
        """Wait for the operation under way on this buffer; raises its I/O error."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()


class DirectFile:
    """A file that is read and written in whole blocks."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            self.descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
            self.is_direct = True
        except (OSError, AttributeError):  # tmpfs before Linux 6.6, and systems without O_DIRECT
            self.descriptor = os.open(path, flags, 0o600)
            self.is_direct = False
        self.bytes = padded(num_bytes)
        os.posix_fallocate(self.descriptor, 0, max(self.bytes, BLOCK))

    def read(self, buffer: Buffer, start: int, stop: int) -> None:
        """Read bytes `start` to `stop` of the file to the same position in the buffer."""
        view = memoryview(buffer.memory)
        while start < stop:
            count = os.preadv(self.descriptor, [view[start:stop]], start)
            if count == 0:
                raise OSError(f"{self.path}: ends at byte {start}, expected {stop}")
            start += count

    def write(self, buffer: Buffer, start: int, stop: int) -> None:
        view = memoryview(buffer.memory)
        while start < stop:
            start += os.pwritev(self.descriptor, [view[start:stop]], start)

    def close(self) -> None:
        os.close(self.descriptor)
        self.path.unlink(missing_ok=True)


class Drive:
    """One rank's files, with one thread for reading and one for writing."""

    def __init__(self, folder: Path, rank: int, tracer: Tracer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.tracer = folder, rank, tracer
        self.files: dict[str, DirectFile] = {}
        self.read_bytes = self.written_bytes = 0
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="nvme-read")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="nvme-write")

    def create(self, name: str, num_bytes: int) -> None:
        self.files[name] = DirectFile(self.folder / f"rank{self.rank}.{name}", num_bytes)

    def read(self, name: str, buffer: Buffer, start: int, stop: int) -> None:
        """Begin to read; `buffer.settle()` waits for it."""
        buffer.settle()
        self.read_bytes += stop - start
        buffer.pending = self._readers.submit(self._traced, "read", name, buffer, start, stop)

    def write(self, name: str, buffer: Buffer, start: int, stop: int) -> None:
        """Begin to write; `buffer.settle()` waits for it."""
        buffer.settle()
        self.written_bytes += stop - start
        buffer.pending = self._writers.submit(self._traced, "write", name, buffer, start, stop)

    def _traced(self, op: str, name: str, buffer: Buffer, start: int, stop: int) -> None:
        with self.tracer.span("io", op, unit=name, bytes=stop - start):
            operate = self.files[name].read if op == "read" else self.files[name].write
            operate(buffer, start, stop)

    @property
    def file_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def is_direct(self) -> bool:
        return all(file.is_direct for file in self.files.values())

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        for file in self.files.values():
            file.close()
        self.files.clear()
