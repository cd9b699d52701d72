"""Plans of models with a vision tower: what each framework runs, gathers and keeps of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import zsim
from tests.specs.test_towers import QWEN3_VL
from zsim.cost.flops import tower_flops_per_token
from zsim.plan.make import make_plan, plan_basis, stages_of
from zsim.plan.ops import Collective, PointToPoint
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import Segment, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.spec import ModelSpec
from zsim.specs.presets import model_preset_path

IMAGES = {"per_sample": 1, "width": 448, "height": 448}


def job(
    strategy: Mapping[str, Any],
    images: Mapping[str, Any] | None = IMAGES,
    model: Mapping[str, Any] | None = None,
    parallelism: Mapping[str, Any] | None = None,
    **training: Any,
) -> Job:
    table = {"sequence_length": 512, **training, **({"images": dict(images)} if images else {})}
    experiment = zsim.Experiment(
        model=dict(model or QWEN3_VL),
        cluster="dgx-h100",
        nodes=1,
        training=table,
        strategy=dict(strategy),
        parallelism=dict(parallelism or {}),
    )
    return resolve(experiment)


def segments(resolved: Job) -> list[Segment]:
    (model,) = stages_of(resolved.model, resolved.parallelism)
    return list(make_workload(model, resolved.training).segments)


def test_the_tower_runs_between_the_embedding_and_the_blocks() -> None:
    names = [segment.name for segment in segments(job({"kind": "fsdp2"}))]
    tower = [f"model.visual.blocks.{number}" for number in range(3)]
    layers = [f"model.language_model.layers.{number}" for number in range(4)]
    assert names == ["before", *tower, "projector", *layers, "after"]


def test_a_block_of_the_tower_has_the_work_and_the_memory_of_its_patches() -> None:
    """784 patches. Forward: 2 x 784 (32 x 96 + 32 x 32 + 2 x 32 x 48) FLOPs of products, and all pairs of
    patches, 4 x 784 x 784 x 32. The checkpoint is 784 rows of 32 in bf16.
    """
    _, block, *_ = segments(job({"kind": "fsdp2"}, activation_checkpointing="full"))
    works = [kernels_of(call.work.forward).kernels for call in block.calls]
    flops = sum(kernel.flops for kernels in works for kernel in kernels)
    products = 2 * 784 * (32 * 96 + 32 * 32 + 2 * 32 * 48)
    assert flops == products + 4 * 784 * 784 * 32
    assert block.input_bytes == 784 * 32 * 2


def test_the_towers_own_policy_is_kept_apart() -> None:
    resolved = job(
        {"kind": "fsdp2"},
        {**IMAGES, "activation_checkpointing": "none"},
        activation_checkpointing="full",
    )
    checkpointed = [segment.is_checkpointed for segment in segments(resolved)]
    assert checkpointed == [False] * 5 + [True] * 4 + [False]


def gathers(resolved: Job) -> list[int]:
    plan = zsim.plan.make.make_plan(resolved)
    works = [op.work for op in plan.program.ops]
    return [work.bytes for work in works if isinstance(work, Collective) and work.kind == "all_gather"]


def _numels(model: ModelSpec) -> tuple[int, int]:
    """Parameters of a block of the tower, and of the tower but for what embeds patches."""
    assert model.vision_tower is not None
    embedding = sum(module.numel for module in model.vision_tower.before)
    return model.vision_tower.blocks[0].numel, model.vision_tower.numel - embedding


@pytest.mark.parametrize("text_only", [True, False])
def test_parameters_of_the_tower_are_those_that_are_planned_for(text_only: bool) -> None:
    """ZeRO-3's shard is the 8th part of all parameters, tower included, padded by at most 7 each."""
    resolved = job(
        {"kind": "reference", "stage": 3}, None if text_only else IMAGES, {**QWEN3_VL, "text_only": text_only}
    )
    report = zsim.simulate(resolved.experiment).report.to_dict()
    numel = resolved.model.numel
    assert report["peak_bytes"]["gpu"]["parameters"] == pytest.approx(2 * numel / 8, rel=0.02)


