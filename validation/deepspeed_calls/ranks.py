"""Run configurations on this rank."""

from __future__ import annotations

from typing import Any

import torch

from validation.backends import Optimization, Strategy, make_trainer
from validation.collective_log import CollectiveLog
from validation.examples import make_batch
from validation.llama import Llama
from validation.record.cases import Recording
from validation.record.run import shape_of
from zsim.comparison.plan_check import fold

WARM_UP_STEPS = 3  # ZeRO-3 observes the first, records the second, and prefetches from the third on


def calls_of(rank: int, world_size: int, cases: list[tuple[Recording, str]]) -> list[list[Any]]:
    """The folded calls of each configuration's fourth step."""
    return [_calls(rank, world_size, recording, model) for recording, model in cases]


def _calls(rank: int, world_size: int, recording: Recording, model_name: str) -> list[Any]:
    torch.manual_seed(0)
    shape = shape_of(model_name)
    model = Llama(shape, checkpointing=recording.checkpointing)
    optimization = Optimization(
        accumulation_steps=recording.accumulation_steps, gradient_clipping=recording.gradient_clipping
    )
    trainer = make_trainer(Strategy(recording.backend, dict(recording.options)), model, optimization)
    each = recording.micro_batch_size

    def step(number: int) -> None:
        batches = []
        for micro in range(recording.accumulation_steps):
            index = number * recording.accumulation_steps + micro
            batch = make_batch(index, each * world_size, recording.sequence_length, shape.vocab_size)
            tokens, labels = (tensor[rank * each : (rank + 1) * each] for tensor in batch)
            batches.append((tokens, labels))
        trainer.step(batches)

    for number in range(WARM_UP_STEPS):
        step(number)
    with CollectiveLog() as log:
        step(WARM_UP_STEPS)
    trainer.close()
    return fold(log.calls)
