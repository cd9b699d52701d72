"""AdamW on a piece of a flat tensor (Loshchilov and Hutter 2019, algorithm 2).

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    p <- p - lr wd p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Everything is elementwise, so the result does not depend on how parameters are cut into shards: this is why
optimizer states can be partitioned at all. The order of operations is that of torch.optim.AdamW, and the
results are equal bit by bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from validation.zero.config import ZeroConfig
from validation.zero.layout import Layout


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    config: ZeroConfig,
    decay: float,
) -> None:
    """One step, in place; all tensors are fp32 and of the same shape. `step` counts from 1."""
    beta1, beta2 = config.betas
    parameter.mul_(1 - config.learning_rate * decay)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    step_size = config.learning_rate / (1 - beta1**step)
    root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(config.epsilon)
    parameter.addcdiv_(mean, root, value=-step_size)


def runs_of_equal_decay(layout: Layout, owned: slice, config: ZeroConfig) -> Iterable[tuple[slice, float]]:
    """(elements of the shard, weight decay): consecutive elements with the same decay are joined, padding is
    left out.

    A parameter whose name contains one of `config.no_decay` is not decayed.
    """
    runs: list[tuple[slice, float]] = []
    for piece in layout.pieces(owned):
        is_spared = any(part in piece.slot.name for part in config.no_decay)
        decay = 0.0 if is_spared else config.weight_decay
        if runs and runs[-1][1] == decay:
            runs[-1] = (slice(runs[-1][0].start, piece.stop), decay)
        else:
            runs.append((slice(piece.start, piece.stop), decay))
    return runs


def step_shard(
    layout: Layout,
    owned: slice,
    config: ZeroConfig,
    step: int,
    states: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
) -> None:
    """Apply AdamW to the shard `owned`; `states` are master weights, mean, square."""
    wide = gradient if gradient.dtype is torch.float32 else gradient.float()
    for run, decay in runs_of_equal_decay(layout, owned, config):
        master, mean, square = (state[run] for state in states)
        adamw(master, wide[run], mean, square, step=step, config=config, decay=decay)
