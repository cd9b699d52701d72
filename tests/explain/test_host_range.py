"""Steps that wait for their host: their range is that of hosts, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.api import simulate
from zsim.engine.simulate import simulate_job
from zsim.explain.variants import host_range
from zsim.report.report import Report
from zsim.specs.cluster.spreads import scale_host_speeds
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def experiment(length: int, **host: Any) -> Experiment:
    """A model whose hooks and launches take the host longer than few tokens take the GPU."""
    return Experiment(
        model="llama-3.2-1b",
        cluster={"extends": "dgx-a100-80gb", "host": host} if host else "dgx-a100-80gb",
        gpus=2,
        training={"micro_batch_size": 1, "sequence_length": length},
        strategy={"kind": "deepspeed", "stage": 3},
    )


def report(length: int, **host: Any) -> Report:
    return simulate(experiment(length, **host)).report


def test_a_step_that_waits_for_its_host_is_known_no_better_than_hosts_are() -> None:
    """The host issues nearly all the time, so that the step goes with its speed: 0.76 to 1.88 times, less
    what the driver's calls take."""
    found = report(64)
    assert found.validation is not None
    assert found.step_seconds_range is not None
    (spread,) = found.validation.inputs
    assert spread.what == "the host"
    assert spread.fast == pytest.approx(0.76, abs=0.05)
    assert spread.slow == pytest.approx(1.88, abs=0.1)
    low, high = found.step_seconds_range
    assert low < spread.fast * found.step_seconds
    assert spread.slow * found.step_seconds < high
    (note,) = (note for note in found.notes if note.startswith("the host ("))
    assert "EPYC 7742" in note
    assert "cluster.host.cpu" in note


def test_a_step_whose_host_is_ahead_of_its_gpu_is_not_known_worse_for_it() -> None:
    found = report(16_384)
    assert found.validation is not None
    assert found.validation.inputs == ()
    assert not [note for note in found.notes if note.startswith("the host (")]


def test_a_host_whose_speed_was_measured_has_no_spread() -> None:
    """A file that extends another has the weaker grade of both, so the whole table is the user's."""
    job = resolve(experiment(64))
    host = job.cluster.host.model_copy(update={"evidence": "measured"})
    cluster = job.cluster.model_copy(update={"host": host})
    outcome = simulate_job(replace(job, cluster=cluster))
    assert host_range(outcome) is None


def test_the_ends_are_simulations_of_their_own() -> None:
    outcome = simulate_job(resolve(experiment(64)))
    found = host_range(outcome)
    assert found is not None
    job = outcome.job
    slow = simulate_job(replace(job, cluster=scale_host_speeds(job.cluster, "slow"))).trace.step_seconds
    fast = simulate_job(replace(job, cluster=scale_host_speeds(job.cluster, "fast"))).trace.step_seconds
    assert (found.fast_seconds, found.slow_seconds) == (fast, slow)
    assert found.fast_seconds < outcome.trace.step_seconds < found.slow_seconds


def test_another_cpu_changes_what_a_host_bound_step_takes() -> None:
    """An EPYC 7763 takes 2145 / 2635 of an EPYC 7742's time."""
    before, after = report(64).step_seconds, report(64, cpu="EPYC 7763").step_seconds
    assert after / before == pytest.approx(2145 / 2635, abs=0.03)


def test_a_reported_step_of_lora_under_zero_3_lies_in_the_range_of_its_host() -> None:
    """hiyouga/LlamaFactory issue 5014: Llama 3 8B, LoRA of rank 8, ZeRO-3 on the 8 A800 of a node: 4 s, of
    which the host is most; 3.5 s here."""
    found = simulate(
        Experiment(
            model="llama-3-8b",
            cluster="dgx-a100-80gb",
            nodes=1,
            training={
                "sequence_length": 1024,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "activation_checkpointing": "full",
                "lora": {"rank": 8, "targets": "all-linear", "dtype": "bf16"},
            },
            strategy={"kind": "deepspeed", "stage": 3},
        )
    ).report
    assert found.step_seconds_range is not None
    assert found.step_seconds_range[0] < 4.0 < found.step_seconds_range[1]
    assert found.breakdown.seconds["host_bound"] > found.step_seconds / 2