def test_tensor_parallel_megatron_cuts_the_tower_and_torch_does_not() -> None:
    """Megatron-Bridge gives the tower its language model's tensor parallelism, without that of sequences."""
    degrees = {"tensor": 2, "sequence_parallel": True}
    cut = segments(job({"kind": "megatron"}, parallelism=degrees))[1]
    qkv = next(call for call in cut.calls if call.name.endswith("attn.qkv"))
    assert qkv.parameters[0].shape == (48, 32)
    assert [call.name.rpartition(" ")[2] for call in cut.calls if " " in call.name] == ["all_reduce"] * 2
    uncut = segments(job({"kind": "fsdp2"}, parallelism={"tensor": 2}))[1]
    assert [call.parameters[0].shape for call in uncut.calls if call.name.endswith("attn.qkv")] == [(96, 32)]


def test_the_first_stage_of_a_pipeline_has_the_tower() -> None:
    resolved = job({"kind": "megatron"}, parallelism={"pipeline": 2}, gradient_accumulation_steps=2)
    stages = stages_of(plan_basis(resolved).model, resolved.parallelism)
    assert [stage.vision_tower is not None for stage in stages] == [True, False]
    assert sum(stage.numel for stage in stages) == resolved.model.numel


@pytest.mark.parametrize("kind", ["megatron", "fsdp2", "deepspeed"])
def test_stages_send_the_language_model_s_stream_and_not_the_tower_s(kind: str) -> None:
    """17 tokens of 576 features in bf16 go on. The tower has 17 images of 1,024 patches with 768 features."""
    config = json.loads(model_preset_path("smolvlm-256m").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    stage = {"stage": 0, "config": {"train_micro_batch_size_per_gpu": 1}} if kind == "deepspeed" else {}
    training = {"sequence_length": 17, "gradient_accumulation_steps": 2, "precision": "bf16"}
    plan = make_plan(job({"kind": kind, **stage}, None, config, {"pipeline": 2}, **training))
    works = [op.work for program in plan.programs for op in program.ops]
    sizes = [work.messages[0].bytes for work in works if isinstance(work, PointToPoint)]
    assert set(sizes) - {8} == {17 * 576 * 2}


def test_flops_of_the_tower_are_those_of_its_rows() -> None:
    """A frozen tower has forward alone: of the products of a block 2 x 784 x its weights, biases counted as
    weights are, and 4 d S of attention, over 512 tokens.
    """
    resolved = job({"kind": "fsdp2"}, frozen=["model.visual"])
    tower, images = resolved.model.vision_tower, resolved.training.images
    assert tower is not None
    assert images is not None
    rows = {"patches": 784, "merged": 196, "windows": 784, "": 0}
    expected = 0.0
    for module in tower.modules:
        name = module.name.rpartition(".")[2]
        is_product = "norm" in name or name in ("qkv", "proj", "linear_fc1", "linear_fc2")
        expected += 2 * rows[module.sample_rows] * module.numel * is_product
        expected += 4 * 784 * 784 * 32 * (name == "core")
    flops, recomputed = tower_flops_per_token(tower, resolved.training)
    assert flops == recomputed == pytest.approx(expected / 512)


def test_low_rank_adapters_on_all_linear_layers_are_on_the_towers_too() -> None:
    """PEFT's "all-linear" names no model inside; the patches' convolution gets none."""
    resolved = job({"kind": "ddp"}, lora={"rank": 4, "targets": "all-linear"})
    names = [name for name, _ in resolved.model.named_parameters() if "lora_A" in name]
    assert "model.visual.blocks.0.attn.qkv.lora_A.default.weight" in names
    assert "model.visual.merger.linear_fc1.lora_A.default.weight" in names
    assert not any("patch_embed" in name for name in names)


def test_torchtitan_gathers_the_tower_as_one_and_transformers_block_by_block() -> None:
    resolved = job({"kind": "fsdp2", "wrapping": "torchtitan"})
    _, in_tower = _numels(resolved.model)
    assert 2 * in_tower in gathers(resolved)
    resolved = job({"kind": "fsdp2", "wrapping": "huggingface"})
    block, _ = _numels(resolved.model)
    assert gathers(resolved).count(2 * block) >= 2 * 3
