"""Moments beside the steady step: their bytes, from what the frameworks' sources do.

GPT-2 has P = 124,439,808 parameters, of them 50,257 x 768 in the embedding, which the head is tied to.
"""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.plan.make import make_plan, moments_of
from zsim.plan.memory.capacity import framework_memory
from zsim.plan.memory.tensors import device_peaks
from zsim.plan.moments import (
    BUILDING,
    EVALUATION,
    FIRST_FORWARD,
    FIRST_UPDATE,
    GATHERED_SAVE,
    LOADING,
    RESUMING,
    SAVING,
    UNOFFLOADED_SAVE,
    BetweenSteps,
    JobMoment,
)
from zsim.specs.experiment.resolve import resolve

P, EMBEDDING = 124_439_808, 50_257 * 768
QWEN_72B = {
    "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip


def held_by(strategy: dict[str, Any], **options: Any) -> BetweenSteps:
    training = {"sequence_length": 512, "micro_batch_size": 1, **options.pop("training", {})}
    facts = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 4, **options}
    job = resolve(Experiment(strategy=strategy, training=training, **facts))
    return BetweenSteps(job, make_plan(job))


def moments(strategy: dict[str, Any], **options: Any) -> dict[str, JobMoment]:
    held = held_by(strategy, **options)
    return {moment.name: moment for moment in moments_of(held.job, held.plan)}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **keys}}
    return {"kind": "deepspeed", "config": config}


def test_stage_3_makes_its_states_before_the_first_step_with_gradients_of_a_sub_group() -> None:
    """hiyouga/LlamaFactory#5590: 16 A100 80 GB of Qwen's 72 billion parameters ran out of memory when a
    sub-group's 3.74 GiB were wanted beside 57.9 GiB: 66.2 GB in all, without the CUDA context. A sub-group is
    full at 1e9 elements or just above."""
    options = {"model": QWEN_72B, "cluster": "dgx-a100-80gb", "gpus": 16}
    held = held_by({"kind": "deepspeed", "stage": 3}, training={"sequence_length": 2048}, **options)
    found = {moment.name: moment for moment in moments_of(held.job, held.plan)}[BUILDING]
    size = (found.gpu_bytes or 0) - held.context_bytes
    states = held.gpu_bytes_of("parameters", "optimizer_states")
    assert (size - states) / 2**30 == pytest.approx(3.74, abs=0.03)
    assert size == pytest.approx((57.9 + 3.74) * 2**30, rel=0.03)
    assert found.is_certain


def test_an_offloaded_optimizer_is_not_built_on_the_gpu() -> None:
    assert BUILDING not in moments(zero(3, offload_optimizer={"device": "cpu"}))


def test_whole_16_bit_weights_are_gathered_on_rank_0_only_where_the_key_says_so() -> None:
    """2 P in the host of rank 0, and on GPUs the embedding, the largest module."""
    strategy = zero(3, stage3_gather_16bit_weights_on_model_save=True)
    found, held = moments(strategy)[GATHERED_SAVE], held_by(strategy)
    assert (found.host_bytes, found.is_certain) == (2 * P, True)
    assert found.gpu_bytes == held.gpu_bytes + 2 * EMBEDDING
    assert GATHERED_SAVE not in moments(zero(3))


