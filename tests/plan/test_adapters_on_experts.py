"""Adapters on routed experts: PEFT's, merged into stacked weights, and Megatron-Bridge's beside products."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.expert_libraries import DEEPSPEED_MOE
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Collective
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import ModuleCall, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

HIDDEN, WIDTH, EXPERTS, LAYERS, TOP_K, RANK, TOKENS = 256, 128, 8, 2, 2, 8, 128
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 512,
    "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "tie_word_embeddings": False,
}  # fmt: skip
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
PREFIX = "model.layers.0.mlp."


def job(lora: dict[str, Any], strategy: dict[str, Any] | None = None, **more: Any) -> Job:
    training = {
        "sequence_length": TOKENS // 2, "micro_batch_size": 2, "precision": "bf16",
        "lora": {"rank": RANK, **lora}, **more.pop("training", {}),
    }  # fmt: skip
    given = {"model": QWEN, "cluster": "dgx-h100", "gpus": 8, **more}
    return resolve(Experiment(**given, training=training, strategy=strategy or {"kind": "ddp"}))


def trained(found: Job) -> dict[str, tuple[int, ...]]:
    """Shapes of what is trained in the first layer's MLP."""
    named = found.model.named_parameters()
    return {name.removeprefix(PREFIX): one.shape for name, one in named if one.trainable and PREFIX in name}


def calls(lora: dict[str, Any]) -> list[ModuleCall]:
    """The modules of the blocks, of a whole model kept in bf16 of which everything is kept; as transformers
    makes the embedding's output require a gradient with checkpointing."""
    found = job(lora, training={"stored_dtype": "bf16", "activation_checkpointing": "full"})
    model = stages_of(found.model, found.parallelism)[0]
    workload = make_workload(model, replace(found.training, activation_checkpointing="none"))
    all_calls = [call for segment in workload.segments for call in segment.calls]
    return [call for call in all_calls if not call.name.startswith(("lm_head", "loss"))]


def saved_bytes(lora: dict[str, Any]) -> int:
    return sum(call.work.saved_bytes for call in calls(lora))


def flops(lora: dict[str, Any]) -> tuple[float, float]:
    """Forward and backward."""
    found = calls(lora)
    forward = sum(total_flops(kernels_of(call.work.forward).kernels) for call in found)
    return forward, sum(total_flops(kernels_of(call.work.backward).kernels) for call in found)


GATE_UP = {"base_layer.lora_A": (EXPERTS * RANK, HIDDEN), "base_layer.lora_B": (2 * WIDTH, EXPERTS * RANK)}
DOWN = {"lora_A": (EXPERTS * RANK, WIDTH), "lora_B": (HIDDEN, EXPERTS * RANK)}
DOUBLED = {
    "base_layer.lora_A": (EXPERTS * 2 * RANK, HIDDEN),
    "base_layer.lora_B": (2 * WIDTH, EXPERTS * 2 * RANK),
}
GATE = {"gate.lora_A": (RANK, HIDDEN), "gate.lora_B": (EXPERTS, RANK)}


