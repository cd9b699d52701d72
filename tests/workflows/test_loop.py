"""The loop of rollouts and updates, against identities that hold whatever the seconds of its phases are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import zsim
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.loop import RlStepTimes, run_loop
from zsim.workflows.rl.phases import PhaseTimes, phase_times
from zsim.workflows.rl.result import RlResult, simulate_rl

LENGTHS = {"prompt": {"mean": 100}, "response": {"mean": 300, "sigma": 0.6}, "max_response": 1500}


def experiment(**rl: Any) -> zsim.Experiment:
    table = {
        "framework": "nemo-rl", "prompts_per_step": 16, "samples_per_prompt": 8, "mini_batch_samples": 64,
        "lengths": LENGTHS, **rl,
    }  # fmt: skip
    training = {"sequence_length": 2048, "micro_batch_size": 1, "activation_checkpointing": "full"}
    return zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        nodes=1,
        strategy={"kind": "fsdp2"},
        training=training,
        rl=table,
    )


@cache
def simulator() -> Simulator:
    return Simulator()


def resolved(**rl: Any) -> RlJob:
    return resolve_rl(experiment(**rl), simulator())


@cache
def colocated() -> RlResult:
    return simulate_rl(experiment(), simulator())


def fixed(job: RlJob, **seconds: Any) -> PhaseTimes:
    """Phases of given lengths, all others without time."""
    times = replace(
        colocated().times, training=0.0, old_logprobs=0.0, reference=0.0, reward=0.0, weight_sync=0.0,
        offload=0.0, controller=0.0,
    )  # fmt: skip
    return replace(times, **seconds)


def looped(job: RlJob, **seconds: Any) -> RlStepTimes:
    return run_loop(job, fixed(job, **seconds))


def test_a_colocated_step_is_the_sum_of_its_phases() -> None:
    result = colocated()
    assert result.step.seconds == pytest.approx(sum(result.phases_seconds.values()), rel=1e-9)
    assert result.step.exposed_rollout == pytest.approx(result.step.rollout)


def test_no_staleness_is_the_synchronous_loop_event_by_event() -> None:
    """Depth 0 of async equals split on the same GPUs."""
    seconds = {"training": 5.0, "weight_sync": 1.5, "reference": 2.0}
    split = looped(resolved(placement="split", rollout={"gpus": 4}), **seconds)
    zero = looped(resolved(placement="async", max_staleness=0, rollout={"gpus": 4}), **seconds)
    assert zero.seconds == split.seconds
    assert zero.marks == split.marks
    assert [log.times for log in zero.logs] == [log.times for log in split.logs]


def test_a_trainer_without_time_leaves_the_rollout() -> None:
    step = looped(resolved(placement="split", rollout={"gpus": 4}))
    assert step.seconds == pytest.approx(step.rollout)


def test_a_slow_trainer_hides_the_rollout() -> None:
    """One step off policy: a step is the longer of both, and the sync."""
    job = resolved(placement="async", rollout={"gpus": 4})
    slow = looped(job, training=500.0, weight_sync=2.0)
    assert slow.seconds == pytest.approx(502.0, rel=1e-6)
    assert slow.exposed_rollout == pytest.approx(0.0, abs=1e-9)


def test_async_is_never_slower_than_split() -> None:
    seconds = {"training": 3.0, "weight_sync": 0.5}
    split = looped(resolved(placement="split", rollout={"gpus": 4}), **seconds)
    late = looped(resolved(placement="async", rollout={"gpus": 4}), **seconds)
    assert late.seconds < split.seconds


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_sample_is_older_than_allowed(staleness: int) -> None:
    step = looped(
        resolved(placement="async", max_staleness=staleness, rollout={"gpus": 4}),
        training=4.0,
        weight_sync=0.5,
    )
    assert 0 <= step.mean_staleness <= step.max_staleness <= staleness


def test_every_sample_is_trained_on_once() -> None:
    step = looped(resolved(placement="async", max_staleness=2, rollout={"gpus": 4}), training=4.0)
    numbers = [request.number for request in step.requests]
    assert len(set(numbers)) == len(numbers) == step.steps * 128


def test_generated_tokens_are_those_of_the_samples() -> None:
    """Tokens that are generated are trained on, or are in flight at the end."""
    step = colocated().step
    assert sum(log.generated_tokens for log in step.logs) == sum(
        request.response_tokens for request in step.requests
    )


def test_responses_of_one_length_have_no_tail() -> None:
    lengths = {"prompt": {"mean": 100}, "response": {"law": "constant", "mean": 300}, "max_response": 1500}
    step = looped(resolved(lengths=lengths))
    assert step.tail == 0.0


def test_a_higher_cap_with_the_same_lengths_changes_nothing() -> None:
    values = {"prompt": {"mean": 100}, "response": {"values": [100, 200, 300, 700]}}
    low = looped(resolved(lengths={**values, "max_response": 700}))
    high = looped(resolved(lengths={**values, "max_response": 1500}))
    assert low.seconds == high.seconds


def test_updates_share_the_forward_and_backward_of_a_rollout() -> None:
    """Twice as many updates are half as large: only the optimizer and the reductions are paid again."""
    once = phase_times(resolved(mini_batch_samples=128), simulator())
    twice = phase_times(resolved(mini_batch_samples=64), simulator())
    assert resolved(mini_batch_samples=64).updates == 2
    assert once.training < twice.training < 1.5 * once.training


def test_epochs_repeat_the_updates() -> None:
    once, twice = resolved(), resolved(epochs=2)
    assert (once.updates, twice.updates) == (2, 4)


def test_no_reference_is_one_pass_less() -> None:
    with_it = phase_times(resolved(), simulator())
    without = phase_times(resolved(reference="none"), simulator())
    assert (without.reference, without.old_logprobs) == (0.0, with_it.old_logprobs)
    assert with_it.reference == with_it.old_logprobs > 0.0


def test_a_pass_without_backward_is_about_a_third_of_training() -> None:
    """Two FLOPs a parameter and token against six, and eight with recomputation."""
    times = phase_times(resolved(mini_batch_samples=128), simulator())
    assert 0.15 < times.old_logprobs / times.training < 0.45


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        ({"framework": "veril"}, r"rl.framework: found 'veril', expected one of areal, .*verl"),
        ({"mini_batch_samples": 50}, r"rl.mini_batch_samples: found 50, expected a divisor of the 128"),
        ({"mini_batch_samples": 4}, r"fewer than the trainer's 8 replicas"),
        ({"rollout": {"gpus": 4}}, r"rl.rollout.gpus: found 4 with placement 'colocated'"),
        ({"placement": "split", "rollout": {"gpus": 8}}, r"leaves 0 to training"),
        ({"max_staleness": 2}, r"rl.max_staleness: found 2 with placement 'colocated'"),
        ({"rollout": {"tensor": 3}}, r"a replica has 3 GPUs, and the rollout 8"),
        ({"rollout": {"gpu_memory_utilization": 0.05}}, r"leaves no room for a cache"),
        (
            {"lengths": {"prompt": {"mean": 100}, "response": {"mean": 3000}, "max_response": 4000}},
            r"training.sequence_length: found 2,048, but prompts and responses .* up to",
        ),
    ],
)
def test_contradictions_are_refused_by_name(rl: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(**rl)


def test_what_is_not_simulated_says_so() -> None:
    with pytest.raises(NotSimulatedError, match=r"rl.over_sampling with placement 'async': is not"):
        resolved(placement="async", over_sampling=2.0)


def test_the_json_has_the_phases_and_the_step() -> None:
    content = colocated().to_dict()
    assert content["step_seconds"] == colocated().step.seconds
    assert set(content["phases_seconds"]) >= {"rollout", "training", "weight_sync", "old_logprobs", "other"}
    assert content["peak_bytes_by_phase"]["rollout"]["total"] > 0
    assert content["training"]["step_seconds"] > 0
