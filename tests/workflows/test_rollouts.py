"""Over-sampling, partial rollouts, turns, critics and drafts, against what holds for any seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.workflows.test_loop import LENGTHS, colocated, experiment, fixed, looped, resolved, simulator
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.ops import MODEL_STATES
from zsim.specs.experiment.load import change_experiment
from zsim.specs.library import Library
from zsim.specs.strategy.registry import workflow_names
from zsim.units import format_bytes
from zsim.workflows.rl.framework import SINGLE_TENSOR_SECONDS, workflow_of
from zsim.workflows.rl.job import RlJob, packed_job, resolve_rl
from zsim.workflows.rl.loop import Loop, split_turns
from zsim.workflows.rl.memory import PhaseMemory, memory_by_phase, remedies
from zsim.workflows.rl.packing import batch_by_count, batch_padded, pack
from zsim.workflows.rl.phases import BROADCAST_SHARE, num_tensors, phase_times, sync_seconds
from zsim.workflows.rl.result import simulate_rl
from zsim.workflows.rollout.engine import ENGINES, largest_graph

ASYNC: dict[str, Any] = {"placement": "async", "rollout": {"gpus": 4}}


def test_one_prompt_for_each_that_is_trained_on_is_no_over_sampling() -> None:
    assert looped(resolved(over_sampling=1.0)).seconds == looped(resolved()).seconds


def test_more_prompts_than_needed_end_the_rollout_earlier_and_lose_tokens() -> None:
    plain, more = looped(resolved()), looped(resolved(over_sampling=1.5))
    assert more.rollout < plain.rollout
    assert len(more.requests) == len(plain.requests) == 128
    assert more.dropped_tokens > 0 == plain.dropped_tokens


def test_a_step_with_over_sampling_trains_on_the_prompts_that_end_first() -> None:
    """Those whose longest response is the shortest of all that are started, as in the loop, unless the
    others go on in the next step.
    """
    job = resolved(over_sampling=1.5)
    trained = looped(job).requests
    assert job.samples.responses.sum() == pytest.approx(sum(r.response_tokens for r in trained), rel=0.02)
    assert job.samples.responses.shape == resolved().samples.responses.shape
    assert job.samples.responses.sum() < 0.9 * resolved().samples.responses.sum()
    continued = resolved(over_sampling=1.5, partial_rollout=True)
    assert continued.samples.responses.sum() == resolved().samples.responses.sum()


def test_what_a_step_does_not_depend_on_is_named() -> None:
    job = resolved(placement="split", offload={"optimizer": True}, rollout={"acceptance": 0.5})
    notes = " ".join(job.notes)
    assert "rl.offload.optimizer: no effect without placement 'colocated'" in notes
    assert "rl.rollout.acceptance: no effect without draft_tokens" in notes
    assert "no effect" not in " ".join(resolved(offload={"optimizer": True}).notes)
    with pytest.raises(InputError, match=r"rl\.rollout\.expert: found 2, but llama-3.2-1b has no experts"):
        resolved(rollout={"expert": 2})


def test_steps_between_syncs_make_samples_older() -> None:
    """Every third step gets new weights: its samples are 0, 1 and 2 versions old."""
    step = looped(resolved(sync={"every": 3}))
    assert (step.mean_staleness, step.max_staleness) == (1.0, 2)


def test_generated_tokens_are_trained_on_or_dropped() -> None:
    """Aborted responses keep what they have, which is what is dropped."""
    step = looped(resolved(over_sampling=1.5))
    trained = sum(request.response_tokens for request in step.requests)
    assert sum(log.generated_tokens for log in step.logs) == trained + step.dropped_tokens


def test_partial_rollouts_drop_nothing() -> None:
    step = looped(resolved(over_sampling=1.5, partial_rollout=True))
    assert step.dropped_tokens == 0
    assert step.max_staleness >= 1


def test_partial_rollouts_of_as_many_prompts_as_needed_change_nothing() -> None:
    assert looped(resolved(partial_rollout=True)).seconds == looped(resolved()).seconds


def test_rounds_of_sampling_repeat_the_rollout() -> None:
    once, twice = looped(resolved()), looped(resolved(sampling_rounds=2.0))
    assert twice.rollout == pytest.approx(2 * once.rollout)
    trained = sum(request.response_tokens for request in once.requests)
    assert twice.dropped_tokens == trained
    more = looped(resolved(over_sampling=1.5))
    again = looped(resolved(over_sampling=1.5, sampling_rounds=2.0))
    kept = sum(request.response_tokens for request in more.requests)
    assert again.dropped_tokens == 2 * more.dropped_tokens + kept


def test_a_rollout_that_drains_holds_the_update_until_responses_end() -> None:
    keeps = looped(resolved(**ASYNC, partial_rollout=True), training=1.0)
    drains = looped(resolved(**ASYNC, partial_rollout=False), training=1.0)
    assert drains.seconds >= keeps.seconds


def test_new_weights_between_iterations_keep_all_tokens() -> None:
    """In flight or not, every response of a trained step has all of its tokens."""
    for partial in (True, False):
        step = looped(resolved(**ASYNC, partial_rollout=partial), training=1.0, weight_sync=0.5)
        assert all(request.generated == request.response_tokens for request in step.requests)


def test_turns_have_the_tokens_of_the_response() -> None:
    assert split_turns(10, 4) == (2, 3, 2, 3)
    assert split_turns(2, 5) == (1, 1)


def test_turns_of_an_environment_without_time_or_tokens_generate_the_same() -> None:
    """Each turn costs a prefill of the token before it, and finds the others in the cache."""
    single, turns = looped(resolved()), looped(resolved(environment={"turns": 3}))
    tokens = [sum(request.response_tokens for request in step.requests) for step in (single, turns)]
    assert tokens[0] == tokens[1]
    assert turns.seconds == pytest.approx(single.seconds, rel=0.1)


def test_an_environment_that_takes_its_time_makes_the_rollout_longer() -> None:
    """Two waits of 5 s at least, for every sample."""
    single = looped(resolved())
    slow = looped(resolved(environment={"turns": 3, "seconds": "5 s"}))
    assert slow.seconds > single.seconds + 5.0
    assert min(request.end_seconds for request in slow.requests) > 10.0


def test_observations_are_trained_on() -> None:
    plain = resolved(environment={"turns": 3})
    more = resolved(environment={"turns": 3, "observation_tokens": 60})
    assert more.whole_pass.total_tokens - plain.whole_pass.total_tokens == 128 * 2 * 60


def test_few_environments_answer_one_after_the_other() -> None:
    many = looped(resolved(environment={"turns": 2, "seconds": "1 s"}))
    few = looped(resolved(environment={"turns": 2, "seconds": "1 s", "concurrency": 2}))
    assert few.seconds > many.seconds
    assert few.seconds > 128 / 2 * 1.0


def test_a_draft_that_is_never_accepted_only_costs() -> None:
    none = looped(resolved()).rollout
    useless = looped(resolved(rollout={"draft_tokens": 2, "acceptance": 0.0})).rollout
    good = looped(resolved(rollout={"draft_tokens": 2, "acceptance": 0.8})).rollout
    assert good < none < useless


def test_acceptance_is_never_predicted() -> None:
    with pytest.raises(InputError, match=r"rl.rollout.acceptance: missing beside draft_tokens"):
        resolved(rollout={"draft_tokens": 2})


def test_a_critic_as_large_as_the_actor_doubles_the_updates() -> None:
    actor = phase_times(resolved(framework="openrlhf", algorithm="grpo"), simulator())
    both = phase_times(resolved(framework="openrlhf", algorithm="ppo"), simulator())
    assert both.training == pytest.approx(2 * actor.training, rel=0.01)
    assert both.values == pytest.approx(both.old_logprobs, rel=0.01)
    assert actor.values == 0.0


def test_a_critic_leaves_and_comes_back_as_the_actor_does() -> None:
    """As large, it takes as long beside the sleep of the engine."""
    kept = {"offload": {"parameters": False, "optimizer": False}}
    asked: tuple[dict[str, Any], ...] = (kept, {"algorithm": "grpo"}, {"algorithm": "ppo"})
    sleep, actor, both = (
        phase_times(resolved(framework="openrlhf", **table), simulator()).offload for table in asked
    )
    assert both - sleep == pytest.approx(2 * (actor - sleep), rel=1e-3)


def test_a_critic_without_ppo_is_refused() -> None:
    with pytest.raises(InputError, match=r"rl.critic.model: found a critic with algorithm 'grpo'"):
        resolved(critic={"model": "llama-3.2-1b"})


def test_a_reward_model_is_a_pass_over_all_samples() -> None:
    times = phase_times(resolved(reward={"model": "llama-3.2-1b"}), simulator())
    assert times.reward == pytest.approx(times.old_logprobs, rel=0.01)


@pytest.mark.parametrize("name", workflow_names())
def test_every_framework_has_what_its_placements_need(name: str) -> None:
    framework = workflow_of(name)
    for placement in framework.placements:
        assert framework.transports[placement] in framework.syncs
        assert None in framework.engines.values() or framework.memory_utilization[placement] > 0
        assert placement in framework.controllers
    assert framework.sources


@pytest.mark.parametrize("framework", ["verl", "trl", "deepspeed-chat"])
def test_dpo_is_refused_by_its_own_name(framework: str) -> None:
    with pytest.raises(NotSimulatedError, match=r"rl.algorithm = 'dpo', whose pairs are data,: is not sim"):
        resolved(framework=framework, algorithm="dpo")


def test_deepspeed_chat_has_no_async() -> None:
    with pytest.raises(InputError, match=r"rl.placement: DeepSpeed-Chat has no 'async'; expected colocated"):
        resolved(framework="deepspeed-chat", algorithm="ppo", placement="async")


def test_shards_to_shards_sends_each_receiver_its_part() -> None:
    """Twice as many tensor ranks each get half: the seconds beyond the fixed ones halve."""
    jobs = [
        resolved(placement="split", rollout={"gpus": 4, "tensor": tensor}, sync={"transport": "reshard"})
        for tensor in (1, 2)
    ]
    fixed_seconds = jobs[0].sync.seconds + jobs[0].sync.seconds_per_tensor * 147
    one, two = (sync_seconds(job) - fixed_seconds for job in jobs)
    assert one == pytest.approx(2 * two, rel=0.05)


def broadcast_seconds(framework: str, rollout_gpus: int, nodes: int) -> float:
    """Seconds in which the bytes of a broadcast move, without calls."""
    asked = experiment(framework=framework, placement="split", rollout={"gpus": rollout_gpus})
    job = resolve_rl(asked.model_copy(update={"nodes": nodes}), simulator())
    calls = job.sync.seconds + job.sync.seconds_per_tensor * num_tensors(job.update_job.model)
    return sync_seconds(job) - calls


def test_a_broadcast_leaves_by_the_cards_of_its_group() -> None:
    """verl's trainer is there with one rank, NeMo-RL's with all: the 8 cards of its node take an eighth of
    the seconds. Inside of a node NVLink takes a ninth.
    """
    one, all_cards = broadcast_seconds("verl", 8, 2), broadcast_seconds("nemo-rl", 8, 2)
    assert one == pytest.approx(8 * all_cards, rel=1e-6)
    assert one == pytest.approx(9 * broadcast_seconds("verl", 4, 1), rel=1e-6)
    assert one == pytest.approx(2 * 1.236e9 / (BROADCAST_SHARE * 50e9), rel=0.01)


def test_samples_of_a_micro_batch_attend_to_their_own_tokens_alone() -> None:
    """32 samples of 2,048 tokens are 4 micro-batches of 8 of them, not of one of 16,384 tokens."""
    job = resolved()
    batch = pack(np.full(32, 2048), 1, 16384)
    training = packed_job(job.update_job, batch).training
    assert (batch.micro_batches, batch.sample_tokens) == (4, 2048)
    assert (training.sequence_length, training.micro_batch_size) == (2048, 8)


@pytest.mark.parametrize(("replicas", "max_tokens"), [(1, 4096), (3, 4096), (8, 1000)])
def test_samples_go_into_the_first_micro_batch_with_room(replicas: int, max_tokens: int) -> None:
    """As a search of all of them has it. Samples longer than a micro-batch have one each."""
    lengths = np.random.default_rng(1).lognormal(6.0, 0.8, 700).clip(1, 4000).astype(np.int64)
    loads = [0] * replicas
    fills: list[list[int]] = [[] for _ in range(replicas)]
    for length in np.sort(lengths)[::-1]:
        replica = loads.index(min(loads))
        loads[replica] += int(length)
        fit = [index for index, fill in enumerate(fills[replica]) if fill + length <= max_tokens]
        if fit:
            fills[replica][fit[0]] += int(length)
        else:
            fills[replica].append(int(length))
    assert pack(lengths, replicas, max_tokens).micro_batches == max(map(len, fills))


def test_micro_batches_are_filled_as_a_framework_fills_them() -> None:
    """Samples of 7, 6 and 5 tokens with room for 10: each alone, where NeMo-RL's stages pad all to 7. The 18
    tokens are two micro-batches of verl's, one of which is longer than 10.
    """
    lengths = np.array([6, 7, 5])
    first, padded, even = (pack(lengths, 1, 10, fill) for fill in ("first-fit", "padded", "even"))
    assert (first.micro_batches, first.tokens) == (3, 6)
    assert (padded.micro_batches, padded.tokens, padded.sample_tokens) == (3, 7, 7)
    assert (even.micro_batches, even.tokens, even.total_tokens) == (2, 9, 18)
    # 4 and 3 share one, whose 3 grows by the 2 that are missing of 9, which has one of its own.
    shared = pack(np.array([9, 4, 3]), 1, 9, "padded")
    assert (shared.micro_batches, shared.tokens) == (2, 9)
    assert shared.sample_tokens == pytest.approx((81 + 16 + 25) / 18)
    # A replica with fewer micro-batches, or one beyond the room, runs as much as the others.
    uneven = pack(np.array([12, 5, 5]), 2, 10, "padded")
    assert (uneven.micro_batches, uneven.tokens) == (1, 12)
    assert uneven.sample_tokens == pytest.approx((144 + 25 + 49) / 24)


def test_stages_of_nemo_rl_run_padded_micro_batches_and_others_do_not() -> None:
    def tokens(framework: str, pipeline: int) -> float:
        asked = experiment(framework=framework)
        data = {"parallelism.pipeline": pipeline, "strategy.kind": "megatron"}
        return resolve_rl(change_experiment(asked, data), simulator()).update.tokens

    assert tokens("nemo-rl", 2) > 1.1 * tokens("nemo-rl", 1)
    assert tokens("slime", 2) == pytest.approx(tokens("slime", 1), rel=0.02)


def test_passes_without_backward_have_micro_batches_of_their_own() -> None:
    job = resolved(logprob_micro_batch_size=4)
    assert job.whole_pass.micro_batches * 3 < resolved().whole_pass.micro_batches
    assert job.update == resolved().update
    assert resolved(logprob_micro_batch_tokens=4 * 2048).whole_pass == job.whole_pass
    padded = resolved(batching="padded", logprob_micro_batch_size=4)
    assert (padded.whole_pass.micro_batches, padded.update.micro_batches) == (4, 8)
    with pytest.raises(
        InputError, match=r"rl.logprob_micro_batch_tokens: found 9 .* rl.logprob_micro_batch_size"
    ):
        resolved(batching="padded", logprob_micro_batch_tokens=9)
    both = {"logprob_micro_batch_size": 3, "logprob_micro_batch_tokens": 9}
    with pytest.raises(InputError, match=r"rl.logprob_micro_batch_tokens: found 9 with .* of 3 samples"):
        resolved(batching="padded", **both)
    with pytest.raises(
        InputError, match=r"found 9 beside rl.logprob_micro_batch_size 3; expected one of them"
    ):
        resolved(**both)


def test_micro_batches_of_a_number_of_samples_are_padded_or_not() -> None:
    """Two replicas have 5 and 3 samples, 2 to a micro-batch: three, of which padding to their own longest
    makes (4, 8, 5) of both replicas at once, and padding to the cap always two of 10.
    """
    lengths = np.array([1, 4, 8, 2, 5, 3, 2, 1])
    plain, own = batch_by_count(lengths[:6], 1, 2), batch_padded(lengths[:6], 1, 2)
    assert (plain.micro_batches, plain.tokens, plain.total_tokens) == (3, 23 / 3, 23)
    assert plain.sample_tokens == pytest.approx((1 + 16 + 64 + 4 + 25 + 9) / 23)
    assert (own.micro_batches, own.tokens, own.sample_tokens) == (3, 2 * (4 + 8 + 5) / 3, 17 / 3)
    both = batch_padded(lengths, 2, 2)  # (1, 4), (8, 2) beside (5, 3), (2, 1)
    assert (both.micro_batches, both.tokens) == (2, 5 + 8)
    parts = batch_by_count(lengths, 2, 2)
    assert (parts.micro_batches, parts.tokens, parts.total_tokens) == (2, (8 + 10) / 2, 26)
    cap = batch_padded(lengths, 2, 2, 10)
    assert (cap.micro_batches, cap.tokens, cap.total_tokens) == (2, 20, 26)


def test_padding_takes_longer_and_equal_lengths_need_none() -> None:
    """Packing of as many samples as have room is the same where all are alike."""
    kinds = ("packed", "unpadded", "padded")
    tokens = [resolved(batching=kind).update.tokens for kind in kinds]
    assert tokens[2] > 1.3 * tokens[1]
    alike = {**LENGTHS, "response": {"law": "constant", "mean": 1948}, "max_response": 1948}
    equal = [resolved(batching=kind, lengths=alike) for kind in kinds]
    assert {(job.update.micro_batches, job.update.tokens) for job in equal} == {(8, 2048.0)}
    with pytest.raises(
        InputError, match=r"rl.micro_batch_tokens: found 4,096 with micro-batches of 1 sample"
    ):
        resolved(batching="padded", micro_batch_tokens=4096)
    assert resolved(micro_batch_tokens=16384).update.micro_batches == 1


@pytest.mark.parametrize(
    ("framework", "tokens"), [("trl", "sides"), ("nemo-rl", "rollout"), ("deepspeed-chat", "cap")]
)
def test_frameworks_pad_to_what_they_pad(framework: str, tokens: str) -> None:
    """TRL prompts and completions each to their longest, NeMo-RL samples, DeepSpeed-Chat to the cap."""
    lengths = {**LENGTHS, "prompt": {"low": 50, "high": 150}}
    algorithm = "ppo" if framework == "deepspeed-chat" else "grpo"
    asked = experiment(framework=framework, lengths=lengths, batching="padded", algorithm=algorithm)
    job = resolve_rl(asked, simulator())
    prompts, responses = job.samples.prompts, job.samples.responses
    sides = int(prompts.max() + responses.max())
    expected = {"sides": sides, "rollout": int(job.samples.totals.max()), "cap": 2048}
    assert job.update.sample_tokens == expected[tokens]


def test_a_tensor_of_a_convolution_is_sent_once_and_each_expert_by_itself() -> None:
    library = Library()
    dense, experts = library.model("qwen3.5-27b"), library.model("qwen3-30b-a3b")
    for model in (dense, library.model("nemotron-3-nano-4b")):
        assert num_tensors(model) == len(list(model.named_parameters()))
    assert num_tensors(experts) == 18_867  # as model.safetensors.index.json of Qwen3-30B-A3B has them


def test_without_buckets_every_parameter_has_a_call() -> None:
    """146 parameters, less the part of each that buckets take as well."""
    packed, single = (
        resolved(framework="verl", placement="split", sync=sync) for sync in ({}, {"bucket": 0})
    )
    more = 146 * (SINGLE_TENSOR_SECONDS - packed.sync.seconds_per_tensor)
    assert sync_seconds(single) - sync_seconds(packed) == pytest.approx(more)


def test_shared_memory_of_other_gpus_is_refused() -> None:
    with pytest.raises(InputError, match=r"rl.sync.transport: found 'ipc' with placement 'split'"):
        resolved(placement="split", sync={"transport": "ipc"})


def test_replicas_alike_are_simulated_in_part() -> None:
    """Of 16,384 samples on 8 replicas 4 replicas have half, and the step is about as long as all would be."""
    job = resolved(prompts_per_step=2048, samples_per_prompt=8, mini_batch_samples=1024)
    loop = Loop(job, fixed(job))
    assert (len(loop.replicas), loop.part) == (4, 0.5)


def test_the_range_holds_the_step() -> None:
    low, high = colocated().step_seconds_range
    assert low < colocated().step.seconds < high


def test_an_engine_on_gpus_of_its_own_fits_with_the_share_that_its_framework_has() -> None:
    """0.95 of OpenRLHF, beyond what torch's allocator leaves to a trainer. 0.99 leaves no room for graphs,
    and the share that is proposed does."""
    asked = {"framework": "openrlhf", "placement": "split"}
    result = simulate_rl(experiment(**asked), simulator())
    assert result.capacity_bytes < result.memory["rollout"].total < result.job.cluster.gpu.memory.capacity
    assert result.verdicts["rollout"].word == "fits"
    full = simulate_rl(experiment(**asked, rollout={"gpu_memory_utilization": 0.99}), simulator())
    (sentence,) = full.remedies
    assert full.phase_capacity_bytes("rollout") == full.job.cluster.gpu.memory.capacity
    share = float(sentence.partition("gpu_memory_utilization = ")[2])
    mended = simulate_rl(experiment(**asked, rollout={"gpu_memory_utilization": share}), simulator())
    assert (full.verdicts["rollout"].word, mended.verdicts["rollout"].word) == ("does not fit", "fits")


def test_an_engine_that_does_not_fit_beside_the_trainer_says_what_to_change() -> None:
    """verl keeps the trainer's states unless told otherwise, which count against the engine's share."""
    result = simulate_rl(experiment(framework="verl", rollout={"gpu_memory_utilization": 1.0}), simulator())
    assert not result.fits
    (sentence,) = [text for text in result.remedies if text.startswith("rollout needs")]
    assert "rl.offload.optimizer = true" in sentence
    assert "rl.rollout.gpu_memory_utilization = 0.9" in sentence
    missing, states = (format_bytes(size) for size in (10**12, 10**11))
    phase = PhaseMemory({"optimizer_states": 10**11, "kv_cache": 10**12})
    (sentence,) = remedies(result.job, {"weight_sync": phase}, 10**11)
    assert sentence.startswith(f"weight sync needs {missing} more")
    assert f"rl.offload.optimizer = true ({states} of it), or " in sentence
    offloaded = experiment(
        framework="verl",
        rollout={"gpu_memory_utilization": 0.95},
        offload={"optimizer": True, "parameters": True},
    )
    assert simulate_rl(offloaded, simulator()).memory["rollout"].total < result.memory["rollout"].total


def test_an_engine_that_schedules_ahead_hides_its_python() -> None:
    """vLLM since 0.14, and since 0.25 where Ray runs its ranks: NeMo-RL's of more than one GPU."""
    seconds = {
        (tensor, version): looped(resolved(rollout={"tensor": tensor, "engine_version": version})).rollout
        for tensor in (1, 2)
        for version in ("0.11.2", "0.17.1", "0.25")
    }
    assert seconds[1, "0.17.1"] == seconds[1, "0.25"] < 0.95 * seconds[1, "0.11.2"]
    assert seconds[2, "0.25"] < 0.95 * seconds[2, "0.17.1"]
    assert seconds[2, "0.17.1"] == seconds[2, "0.11.2"]


