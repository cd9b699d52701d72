"""What a forward costs: the bytes that autograd keeps, and what zsim says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import FORWARD
from zsim.specs.model.spec import Module


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


def forward_work(modules: Iterable[Module], shape: BatchShape, options: WorkOptions) -> tuple[float, int]:
    """(FLOPs, bytes kept) of modules."""
    flops, kept = 0.0, 0
    for module in modules:
        local = shape.seen_by(module)
        flops += sum(kernel.flops for kernel in module.kernels(FORWARD, local, options))
        kept += module.saved_bytes(local, options)
    return flops, kept
