"""A head whose loss takes its weight without calling it: who fetches it, and how long it stays."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import peak_bytes
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 4096, "max_position_embeddings": 512,
}  # fmt: skip
HEAD = 4096 * 256


def job_of(tied: bool = False, zero: dict[str, Any] | None = None, **training: Any) -> Job:
    table = {"sequence_length": 512, "micro_batch_size": 1, **training}
    block = {"stage": 3, "stage3_param_persistence_threshold": 0, **(zero or {})}
    return resolve(
        zsim.Experiment(
            model={**LLAMA, "tie_word_embeddings": tied}, cluster="dgx-h100", gpus=4, training=table,
            strategy={"config": {"bf16": {"enabled": True}, "zero_optimization": block}},
        )
    )  # fmt: skip


def gathers_of(plan: Plan, name: str) -> list[int]:
    return [
        number
        for number, op in enumerate(plan.ops)
        if isinstance(op.work, Collective) and op.work.kind == "all_gather" and name in op.name
    ]


def test_zero_3_gathers_the_heads_weight_when_the_models_forward_begins() -> None:
    """An external parameter of the model: fetched before the embedding, once, and held to the end of
    backward."""
    plan = make_plan(job_of(liger=True, zero={"stage3_prefetch_bucket_size": 0}))
    (gather,) = gathers_of(plan, "lm_head")
    assert gather < min(gathers_of(plan, "embed_tokens"))
    computing = [op.stream == "compute" and op.phase == "backward" for op in plan.ops]
    last_kernels = max(number for number, computes in enumerate(computing) if computes)
    frees = [c.op for c in plan.memory if c.category == "buffers" and c.bytes == -2 * HEAD and c.until < 0]
    assert frees
    assert max(frees) > last_kernels


def test_called_by_itself_the_head_is_gathered_where_it_runs() -> None:
    plan = make_plan(job_of(zero={"stage3_prefetch_bucket_size": 0}))
    assert min(gathers_of(plan, "lm_head")) > min(gathers_of(plan, "embed_tokens"))


def test_a_tied_heads_weight_is_the_embeddings_and_stays_too() -> None:
    plan = make_plan(job_of(tied=True, liger=True, zero={"stage3_prefetch_bucket_size": 0}))
    assert len(gathers_of(plan, "embed_tokens")) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reuse", [0, 10**9])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_left_gathered_after_a_step(tied: bool, reuse: int, micro_batches: int) -> None:
    zero = {"stage3_max_reuse_distance": reuse}
    plan = make_plan(job_of(tied, zero, liger=True, gradient_accumulation_steps=micro_batches))
    left = sum(change.bytes for change in plan.memory if change.category == "buffers")
    assert left == 0


def test_logits_are_never_whole() -> None:
    """32,768 tokens and 4,096 words are 134M logits, of which eager keeps 4 bytes each and passes 8 more;
    Liger's pieces are as large as the hidden states, 16.8 MB."""
    eager, liger = (
        peak_bytes(job, make_plan(job))
        for job in (
            job_of(micro_batch_size=64, activation_checkpointing="full", liger=flag) for flag in (False, True)
        )
    )
    logits = 64 * 512 * 4096
    assert eager - liger > 4 * logits


def test_the_loss_after_a_fused_head_has_no_kernels_of_its_own() -> None:
    plan = make_plan(job_of(liger=True))
    works = {op.name: op.work for op in plan.ops if op.name in ("lm_head", "loss", "loss backward")}
    for name, work in works.items():
        assert isinstance(work, Kernels)
        assert bool(work.kernels) == (name == "lm_head")


def test_a_model_built_whole_is_whole_on_every_gpu_first() -> None:
    """Llama-3-70B: 70,553,706,496 bf16 weights on an H100 of 85 GB, and 1.28 GiB of context and communicator;
    built under zero.Init it never is."""
    experiment: dict[str, Any] = {
        "model": "llama-3-70b", "cluster": "dgx-h100", "nodes": 4,
        "training": {"activation_checkpointing": "full"},
    }  # fmt: skip
    whole, sharded = (
        zsim.simulate(
            zsim.Experiment(**experiment, strategy={"kind": "deepspeed", "stage": 3, "zero_init": flag})
        ).report
        for flag in (False, True)
    )
    assert sharded.fits
    assert not whole.fits
    assert whole.out_of_memory is not None
    assert whole.out_of_memory.op == "start-up"
    assert whole.to_dict()["startup_bytes"] == 2 * 70_553_706_496 + 1_374_389_535 + 2 * 2**25
    assert whole.step_seconds == sharded.step_seconds


@pytest.mark.parametrize("loss", ["fused_linear", "tiled", "unsloth-fused"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_heads_weight_gets_no_gradient(loss: str, tied: bool) -> None:
    """512 tokens, 256 by 4,096 weights: a product is 2 x 512 x 4,096 x 256 = 1.0737e9 FLOPs, of which a
    frozen weight needs two.
    """
    counts = []
    for lora in ({}, {"lora": {"rank": 4, "targets": ["q_proj"]}}):
        plan = make_plan(job_of(tied, {"stage": 1}, cross_entropy=loss, **lora))
        works = [op.work for op in plan.ops if op.name == "lm_head" and op.phase == "forward"]
        (kernels,) = [work for work in works if isinstance(work, Kernels)]
        counts.append(sum(kernel.flops for kernel in kernels.kernels) / (2 * 512 * 4096 * 256))
    assert counts == [pytest.approx(3, rel=1e-3), pytest.approx(2, rel=1e-3)]