def test_an_engine_is_the_one_that_is_said() -> None:
    """TensorRT-LLM reserves whole answers, and computes prompts without graphs."""
    vllm, trtllm = (resolved(framework="verl", rollout={"engine": name}) for name in ("vllm", "trtllm"))
    assert trtllm.limits.reserves_responses
    assert not vllm.limits.reserves_responses
    assert trtllm.pricer().launch_seconds > vllm.pricer().launch_seconds


def test_sglangs_graphs_are_of_decoding_and_of_no_more_sequences_than_it_captures() -> None:
    """Up to 256 on an H100 with less than 4 tensor ranks: 257 sequences are launched kernel by kernel."""
    vllm, sglang = (resolved(framework="verl", rollout={"engine": name}) for name in ("vllm", "sglang"))
    assert [job.pricer().max_graph for job in (vllm, sglang)] == [512, 256]
    memory = sglang.cluster.gpu.memory.model_copy(update={"capacity": 16 * 2**30})
    small = sglang.cluster.gpu.model_copy(update={"memory": memory})
    assert [largest_graph(ENGINES["sglang"], small, ranks) for ranks in (1, 4)] == [8, 8]
    few, many = (sglang.pricer().seconds(count, 300 * count) for count in (256, 257))
    assert many > 1.3 * few
    wide = resolved(framework="verl", rollout={"engine": "sglang", "tensor": 4})
    assert wide.pricer().max_graph == 512


