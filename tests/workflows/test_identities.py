"""Limits and identities of a step of reinforcement learning that other tests of this folder do not have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.workflows.test_loop import experiment, looped, resolved, simulator
from tests.workflows.test_replica import requests, run
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.engine.micro_batches import simulate_step
from zsim.engine.simulator import Simulator
from zsim.frameworks.verl.workflow import RELOAD_BANDWIDTH
from zsim.specs.cluster.files import load_cluster
from zsim.specs.experiment.rl import RlLengthsTable
from zsim.specs.experiment.tables import Experiment
from zsim.specs.library import Library
from zsim.workflows.rl.framework import Offloads
from zsim.workflows.rl.job import RlJob, packed_job, resolve_rl
from zsim.workflows.rl.memory import host_memory_by_phase, memory_by_phase, remedies
from zsim.workflows.rl.phases import model_bytes, num_tensors, phase_times, sync_seconds
from zsim.workflows.rl.result import RlResult, phase_spread, simulate_rl
from zsim.workflows.rl.samples import draw_samples
from zsim.workflows.rollout.limits import (
    BLOCK_TOKENS,
    BUDGET_OVERHEAD,
    EngineLimits,
    blocks_for,
    engine_limits,
)

GPU = load_cluster("dgx-h100").gpu


@cache
def result_of(**rl: Any) -> RlResult:
    return simulate_rl(experiment(**rl), simulator())


def test_answers_without_length_leave_trainer_and_sync() -> None:
    """One token a response: a prefill of 100 tokens remains."""
    lengths = {"prompt": {"mean": 100}, "response": {"law": "constant", "mean": 1}, "max_response": 1}
    step = looped(resolved(placement="split", lengths=lengths), training=50.0, weight_sync=2.0)
    assert step.seconds == pytest.approx(52.0, rel=0.01)


def test_a_step_off_takes_at_least_the_longer_side_and_at_most_both() -> None:
    """A slow trainer hides the rollout whole, and takes itself and the sync."""
    job = resolved(placement="async", max_staleness=1, partial_rollout=True)
    rollout = looped(job).seconds
    for training in (0.3 * rollout, 3.0 * rollout):
        step = looped(job, training=training, weight_sync=1.0)
        assert max(rollout, training) <= step.seconds <= rollout + training + 1.0
        if training > rollout:
            assert step.seconds == pytest.approx(training + 1.0, rel=0.01)


def test_half_of_the_requests_take_half_of_the_saturated_time() -> None:
    """16 slots, answers alike: 64 requests are four rounds, 32 are two, whatever runs in them."""
    limits = EngineLimits(16, 16384, 10**6, prefix_caching=False)
    four, two = (run(requests([400] * count), limits)[0] for count in (64, 32))
    assert four == pytest.approx(2 * two, rel=0.01)


def test_a_law_without_spread_is_the_constant() -> None:
    constant, narrow = (
        draw_samples(
            RlLengthsTable.model_validate(
                {"prompt": {"mean": 100}, "response": {"mean": 300, **law}, "max_response": 1500}
            ),
            16,
            8,
            2048,
        ).responses
        for law in ({"law": "constant"}, {"law": "lognormal", "sigma": 1e-4})
    )
    assert np.array_equal(constant, narrow)


def test_at_most_all_but_one_of_a_group_find_their_prompt() -> None:
    """n samples of 160 tokens, of which the last is always computed: at most 159 x (n - 1) are found."""
    for samples in (1, 2, 8):
        _, log = run(requests([50] * samples, prompt=160, group_size=samples), EngineLimits(1, 16384, 10**4))
        assert log.cached_tokens <= 160 * (samples - 1)
        assert log.cached_tokens + log.prefill_tokens == 160 * samples


def test_a_cache_for_one_sequence_is_serial() -> None:
    limits = EngineLimits(64, 16384, blocks_for(200 + 100), prefix_caching=False)
    alone, _ = run(requests([100], prompt=200), limits)
    all_four, log = run(requests([100] * 4, prompt=200), limits)
    assert all_four == pytest.approx(4 * alone, rel=1e-9)
    assert max(log.running) == 1


@pytest.mark.parametrize("transport", ["broadcast", "reshard", "host"])
def test_a_sync_is_never_faster_than_the_link_of_its_slowest_receiver(transport: str) -> None:
    """On one node, whose GPUs have 450 GB/s, and on two, of 50 GB/s cards."""
    job = resolved(placement="split", sync={"transport": transport})
    received = model_bytes(job) / job.model.layout.gpus
    assert sync_seconds(job) > received / job.cluster.node_link.bandwidth
    wide = resolve_on(2, placement="split", sync={"transport": transport})
    assert sync_seconds(wide) > received / (wide.cluster.nic.per_node * wide.cluster.nic.bandwidth)


def resolve_on(nodes: int, **rl: Any) -> RlJob:
    return resolve_rl(experiment(**rl).model_copy(update={"nodes": nodes}), simulator())


def test_a_trained_token_takes_twelve_flops_a_parameter() -> None:
    """2 to generate, 2 for the old log-probabilities, 2 for the reference's, and 6 to train: of the trainer's
    10 three fifths are the update's.
    """
    result = result_of()
    report = result.times.update.report
    flops = report.to_dict()["model_flops_per_second_per_gpu"] * report.step_seconds * 8
    trained = result.job.update.total_tokens
    parameters = result.job.update_job.model.numel
    assert flops / trained == pytest.approx(6 * parameters, rel=0.1)
    model = served_model(Library().model("llama-3.2-1b"), EngineLayout())
    weights = sum(product.numel * count for product, count in model.products.items()) + model.head.numel
    assert 2 * weights == pytest.approx(2 * parameters, rel=0.01)


def test_what_is_not_offloaded_adds_to_the_rollout() -> None:
    job, times = resolved(), result_of().times
    parts = replace(job, offloads=replace(job.offloads, parameters=False, optimizer=False))
    kept, freed = (memory_by_phase(each, times)["rollout"] for each in (parts, job))
    peaks = times.update.report.peaks["gpu"].at_total
    assert kept.total - freed.total == peaks["parameters"] + peaks["optimizer_states"]


@pytest.mark.parametrize(
    ("strategy", "bytes_of_a_parameter"),
    [({"kind": "fsdp2"}, 0), ({"kind": "ddp"}, 0), ({"kind": "megatron", "distributed_optimizer": True}, 4)],
)
def test_gradients_stay_for_the_rollout_only_as_buffers(
    strategy: dict[str, Any], bytes_of_a_parameter: int
) -> None:
    """FSDP2's are let go behind an update. Megatron's are one buffer of fp32 for all parameters."""
    asked = experiment(framework="verl", offload={"sleep_level": 1}).model_dump(exclude_unset=True)
    result = simulate_rl(Experiment.model_validate({**asked, "strategy": strategy}), simulator())
    numel = result.job.update_job.model.numel
    for phase in ("rollout", "weight_sync"):
        kept = result.memory[phase].by_category
        assert kept["gradients"] == pytest.approx(bytes_of_a_parameter * numel, rel=0.01)
        assert kept["parameters"] > 0


def test_what_leaves_the_gpus_is_on_the_host_until_it_is_back() -> None:
    """NeMo-RL's optimizer and parameters during the rollout, and the engine's weights while it sleeps at
    level 1. Eight GPUs of a node have the trainer's states once, and eight copies of a 1B's weights."""
    job, times = resolved(reference="none"), result_of().times
    host = host_memory_by_phase(job, times)
    gpu = times.update.report.peaks["gpu"].at_total
    assert host["rollout"].by_category == {name: 8 * gpu[name] for name in ("optimizer_states", "parameters")}
    assert host["weight_sync"].total == 8 * gpu["optimizer_states"]
    assert host["training"].by_category == {"rollout_weights": 8 * job.model.weight_bytes}
    two, none = (
        host_memory_by_phase(replace(job, offloads=Offloads(False, False, level)), times) for level in (2, 0)
    )
    assert all(phase.total == 0 for phases in (two, none) for phase in phases.values())


def test_a_pass_with_micro_batches_of_its_own_has_a_peak_of_its_own() -> None:
    """Old log-probabilities of four times as many samples at once have four times the logits, beside the
    parameters, while NeMo-RL's optimizer is on the host."""
    plain, wide = result_of(), result_of(logprob_micro_batch_size=4)
    assert "old_logprobs" not in {*plain.memory, *plain.host_memory}
    kept = wide.memory["old_logprobs"].by_category
    assert kept["activations"] == pytest.approx(4 * plain.times.pass_peak["activations"], rel=0.05)
    assert kept["parameters"] == wide.memory["training"].by_category["parameters"]
    assert "optimizer_states" not in kept
    assert wide.host_memory["old_logprobs"].total
    assert wide.memory["training"] == plain.memory["training"]
    vast = result_of(logprob_micro_batch_size=64, prompts_per_step=256)
    assert not vast.fits
    assert vast.verdict == vast.verdicts["old_logprobs"]
    assert "a smaller rl.logprob_micro_batch_size" in " ".join(vast.remedies)


