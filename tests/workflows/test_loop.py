"""The loop of rollouts and updates, against identities that hold whatever the seconds of its phases are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import typer

import zsim
from zsim.cli import app
from zsim.engine.simulator import Simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.memory.capacity import usable_bytes
from zsim.units import format_amount, format_bytes, format_seconds
from zsim.workflows.rl.job import RlJob, resolve_rl
from zsim.workflows.rl.loop import RlStepTimes, run_loop
from zsim.workflows.rl.memory import PhaseMemory
from zsim.workflows.rl.phases import PhaseTimes, phase_times
from zsim.workflows.rl.result import RlResult, simulate_rl
from zsim.workflows.rollout.limits import blocks_for

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


def test_as_many_samples_of_prime_rl_run_as_it_has_places() -> None:
    """1,024 samples, whatever the staleness and the prompts they are of. NeMo-RL's places are of prompts, a
    step's times the staleness."""
    for staleness in (1, 3):
        job = resolved(framework="prime-rl", placement="async", max_staleness=staleness)
        assert (job.max_in_flight, job.limits_samples) == (1024, True)
        plain = resolved(placement="async", max_staleness=staleness)
        assert (plain.max_in_flight, plain.limits_samples) == (staleness * 16, False)


def test_a_sample_of_prime_rl_gives_its_place_to_the_next_while_its_prompt_goes_on() -> None:
    """16 places of samples, two prompts' worth: as soon as short responses end others start. With places of
    prompts the short ones of each wait for its longest.
    """
    lengths = {**LENGTHS, "response": {"values": [50] * 7 + [1400]}, "correlation": 0.0}
    job = resolved(framework="prime-rl", placement="async", max_staleness=4, lengths=lengths)
    few = replace(job, framework=replace(job.framework, in_flight=16))
    started = looped(few)
    assert max(max(log.running) for log in started.logs) <= 16
    unlimited = looped(replace(job, framework=replace(job.framework, in_flight=None)))
    assert unlimited.seconds <= started.seconds


def test_prime_rl_trains_on_the_prompts_that_end_first() -> None:
    """A step does not wait for a response of 1,400 tokens that was started before others of 100. Each sample
    is trained on at most once.
    """
    lengths = {**LENGTHS, "response": {"values": [100] * 99 + [1400]}, "correlation": 0.0}
    job = resolved(framework="prime-rl", placement="async", max_staleness=3, lengths=lengths)
    ordered = replace(job, framework=replace(job.framework, trains_finished_first=False))
    first, in_order = looped(job, training=0.5), looped(ordered, training=0.5)
    assert first.exposed_rollout < 0.2 * in_order.exposed_rollout
    numbers = [request.number for request in first.requests]
    assert len(set(numbers)) == len(numbers) >= first.steps * 128


def test_prime_rl_gives_up_what_new_weights_make_too_old() -> None:
    """With a staleness of 1 a response that runs when the second new weights come is lost, and the others of
    its prompt are trained on: a step still has its 128 samples, of more than 16 prompts.
    """
    lengths = {**LENGTHS, "response": {"values": [100] * 19 + [1400]}, "correlation": 0.0}
    job = resolved(framework="prime-rl", placement="async", max_staleness=1, lengths=lengths)
    step = looped(job, training=0.5)
    assert step.dropped_tokens > 0
    assert 128 <= len(step.requests) / step.steps < 128 + 8
    assert all(request.is_finished for request in step.requests)
    assert len({request.group for request in step.requests}) > 16 * step.steps
    free = looped(resolved(framework="prime-rl", placement="async", lengths=lengths), training=0.5)
    assert free.dropped_tokens == 0


def test_prime_rl_starts_nothing_while_two_batches_wait_for_the_trainer() -> None:
    """A step's 256 prompts have places for half. One batch trains, one waits, and of a third with responses
    of one length the first half ends: it is 2 old when it is trained on, and 4, the staleness, without the
    gate.
    """
    lengths = {**LENGTHS, "response": {"mean": 300, "sigma": 0.0}}
    job = resolved(
        framework="prime-rl", placement="async", prompts_per_step=256, max_staleness=4, lengths=lengths
    )
    assert looped(job, training=1000.0).max_staleness == 2
    free = replace(job, framework=replace(job.framework, max_batches_ahead=inf))
    assert looped(free, training=1000.0).max_staleness == 4


def test_a_fraction_of_a_step_lies_between_its_neighbours() -> None:
    """An eighth lets 2 of 16 prompts start a step early. The more do, the less the trainer waits."""
    seconds, ages = [], []
    for staleness in (0.0, 0.125, 0.5, 1.0):
        job = resolved(
            placement="async", max_staleness=staleness, rollout={"gpus": 4}, partial_rollout=staleness > 0,
            framework="verl", mini_batch_samples=128,
        )  # fmt: skip
        step = looped(job, training=4.0, weight_sync=0.5)
        seconds.append(step.seconds)
        ages.append(step.mean_staleness)
        assert step.max_staleness <= 1
    assert ages == [0.0, 0.125, 0.5, 1.0]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[2] > seconds[3]


