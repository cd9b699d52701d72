"""Two shortcuts for FSDP2 on fake tensors; neither changes what FSDP2 does.

- Each `fully_shard` cuts each parameter into one chunk per rank and takes one of them: on 1,024 ranks a
million fake tensors, minutes. `FirstChunks` cuts a chunk only when it is requested. -
`reshard_after_forward=<int>` makes a device mesh, which needs real numbers; it is made outside the
FakeTensorMode, and once per size instead of once per block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fully_shard


class FirstChunks:
    """A lazy version of the list that `_chunk_with_empty` returns: chunks are cut on access."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor = tensor
        self.num_chunks = num_chunks
        self.dim = dim
        self.length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num_chunks:
            raise IndexError(index)
        start = index * self.length
        rows = min(self.length, self.tensor.size(self.dim) - start)
        return self.tensor.narrow(self.dim, start, rows) if rows > 0 else self.tensor.new_empty(0)


@contextmanager
def fsdp_shortcuts() -> Iterator[None]:
    """Apply both shortcuts to FSDP2 inside the context."""
    original = _fsdp_init._get_post_forward_mesh_info
    made: dict[tuple[int, Any], Any] = {}

    def get_post_forward_mesh_info(reshard_after_forward: bool | int, mesh_info: Any) -> Any:
        if isinstance(reshard_after_forward, bool):
            return original(reshard_after_forward, mesh_info)
        key = (reshard_after_forward, mesh_info.mesh)
        if key not in made:
            with unset_fake_temporarily():
                made[key] = original(reshard_after_forward, mesh_info)
        return made[key]

    with (
        mock.patch.object(_fsdp_param, "_chunk_with_empty", FirstChunks),
        mock.patch.object(_fully_shard, "_get_post_forward_mesh_info", get_post_forward_mesh_info),
    ):
        yield