def test_an_engine_has_the_bounds_that_its_framework_gives_it() -> None:
    """AReaL 4aef98d8 cli_args.py: 256 sequences of vLLM, and SGLang's 32,768 tokens of prompts."""
    asked = {name: resolved(framework="areal", placement="split", rollout={"engine": name}).limits
             for name in ("sglang", "vllm")}  # fmt: skip
    assert (asked["sglang"].max_num_seqs, asked["sglang"].max_num_batched_tokens) == (2048, 32768)
    assert (asked["vllm"].max_num_seqs, asked["vllm"].max_num_batched_tokens) == (256, 8192)


@pytest.mark.parametrize("framework", ["trl", "openrlhf", "prime-rl", "slime"])
def test_an_engine_that_a_framework_has_not_is_refused(framework: str) -> None:
    placement = "async" if framework == "prime-rl" else "split"
    rollout = {"engine": "trtllm", "gpus": 4}
    with pytest.raises(InputError, match=r"rl.rollout.engine: .* has no 'trtllm'; expected (vllm|sglang)$"):
        resolved(framework=framework, placement=placement, rollout=rollout)


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_releases_of_other_engines_than_vllm_are_refused(engine: str) -> None:
    with pytest.raises(InputError, match=rf"rl.rollout.engine_version: found '0.4' with engine '{engine}'"):
        resolved(framework="verl", rollout={"engine": engine, "engine_version": "0.4"})