def named(experts: Mapping[str, tuple[int, ...]], gate: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    found = {f"experts.{name}": shape for name, shape in experts.items()} | dict(gate or {})
    return {f"{name}.default.weight": shape for name, shape in found.items()}


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"targets": [], "target_parameters": STACKED}, named({**GATE_UP, **DOWN})),
        ({"targets": [], "target_parameters": STACKED[1:]}, named(DOWN)),
        ({"targets": ["q_proj", "gate_proj", "up_proj", "down_proj"]}, named({**DOUBLED, **DOWN})),
        ({"targets": ["down_proj"]}, named(DOWN)),
        ({"targets": "all-linear"}, named({**DOUBLED, **DOWN}, GATE)),
    ],
)
def test_names_and_shapes_are_those_of_peft(lora: dict[str, Any], expected: dict[str, Any]) -> None:
    """As PEFT 0.21.2 prints them of transformers 5.24's Qwen3-MoE: what transformers 4 called `gate_proj` and
    `up_proj` is one weight with twice the rank; "all-linear" has the router too."""
    assert trained(job(lora)) == expected
    assert list(trained(job(lora))) == list(expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_autograd_keeps_is_what_it_keeps_of_peft(dtype: str) -> None:
    """Bytes that more is kept than with adapters on `q_proj` alone, by `saved_tensors_hooks` on a CPU with
    transformers 5.24 (grouped_mm) and PEFT 0.21.2: the merged weights, rows, and casts of fp32 adapters."""
    attention = {"targets": ["q_proj"], "dtype": dtype}
    both = {**attention, "targets": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
    one = {"targets": [], "target_parameters": STACKED[:1], "dtype": dtype}
    measured = {"fp32": (3_899_392, 2_220_032), "bf16": (3_538_944, 2_224_128)}
    more = tuple(saved_bytes(lora) - saved_bytes(attention) for lora in (both, one))
    assert more == measured[dtype]


def test_sums_are_made_twice_and_their_gradients_multiplied_by_both_factors() -> None:
    """torch's FlopCounterMode counts 83,886,080 in `baddbmm` forward and in `bmm` backward: twice the sum,
    2 E out in r each, with twice the rank for gate and up. The products of all rows for the gradient of the
    sum, as large as those of forward, it does not count."""
    attention = flops({"targets": ["q_proj"]})
    both = flops({"targets": ["q_proj", "gate_proj", "up_proj", "down_proj"]})
    assert both[0] - attention[0] == 83_886_080
    rows = LAYERS * 2 * TOKENS * TOP_K * (HIDDEN * 2 * WIDTH + WIDTH * HIDDEN)
    assert both[1] - attention[1] == 83_886_080 + rows


def test_frozen_experts_have_no_products_for_their_weights() -> None:
    """The gate's and the experts' products backward are one each for their inputs, as many as forward."""
    found = [
        call for call in calls({"targets": ["q_proj"]}) if ".experts." in call.name or ".gate" in call.name
    ]
    products = [call for call in found if total_flops(kernels_of(call.work.forward).kernels)]
    assert len(products) == 3 * LAYERS
    for call in products:
        forward, backward = (kernels_of(one).kernels for one in (call.work.forward, call.work.backward))
        assert total_flops(backward) == total_flops(forward)
    assert all(call.work.saved_bytes == 0 for call in products if call.name.endswith("down_proj"))


def test_fsdp2_scatters_gradients_of_adapters_alone() -> None:
    """fp32, of both layers; their weights are gathered with the block."""
    found = job({"targets": [], "target_parameters": STACKED}, {"kind": "fsdp2", "wrapping": "huggingface"})
    works = [op.work for op in make_plan(found).programs[0].ops if isinstance(op.work, Collective)]
    numel = LAYERS * EXPERTS * RANK * (HIDDEN + 2 * WIDTH + WIDTH + HIDDEN)
    assert found.model.trainable_numel == numel
    assert sum(work.bytes for work in works if work.kind == "reduce_scatter") == 4 * numel


def test_an_adapter_config_names_parameters(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    config = {"peft_type": "LORA", "r": RANK, "target_modules": [], "target_parameters": STACKED[::-1]}
    path.write_text(json.dumps(config))
    assert trained(job({"config": str(path)})) == named({**GATE_UP, **DOWN})


# -- Megatron-Bridge ---------------------------------------------------------------------------------------

BRIDGE = {"kind": "megatron", "moe_grouped_gemm": True}
SPREAD = {"expert_imbalance": 1.0, "expert": 4, "dispatcher": "all-to-all"}


def bridge(lora: dict[str, Any] | None = None, strategy: dict[str, Any] | None = None) -> Job:
    targets = {"targets": ["linear_fc1", "linear_fc2"], **(lora or {})}
    return job(targets, {**BRIDGE, **(strategy or {})}, parallelism=SPREAD)


# Elements of both pairs: A of hidden and of width, B of both first products and of hidden.
PAIRS = RANK * (HIDDEN + 2 * WIDTH + WIDTH + HIDDEN)


@pytest.mark.parametrize(
    ("lora", "strategy", "per_layer"),
    [
        ({}, {}, 1),
        ({"share_expert_adapters": False}, {}, EXPERTS),
        ({}, {"moe_grouped_gemm": False}, EXPERTS),
    ],
)
def test_experts_that_run_together_share_one_adapter(
    lora: dict[str, Any], strategy: dict[str, Any], per_layer: int
) -> None:
    """A rank of four keeps fp32 sums of the shared pair, or of two experts' pairs, and reduces them over the
    two ranks that have the same."""
    found = bridge(lora, strategy)
    assert found.model.trainable_numel == LAYERS * per_layer * PAIRS
    plan = make_plan(found).programs[0]
    local = LAYERS * PAIRS * (1 if per_layer == 1 else per_layer // 4)
    assert sum(one.bytes for one in plan.resident if one.category == "gradients") == 4 * local
    over = [op.work for op in plan.ops if isinstance(op.work, Collective) and op.work.group == "expert_data"]
    assert sum(work.bytes for work in over) == 4 * local


def test_a_shared_adapters_gradients_are_summed_among_the_experts_ranks() -> None:
    """bf16, one call for each weight as its gradient is made (`_allreduce_shared_expert_grad`)."""
    sizes = [2 * RANK * n for n in (HIDDEN, 2 * WIDTH, WIDTH, HIDDEN)]

    def sums(found: Job) -> Counter[int]:
        works = [op.work for op in make_plan(found).programs[0].ops if isinstance(op.work, Collective)]
        return Counter(work.bytes for work in works if work.group == "expert" and work.kind == "all_reduce")

    assert sums(bridge()) == Counter(sizes * LAYERS)
    assert sums(bridge({"share_expert_adapters": False})) == Counter()


def test_megatrons_four_products_are_the_default() -> None:
    found = job({}, BRIDGE, parallelism=SPREAD)
    attention = RANK * (HIDDEN + 512 + 256 + HIDDEN)  # q, k and v of 256 + 2 x 128; 256 back to 256
    assert found.model.trainable_numel == LAYERS * (PAIRS + attention)


def test_experts_of_their_own_copy_their_rows_together() -> None:
    """Each local expert's adapter works on its own rows: FLOPs as many as of a shared one."""
    works = []
    for lora in ({}, {"share_expert_adapters": False}):
        found = bridge(lora)
        model = stages_of(found.model, found.parallelism)[0]
        segments = make_workload(model, found.training).segments
        works.append([call for one in segments for call in one.calls if ".lora_" in call.name])
    shared, own = (
        sum(total_flops(kernels_of(call.work.forward).kernels) for call in found) for found in works
    )
    assert shared == own == LAYERS * 2 * TOKENS * TOP_K * PAIRS


@pytest.mark.parametrize(
    ("lora", "strategy", "more", "error", "message"),
    [
        ({"target_parameters": ["experts.gate_up"]}, {}, {}, InputError, "did you mean 'gate_up_proj'"),
        ({"targets": ["gate_proj"]}, {}, {}, InputError, "found gate_proj without up_proj"),
        (
            {"target_parameters": STACKED, "dropout": 0.1},
            {},
            {},
            InputError,
            r"dropout: found 0.1 .* expected 0",
        ),
        ({"target_parameters": STACKED}, {"kind": "fsdp1"}, {}, InputError, "expected strategy 'fsdp2'"),
        (
            {"target_parameters": STACKED},
            {"kind": "deepspeed", "stage": 3},
            {},
            NotSimulatedError,
            "expected stage 0 to 2",
        ),
        (
            {"target_parameters": STACKED},
            {"kind": "fsdp2", "wrapping": "torchtitan"},
            {},
            NotSimulatedError,
            "these are of 'torchtitan'",
        ),
        ({"targets": r".*\.gate_proj"}, {}, {}, NotSimulatedError, "expected a list of names"),
        ({"share_expert_adapters": False}, {}, {}, InputError, "share_expert_adapters: found false"),
        ({"targets": ["linear_fc1"]}, {}, {}, InputError, "'linear_fc1'"),
        ({"target_parameters": ["q_proj.weight"]}, {}, {}, InputError, "'q_proj.weight' matches no stacked"),
        (
            {"target_parameters": STACKED},
            {},
            {"model": "llama-3.2-1b"},
            InputError,
            "target_parameters: 'llama-3.2-1b' has no routed experts",
        ),
        (
            {"share_expert_adapters": False},
            {},
            {"model": "llama-3.2-1b"},
            InputError,
            "share_expert_adapters: 'llama-3.2-1b' has no routed experts",
        ),
        (
            {"target_parameters": STACKED, "targets": ["linear_fc1"]},
            BRIDGE,
            {},
            InputError,
            "beside Megatron's targets",
        ),
        (
            {},
            BRIDGE,
            {"parallelism": {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}},
            NotSimulatedError,
            "expert_tensor: found 2 .* expected 1",
        ),
        (
            {},
            BRIDGE,
            {"training": {"activation_checkpointing": "selective", "recompute_modules": ["moe_act"]}},
            NotSimulatedError,
            "expected 'moe'",
        ),
        ({}, {**BRIDGE, "fsdp_sharding": "optim"}, {}, NotSimulatedError, "fsdp_sharding: found 'optim'"),
    ],
)
def test_what_is_refused(
    lora: dict[str, Any],
    strategy: dict[str, Any],
    more: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        job(lora, strategy or None, **more)


def test_zero_1_reduces_merged_experts_adapters_at_the_boundary() -> None:
    """A second micro-batch's sums are freed (`make_plan` checks that), and reduced with all else."""
    config = {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    strategy = {"kind": "deepspeed", "version": "0.19.8", "config": config}
    found = job({"target_parameters": STACKED}, strategy)
    ops = make_plan(found).programs[0].ops
    reduced = sum(
        op.work.bytes
        for op in ops
        if isinstance(op.work, Collective) and op.work.kind in ("reduce", "reduce_scatter", "all_reduce")
        and op.work.bytes > 8
    )  # fmt: skip
    assert reduced == 2 * found.model.trainable_numel


# Parameters of the model: 8 experts of 3 x 256 x 128 in two layers, and everything.
FROZEN_EXPERTS, WHOLE = 2 * 786_432, 2_483_712
ON_Q = {"targets": ["q_proj"]}
TRAINED = LAYERS * RANK * (HIDDEN + HIDDEN)


def resident_parameters(found: Job) -> int:
    return sum(one.bytes for one in make_plan(found).programs[0].resident if one.category == "parameters")


@pytest.mark.parametrize(
    ("strategy", "dtype", "expected"),
    [
        ({"kind": "ddp"}, None, 2 * WHOLE + 4 * TRAINED),
        ({"kind": "ddp"}, "fp32", 4 * WHOLE + 4 * TRAINED),
        ({"kind": "fsdp2", "wrapping": "huggingface"}, None, 2 * WHOLE + 4 * TRAINED),
        ({"kind": "fsdp2", "wrapping": "torchtitan"}, None, 2 * WHOLE + 4 * TRAINED),
        ({"kind": "fsdp2", "wrapping": "torchtitan"}, "fp32", 4 * WHOLE + 4 * TRAINED),
        ({"kind": "fsdp1", "wrapping": "peft"}, None, 2 * WHOLE + 4 * TRAINED),
    ],
)
def test_frozen_experts_are_kept_in_the_type_of_frozen_weights(
    strategy: dict[str, Any], dtype: str | None, expected: int
) -> None:
    """On one GPU, 2,483,712 parameters: embedding and head 2 x 256,000; two layers of 196,608 in attention,
    128 and 512 in norms, 2,048 in the router and 786,432 in experts; 256 in the last norm. bf16 if nothing
    else is said; the adapters in fp32."""
    training = {} if dtype is None else {"frozen_dtype": dtype}
    assert resident_parameters(job(ON_Q, strategy, gpus=1, training=training)) == expected


def test_stacked_experts_are_not_quantised_and_that_is_said() -> None:
    """bitsandbytes takes the place of linear layers: q 65,536, k and v 32,768 each and o 65,536 of each layer
    are half a byte an element, a byte for 64, 4 for 16,384 and 1,092 bytes: 34,900 and 17,996. Stacked
    experts are no linear layers, and stay in bf16 like all else."""
    found = job({**ON_Q, "quantized": "nf4"}, gpus=1)
    packed = LAYERS * 2 * (34_900 + 17_996)
    rest = WHOLE - LAYERS * 196_608
    assert resident_parameters(found) == packed + 2 * rest + 4 * TRAINED
    (note,) = [one for one in found.notes if "quantized" in one]
    assert "experts stay in 16 bits" in note


def test_experts_that_run_one_by_one_keep_their_type() -> None:
    """DeepSpeed's own layer, in which an expert's products are modules."""
    from zsim.plan.parallel.experts import expand_experts
    from zsim.specs.strategy.experts import ExpertSplit

    model = expand_experts(job(ON_Q).model, ExpertSplit(library=DEEPSPEED_MOE))
    experts = [one for name, one in model.named_parameters() if "deepspeed_experts" in name]
    assert sum(one.numel for one in experts) == FROZEN_EXPERTS
    assert {(one.stored_dtype, one.trainable) for one in experts} == {("bf16", False)}


# -- transformers 4 ----------------------------------------------------------------------------------------

LOOPED = {"transformers": "4.57"}


@pytest.mark.parametrize(
    ("targets", "trained_numel", "tensors"),
    [
        ("all-linear", 180_352, 116),
        (["q_proj", "gate_proj"], 57_344, 36),
        (["down_proj"], 49_152, 32),
    ],
)
def test_adapters_on_experts_that_are_linear_layers_are_peft_s(
    targets: str | list[str], trained_numel: int, tensors: int
) -> None:
    """Elements and tensors that PEFT 0.21.2 trains of this model with transformers 4.57.6: each expert's
    products have A and B of rank 8 like any other, and so has the router with "all-linear"."""
    found = job({"targets": targets}, training=LOOPED)
    names = [name for name, one in found.model.named_parameters() if one.trainable]
    assert (found.model.trainable_numel, len(names)) == (trained_numel, tensors)
    if targets == "all-linear":
        assert f"{PREFIX}experts.7.up_proj.lora_B.default.weight" in names
        assert f"{PREFIX}gate.lora_A.default.weight" in names


def test_experts_that_are_linear_layers_are_quantised() -> None:
    """Bytes of all weights as transformers 4.57.6 loads this model with bitsandbytes 0.50.2 (nf4, double
    quantisation), scales included: 2,106,768. Products of 32,768 are 16,384 + 512 + 8 + 1,092 each."""
    found = job({**ON_Q, "quantized": "nf4", "preparation": "none"}, gpus=1, training=LOOPED)
    assert resident_parameters(found) == 2_106_768 + 4 * TRAINED
    (note,) = [one for one in found.notes if "quantized" in one]
    assert "routed experts are quantised, each three linear layers" in note


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_on_linear_experts_run_under_zero(stage: int) -> None:
    """Every adapter's gradient is reduced, in bf16: 180,352 elements on two ranks."""
    found = job({"targets": "all-linear"}, {"kind": "deepspeed", "stage": stage}, gpus=2, training=LOOPED)
    works = [op.work for op in make_plan(found).programs[0].ops if isinstance(op.work, Collective)]
    kinds = ("reduce", "reduce_scatter", "all_reduce")
    reduced = sum(work.bytes for work in works if work.kind in kinds and work.bytes > 8)
    assert reduced == 2 * 180_352


def test_an_experts_adapters_see_its_rows() -> None:
    """Products of 2 x 128 tokens, of which an expert of 8 has 2 in 8: FLOPs of A and B of all experts are
    those of 256 rows on each of the two."""
    found = job({"targets": ["gate_proj", "up_proj", "down_proj"]}, training=LOOPED)
    model = stages_of(found.model, found.parallelism)[0]
    segments = make_workload(model, found.training).segments
    parts = [call for one in segments for call in one.calls if ".lora_" in call.name]
    forward = sum(total_flops(kernels_of(call.work.forward).kernels) for call in parts)
    per_row = 2 * (HIDDEN + WIDTH) + WIDTH + HIDDEN
    assert forward == LAYERS * 2 * TOKENS * TOP_K * RANK * per_row
