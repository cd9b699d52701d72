"""Adapters and frozen weights: bytes against torch and PEFT, collectives and updates by framework."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from zsim.api import simulate
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# Adapters of rank 8 on all products of a block: (256 + 256) + 2 (256 + 128) + (256 + 256) on attention's and
# 3 (256 + 512) on the MLP's, in two blocks.
TRAINED = 2 * 8 * (512 + 2 * 384 + 512 + 3 * 768)
ALL = 4_000


def job(strategy: dict[str, Any], gpus: int = 8, **training: Any) -> Any:
    table = {
        "sequence_length": 64,
        "micro_batch_size": 2,
        "precision": "bf16",
        "attention": "math",
        **training,
    }
    return resolve(Experiment(model=SMALL, cluster="dgx-h100", gpus=gpus, training=table, strategy=strategy))


def saved_bytes(*, inputs_have_gradients: bool, **lora: Any) -> int:
    """Bytes that all modules but head and loss keep; with checkpointing transformers makes the embedding's
    output require a gradient, and here everything is kept nevertheless."""
    checkpointing = {"activation_checkpointing": "full"} if inputs_have_gradients else {}
    found = job({"kind": "ddp"}, 1, stored_dtype="bf16", lora={"dtype": "fp32", **lora}, **checkpointing)
    workload = make_workload(found.model, replace(found.training, activation_checkpointing="none"))
    calls = [call for segment in workload.segments for call in segment.calls]
    return sum(call.work.saved_bytes for call in calls if not call.name.startswith(("lm_head", "loss")))


@pytest.mark.parametrize(
    ("inputs_have_gradients", "lora", "measured"),
    [
        (True, {"dtype": "bf16"}, 2_931_200),
        (True, {}, 4_401_664),
        (False, {"dtype": "bf16"}, 2_799_616),
        (True, {"dropout": 0.1}, 4_925_952),
        (False, {"dropout": 0.1}, 4_696_064),
        (False, {"dropout": 0.1, "dtype": "bf16"}, 3_618_816),
    ],
)
def test_saved_bytes_are_those_of_peft(
    inputs_have_gradients: bool, lora: dict[str, Any], measured: int
) -> None:
    """Bytes of the tensors that autograd saves of transformers 5.23's Llama with PEFT 0.21.2, by
    `saved_tensors_hooks` on a CPU, parameters left out, dropout by `native_dropout` as on CUDA. zsim leaves
    out cosines and sines (2 x 64 x 64 x 2 bytes) and the statistics of norms (512 bytes each; the first has
    none without a gradient)."""
    left_out = 2 * 64 * 64 * 2 + 512 * (5 if inputs_have_gradients else 4)
    counted = saved_bytes(inputs_have_gradients=inputs_have_gradients, rank=8, targets="all-linear", **lora)
    assert counted + left_out == measured


def products(**training: Any) -> set[str]:
    """The types that the first layer's products compute in, adapters' too."""
    found = job({"kind": "ddp"}, 1, **training)
    workload = make_workload(found.model, found.training)
    calls = [call for segment in workload.segments for call in segment.calls if "layers.0" in call.name]
    kernels = [kernel for call in calls for kernel in kernels_of(call.work.forward).kernels]
    return {kernel.dtype for kernel in kernels if kernel.kind == "gemm" and not kernel.is_batched}


def test_adapters_beside_a_base_in_bf16_are_under_autocast_unless_their_type_is_given() -> None:
    """transformers' Trainer with bf16=True computes PEFT's fp32 adapters under torch.autocast, whatever the
    base was loaded in. Adapters that are said to be in fp32 beside it are not."""
    lora = {"rank": 8, "targets": "all-linear"}
    assert products(stored_dtype="bf16", lora=lora) == products(lora=lora) == {"bf16"}
    assert products(stored_dtype="bf16", lora={**lora, "dtype": "fp32"}) == {"bf16", "fp32"}
    found = job({"kind": "ddp"}, 1, stored_dtype="bf16", lora=lora)
    assert any("adapters in fp32 under torch.autocast" in note for note in found.notes)
    found = job({"kind": "ddp"}, 1, stored_dtype="bf16", frozen_dtype="fp32", lora=lora)
    assert any("stored_dtype 'bf16' has no effect" in note for note in found.notes)


FRAMEWORKS: tuple[dict[str, Any], ...] = (
    {"kind": "ddp"},
    {"kind": "fsdp2"},
    {"kind": "fsdp2", "wrapping": "huggingface"},
    {"kind": "fsdp1"},
    {"kind": "fsdp1", "wrapping": "peft"},
    {"kind": "deepspeed", "stage": 0},
    {"kind": "deepspeed", "stage": 1},
    {"kind": "deepspeed", "stage": 2},
    {"kind": "deepspeed", "stage": 3},
    {"kind": "megatron"},
)
LORA: dict[str, Any] = {"lora": {"rank": 8, "targets": "all-linear"}}


def reduced_bytes(found: Any, kind: str) -> int:
    ops = make_plan(found).programs[0].ops
    works = [op.work for op in ops if isinstance(op.work, Collective) and op.work.kind == kind]
    return sum(work.bytes for work in works if work.bytes > ALL)


def test_ddp_reduces_adapters_alone() -> None:
    """fp32 gradients of the adapters, whatever the model's size."""
    assert reduced_bytes(job({"kind": "ddp"}, **LORA), "all_reduce") == 4 * TRAINED