def test_a_framework_with_an_engine_of_its_own_expects_none() -> None:
    with pytest.raises(InputError, match=r"has no 'vllm'; expected none$"):
        resolved(framework="deepspeed-chat", algorithm="ppo", rollout={"engine": "vllm"})


def test_only_log_probabilities_cost_their_python() -> None:
    """OpenRLHF 3c3be623 asks for them with is_correction_enable alone, which is False by default."""
    seconds = {
        name: resolved(framework=name, placement="split").pricer().host.seconds_per_sequence
        for name in ("openrlhf", "nemo-rl")
    }
    assert seconds["openrlhf"] < 0.2 * seconds["nemo-rl"]


def test_adapters_run_without_graphs_unless_they_are_merged() -> None:
    """NeMo-RL adds them to the weights that it sends, verl loads them beside weights that are whole."""
    seconds = {}
    for framework in ("verl", "nemo-rl"):
        plain = experiment(framework=framework, rollout={"tensor": 1})
        adapted = change_experiment(plain, {"training.lora.rank": 8})
        jobs = [resolve_rl(asked, simulator()) for asked in (plain, adapted)]
        seconds[framework] = [looped(job).rollout for job in jobs]
        assert jobs[0].model.weight_bytes == jobs[1].model.weight_bytes
    assert seconds["verl"][1] > 2 * seconds["verl"][0]
    assert seconds["nemo-rl"][1] == seconds["nemo-rl"][0]


