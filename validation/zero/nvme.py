"""ZeRO-Infinity's third tier: states in files, read, updated and written in a pipeline.

Each rank has one file per flat tensor, of equal sections: master weights, mean, square, reduced gradient.
Parameter shards have separate files. The files are `files.DirectFile`s, so the times are the drive's and not
the page cache's.

# [Note: the pipeline] While tensor i is updated, i + 1 is read and i - 1 is written, each on a separate I/O
thread (Rajbhandari et al. 2021, section 6.3: "overlap-centric design"). Three buffers rotate; a read into a
buffer waits for the write out of it. So the memory is that of three shards, however large the model is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from validation.tracing import Tracer
from validation.zero.files import Buffer, Drive, padded
from validation.zero.places import States

SECTIONS = 4  # master, mean, square, gradient


class NvmeStates:
    """A `StateKeeper` in files. [Note: the pipeline]"""

    def __init__(self, folder: Path, rank: int, tracer: Tracer, gradient_dtype: torch.dtype) -> None:
        self.drive = Drive(folder / "states", rank, tracer)
        self.gradient_dtype = gradient_dtype
        self.numels: dict[str, int] = {}
        self._ring: list[Buffer] = []

    def create(self, name: str, master: Tensor) -> None:
        self.numels[name] = master.numel()
        section = self._section(name)
        self.drive.create(name, SECTIONS * section)
        if not self._ring or len(self._ring[0].bytes) < SECTIONS * section:
            for buffer in self._ring:
                buffer.settle()
            self._ring = [Buffer(SECTIONS * section) for _ in range(3)]
        states, _ = self._views(name, self._ring[0])
        self._ring[0].settle()
        states.master.copy_(master)
        states.mean.zero_()
        states.square.zero_()
        self.drive.write(name, self._ring[0], 0, 3 * section)
        self._ring[0].settle()

    def _section(self, name: str) -> int:
        return padded(4 * self.numels[name])

    def _views(self, name: str, buffer: Buffer) -> tuple[States, Tensor]:
        section, numel = self._section(name), self.numels[name]
        states = States(*(buffer.view(i * section, torch.float32, numel) for i in range(3)))
        return states, buffer.view(3 * section, self.gradient_dtype, numel)

    def add_gradient(self, name: str, piece: Tensor, *, is_first: bool) -> None:
        """Write the gradient's section; if it has a sum already, read and add first."""
        buffer, section = self._ring[0], self._section(name)
        buffer.settle()
        gradient = self._views(name, buffer)[1]
        if is_first:
            gradient.copy_(piece)
        else:
            self._settle_all()  # the write of the sum may be under way
            self.drive.read(name, buffer, 3 * section, 4 * section)
            buffer.settle()
            gradient += piece.to("cpu")
        self.drive.write(name, buffer, 3 * section, 4 * section)
        self._ring.append(self._ring.pop(0))

    def gradient(self, name: str) -> Tensor:
        """Read the gradient; valid until the next call of any method."""
        buffer, section = self._ring[0], self._section(name)
        self._settle_all()
        self.drive.read(name, buffer, 3 * section, 4 * section)
        buffer.settle()
        return self._views(name, buffer)[1]

    def drop_gradients(self) -> None:
        """Do nothing: the gradients' sections will be written before they are read again."""

    def walk(self, names: Sequence[str]) -> Iterator[tuple[str, States, Tensor]]:
        self._settle_all()
        for index, name in enumerate(names):
            if index == 0:
                self.drive.read(name, self._ring[0], 0, SECTIONS * self._section(name))
            if index + 1 < len(names):  # waits for the write out of that buffer, two tensors ago
                following = names[index + 1]
                buffer = self._ring[(index + 1) % 3]
                self.drive.read(following, buffer, 0, SECTIONS * self._section(following))
            buffer = self._ring[index % 3]
            buffer.settle()
            states, gradient = self._views(name, buffer)
            yield name, states, gradient
            self.drive.write(name, buffer, 0, 3 * self._section(name))
        self._settle_all()

    def _settle_all(self) -> None:
        for buffer in self._ring:
            buffer.settle()

    def read(self, name: str) -> States:
        """The states in a buffer; valid until the next call of any method."""
        self._settle_all()
        self.drive.read(name, self._ring[0], 0, 3 * self._section(name))
        self._ring[0].settle()
        return self._views(name, self._ring[0])[0]

    def write(self, name: str, states: States) -> None:
        self._settle_all()
        kept, _ = self._views(name, self._ring[0])
        for target, new in zip(kept, states, strict=True):
            if target.data_ptr() != new.data_ptr():
                target.copy_(new)
        self.drive.write(name, self._ring[0], 0, 3 * self._section(name))
        self._settle_all()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("buffers", buffer.bytes) for buffer in self._ring)

    def file_bytes(self) -> int:
        return self.drive.file_bytes

    def close(self) -> None:
        self._settle_all()
        self.drive.close()


class NvmeParameters:
    """A `ParameterKeeper` in files: a shard is read into a staging buffer, ahead of its gather."""

    def __init__(self, folder: Path, rank: int, tracer: Tracer, device: torch.device) -> None:
        self.drive = Drive(folder / "parameters", rank, tracer)
        self.device = device
        self.shapes: dict[str, tuple[torch.dtype, int]] = {}
        self._coming: dict[str, Buffer] = {}
        self._spare: list[Buffer] = []

    def create(self, name: str, shard: Tensor) -> None:
        self.shapes[name] = (shard.dtype, shard.numel())
        self.drive.create(name, shard.nbytes)
        self.put(name, shard)

    def put(self, name: str, master: Tensor) -> None:
        dtype, numel = self.shapes[name]
        num_bytes = numel * dtype.itemsize
        buffer = self._buffer(num_bytes)
        buffer.view(0, dtype, numel).copy_(master)
        self.drive.write(name, buffer, 0, padded(num_bytes))
        self._spare.append(buffer)

    def _buffer(self, num_bytes: int) -> Buffer:
        """A spare buffer that is large enough, the least recently used first; at most four are kept."""
        for index, buffer in enumerate(self._spare):
            if len(buffer.bytes) >= padded(num_bytes):
                self._spare.pop(index).settle()
                return buffer
        while len(self._spare) >= 4:
            self._spare.pop(0).settle()
        return Buffer(num_bytes)

    def fetch(self, name: str) -> None:
        if name not in self._coming:
            for buffer in self._spare:  # a write of this shard may still be under way
                buffer.settle()
            dtype, numel = self.shapes[name]
            self._coming[name] = self._buffer(numel * dtype.itemsize)
            self.drive.read(name, self._coming[name], 0, padded(numel * dtype.itemsize))

    def take(self, name: str) -> Tensor:
        self.fetch(name)
        buffer = self._coming.pop(name)
        buffer.settle()
        dtype, numel = self.shapes[name]
        shard = buffer.view(0, dtype, numel).to(self.device, copy=True)
        self._spare.append(buffer)
        return shard

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("buffers", buffer.bytes) for buffer in (*self._spare, *self._coming.values()))

    def file_bytes(self) -> int:
        return self.drive.file_bytes

    def close(self) -> None:
        for buffer in (*self._spare, *self._coming.values()):
            buffer.settle()
        self._spare.clear()
        self._coming.clear()
        self.drive.close()