def test_an_update_that_does_not_fit_is_told_the_key_that_sizes_its_micro_batches() -> None:
    """Where micro-batches are packed up to so many tokens, `training.micro_batch_size` says nothing."""
    packed = result_of(micro_batch_tokens=262_144, prompts_per_step=256, mini_batch_samples=2048)
    assert not packed.fits
    assert "a smaller rl.micro_batch_tokens" in " ".join(packed.remedies)
    assert "training.micro_batch_size" not in " ".join(packed.remedies)


def test_verl_moves_offloaded_parameters_for_every_pass() -> None:
    """There and back, before and after log-probabilities and updates. A reference without adapters is a model
    of its own, which stays."""
    kept, moved = (
        simulate_rl(
            experiment(framework="verl", reference="host", offload={"parameters": value}), simulator()
        )
        for value in (False, True)
    )
    seconds = 2 * moved.times.update.report.peaks["gpu"].by_category["parameters"] / RELOAD_BANDWIDTH
    for phase in ("old_logprobs", "training"):
        assert moved.phases_seconds[phase] - kept.phases_seconds[phase] == pytest.approx(seconds)
    for phase in ("reference", "weight_sync"):
        assert moved.phases_seconds[phase] == kept.phases_seconds[phase]


def test_verl_moves_the_critics_parameters_for_its_passes_too() -> None:
    """As large as the actor's: once more for the values, and once more in the updates."""
    kept, moved = (
        phase_times(resolved(framework="verl", algorithm="ppo", offload={"parameters": value}), simulator())
        for value in (False, True)
    )
    seconds = 2 * moved.critic_peak["parameters"] / RELOAD_BANDWIDTH
    assert moved.values - kept.values == pytest.approx(seconds)
    assert moved.training - kept.training == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    "strategy", [{"kind": "ddp"}, {"kind": "fsdp1"}, {"kind": "fsdp2"}, {"kind": "deepspeed", "stage": 2}]
)
def test_a_reference_of_adapters_is_the_base_alone(strategy: dict[str, Any]) -> None:
    """Its pass is that of the frozen products, and shorter than the policy's, which has adapters as well."""
    asked = experiment(framework="trl", reference="resident").model_dump(exclude_unset=True)
    asked["strategy"] = strategy
    asked["training"]["lora"] = {"rank": 8, "targets": "all-linear"}
    times = phase_times(resolve_rl(Experiment(**asked), simulator()), simulator())
    assert 0.0 < times.reference < 0.8 * times.old_logprobs