STREAM = {
    "framework": "verl", "placement": "async", "max_staleness": 0, "mini_batch_samples": 32,
    "rollout": {"gpus": 4, "balance": "least-loaded"},
}  # fmt: skip


def test_a_stream_of_whole_steps_without_staleness_takes_turns() -> None:
    seconds = {"training": 4.0, "weight_sync": 0.5}
    lengths = {**LENGTHS, "response": {"values": [300]}, "prompt": {"values": [100]}}
    turns = looped(resolved(**STREAM, lengths=lengths), **seconds)
    stream = looped(resolved(**STREAM, lengths=lengths, stream_prompts=16), **seconds)
    assert stream.seconds == pytest.approx(turns.seconds, rel=1e-12)
    assert stream.exposed_rollout == pytest.approx(turns.exposed_rollout)


def test_a_stream_trains_while_the_rest_of_the_step_is_generated() -> None:
    """All but the last chunk of a fast trainer are hidden behind the rollout, which is as long as before."""
    job = resolved(**STREAM, stream_prompts=4)
    alone = looped(job).seconds
    step = looped(job, training=0.04, weight_sync=0.5)
    assert job.chunks == 4
    assert step.seconds == pytest.approx(alone + 0.01 + 0.5, abs=0.005)
    assert step.max_staleness == 0
    slow = looped(job, training=400.0)
    assert 400 < slow.seconds < looped(resolved(**STREAM), training=400.0).seconds


@pytest.mark.parametrize("partial", [True, False])
def test_a_stream_trains_on_every_sample_once_whenever_it_ended(partial: bool) -> None:
    """It takes what ends first, so that a long response may be older than half a step."""
    stream = {**STREAM, "max_staleness": 0.5, "partial_rollout": partial}
    seconds = {"training": 2.0, "weight_sync": 0.1}
    step = looped(resolved(**stream, stream_prompts=4), **seconds)
    numbers = [request.number for request in step.requests]
    assert len(set(numbers)) == len(numbers) == step.steps * 128
    assert step.dropped_tokens == 0
    assert 0 < step.mean_staleness <= step.max_staleness
    ends = [request.end_seconds for request in step.requests]
    groups = [max(ends[start : start + 8]) for start in range(0, len(ends), 8)]
    assert groups == sorted(groups)
    assert step.exposed_rollout < looped(resolved(**stream), **seconds).exposed_rollout


