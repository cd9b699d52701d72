"""Places of optimizer states, reduced gradients and parameter shards: the device or host memory.

Two small interfaces, so that the engine is the same for all places; `nvme.py` implements them for files.
ZeRO-Offload (Ren et al. 2021) puts states and the update in host memory: a gradient shard is copied down as
soon as it is reduced, AdamW runs on the CPU, and the new parameters are copied back up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class States(NamedTuple):
    """A shard's fp32 master weights and AdamW's two moments."""

    master: Tensor
    mean: Tensor
    square: Tensor


class StateKeeper(Protocol):
    """Keeps each flat tensor's shard of the optimizer states, and of the reduced gradient.

    `walk` yields (name, states, gradient) one after another; changes to the states are kept if made before
    the next one is requested. `gradient` may be slow (a read); use `walk` to go over all of them."""

    def create(self, name: str, master: Tensor) -> States | None: ...
    def add_gradient(self, name: str, piece: Tensor, *, is_first: bool) -> None: ...
    def gradient(self, name: str) -> Tensor: ...
    def drop_gradients(self) -> None: ...
    def walk(self, names: Sequence[str]) -> Iterator[tuple[str, States, Tensor]]: ...
    def read(self, name: str) -> States: ...
    def write(self, name: str, states: States) -> None: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def file_bytes(self) -> int: ...
    def close(self) -> None: ...


class ParameterKeeper(Protocol):
    """Keeps stage 3's parameter shards, in the compute dtype. `put` stores new fp32 values; `fetch` begins to
    bring a shard to the device, `take` returns it there."""

    def create(self, name: str, shard: Tensor) -> None: ...
    def put(self, name: str, master: Tensor) -> None: ...
    def fetch(self, name: str) -> None: ...
    def take(self, name: str) -> Tensor: ...
    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...
    def file_bytes(self) -> int: ...
    def close(self) -> None: ...


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy in newly allocated host memory: pinned where there is a GPU to copy to."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


class MemoryStates:
    """States in memory: on the device (`is_host=False`) or in host memory."""

    def __init__(self, is_host: bool) -> None:
        self.is_host = is_host
        self.states: dict[str, States] = {}
        self.gradients: dict[str, Tensor] = {}

    def create(self, name: str, master: Tensor) -> States:
        kept = in_host_memory(master) if self.is_host else master
        self.states[name] = States(kept, torch.zeros_like(kept), torch.zeros_like(kept))
        return self.states[name]

    def add_gradient(self, name: str, piece: Tensor, *, is_first: bool) -> None:
        if not is_first:
            self.gradients[name] += piece.to(self.gradients[name].device)
        else:
            self.gradients[name] = in_host_memory(piece) if self.is_host else piece

    def gradient(self, name: str) -> Tensor:
        return self.gradients[name]

    def drop_gradients(self) -> None:
        self.gradients.clear()

    def walk(self, names: Sequence[str]) -> Iterator[tuple[str, States, Tensor]]:
        for name in names:
            yield name, self.states[name], self.gradients[name]

    def read(self, name: str) -> States:
        return self.states[name]

    def write(self, name: str, states: States) -> None:
        for kept, new in zip(self.states[name], states, strict=True):
            if kept is not new:
                kept.copy_(new)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for states in self.states.values():
            yield from (("optimizer_states", tensor) for tensor in states)
        yield from (("gradients", gradient) for gradient in self.gradients.values())

    def file_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.states.clear()
        self.gradients.clear()


class DeviceParameters:
    """Shards on the device: there is nothing to fetch."""

    def __init__(self) -> None:
        self.shards: dict[str, Tensor] = {}

    def create(self, name: str, shard: Tensor) -> None:
        self.shards[name] = shard

    def put(self, name: str, master: Tensor) -> None:
        if self.shards[name].data_ptr() != master.data_ptr():  # fp32 weights are also the master
            self.shards[name].copy_(master)

    def fetch(self, name: str) -> None:
        pass

    def take(self, name: str) -> Tensor:
        return self.shards[name]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("parameters", shard) for shard in self.shards.values())

    def file_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.shards.clear()


class HostParameters(DeviceParameters):
    """Shards in host memory; each use copies the shard to the device, on CUDA without blocking the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._coming: dict[str, Tensor] = {}

    def create(self, name: str, shard: Tensor) -> None:
        self.shards[name] = in_host_memory(shard)

    def fetch(self, name: str) -> None:
        if name not in self._coming:
            staging = torch.empty_like(self.shards[name], device=self.device)
            self._coming[name] = staging.copy_(self.shards[name], non_blocking=True)

    def take(self, name: str) -> Tensor:
        self.fetch(name)
        return self._coming.pop(name)
