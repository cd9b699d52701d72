"""Steps of which only some micro-batches are simulated take as long as those simulated whole."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.engine.micro_batches import SimulatedStep, simulate_step
from zsim.specs.experiment.resolve import resolve


def step_of(sequences: int, micro_batches: int, *, whole: bool) -> SimulatedStep:
    """GPT-2 under nanotron's ZeRO-1 on 8 H100, where the host takes 54 ms for a micro-batch."""
    training: dict[str, Any] = {
        "sequence_length": 1024, "micro_batch_size": sequences,
        "gradient_accumulation_steps": micro_batches, "liger": True,
    }  # fmt: skip
    strategy = {"kind": "megatron", "engine": "nanotron", "distributed_optimizer": True}
    simulation = {"every_micro_batch": whole}
    experiment = Experiment(
        model="gpt2", cluster="dgx-h100", nodes=1, training=training, strategy=strategy, simulation=simulation
    )
    return simulate_step(resolve(experiment))


@pytest.mark.parametrize(("sequences", "simulated"), [(1, 3), (3, 6)])
def test_a_gpu_that_catches_up_with_its_host_does_not_hide_the_hosts_pace(
    sequences: int, simulated: int
) -> None:
    """With three sequences the GPU has a backlog from the step's beginning, so that steps of three and of two
    micro-batches differ by 52.7 ms and later ones by the host's 53.4 ms."""
    few, whole = (step_of(sequences, 12, whole=whole) for whole in (False, True))
    assert (few.outcome_micro_batches, whole.outcome_micro_batches) == (simulated, 12)
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-5)


def test_the_terms_of_a_step_add_up_to_its_seconds() -> None:
    step = step_of(3, 12, whole=False)
    total = sum(times * outcome.trace.step_seconds for times, outcome in step.terms)
    assert total == pytest.approx(step.seconds, rel=1e-12)