def test_every_call_of_the_trainer_has_the_time_that_is_none_of_its_passes() -> None:
    """3.0 s of verl's updates: of four calls of a step three times more than of one."""
    once, four = (
        phase_times(resolved(**STREAM, stream_prompts=prompts), simulator()).training for prompts in (16, 4)
    )
    assert four - once == pytest.approx(3 * 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"framework": "slime"},
            "found 4 with slime, where updates await the rollout; expected none$",
        ),
        ({"placement": "split"}, "found 4 with placement 'split', where updates await"),
        ({"stream_prompts": 3}, "found 3, expected a divisor of the 16 prompts.* such as 4$"),
        ({"mini_batch_samples": 64}, "whose samples are whole mini-batches of 64, such as 8$"),
        ({"mini_batch_samples": None}, "the whole step without rl.mini_batch_samples, such as 16$"),
    ],
)
def test_streams_are_verls_and_of_whole_mini_batches(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(**{**STREAM, "stream_prompts": 4, **changes})


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
        (
            {"rollout": {"gpu_memory_utilization": 0.03}},
            r"leaves no room for a cache; .* or a gpu_memory_utilization of at least 0\.\d+$",
        ),
        (
            {"prompts_per_step": 10**9},
            r"found 1,000,000,000 x samples_per_prompt 8 = 8,000,000,000 samples of a step, expected at most",
        ),
        (
            {"prompts_per_step": 32768, "over_sampling": 2.0},
            r"8 x over_sampling x sampling_rounds = 524,288 samples",
        ),
        (
            {"environment": {"turns": 5000}},
            r"rl.environment.turns: found 5,000 with 128 samples, .* expected at most 4,096$",
        ),
        (
            {"lengths": {"prompt": {"mean": 100}, "response": {"mean": 3000}, "max_response": 4000}},
            r"training.sequence_length: found 2,048, but prompts and responses .* up to",
        ),
    ],
)
def test_contradictions_are_refused_by_name(rl: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(**rl)


@pytest.mark.parametrize(("gpus", "nearest"), [(4, "8"), (10, "8 or 16")])
def test_a_rollout_that_leaves_parts_of_nodes_names_those_that_do_not(gpus: int, nearest: str) -> None:
    """Of 24 GPUs 20 and 14 are left."""
    three = experiment(placement="split", rollout={"gpus": gpus}).model_copy(update={"nodes": 3})
    message = rf"found {gpus} of 24 GPUs, which leaves {24 - gpus} to training, .* expected {nearest}$"
    with pytest.raises(InputError, match=message):
        resolve_rl(three, simulator())


def test_what_is_not_simulated_says_so() -> None:
    with pytest.raises(NotSimulatedError, match=r"rl.over_sampling with placement 'async': is not"):
        resolved(placement="async", over_sampling=2.0)


def test_the_json_has_the_phases_and_the_step() -> None:
    content = colocated().to_dict()
    assert content["step_seconds"] == colocated().step.seconds
    assert set(content["phases_seconds"]) >= {"rollout", "training", "weight_sync", "old_logprobs", "other"}
    assert content["peak_bytes_by_phase"]["rollout"]["total"] > 0
    assert content["training"]["step_seconds"] > 0


def test_every_phase_has_the_verdict_of_the_usable_bytes() -> None:
    result = colocated()
    assert result.capacity_bytes == usable_bytes(result.job.cluster) < result.job.cluster.gpu.memory.capacity
    assert result.verdicts.keys() == result.memory.keys()
    assert result.verdict.probability == min(found.probability for found in result.verdicts.values())
    full = replace(result, step=result.step)
    limit = result.capacity_bytes
    vars(full)["memory"] = {**result.memory, "weight_sync": PhaseMemory({"bucket": int(1.02 * limit)})}
    assert 1.02 * limit < result.job.cluster.gpu.memory.capacity
    assert (full.fits, full.verdict.exit_code, full.to_dict()["fits"]) == (False, 1, False)
    assert any(line.startswith(full.verdict.word.upper()) for line in full.lines())


def test_states_that_fill_the_memory_of_a_phase_do_not_fit() -> None:
    """Parameters are exact: no error of zsim leaves room for other bytes beside them."""
    result = colocated()
    full, limit = replace(result, step=result.step), result.capacity_bytes
    states = {"parameters": limit, "buffers": int(0.02 * limit)}
    vars(full)["memory"] = {**result.memory, "weight_sync": PhaseMemory(states)}
    assert full.verdicts["weight_sync"].word == "does not fit"


def test_the_header_counts_the_gpus_of_both_sides() -> None:
    result = simulate_rl(experiment(placement="async", rollout={"gpus": 2}), simulator())
    assert "on 8 GPUs (6 of the trainer, 2 of the rollout)," in result.headline()
    expected = result.tokens / result.step.seconds / 8
    assert result.tokens_per_second_per_gpu == pytest.approx(expected)
    heading = next(line for line in result.lines() if line.startswith("Phase"))
    assert heading.split()[-4:] == ["exposed", "exposed", "of", "step"]


def test_the_text_has_the_range_and_the_notes() -> None:
    result = colocated()
    text = " ".join(" ".join(result.lines()).split())
    low, high = map(format_seconds, result.step_seconds_range)
    assert f"{low} to {high} in 80 %" in text
    assert "note: samples are packed: an update is" in text
    assert result.to_dict()["notes"] == list(result.job.notes)


def test_the_text_says_what_the_fullest_phase_holds_and_what_an_engine_runs() -> None:
    """The categories of the phase, largest first, and the fullest replica's part of its cache."""
    result = colocated()
    text = " ".join(" ".join(result.lines()).split())
    fullest = min(result.verdicts, key=lambda name: result.verdicts[name].probability)
    parts = sorted(
        ((size, name) for name, size in result.memory[fullest].by_category.items() if size), reverse=True
    )
    assert "It holds " + ", ".join(f"{n.replace('_', ' ')} {format_bytes(b)}" for b, n in parts) in text
    peak = max(log.peak_blocks for log in result.step.logs) / result.job.limits.cache_blocks
    assert re.search(
        rf"A replica of 1 GPU runs \d+ sequences in the mean, .* up to {100 * peak:.0f} % of its cache\.",
        text,
    )


def test_a_cache_that_is_too_small_is_said_with_its_preemptions() -> None:
    """Room for about four of 40 sequences."""
    job = resolved(prompts_per_step=40)
    small = replace(job, limits=replace(job.limits, cache_blocks=blocks_for(1600)))
    result = RlResult(small, fixed(small), looped(small))
    preemptions = sum(log.preemptions for log in result.step.logs)
    assert preemptions > 0
    assert f"are preempted {preemptions:,} times a step" in " ".join(result.loop_sentences())
    assert result.to_dict()["rollout"]["preemptions"] == preemptions


def test_counters_of_overlapping_steps_are_those_of_one() -> None:
    """Every prompt of 100 tokens is computed once on each replica that has a sample of it, of 16 prompts at
    most 128 times, whatever number of steps is simulated."""
    result = simulate_rl(experiment(placement="async", rollout={"gpus": 4}), simulator())
    assert 16 * 100 <= result.to_dict()["rollout"]["prefill_tokens"] <= 128 * 100


@pytest.mark.parametrize(
    ("busy", "advice"),
    [
        ((0.95, 0.5), "as long as the rollout takes"),
        ((0.5, 0.95), "as long as the trainer takes"),
        ((0.95, 0.95), ""),
    ],
)
def test_the_side_that_never_rests_is_the_one_that_more_gpus_help(
    busy: tuple[float, float], advice: str
) -> None:
    result = simulate_rl(experiment(placement="async", rollout={"gpus": 4}), simulator())
    step = replace(result.step, busy_rollout=busy[0], busy_training=busy[1])
    text = " ".join(replace(result, step=step).loop_sentences())
    assert ("so that a step is" in text) == bool(advice)
    assert advice in text
    assert "so that a step is" not in " ".join(replace(colocated(), step=step).loop_sentences())


def test_defaults_of_the_framework_are_said_and_never_replace_what_the_file_states() -> None:
    silent = experiment(framework="verl")
    silent = silent.model_copy(update={"training": type(silent.training)(sequence_length=2048)})
    job = resolve_rl(silent, simulator())
    assert job.update_job.training.activation_checkpointing == "full"
    assert any("training.activation_checkpointing = full" in note for note in job.notes)
    stated = type(silent.training)(
        sequence_length=2048, activation_checkpointing="none", gradient_accumulation_steps=4
    )
    job = resolve_rl(silent.model_copy(update={"training": stated}), simulator())
    assert job.update_job.training.activation_checkpointing == "none"
    assert not any("activation_checkpointing" in note for note in job.notes)
    assert any("training.gradient_accumulation_steps = 4 does not count" in note for note in job.notes)


def test_the_text_says_how_old_and_how_many_samples_are_trained_on() -> None:
    """With 4 of 16 prompts more, whose responses are the longest."""
    lost = " ".join(simulate_rl(experiment(over_sampling=1.25), simulator()).lines())
    assert re.search(r"[1-4]\d % of the generated tokens are dropped\.", lost)
    late = " ".join(simulate_rl(experiment(placement="async"), simulator()).lines())
    assert "Samples are 1.0 versions older than the policy in the mean, at most 1." in late


def test_three_lines_are_the_verdict_the_step_and_the_hours() -> None:
    asked = experiment()
    result = colocated()
    fits, step, bill = _joined(result.brief_lines())
    assert fits.startswith(f"{result.verdict.word.upper()}  ")
    assert step.startswith(f"step {format_seconds(result.step.seconds)} (")
    hours = 1000 * result.step.seconds * 8 / 3600
    assert bill == f"1,000 steps: {format_amount(hours)} GPU-hours"
    priced = zsim.Experiment(**{**dict(asked), "cost": {"gpu_hour_price": 2.0}})
    job = replace(result.job, experiment=priced)
    assert _joined(replace(result, job=job).brief_lines())[2].endswith(f", {format_amount(2 * hours)} USD")


def _joined(lines: Iterable[str]) -> list[str]:
    """Lines, those that go on in a second one as one."""
    return "\n".join(lines).replace("\n  ", " ").split("\n")


FILE = """
model = "llama-3.2-1b"
cluster = "dgx-h100"
nodes = 1
training.sequence_length = 2048
strategy.kind = "fsdp2"
[rl]
framework = "nemo-rl"
prompts_per_step = 8
samples_per_prompt = 4
lengths.response.mean = 100
lengths.prompt.mean = 50
lengths.max_response = 500
"""


@pytest.mark.parametrize("option", [["--full"], ["--unfold"], ["--tokens", "1T"], ["--samples", "9"]])
def test_options_that_do_nothing_are_refused_by_name(option: list[str], tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(FILE)
    with pytest.raises(InputError, match=f"^{option[0]}: does nothing for an experiment with \\[rl\\]"):
        run_command("run", str(tmp_path / "rl.toml"), *option)


def test_the_folder_that_was_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rl.toml").write_text(FILE)
    run_command("run", str(tmp_path / "rl.toml"), "--brief", "--out", str(tmp_path / "out"))
    lines = capsys.readouterr().out.splitlines()
    written = [tmp_path / "out" / name for name in ("report.html", "trace.json.gz", "report.json")]
    assert [line.split()[-1] for line in lines[-3:]] == [str(path) for path in written]
    assert all(path.exists() for path in written)


def run_command(*arguments: str) -> None:
    """A command of zsim, in this process."""
    typer.main.get_command(app)(list(arguments), standalone_mode=False)
