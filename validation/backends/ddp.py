"""torch DistributedDataParallel, with AdamW or with sharded optimizer states (ZeRO stage 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from validation.backends import Batch, Optimization, decay_groups, nothing
from validation.tracing import Tracer


class DdpTrainer:
    """`options` go to DistributedDataParallel (bucket_cap_mb, find_unused_parameters, ...)."""

    def __init__(self, model: nn.Module, optimization: Optimization, tracer: Tracer, **options: Any) -> None:
        self.optimization = optimization
        self.tracer = tracer
        self.model = DistributedDataParallel(model, **options)
        self.optimizer = self.make_optimizer(decay_groups(model, optimization))

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.optimization.learning_rate, foreach=False)

    def step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None] = nothing) -> Tensor:
        losses = []
        for index, (tokens, labels) in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                with self.tracer.span("phase", "forward"):
                    loss = self.model(tokens, labels).loss
                with self.tracer.span("phase", "backward"):
                    (loss / len(micro_batches)).backward()
            losses.append(loss.detach().float())
        before_update()
        with self.tracer.span("phase", "update"):
            if self.optimization.gradient_clipping:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.optimization.gradient_clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().float().clone() for name, p in self.model.module.named_parameters()}

    def held_bytes(self) -> dict[str, dict[str, int]]:
        return {"device": storage_bytes(model_states(self.model.module, self.optimizer))}

    def close(self) -> None:
        del self.model, self.optimizer


class ZeroRedundancyTrainer(DdpTrainer):
    """DDP gradients with torch's ZeroRedundancyOptimizer, which assigns whole parameters to ranks
    greedily."""

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.AdamW, lr=self.optimization.learning_rate, foreach=False
        )
        return optimizer


def model_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """(category, tensor) of a model's and an optimizer's tensors."""
    for parameter in model.parameters():
        yield "parameters", parameter
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer wraps the rank's optimizer
    for state in inner.state.values():
        yield from (("optimizer_states", value) for value in state.values() if isinstance(value, Tensor))


def storage_bytes(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, int]:
    """Bytes by category; each storage counts once; AdamW's step counters (one number each) are left out."""
    seen: set[int] = set()
    held: dict[str, int] = {}
    for category, tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        is_counter = category == "optimizer_states" and local.dim() == 0
        if storage.nbytes() and storage.data_ptr() not in seen and not is_counter:
            seen.add(storage.data_ptr())
            held[category] = held.get(category, 0) + storage.nbytes()
    return held
