"""Routed experts as transformers 4 has them: modules of their own, which the host runs one by one."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.cost.flops import active_numel, model_flops_per_token
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.expert_layer import has_experts, stacked_experts
from zsim.specs.model.expert_loop import unstack_experts
from zsim.specs.model.huggingface import load_model, model_from_config

TINY: dict[str, Any] = {
    "model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 2,
}  # fmt: skip


def job_of(strategy: dict[str, Any], model: dict[str, Any] | str = TINY, **training: Any) -> Job:
    training = {"sequence_length": 96, **training}
    data: dict[str, Any] = {"model": model, "cluster": "dgx-h100", "gpus": 8, "training": training}
    return resolve(Experiment(**data, strategy=strategy))


def names(config: dict[str, Any]) -> list[str]:
    model = unstack_experts(model_from_config(config, name="tiny", source="test"))
    found = [name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")]
    return [name.removeprefix("model.layers.0.").removesuffix(".weight") for name in found]


def test_qwens_experts_have_the_names_of_transformers_4_in_their_order() -> None:
    """`named_parameters()` of Qwen2MoeSparseMoeBlock in 4.57.1: gate, experts, shared expert, its gate."""
    attention = [
        "self_attn.q_proj", "self_attn.q_proj.bias", "self_attn.k_proj", "self_attn.k_proj.bias",
        "self_attn.v_proj", "self_attn.v_proj.bias", "self_attn.o_proj",
    ]  # fmt: skip
    parts = ("gate_proj", "up_proj", "down_proj")
    experts = [f"mlp.experts.{number}.{part}" for number in range(3) for part in parts]
    shared = [f"mlp.shared_expert.{part}" for part in parts]
    norms = ["input_layernorm", "post_attention_layernorm"]
    assert names(TINY) == [*attention, "mlp.gate", *experts, *shared, "mlp.shared_expert_gate", *norms]


def test_mixtrals_layer_is_a_block_sparse_moe_of_w1_w2_and_w3() -> None:
    """`named_parameters()` of MixtralDecoderLayer in 4.57.1."""
    experts = [f"block_sparse_moe.experts.{number}.w{part}" for number in range(2) for part in (1, 2, 3)]
    assert names(MIXTRAL)[4:-2] == ["block_sparse_moe.gate", *experts]


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "deepseek-v3"])
def test_experts_one_by_one_are_the_same_parameters_and_products(preset: str) -> None:
    """Whole, for one token, and by the convention."""
    stacked = load_model(preset)
    looped = unstack_experts(stacked)
    assert (stacked_experts(looped), has_experts(looped)) == (None, True)
    assert looped.numel == stacked.numel
    assert active_numel(looped) == active_numel(stacked)
    assert model_flops_per_token(looped, 4096) == pytest.approx(model_flops_per_token(stacked, 4096))
    last = (sum(one.forward_flops(4096) for one in model.blocks[-1].modules) for model in (looped, stacked))
    assert next(last) == pytest.approx(next(last))


def test_families_whose_experts_were_stacked_in_transformers_4_stay_as_they_are() -> None:
    model = load_model("gpt-oss-20b")
    assert unstack_experts(model) is model


def is_looped(job: Job) -> bool:
    return stacked_experts(job.model) is None


def test_the_release_decides_how_experts_run() -> None:
    assert is_looped(job_of({"kind": "ddp"}, transformers="4.57"))
    assert is_looped(job_of({"kind": "ddp"}, transformers=4.51))
    assert not is_looped(job_of({"kind": "ddp"}, transformers="5.2.0"))


def said(job: Job) -> list[str]:
    return [note for note in job.notes if "routed experts" in note]


def test_without_a_release_the_age_of_deepspeed_decides_and_the_report_says_so() -> None:
    """transformers 5.0.0 is of January 2026, as is DeepSpeed 0.18.5."""
    old = job_of({"kind": "deepspeed", "stage": 2, "version": "0.18.3"})
    new = job_of({"kind": "deepspeed", "stage": 2, "version": "0.18.5"})
    assert (is_looped(old), is_looped(new), is_looped(job_of({"kind": "fsdp1"}))) == (True, False, False)
    assert ["one by one" in note and "DeepSpeed 0.18.3" in note for note in said(old)] == [True]
    assert ["stacked" in note and 'training.transformers = "4.57"' in note for note in said(new)] == [True]
    assert said(job_of({"kind": "ddp"}, transformers="4.57")) == []


def test_a_release_of_deepspeed_that_nobody_named_is_said_beside_old_experts() -> None:
    """Leaf modules by default since 0.18.0."""
    asked = {"kind": "deepspeed", "stage": 3}
    found = job_of(asked, transformers="4.57").notes
    assert [note for note in found if "before 0.18 ZeRO-3 fetches every product" in note]
    named = job_of({**asked, "version": "0.19.8"}, transformers="4.57").notes
    assert not [note for note in named if "before 0.18" in note]


def test_a_release_beside_other_code_is_refused_and_without_experts_is_said() -> None:
    with pytest.raises(InputError, match=r"training.transformers: found '4.57'.*'torchtitan'"):
        job_of({"kind": "fsdp2"}, transformers="4.57")
    with pytest.raises(InputError, match=r"training.transformers: found '2.0', expected a release"):
        job_of({"kind": "ddp"}, transformers="2.0")
    dense = job_of({"kind": "ddp"}, "llama-3.2-1b", transformers="4.57")
    assert [note for note in dense.notes if "without effect" in note]


def test_zero_3_hooks_every_product_of_every_expert_unless_its_block_is_a_leaf() -> None:
    """Leaf classes by default since DeepSpeed 0.18.0; an expert's container and its activation, which has no
    parameters, are hooked and fetch nothing."""
    old = make_plan(job_of({"kind": "deepspeed", "stage": 3, "version": "0.16.5"}, transformers="4.51"))
    fetched = [
        op.name.removeprefix("fetch ") for op in old.ops if op.name.startswith("fetch model.layers.1.")
    ]
    parts = ("gate_proj", "up_proj", "down_proj")
    products = {f"model.layers.1.mlp.experts.{number}.{part}" for number in range(3) for part in parts}
    assert products <= set(fetched)
    assert not [name for name in fetched if name in ("model.layers.1.mlp", "model.layers.1.mlp.experts")]
    new = make_plan(job_of({"kind": "deepspeed", "stage": 3}, transformers="4.57"))
    whole = {op.name for op in new.ops if op.name.startswith("fetch model.layers.1.mlp")}
    assert whole == {"fetch model.layers.1.mlp"}


def test_a_script_can_make_the_block_a_leaf_before_it_was_the_default() -> None:
    """`deepspeed.utils.set_z3_leaf_modules`, since 0.13.1; by the class's name or full name."""
    old = {"kind": "deepspeed", "stage": 3, "version": "0.16.5"}
    name = "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock"
    for given in ("Qwen2MoeSparseMoeBlock", name):
        plan = make_plan(job_of({**old, "leaf_modules": [given]}))
        whole = {op.name for op in plan.ops if op.name.startswith("fetch model.layers.1.mlp")}
        assert whole == {"fetch model.layers.1.mlp"}
    with pytest.raises(InputError, match=r"found 'Mixtral.* expected 'Qwen2MoeSparseMoeBlock'"):
        job_of({**old, "leaf_modules": ["MixtralSparseMoeBlock"]})
    with pytest.raises(InputError, match=r"DeepSpeed 0\.12\.6 has no leaf modules"):
        job_of({**old, "version": "0.12.6", "leaf_modules": ["Qwen2MoeSparseMoeBlock"]})
    idle = job_of({**old, "stage": 2, "leaf_modules": ["Qwen2MoeSparseMoeBlock"]}).notes
    assert [note for note in idle if "leaf_modules is without effect at stage 2" in note]