def hybrid(stage: int = 3, **rl: Any) -> RlJob:
    """8 GPUs whose 128 samples are generated in batches of 4 each."""
    asked = experiment(framework="deepspeed-chat", algorithm="ppo", **rl)
    changes = {"strategy": {"kind": "deepspeed", "stage": stage}, "training.micro_batch_size": 4}
    return resolve_rl(change_experiment(asked, changes), simulator())


def test_a_hybrid_engine_generates_a_micro_batch_after_the_other() -> None:
    """16 samples of each GPU in 4 batches, for each of which the weights are gathered."""
    job, whole = hybrid(), hybrid(rollout={"max_num_seqs": 16})
    assert (job.rollout_batches, whole.rollout_batches) == (4, 1)
    assert sync_seconds(job) == pytest.approx(4 * sync_seconds(whole))
    assert looped(job).rollout > 1.5 * looped(whole).rollout
    with pytest.raises(InputError, match=r"found 0.5 with DeepSpeed-Chat, whose cache"):
        hybrid(rollout={"gpu_memory_utilization": 0.5})


def test_a_hybrid_engine_holds_gathered_weights_for_the_rollout_alone() -> None:
    """The cache has 4 sequences of the cap. ZeRO-2's weights are whole, and nothing is gathered."""
    for stage, weights, bucket in ((3, hybrid().model.weight_bytes, 10**9), (2, 0, 0)):
        job = hybrid(stage)
        times = phase_times(job, simulator())
        memory = memory_by_phase(job, times)
        assert times.weight_sync == (sync_seconds(job) if stage == 3 else 0.0)
        assert memory["weight_sync"].by_category["bucket"] == bucket
        assert memory["rollout"].by_category["rollout_weights"] == weights
        assert memory["training"].by_category["rollout_weights"] == 0
        assert job.cache_bytes == 4 * 2048 * job.model.cache_bytes_per_token
        assert memory["training"].by_category["kv_cache"] == job.cache_bytes


