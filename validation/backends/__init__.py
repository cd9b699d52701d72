"""The same training by several frameworks, behind one small interface.

`make_trainer(case)` gives a `Trainer`: `engine` is this repository's ZeRO, the others are torch's and
DeepSpeed's. A backend that is not installed raises `BackendMissing`, which callers report; nothing is skipped
silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn as nn
from torch import Tensor

from validation.tracing import SILENT, Tracer

Batch = tuple[Tensor, Tensor]


def nothing() -> None:
    """Do nothing."""


class BackendMissing(Exception):
    """A backend's package is not installed, or does not run on this machine."""


class Trainer(Protocol):
    """A model in training on this rank."""

    def step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None] = nothing) -> Tensor:
        """Run one optimizer step; returns this rank's mean loss. `before_update` is called when the last
        backward has ended, when the rank holds all its gradients."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter in fp32, unsharded; a collective call."""

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Live bytes by place (device, host, nvme) and category."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Strategy:
    """The backend that trains, and its `options`."""

    backend: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimization:
    """The settings on which all backends must agree."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    accumulation_steps: int = 1
    gradient_clipping: float = 0.0
    no_decay: tuple[str, ...] = ()


def make_trainer(
    strategy: Strategy, model: nn.Module, optimization: Optimization, tracer: Tracer = SILENT
) -> Trainer:
    """The trainer of `strategy.backend`."""
    from validation.backends import ddp, deepspeed_backend, engine_backend, fsdp2

    makers: dict[str, Callable[..., Trainer]] = {
        "engine": engine_backend.EngineTrainer,
        "ddp": ddp.DdpTrainer,
        "zero_redundancy": ddp.ZeroRedundancyTrainer,
        "fsdp2": fsdp2.Fsdp2Trainer,
        "deepspeed": deepspeed_backend.DeepSpeedTrainer,
    }
    if strategy.backend not in makers:
        raise ValueError(f"backend: found '{strategy.backend}', expected one of {', '.join(makers)}")
    return makers[strategy.backend](model, optimization, tracer, **strategy.options)


def decay_groups(model: nn.Module, optimization: Optimization) -> list[dict[str, Any]]:
    """torch.optim parameter groups: with weight decay, and without (by name)."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": optimization.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = any(part in name for part in optimization.no_decay)
            groups[is_spared]["params"].append(parameter)
    return [group for group in groups if group["params"]]