def test_a_save_copies_one_flat_tensor_of_each_local_rank() -> None:
    """Stage 2 has one of P / 4 fp32 elements, which 4 ranks of a node copy at once: 4 P bytes; stage 3 one
    per sub-group, here of a tenth of a rank's elements or a tensor more."""
    assert moments(zero(2))[SAVING].host_bytes == 4 * P
    small = moments(zero(3, sub_group_size=P // 40))[SAVING].host_bytes
    assert small is not None
    assert 4 * P / 10 <= small <= 4 * (P / 10 + EMBEDDING)


def test_resuming_reads_a_partition_a_rank_and_below_stage_3_the_model_on_every_rank() -> None:
    """4 ranks read 12 P / 4 each, and in stage 2 also 2 P each."""
    assert moments(zero(2))[RESUMING].host_bytes == pytest.approx(12 * P + 4 * 2 * P, rel=1e-6)
    assert moments(zero(3))[RESUMING].host_bytes == pytest.approx(12 * P, rel=1e-4)


def test_weights_are_loaded_by_every_rank_of_a_node_unless_the_framework_builds_shards() -> None:
    """fp32 under DDP and FSDP: 4 ranks x 4 P; under zero.Init at most a file of 5 GB a rank, here all of the
    model's 2 P."""
    assert moments({"kind": "ddp"})[LOADING].host_bytes == 16 * P
    assert moments({"kind": "fsdp2"})[LOADING].host_bytes == 16 * P
    assert moments(zero(3))[LOADING].host_bytes == 8 * P
    assert moments(zero(2))[LOADING].host_bytes == 16 * P


def test_the_first_forward_is_without_the_states_that_the_first_update_makes() -> None:
    """FSDP2 on 4 GPUs: Adam's two fp32 states of a rank's quarter are 2 P bytes; the update has them and the
    gradients, P, beside the parameters, P."""
    held = held_by({"kind": "fsdp2"})
    found = {moment.name: moment for moment in moments_of(held.job, held.plan)}
    peak = device_peaks(held.program)["gpu"] + held.context_bytes
    assert held.lazy_bytes == pytest.approx(2 * P, rel=1e-3)
    assert found[FIRST_FORWARD].gpu_bytes == peak - held.lazy_bytes
    update = found[FIRST_UPDATE].gpu_bytes or 0
    assert 4 * P <= update - held.context_bytes <= 5.1 * P
    assert FIRST_UPDATE not in moments(zero(3))


def test_a_whole_state_dict_is_on_rank_0s_host_or_on_every_gpu() -> None:
    """4 P bytes of fp32 weights; on the way FSDP2 gathers one tensor, FSDP1 all that is outside blocks."""
    held = held_by({"kind": "fsdp2"})
    two, one = moments({"kind": "fsdp2"}), moments({"kind": "fsdp1"})
    assert two[GATHERED_SAVE].host_bytes == one[GATHERED_SAVE].host_bytes == 4 * P
    assert two[GATHERED_SAVE].gpu_bytes == held.gpu_bytes + 4 * EMBEDDING
    assert two[UNOFFLOADED_SAVE].gpu_bytes == held.gpu_bytes + 4 * P
    outside = EMBEDDING + 1024 * 768 + 2 * 768  # positions and the last norm
    assert one[GATHERED_SAVE].gpu_bytes == held_by({"kind": "fsdp1"}).gpu_bytes + 4 * outside
    assert not two[GATHERED_SAVE].is_certain


def test_evaluation_has_the_logits_of_the_trainers_batch() -> None:
    """8 x 512 x 50,257 logits in 16 bits and twice in fp32 are 2.06 GB; a micro-batch of 8 has as many."""
    held = held_by({"kind": "ddp"})
    found = moments({"kind": "ddp"})[EVALUATION]
    logits = 8 * 512 * 50_257 * 10
    assert held.gpu_bytes + logits <= (found.gpu_bytes or 0) < held.gpu_bytes + logits + 4 * P
    assert EVALUATION not in moments({"kind": "ddp"}, training={"micro_batch_size": 8})
    assert EVALUATION not in moments({"kind": "ddp"}, training={"cross_entropy": "fused_linear"})


def test_moments_come_in_the_order_of_a_run() -> None:
    names = list(moments({"kind": "fsdp2"}))
    assert names == [
        LOADING, RESUMING, FIRST_FORWARD, FIRST_UPDATE, EVALUATION, GATHERED_SAVE, UNOFFLOADED_SAVE,
    ]  # fmt: skip


def test_the_context_is_that_of_the_fullest_rank() -> None:
    held = held_by({"kind": "fsdp2"})
    assert held.context_bytes == framework_memory(held.job, held.plan).bytes > 0


def test_what_is_read_to_resume_depends_on_the_optimizer() -> None:
    """SGD without momentum has no states: 4 P bytes of weights, with Adam's two 12 P; of an optimizer whose
    saved states are not known nothing is said."""
    sgd = moments({"kind": "fsdp2"}, training={"optimizer": "sgd"})
    assert sgd[RESUMING].host_bytes == 4 * P
    assert moments({"kind": "fsdp2"})[RESUMING].host_bytes == 12 * P
    assert RESUMING not in moments({"kind": "ddp"}, training={"optimizer": "adamw-8bit"})


def test_a_checkpoint_of_adapters_has_no_frozen_weights() -> None:
    """Rank 8 on the products to queries, keys and values: 12 x 8 x (768 + 3 x 768) elements, in fp32 with two
    moments, for each of four ranks, or once behind the masters' partition."""
    lora = {"lora": {"rank": 8, "targets": ["c_attn"]}}
    adapters = 12 * 8 * (768 + 3 * 768)
    assert moments({"kind": "ddp"}, training=lora)[RESUMING].host_bytes == 4 * 3 * 4 * adapters
    resumed = moments(zero(2), training=lora)[RESUMING]
    assert resumed.host_bytes == 4 * (12 * adapters // 4 + 2 * adapters)


def test_a_whole_state_dict_has_4_bit_weights_packed() -> None:
    """Half a byte for each weight of a product, 2 bytes for what is not quantised and for adapters."""
    lora = {"rank": 8, "targets": "all-linear", "dtype": "bf16", "quantized": "nf4"}
    options = {"model": "llama-3-8b", "training": {"lora": lora, "stored_dtype": "bf16"}}
    held = held_by({"kind": "fsdp1"}, **options)
    named = dict(held.job.model.named_parameters())
    packed = sum(parameter.numel for parameter in named.values() if parameter.is_packed)
    assert packed == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    saved = moments({"kind": "fsdp1"}, **options)[UNOFFLOADED_SAVE]
    assert saved.gpu_bytes == held.gpu_bytes + packed // 2 + 2 * (held.job.model.numel - packed)