def test_a_hybrid_engine_that_does_not_fit_names_what_can_help() -> None:
    """Its cache has as many sequences as a batch, and takes no part of the memory. While one of actor and
    critic is trained, states of the other can leave."""
    asked = hybrid().experiment
    result = simulate_rl(change_experiment(asked, {"rl.rollout.max_num_seqs": 2000}), simulator())
    sentences = {text.partition(" needs")[0]: text for text in result.remedies}
    assert "a smaller rl.rollout.max_num_seqs" in sentences["rollout"]
    assert "gpu_memory_utilization" not in sentences["rollout"]
    for key in ("optimizer", "parameters"):
        assert f"rl.offload.{key} = true" in sentences["training"]
        changes = {"rl.rollout.max_num_seqs": 2000, f"rl.offload.{key}": True}
        mended = simulate_rl(change_experiment(asked, changes), simulator())
        assert mended.memory["training"].total < result.memory["training"].total


def test_a_critic_that_is_not_offloaded_stays_beside_the_actor() -> None:
    """As large as the actor it has as many states, in the rollout and while the actor is trained."""
    offload = {"parameters": False, "optimizer": False}
    actor, both = (
        simulate_rl(experiment(framework="openrlhf", algorithm=name, offload=offload), simulator()).memory
        for name in ("grpo", "ppo")
    )
    states = sum(actor["weight_sync"].by_category[name] for name in MODEL_STATES)
    for phase in ("rollout", "training"):
        assert both[phase].total - actor[phase].total == pytest.approx(states, rel=1e-3)