def test_the_host_waits_for_the_rows_of_every_expert() -> None:
    """Two layers of three experts in forward, none of stacked ones."""
    for release, count in (("4.57", 6), ("5.0", 0)):
        plan = make_plan(job_of({"kind": "ddp"}, transformers=release))
        assert sum(bool(op.host_waits) and op.phase == "forward" for op in plan.ops) == count


def test_tensor_parallelism_around_such_experts_is_refused_as_around_stacked_ones() -> None:
    for release in ("4.57", "5.0"):
        data: dict[str, Any] = {"model": TINY, "cluster": "dgx-h100", "gpus": 8}
        data["parallelism"] = {"tensor": 2}
        training = {"sequence_length": 96, "transformers": release}
        strategy = {"kind": "fsdp2", "wrapping": "huggingface"}
        with pytest.raises(NotSimulatedError, match="tensor"):
            resolve(Experiment(**data, training=training, strategy=strategy))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_names_leaf_classes_shortly_and_none_but_blocks_of_experts(stage: int) -> None:
    """Without its block among the classes, a router (1), and the experts' stack (1) are fetched."""

    def fetches(*classes: str) -> set[str]:
        zero = {"stage": stage, "leaf_module": {"classes": list(classes)}}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        plan = make_plan(job_of({"kind": "deepspeed", "config": config}))
        return {op.name for op in plan.ops if op.name.startswith("fetch model.layers.1.mlp")}

    if stage == 2:
        assert fetches("Qwen2MLP") == set()
        return
    assert fetches("Qwen2MoeSparseMoeBlock") == {"fetch model.layers.1.mlp"}
    assert fetches("MixtralSparseMoeBlock") > {"fetch model.layers.1.mlp.experts"}
    with pytest.raises(NotSimulatedError, match=r"leaf_module\.classes: zsim does not simulate 'Qwen2MLP'"):
        fetches("Qwen2MLP")


def test_leaves_that_are_no_module_are_noted() -> None:
    leaf = {"names": ["model.layers.0", "layers.1"], "name_suffixes": ["mlp", "mpl"]}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "leaf_module": leaf}}
    notes = make_plan(job_of({"kind": "deepspeed", "config": config})).notes
    assert [note for note in notes if "no module with parameters: layers.1, mpl; no effect" in note]
