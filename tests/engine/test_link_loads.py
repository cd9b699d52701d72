"""Loads of links along a step: the same bytes as the step's traffic, and no link more than full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zsim.engine.link_loads import link_loads
from zsim.engine.micro_batches import simulate_step
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (32, {"strategy": {"kind": "deepspeed", "stage": 3}}),
        (32, {"strategy": {"kind": "fsdp2", "replicate": 2}}),
        (
            16,
            {
                "strategy": {"kind": "megatron"},
                "parallelism": {"tensor": 2, "pipeline": 4},
                "training": {"sequence_length": 512, "gradient_accumulation_steps": 4},
            },
        ),
    ],
)
def test_loads_carry_the_bytes_of_the_step(gpus: int, more: dict[str, Any]) -> None:
    """Summed over links and frames, times bandwidth and a frame's time: the bytes of `Outcome.traffic`."""
    settings = {"training": {"sequence_length": 512}, **more}
    job = resolve(Experiment(model="llama-3.2-1b", cluster="dgx-h100", gpus=gpus, **settings))
    outcome = simulate_step(job).outcome
    loads = link_loads(outcome, 50)
    frame = outcome.trace.step_seconds / 50
    assert 0 < loads.max() <= 1 + 1e-6
    for name, own in outcome.topology.classes.items():
        carried = float(loads[own.first : own.first + own.count].sum()) * own.capacity * frame
        assert carried == pytest.approx(outcome.traffic[name].total_bytes, rel=1e-4)


def test_a_link_is_busy_while_its_collective_runs() -> None:
    """DDP's first bucket is reduced in backward: nothing before the first all-reduce, something after."""
    job = resolve(
        Experiment(
            model="gpt2", cluster="dgx-h100", gpus=16, strategy={"kind": "ddp"},
            training={"sequence_length": 512},
        )
    )  # fmt: skip
    outcome = simulate_step(job).outcome
    trace, num_frames = outcome.trace, 200
    cards = outcome.topology.classes["nic_out"]
    busy = link_loads(outcome, num_frames)[cards.first : cards.first + cards.count].max(axis=0)
    starts = [
        start
        for start, info in zip(trace.start_seconds.tolist(), trace.info_indices.tolist(), strict=True)
        if trace.infos[info].kind == "all_reduce"
    ]
    first = int(min(starts) / trace.step_seconds * num_frames)
    assert not busy[:first].any()
    assert np.count_nonzero(busy[first:]) > 5
    fine = link_loads(outcome, 20_000)[cards.first : cards.first + cards.count].max(axis=0)
    waited = np.flatnonzero(fine)[0] * trace.step_seconds / 20_000 - min(starts)
    assert 20e-6 < waited < 200e-6, "bytes move when the latency of a ring over two nodes is over"