def test_only_what_can_help_is_suggested_where_weights_leave_no_room() -> None:
    large = experiment().model_copy(update={"model": "llama-3.1-70b"})
    with pytest.raises(InputError, match=r"expected more GPUs to a replica \(rl.rollout.tensor\)$"):
        resolve_rl(large, simulator())


def test_responses_that_are_aborted_beside_prompts_do_not_go_on() -> None:
    """Equal lengths end at once, so that the last prompts that start are in an iteration when the batch is
    complete."""
    lengths = {"prompt": {"mean": 300}, "response": {"law": "constant", "mean": 150}, "max_response": 400}
    rollout = {"tensor": 2, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "prefix_caching": False}
    step = looped(resolved(lengths=lengths, rollout=rollout, over_sampling=1.5))
    assert step.dropped_tokens > 0
    assert sum(log.generated_tokens for log in step.logs) == 128 * 150 + step.dropped_tokens


def test_prompts_that_were_finished_beyond_the_needed_are_of_the_next_batch() -> None:
    """Nothing is dropped, so that what is generated is trained on but for what goes on at the end."""
    lengths = {**LENGTHS, "response": {"law": "constant", "mean": 150}, "max_response": 400}
    job = resolved(lengths=lengths, over_sampling=1.5, partial_rollout=True)
    loop = Loop(job, fixed(job))
    steps = loop.env.run(until=loop.env.process(loop.train(4)))
    trained = sum(request.generated for step in steps for request in step.requests)  # type: ignore[union-attr]
    rest = sum(request.generated for group in loop._batches[-1].groups for request in group.requests)
    assert sum(replica.log.generated_tokens for replica in loop.replicas) == trained + rest
    assert trained == 4 * 128 * 150


