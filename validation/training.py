"""Train an example on this rank and return the result; the launcher calls this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from validation.backends import Batch, Optimization, Strategy, make_trainer
from validation.collective_log import CollectiveLog
from validation.examples import make_batch, make_model, vocab_of
from zsim.comparison.plan_check import Call


@dataclass(frozen=True)
class TrainCase:
    """A whole run. `sequences` is the global batch of a step, over all ranks and micro-batches."""

    model: str = "small"
    strategy: Strategy = field(default_factory=lambda: Strategy("ddp"))
    optimization: Optimization = field(default_factory=Optimization)
    steps: int = 20
    sequences: int = 24
    length: int = 16
    checkpointing: bool = False
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class TrainResult:
    """`losses` are means over all ranks; `parameters` are rank 0's final ones (empty on other ranks).

    `calls` is each collective of the last step; `held_before_step` the bytes held when its backward had
    ended."""

    losses: list[float]
    parameters: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    held_bytes: dict[str, dict[str, int]] = field(default_factory=dict)


def micro_batches(case: TrainCase, step: int, rank: int, world_size: int, vocab: int) -> list[Batch]:
    """This rank's share of the step's global batch."""
    tokens, labels = make_batch(step, case.sequences, case.length, vocab)
    accumulation = case.optimization.accumulation_steps
    each, rest = divmod(case.sequences, world_size * accumulation)
    if rest:
        raise ValueError(f"{case.sequences} sequences for {world_size} ranks x {accumulation} micro-batches")
    chunks = [(index * world_size + rank) * each for index in range(accumulation)]
    parts = [slice(start, start + each) for start in chunks]
    return [(tokens[part].to(case.device), labels[part].to(case.device)) for part in parts]


def train(rank: int, world_size: int, case: TrainCase) -> TrainResult:
    """Run the case to its end."""
    model = make_model(case.model, case.seed, case.checkpointing).to(case.device)
    vocab = vocab_of(model)
    trainer = make_trainer(case.strategy, model, case.optimization)
    losses: list[float] = []
    calls: list[Call] = []
    for step in range(case.steps):
        batches = micro_batches(case, step, rank, world_size, vocab)
        if step == case.steps - 1:
            with CollectiveLog() as log:
                loss = trainer.step(batches)
            calls = [call.generic for call in log.calls]
        else:
            loss = trainer.step(batches)
        losses.append(mean_over_ranks(loss))
    parameters = trainer.full_parameters()
    held = trainer.held_bytes()
    trainer.close()
    kept = {name: tensor.cpu().numpy() for name, tensor in parameters.items()} if rank == 0 else {}
    return TrainResult(losses, kept, calls, held)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train_all(rank: int, world_size: int, cases: Sequence[TrainCase]) -> list[TrainResult]:
    """Train several cases one after the other on the same ranks, since starting ranks takes longer than
    training."""
    return [train(rank, world_size, case) for case in cases]