def test_intervals_hold_what_is_simulated() -> None:
    """And those of a sync are of its transport."""
    result = result_of()
    for name, (low, high) in result.phases_seconds_range.items():
        assert low <= result.phases_seconds[name] <= high
    assert phase_spread("weight_sync", "reshard") != phase_spread("weight_sync", result.job.transport)


def test_a_reference_is_either_on_the_gpus_or_on_the_host() -> None:
    """Together a shard of 16 bits of every GPU, wherever it is."""
    on_gpus, on_host = (result_of(reference=name) for name in ("resident", "host"))
    for phase in ("rollout", "training", "weight_sync"):
        moved = on_gpus.memory[phase].total - on_host.memory[phase].total
        assert on_host.host_memory[phase].total - on_gpus.host_memory[phase].total == 8 * moved > 0


def test_a_host_without_room_is_named_with_what_mends_it() -> None:
    """A node of 16 GB, where eight copies of a 1B's weights and a reference are more."""
    small = experiment(offload={"sleep_level": 1}).model_copy(
        update={"cluster": {"extends": "dgx-h100", "host": {"memory": "16 GB"}}}
    )
    result = simulate_rl(small, Simulator())
    assert not result.fits
    assert any("the host of a node has: " in text and "rl.offload.sleep_level = 2" in text
               for text in result.remedies)  # fmt: skip


def test_a_step_leaves_memory_as_it_was() -> None:
    """What an update allocates it frees: the phases that follow find the same allocator every time."""
    (program,) = result_of().times.update.plan.programs
    balance: Counter[tuple[str, str]] = Counter()
    for change in program.memory:
        balance[change.device, change.category] += change.bytes
    assert len(balance) > 2
    assert not any(balance.values())


def test_a_resident_reference_is_a_shard_of_16_bits_everywhere() -> None:
    """And none without one: 1.24 billion parameters over 8 GPUs are 309 MB."""
    with_one, without = (result_of(reference=name) for name in ("resident", "none"))
    shard = 2 * with_one.job.update_job.model.numel / 8
    for phase in ("rollout", "training", "weight_sync"):
        difference = with_one.memory[phase].total - without.memory[phase].total
        assert difference == pytest.approx(shard, rel=0.01)
    assert result_of(reference="host").memory["rollout"].total == without.memory["rollout"].total