@pytest.mark.parametrize(("framework", "oldest"), [("slime", 1), ("prime-rl", 2)])
def test_a_rollout_drains_while_environments_answer(framework: str, oldest: int) -> None:
    """The last response that runs may be one whose environment answers next. prime-rl trains on what ended
    before it, so that it waits for a version more.
    """
    step = looped(
        resolved(
            **ASYNC,
            framework=framework,
            max_staleness=1,
            partial_rollout=False,
            environment={"turns": 2, "seconds": "0.5 s", "observation_tokens": 40},
        ),
        training=0.1,
        weight_sync=1.0,
    )
    assert step.max_staleness == oldest


def test_a_sync_beside_training_is_waited_for_only_by_the_next() -> None:
    """Updates of 5 s hide syncs of 2 s. Those of 1 s hide a part: engines stand still during a sync, so that
    a step is one and a rollout.
    """
    overlapped: dict[str, Any] = {**ASYNC, "sync": {"overlap": True}}
    short = {"lengths": {**LENGTHS, "max_response": 10, "response": {"law": "constant", "mean": 10}}}
    hidden = looped(resolved(**overlapped, **short), training=5.0, weight_sync=2.0)
    assert hidden.exposed_sync == 0.0
    assert hidden.seconds == pytest.approx(5.0, rel=0.01)
    partly = looped(resolved(**overlapped, **short), training=1.0, weight_sync=2.0)
    assert 2.0 < partly.seconds < 2.7
    plain = looped(resolved(**ASYNC, **short), training=5.0, weight_sync=2.0)
    assert plain.exposed_sync == 2.0
    assert plain.seconds == pytest.approx(7.0, rel=0.01)
    with pytest.raises(InputError, match=r"rl.sync.overlap: found true where every response"):
        resolved(sync={"overlap": True})


def test_nemo_rl_lets_samples_be_older_by_whole_steps() -> None:
    """Its prompts in flight are a step's, times the age. verl starts a part of the next step's."""
    with pytest.raises(InputError, match=r"rl.max_staleness: found 0.25, but NeMo-RL lets .* whole steps"):
        resolved(**ASYNC, max_staleness=0.25)
    assert resolved(**ASYNC, framework="verl", max_staleness=0.25).max_staleness == 0.25


def test_an_environment_takes_as_long_for_a_response_whatever_the_engines() -> None:
    turns = {"turns": 3, "seconds": "2 s", "sigma": 0.7}
    loops = [
        Loop(job, fixed(job))
        for gpus in (2, 4)
        for job in [resolved(environment=turns, rollout={"gpus": gpus}, placement="split")]
    ]
    for loop in loops:
        loop.start_samples()
    first, second = (
        {number: list(delays) for number, delays in loop._turn_seconds.items()} for loop in loops
    )
    assert first == second
    assert len(first) == 128
    assert {len(delays) for delays in first.values()} == {2}


def test_what_is_exposed_sums_to_the_step_where_rollouts_differ() -> None:
    """Batches of partial rollouts, each with other lengths and with responses of the one before."""
    asked = experiment(placement="split", rollout={"gpus": 4}, over_sampling=1.5, partial_rollout=True)
    result = simulate_rl(asked, simulator())
    assert result.exposed_seconds["rollout"] == pytest.approx(result.step.rollout)
    assert sum(result.exposed_seconds.values()) == pytest.approx(result.step.seconds)
