"""Local SGD and DiLoCo: bytes and seconds of the outer step, and runs of replicas that train apart."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import ZsimError
from zsim.goodput.goodput import simulate_run
from zsim.goodput.simulated_run import SimulatedRun

STATED = {"every": "20 min", "blocking": "5 s", "load": "1 min", "bytes": "96 GB"}


def ran(
    *, strategy: dict[str, Any] | None = None, run: dict[str, Any] | None = None, **local: Any
) -> SimulatedRun:
    tables = {"tokens": "10B", "seeds": 2, "checkpoint": STATED, "recovery": {"restart": "2 min"},
              "local": {"replicas": 4, **local}, **(run or {})}  # fmt: skip
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", nodes=4, run=tables, strategy=strategy or {"kind": "fsdp2"},
        training={"sequence_length": 2048},
    )  # fmt: skip
    return simulate_run(experiment, compares=False)


def outer(found: SimulatedRun) -> Any:
    step = found.prepared.first.outer
    assert step is not None
    return step


@pytest.fixture(scope="module")
def diloco() -> SimulatedRun:
    return ran()


def test_a_gpu_sends_its_shard_around_a_ring_of_replicas(diloco: SimulatedRun) -> None:
    """1,235,814,400 parameters in fp32 over 8 GPUs of a replica, 2 * 3 / 4 of that each; with its card's 50
    GB/s it takes no less than that."""
    shard = 4 * 1_235_814_400 / 8
    assert outer(diloco).bytes_per_gpu == pytest.approx(1.5 * shard)
    assert outer(diloco).averaging_seconds > 1.5 * shard / 50e9
    assert outer(diloco).averaging_seconds < 2 * 1.5 * shard / 50e9


def test_the_step_is_a_replicas_and_its_part_of_the_outer_one(diloco: SimulatedRun) -> None:
    """One node's step, without a message between nodes; all replicas' tokens count."""
    first, step = diloco.prepared.first, outer(diloco)
    assert first.result.job.world_size == 8
    assert [first.nodes, diloco.gpus] == [4, 32]
    waited = (step.averaging_seconds + step.copying_seconds) / 40
    assert step.added_seconds == pytest.approx(waited)
    assert first.step_seconds == pytest.approx(first.result.report.step_seconds + waited)
    assert first.steps == -(-(10**10) // (4 * first.result.report.step_tokens))
    assert diloco.to_dict()["step_seconds"] == pytest.approx(first.step_seconds)


def test_meeting_half_as_often_costs_half(diloco: SimulatedRun) -> None:
    assert outer(ran(every=80)).added_seconds == pytest.approx(outer(diloco).added_seconds / 2)


def test_averaging_beside_inner_steps_is_not_waited_for(diloco: SimulatedRun) -> None:
    """Four fragments of a quarter each, averaged beside two steps: copies alone are left."""
    step = outer(ran(fragments=4, delay=2))
    assert step.averaging_seconds < 0.3 * outer(diloco).averaging_seconds
    assert step.added_seconds == pytest.approx(step.copying_seconds * 4 / 40)
    assert step.bytes_per_gpu == pytest.approx(outer(diloco).bytes_per_gpu, rel=1e-6)


def test_local_sgd_keeps_nothing_in_host_memory(diloco: SimulatedRun) -> None:
    step = outer(ran(method="local-sgd"))
    assert step.copying_seconds == 0.0
    assert step.averaging_seconds == outer(diloco).averaging_seconds


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": 3}, "does not divide the 4 nodes"),
        ({"strategy": {"kind": "deepspeed", "stage": 3}}, "replicas of strategy 'deepspeed'"),
        ({"every": 41, "fragments": 2}, "multiple of fragments"),
        ({"delay": 40}, "fewer steps than from one fragment"),
        ({"method": "local-sgd", "fragments": 2}, "averages all at once"),
        ({"run": {"recovery": {"policy": "per-step"}}}, "is not simulated"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ZsimError, ValueError), match=said):
        ran(**changes)