def test_fsdp2_gathers_everything_and_reduces_adapters_alone() -> None:
    """Two blocks are gathered in bf16 forward and backward; fp32 gradients of adapters are scattered."""
    found = job({"kind": "fsdp2"}, **LORA)
    block = sum(
        parameter.numel for module in found.model.blocks[0].modules for parameter in module.parameters
    )
    gathers = [
        op.work.bytes
        for op in make_plan(found).programs[0].ops
        if isinstance(op.work, Collective) and op.work.kind == "all_gather"
    ]
    assert Counter(gathers)[2 * block] == 4
    assert reduced_bytes(found, "reduce_scatter") == 4 * TRAINED


def test_every_framework_keeps_states_of_adapters_alone() -> None:
    """AdamW's two fp32 moments on one GPU; fp32 masters too where the framework casts weights."""
    for strategy, per_parameter in (
        ({"kind": "ddp"}, 8),
        ({"kind": "fsdp2"}, 8),
        ({"kind": "fsdp1", "wrapping": "peft"}, 8),
        ({"kind": "deepspeed", "stage": 0}, 12),
        ({"kind": "deepspeed", "stage": 1}, 12),
        ({"kind": "deepspeed", "stage": 2}, 12),
        ({"kind": "deepspeed", "stage": 3}, 12),
        ({"kind": "megatron"}, 12),
    ):
        plan = make_plan(job(strategy, 1, **LORA))
        states = [one.bytes for one in plan.programs[0].resident if one.category == "optimizer_states"]
        assert sum(states) == per_parameter * TRAINED, strategy


