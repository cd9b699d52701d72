"""This repository's ZeRO as a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from validation.backends import Batch, Optimization, nothing
from validation.examples import blocks_of
from validation.tracing import Tracer
from validation.zero.config import ZeroConfig
from validation.zero.engine import ZeroEngine


class EngineTrainer:
    """`options` are ZeroConfig's fields."""

    def __init__(
        self,
        model: nn.Module,
        optimization: Optimization,
        tracer: Tracer,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        config = ZeroConfig(
            learning_rate=optimization.learning_rate,
            weight_decay=optimization.weight_decay,
            accumulation_steps=optimization.accumulation_steps,
            gradient_clipping=optimization.gradient_clipping,
            no_decay=optimization.no_decay,
            **options,
        )
        self.engine = ZeroEngine(model, config, blocks=blocks_of(model), device=device, tracer=tracer)

    def step(self, micro_batches: Sequence[Batch], before_update: Callable[[], None] = nothing) -> Tensor:
        losses, tracer = [], self.engine.tracer
        for tokens, labels in micro_batches:
            with tracer.span("phase", "forward"):
                loss = self.engine(tokens, labels).loss
            with tracer.span("phase", "backward"):
                self.engine.backward(loss)
            losses.append(loss.detach().float())
        before_update()
        with tracer.span("phase", "update"):
            self.engine.step()
        return torch.stack(losses).mean()

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: tensor.float() for name, tensor in self.engine.full_parameters()}

    def held_bytes(self) -> dict[str, dict[str, int]]:
        return self.engine.held_bytes()

    def close(self) -> None:
        self.engine.close()
