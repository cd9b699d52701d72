"""The bytes that autograd keeps in a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def saved_bytes(shared: Iterable[torch.Tensor], run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd keeps while `run` runs, but for those of the tensors `shared`."""
    sizes: dict[int, tuple[int, Any]] = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in shared}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes(), storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in sizes.values())