def test_four_bit_weights_and_their_scales() -> None:
    """DDP keeps all of a model: products of 589,824 weights a block in half a byte, with a byte for 64 of
    them, 4 for 16,384, and 1,092 for every product's maps and mean; embedding and head in bf16, norms too."""
    found = job({"kind": "ddp"}, lora={**LORA["lora"], "quantized": "nf4", "preparation": "none"})
    resident = make_plan(found).programs[0].resident
    weights = [module for module in found.model.blocks[0].modules if module.name.endswith("base_layer")]
    numels = [module.numel for module in weights]
    assert sum(numels) == 589_824
    packed = sum(n // 2 + n // 64 + 4 * -(-(n // 64) // 256) + 1092 for n in numels)
    rest = 2 * (2 * 1000 * 256 + 5 * 256) + 4 * TRAINED
    assert sum(one.bytes for one in resident if one.category == "parameters") == 2 * packed + rest


def test_nothing_before_the_first_trained_parameter_runs_backward() -> None:
    """With the first block and the embedding frozen the backward ends in the second block."""
    for strategy in FRAMEWORKS:
        for checkpointing in ("none", "full"):
            found = job(
                strategy,
                frozen=["model.embed_tokens", "model.layers.0.*"],
                activation_checkpointing=checkpointing,
            )
            ops = make_plan(found).programs[0].ops
            names = [op.name for op in ops if op.name.endswith(" backward")]
            assert any("layers.1." in name for name in names)
            assert not any("layers.0." in name or "embed" in name for name in names), strategy


def test_a_product_in_fp8_that_has_no_backward_keeps_nothing() -> None:
    """Under PEFT the first block's first projections, whose input needs no gradient."""
    found = job({"kind": "fsdp2"}, lora={"rank": 8, "targets": "all-linear"}, precision="fp8")
    make_plan(found)  # which frees what it allocates
    segments = make_workload(found.model, found.training).segments
    kept = [
        {call.module.name: call.work.saved_bytes for call in segment.calls}["self_attn.q_proj.base_layer"]
        for segment in segments[1:3]
    ]
    assert kept[0] == 0 < kept[1]


def test_attention_that_has_no_backward_is_not_run_again() -> None:
    found = job(
        {"kind": "fsdp2"}, attention="flash", activation_checkpointing="selective",
        frozen=["model.embed_tokens", "model.layers.0"],
    )  # fmt: skip
    make_plan(found)  # which frees what it allocates
    first, second = make_workload(found.model, found.training).segments[1:3]
    (core,), (again,) = (
        [call.work for call in one.calls if call.name.endswith("core")] for one in (first, second)
    )
    assert (core.recompute, core.saved_bytes) == (None, 0)
    assert again.recompute is not None


def test_a_frozen_product_has_one_product_in_backward() -> None:
    """down_proj of 512 x 256 frozen: the gradient of its input alone; trained: two products."""
    for frozen, count in (((), 2), (("model.layers.*.mlp.down_proj",), 1)):
        workload = make_workload(job({"kind": "ddp"}, frozen=frozen).model, job({"kind": "ddp"}).training)
        call = next(one for one in workload.segments[2].calls if one.name.endswith("down_proj"))
        kernels = call.work.backward.kernels  # type: ignore[union-attr]
        assert sum(kernel.kind == "gemm" for kernel in kernels) == count


HEAD = 1000 * 256


@pytest.mark.parametrize(
    ("strategy", "gpus", "more"),
    [
        # frozen weights are in bf16: the head's 2 bytes become a trained copy's 2, or 4, beside the 2
        ({"kind": "ddp"}, 2, 2 * HEAD),
        ({"kind": "deepspeed", "stage": 2}, 2, 2 * HEAD),
        ({"kind": "deepspeed", "stage": 3}, 2, 2 * HEAD // 2),
        ({"kind": "fsdp2"}, 2, 4 * HEAD // 2),
        ({"kind": "fsdp2", "replicate": 2}, 4, 4 * HEAD // 2),
        ({"kind": "fsdp2", "cpu_offload": True}, 2, 4 * HEAD // 2),
    ],
)
def test_peft_keeps_the_original_beside_what_is_trained_whole(
    strategy: dict[str, Any], gpus: int, more: int
) -> None:
    """`get_peft_model` of PEFT 0.21.2 on this model in bf16: with modules_to_save = ["lm_head"] it has
    `lm_head.original_module.weight`, frozen, and `lm_head.modules_to_save.default.weight`, 256,000 elements
    each. The copy is in bf16 too, beside adapters in fp32."""
    lora = {"rank": 8, "targets": "all-linear"}
    plain = make_plan(job(strategy, gpus, lora=lora))
    saved = make_plan(job(strategy, gpus, lora={**lora, "modules_to_save": ["lm_head"]}))
    sizes = [
        sum(one.bytes for one in plan.programs[0].resident if one.category == "parameters")
        for plan in (plain, saved)
    ]
    assert sizes[1] - sizes[0] == more


@pytest.mark.parametrize(("dtype", "bytes_each"), [(None, 2), ("bf16", 2), ("fp32", 4)])
def test_gradients_and_states_of_what_is_trained_whole_have_its_type(
    dtype: str | None, bytes_each: int
) -> None:
    """One GPU keeps the head's weight, and two states of AdamW, in the type that the copy has. Two GPUs
    reduce its gradient in that type, apart from the adapters' in fp32."""
    lora = {"rank": 8, "targets": "all-linear", "dtype": dtype}
    whole = {**lora, "modules_to_save": ["lm_head"]}
    plans = [make_plan(job({"kind": "ddp"}, 1, lora=table)) for table in (lora, whole)]
    states = [
        sum(one.bytes for one in plan.programs[0].resident if one.category == "optimizer_states")
        for plan in plans
    ]
    assert states[1] - states[0] == 2 * bytes_each * HEAD
    reduced: dict[str, int] = {}
    for op in make_plan(job({"kind": "ddp"}, 2, lora=whole)).programs[0].ops:
        if isinstance(op.work, Collective):
            reduced[op.work.dtype] = reduced.get(op.work.dtype, 0) + op.work.bytes
    types = {"bf16", "fp32"} if dtype is None else {dtype}
    assert reduced.keys() == types
    assert sum(reduced.values()) == sum(
        numel * size
        for numel, size in (
            (HEAD, bytes_each),
            (trained_numel(lora), 2 if dtype == "bf16" else 4),
        )
    )


def trained_numel(lora: dict[str, Any]) -> int:
    numel: int = job({"kind": "ddp"}, 1, lora=lora).model.trainable_numel
    return numel


@pytest.mark.parametrize("more", [{}, {"replicate": 2}, {"cpu_offload": True}, {"no_sync": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_frozen_embedding_keeps_its_shard_over_the_smaller_group(more: dict[str, Any], steps: int) -> None:
    """Backward ends in the first block and prefetches the embedding, 1000 x 256 in bf16, over groups of 2
    ranks, in vain: half of it, 256,000 bytes, stays on the GPU from forward to forward. The next forward
    gathers it over all ranks again: `make_plan` checks that a step frees what it allocates."""
    found = job(
        {"kind": "fsdp2", "wrapping": "torchtitan", "reshard_after_forward": 2, **more},
        frozen=["model.embed_tokens"], gradient_accumulation_steps=steps,
    )  # fmt: skip
    program = make_plan(found).programs[0]
    left = [one.bytes for one in program.resident if (one.category, one.device) == ("buffers", "gpu")]
    assert left == [256_000]
    groups = [
        op.work.group
        for op in program.ops
        if isinstance(op.work, Collective) and op.work.kind == "all_gather" and "embed" in op.name
    ]
    assert groups == ["shard", "post_forward"] * steps


def test_the_smaller_groups_shard_of_a_trained_embedding_goes_in_backward() -> None:
    found = job({"kind": "fsdp2", "wrapping": "torchtitan", "reshard_after_forward": 2}, **LORA)
    kept = job({"kind": "fsdp2", "wrapping": "torchtitan", "reshard_after_forward": 2})
    sizes = [
        sum(one.bytes for one in make_plan(each).programs[0].resident if one.category == "buffers")
        for each in (found, kept)
    ]
    assert sizes == [256_000, 0]


def test_adapters_take_as_long_as_people_saw() -> None:
    """Qwen-7B with adapters of rank 64 on four of its five products, one A100 of 80 GB, FlashAttention-2:
    21.3 s (QwenLM/Qwen's README of November 2023).
    """
    experiment = Experiment(
        model={
            "model_type": "qwen", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128, "no_bias": True,
            "tie_word_embeddings": False, "max_position_embeddings": 8192,
        },
        cluster="dgx-a100-80gb",
        gpus=1,
        training={
            "sequence_length": 8192, "gradient_accumulation_steps": 8, "activation_checkpointing": "full",
            "gradient_clipping": 1.0, "software": "2023", "attention": "flash",
            "lora": {"rank": 64, "targets": ["c_attn", "attn.c_proj", "w1", "w2"], "dropout": 0.05},
        },
        strategy={"kind": "ddp"},
    )  # fmt: skip
    assert simulate(experiment).report.step_seconds == pytest.approx(21.3, rel=0.05)


def test_unsloths_adapters_add_to_the_frozen_products_output() -> None:
    """128 tokens of 256 in 16 bits: `addmm_` reads 65,536 bytes more. PEFT casts the input to fp32 and back,
    and scales and adds the output, each in a kernel.
    """
    calls = {}
    for kernels in ("peft", "unsloth"):
        found = job({"kind": "ddp"}, 1, lora={"targets": ["o_proj"], "kernels": kernels})
        segments = make_workload(found.model, found.training).segments
        calls[kernels] = {call.name: call.work for segment in segments for call in segment.calls}
    name = "model.layers.0.self_attn.o_proj"
    assert f"{name}.lora_dropout.default" in calls["peft"]
    assert f"{name}.lora_dropout.default" not in calls["unsloth"]
    total = calls["unsloth"][name]
    assert [kernel.hbm_bytes for kernel in kernels_of(total.forward).kernels] == [128 * 256 * 2]
    assert not kernels_of(total.backward).kernels
    assert len(kernels_of(calls["peft"][name].forward).kernels) == 2