@pytest.mark.parametrize(
    ("framework", "strategy", "size", "shards"),
    [
        ("nemo-rl", {"kind": "fsdp2"}, 2, 8),
        ("nemo-rl", {"kind": "megatron", "distributed_optimizer": True}, 2, 1),
        ("openrlhf", {"kind": "deepspeed", "stage": 3}, 2, 8),
        ("trl", {"kind": "deepspeed", "stage": 3}, 2, 8),
        ("trl", {"kind": "fsdp2"}, 4, 8),
    ],
)
def test_a_reference_is_cut_as_the_actors_parameters_are(
    framework: str, strategy: dict[str, Any], size: int, shards: int
) -> None:
    """In 16 bits, but for TRL's, which has the type of the actor's: fp32 under FSDP."""
    asked = experiment(framework=framework, reference="resident")
    asked = Experiment.model_validate({**asked.model_dump(exclude_unset=True), "strategy": strategy})
    result = simulate_rl(asked, simulator())
    reference = result.memory["training"].by_category["reference"]
    assert reference == pytest.approx(size * result.job.update_job.model.numel / shards, rel=0.01)


def test_an_engine_keeps_to_its_part_of_the_memory() -> None:
    result = result_of()
    model, limits = result.job.model, result.job.limits
    assert all(log.peak_blocks <= limits.cache_blocks for log in result.step.logs)
    cache = limits.cache_blocks * BLOCK_TOKENS * model.cache_bytes_per_token
    assert cache + model.weight_bytes + BUDGET_OVERHEAD <= 0.6 * GPU.memory.capacity


def test_more_memory_never_holds_fewer_sequences() -> None:
    model = served_model(Library().model("llama-3-70b"), EngineLayout(4))
    blocks = [engine_limits(model, GPU, share / 100, 1024, 8192).cache_blocks for share in range(55, 96, 5)]
    assert blocks == sorted(blocks)
    assert len(set(blocks)) == len(blocks)


def test_an_engine_that_fills_its_part_fits_whatever_errors_trainers_have() -> None:
    """0.9 of 85 GB and 3 GiB are 97 % of what can be used, all of it the engine's own."""
    result = simulate_rl(experiment(rollout={"gpu_memory_utilization": 0.9}), simulator())
    assert result.memory["rollout"].total / result.capacity_bytes > 0.96
    assert result.verdicts["rollout"].word == "fits"


def test_one_slot_is_serial_and_slots_beyond_the_cache_change_nothing() -> None:
    """A cache for four sequences of 300 tokens."""
    four = 4 * blocks_for(200 + 100)
    one, few, many = (
        run(requests([100] * 8, prompt=200), EngineLimits(slots, 16384, four, prefix_caching=False))
        for slots in (1, 4, 400)
    )
    alone, _ = run(requests([100], prompt=200), EngineLimits(1, 16384, four, prefix_caching=False))
    assert one[0] == pytest.approx(8 * alone, rel=1e-9)
    assert max(one[1].running) == 1
    assert max(many[1].running) <= 5  # prompts alone have room for a fifth, which is put off as they grow
    assert many[0] >= 0.99 * few[0]


def test_kernels_that_are_launched_one_by_one_never_take_less_time() -> None:
    eager, graphs = (resolved(rollout={"enforce_eager": value}) for value in (True, False))
    for running in (1, 8, 64, 512):
        assert eager.pricer().seconds(running, 1000 * running) >= graphs.pricer().seconds(
            running, 1000 * running
        )


def test_one_gpu_hands_over_its_own_weights_without_a_fabric() -> None:
    """Calls and copies are left: no ranks have other parts."""
    job = resolve_rl(experiment().model_copy(update={"nodes": None, "gpus": 1}), simulator())
    rates = job.sync
    calls = rates.seconds + rates.seconds_per_tensor * num_tensors(job.update_job.model)
    assert sync_seconds(job) == pytest.approx(calls + model_bytes(job) / rates.bytes_per_second)
    assert sync_seconds(resolved()) >= sync_seconds(job)


def test_a_pass_for_log_probabilities_takes_between_a_quarter_and_half_of_an_update() -> None:
    """2 FLOPs for each parameter and token, against 8 with all blocks computed again, on the same
    micro-batches. Launches and gathers weigh more in a pass, as nothing of backward hides them.
    """
    job = resolved()
    passed, updated = (
        simulate_step(
            packed_job(job.update_job, job.update, forward_only=value), simulate=simulator().outcome
        ).seconds
        for value in (True, False)
    )
    assert updated / 4 < passed < updated / 2


def test_a_phase_that_fits_in_less_than_half_of_all_cases_names_what_helps() -> None:
    result = result_of()
    phases = {"training": result.memory["training"]}
    assert not list(remedies(result.job, phases, 10**12))
    (sentence,) = remedies(result.job, phases, 10**12, unlikely={"training"})
    assert sentence.startswith("training may need more: ")
