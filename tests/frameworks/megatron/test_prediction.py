"""Multi-token prediction under Megatron: one layer more with its own head and loss, on the last stage."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.job import model_size
from zsim.explain.report_of import report_of
from zsim.frameworks.megatron.parallelism import MEGATRON
from zsim.plan.make import make_plan, stages_of
from zsim.plan.memory.tensors import device_peaks
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.prediction import add_prediction_layers, remove_prediction_layers
from zsim.specs.presets import model_preset_path
from zsim.specs.strategy.parallelism import ParallelismConfig

HIDDEN, VOCAB, TOKENS, LAYERS = 512, 1024, 1024, 4
HEADS, NOPE, ROPE, VALUES, Q_RANK, KV_RANK = 4, 64, 32, 64, 192, 128
MODEL: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": HIDDEN, "intermediate_size": 1024,
    "moe_intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "vocab_size": VOCAB, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUES,
}  # fmt: skip


def job_of(count: int = 1, **changes: Any) -> Job:
    strategy = {
        "kind": "megatron",
        "moe_grouped_gemm": True,
        "mtp_layers": count,
        **changes.pop("strategy", {}),
    }
    training = {"sequence_length": TOKENS, "gradient_accumulation_steps": 4, **changes.pop("training", {})}
    parallelism = {"expert": 4, "dispatcher": "all-to-all", **changes.pop("parallelism", {})}
    return resolve(
        Experiment(
            model=MODEL | changes.pop("model", {}), cluster="dgx-h100", gpus=8, training=training,
            strategy=strategy, parallelism=parallelism, **changes,
        )
    )  # fmt: skip


def flops(plan: Plan, phase: str) -> float:
    ops = [op for program in plan.programs for op in program.ops if op.phase == phase]
    return sum(total_flops(op.work.kernels) for op in ops if isinstance(op.work, Kernels))


def test_its_parameters_are_those_of_the_checkpoints_module() -> None:
    """DeepSeek-V3's technical report, section 4.2, has 14 B of them with the embedding and head it shares,
    which are 2 x 129280 x 7168 = 1.85 B."""
    model = load_model("deepseek-v3")
    made = add_prediction_layers(model, 1)
    assert made.numel - model.numel == made.mtp_parameters == model.mtp_parameters == 11_610_067_968
    assert remove_prediction_layers(made).numel == model.numel
    assert model_size(job_of(2)) == {
        **model_size(job_of(0)),
        "mtp_parameters": 2 * job_of(1).model.mtp_parameters,
    }


def test_it_multiplies_as_much_as_its_layer_two_projections_in_one_and_a_head() -> None:
    """Forward 2 T (2 h) h for the projection and 2 T h V for the head, four micro-batches; and a layer like
    the last, as much as one layer more of the model."""
    plain, more = job_of(0), job_of(0)
    more = resolve(more.experiment.model_copy(update={"model": {**MODEL, "num_hidden_layers": LAYERS + 1}}))
    layer = flops(make_plan(more), "forward") - flops(make_plan(plain), "forward")
    own = 4 * 2 * TOKENS * HIDDEN * (2 * HIDDEN + VOCAB)
    assert flops(make_plan(job_of(1)), "forward") == flops(make_plan(plain), "forward") + layer + own
    names = [op.name for op in make_plan(job_of(2)).programs[0].ops if op.phase == "forward"]
    assert Counter(name.rpartition(".")[2] for name in names)["loss"] == 4 * 3


@pytest.mark.parametrize("count", [0, 1, 2])
def test_it_is_on_the_last_stage_which_sums_its_embedding_with_the_firsts(count: int) -> None:
    job = job_of(count, parallelism={"pipeline": 2})
    assert job.parallelism.layers_per_stage == (2, 2 + count)
    sums = [
        [
            op.work.bytes
            for op in program.ops
            if isinstance(op.work, Collective) and op.work.group == "embedding"
        ]
        for program in make_plan(job).programs
    ]
    assert sums == [[VOCAB * HIDDEN * 4] * min(count, 1)] * 2
    report = report_of(simulate_job(job), 0.0).to_dict()
    assert [stage["layers"] for stage in report["stages"]] == [2, 2 + count]


def tensor_calls(count: int, layers: int, **parallelism: Any) -> Counter[tuple[str, str, int]]:
    """Phase, kind and bytes of the calls of tensor parallelism, with a dense model of so many layers."""
    model = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 1024, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": layers, "vocab_size": VOCAB,
    }  # fmt: skip
    job = resolve(
        Experiment(
            model=model, cluster="dgx-h100", gpus=8, training={"sequence_length": TOKENS},
            strategy={"kind": "megatron", "mtp_layers": count}, parallelism={"tensor": 2, **parallelism},
        )
    )  # fmt: skip
    ops = make_plan(job).programs[-1].ops
    return Counter(
        (op.phase, op.work.kind, op.work.bytes)
        for op in ops
        if isinstance(op.work, Collective) and op.work.group == "tensor" and op.work.bytes > 1
    )


def test_beside_tensor_parallelism_its_product_gathers_what_it_reads_and_makes() -> None:
    """Beyond a layer like the last, of T x h x 2 bytes = 1 MiB: forward gathers 2 MiB before the product and
    1 behind it, scatters the sum of the embedding's parts and gathers 1 before the head; three numbers per
    token in fp32, 4 KiB, of its loss. Backward gathers both inputs of its columns again, the gradient of the
    tokens behind the product and of the embedding, and scatters the gradients of both inputs. The sum of the
    norms' gradients is of 14, not 11 of them."""
    unit = TOKENS * HIDDEN * 2
    more = tensor_calls(1, LAYERS, sequence_parallel=True)
    more.subtract(tensor_calls(0, LAYERS + 1, sequence_parallel=True))
    assert {call: number for call, number in more.items() if number} == {
        ("forward", "all_gather", 2 * unit): 1,
        ("forward", "all_gather", unit): 2,
        ("forward", "reduce_scatter", unit): 1,
        ("forward", "all_reduce", TOKENS * 4): 3,
        ("backward", "all_gather", 2 * unit): 1,
        ("backward", "all_gather", unit): 3,
        ("backward", "reduce_scatter", 2 * unit): 1,
        ("backward", "reduce_scatter", unit): 1,
        ("backward", "all_reduce", 11 * HIDDEN * 4): -1,
        ("backward", "all_reduce", 14 * HIDDEN * 4): 1,
    }


def test_without_sequence_parallelism_its_product_is_gathered_and_its_embedding_summed() -> None:
    unit = TOKENS * HIDDEN * 2
    more = tensor_calls(1, LAYERS)
    more.subtract(tensor_calls(0, LAYERS + 1))
    assert {call: number for call, number in more.items() if number} == {
        ("forward", "all_gather", unit): 1,
        ("forward", "all_reduce", unit): 1,
        ("forward", "all_reduce", TOKENS * 4): 3,
        ("backward", "all_reduce", 2 * unit): 1,
        ("backward", "all_reduce", unit): 1,
    }


def test_folded_and_unfolded_are_the_same() -> None:
    job = job_of(1, parallelism={"pipeline": 2})
    folded, unfolded = (report_of(simulate_job(job, unfold=unfold), 0.0) for unfold in (False, True))
    assert folded.step_seconds == pytest.approx(unfolded.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"fsdp_sharding": "optim_grads_params"}}, "with Megatron-FSDP"),
        ({"strategy": {"overlap_expert_parallel": True}}, "with overlap_expert_parallel"),
    ],
)
def test_what_it_is_not_simulated_beside_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotSimulatedError, match=said):
        job_of(1, **changes)


def test_older_megatrons_have_none() -> None:
    with pytest.raises(InputError, match="only Megatron-Core has multi-token prediction"):
        job_of(1, strategy={"version": "3.0", "moe_grouped_gemm": False})


def test_a_model_with_learned_positions_has_none() -> None:
    with pytest.raises(InputError, match="found 1 with 'gpt2', whose positions are learned; Megatron has"):
        resolve(Experiment(
            model="gpt2", cluster="dgx-h100", gpus=8, training={"sequence_length": TOKENS},
            strategy={"kind": "megatron", "mtp_layers": 1},
        ))  # fmt: skip


def test_recomputed_up_projections_run_once_more_and_keep_the_compressed_alone() -> None:
    """Both products with their norms run again; per layer and token go q (4 x 96), k and v (4 x (96 + 64)),
    and the normed q and kv of rank 192 and 128, 2 bytes each; none is back yet at the loss, the peak."""
    recompute = {"activation_checkpointing": "selective", "recompute_modules": ["mla_up_proj"]}
    plain, plan = make_plan(job_of(0)), make_plan(job_of(0, training=recompute))
    wide = HEADS * (NOPE + ROPE), HEADS * (NOPE + VALUES)
    products = 2 * TOKENS * (Q_RANK * wide[0] + KV_RANK * wide[1])
    assert flops(plan, "recompute") == 4 * LAYERS * products
    assert flops(plan, "forward") == flops(plain, "forward")
    peaks = [one.programs[0].memoize(device_peaks)["gpu"] for one in (plain, plan)]
    kept = wide[0] + HEADS * (NOPE + ROPE + VALUES) + Q_RANK + KV_RANK
    assert peaks[0] - peaks[1] == LAYERS * TOKENS * kept * 2
    again = [op.name for op in plan.programs[0].ops if op.phase == "recompute"]
    assert len(again) == 4 * LAYERS
    assert all("self_attn.core" in name for name in again)
    with pytest.raises(NotSimulatedError, match="'mla_up_proj' with attention 'flash'"):
        job_of(0, training={**recompute, "attention": "math"})


def test_products_of_latent_attention_stay_apart() -> None:
    """Queries come from what is compressed, keys' and values' compression from the layer's input: no product
    reads both."""
    job = job_of(0)
    named = {one.name for one in stages_of(job.model, job.parallelism)[0].blocks[0].modules}
    assert {"self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"} <= named
    assert (
        sum(stage.numel for stage in stages_of(job.model, ParallelismConfig(style=MEGATRON)))
        == job.model.numel
    )


@pytest.mark.parametrize(
    ("is_tied", "modules", "sums", "held"),
    [
        (True, 0, ["model.embed_tokens"], 1),
        (True, 1, ["mtp.layers.0.lm_head", "mtp.layers.0.embedding", "model.embed_tokens"], 2),
        (False, 0, [], 0),
        (False, 1, ["mtp.layers.0.lm_head", "model.embed_tokens"], 2),
        (False, 2, [
            "mtp.layers.1.lm_head", "mtp.layers.0.lm_head", "mtp.layers.0.embedding", "model.embed_tokens",
        ], 3),
    ],
)  # fmt: skip
def test_a_shared_weight_is_given_a_gradient_by_each_module(
    is_tied: bool, modules: int, sums: list[str], held: int
) -> None:
    """Without fused accumulation autograd holds the first gradient of a weight, adds each later one and frees
    it, and adds the sum to the buffer once. Two modules more use a tied weight with each prediction; of an
    untied one heads' are summed with heads', embeddings' with embeddings'. Nothing is left after the step.
    """
    strategy = {"kind": "megatron", "mtp_layers": modules, "gradient_accumulation_fusion": False}
    config = json.loads(model_preset_path("exaone-4.0-1.2b").read_text(encoding="utf-8"))
    model = {key: value for key, value in config.items() if key != "_source"} | {
        "tie_word_embeddings": is_tied
    }
    job = resolve(Experiment(model=model, cluster="dgx-h100", gpus=8, strategy=strategy))
    plan = make_plan(job)
    names = [op.name for op in plan.ops]
    assert [name.removeprefix("add tied gradient ") for name in names if "tied" in name] == sums
    assert names.count("add gradient model.embed_tokens") == 1
    assert names.count("add gradient lm_head") == (not is_tied)
    level, levels = 0, [0]
    for change in plan.memory:
        if change.category == "activations" and abs(change.bytes) == 2 * 102_400 * 2_048:
            level += change.bytes
            levels.append(level // abs(change.bytes))
    assert max(levels) == held
    assert level == 0


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_have_one_copy_of_what_predictions_share(is_tied: bool) -> None:
    """The last of two stages has the head's V x h and, where it is not the embedding's, the embedding's."""
    job = job_of(2, model={"tie_word_embeddings": is_tied}, parallelism={"pipeline": 2, "expert": 1})
    *_, last = stages_of(job.model, job.parallelism)
    tables = [module.numel for module in last.after if module.numel >= VOCAB * HIDDEN]
    assert tables == [VOCAB * HIDDEN] * (1 if is_tied else 2)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_frozen_head_and_embedding_are_given_no_gradient_by_prediction(is_tied: bool) -> None:
    """Under LoRA both are frozen, tied or not: a product back through each head, none for its weight."""
    strategy = {"kind": "megatron", "mtp_layers": 1, "gradient_accumulation_fusion": False}
    model = {**MODEL, "tie_word_embeddings": is_tied}
    training = {"sequence_length": TOKENS, "lora": {"rank": 8}}
    job = resolve(Experiment(model=model, cluster="dgx-h100", gpus=8, training=training, strategy=strategy))
    ops = make_plan(job).programs[0].ops
    assert not [op.name for op in ops if op.name.startswith("add tied gradient ")]
    backward = [(op.name, op.work) for op in ops if op.phase == "backward" and isinstance(op.work, Kernels)]
    assert not [name for name, _ in backward if "embed" in name]
    heads = [total_flops(work.kernels) for name, work in backward if name.endswith("lm_head backward")]
    assert heads == [2 * TOKENS * HIDDEN * VOCAB] * 2


@pytest.mark.parametrize(
    ("strategy", "depths", "is_noted"),
    [({}, 1, True), ({"mtp_layers": 0}, 1, False), ({"mtp_layers": 1}, 1, False), ({}, 0, False)],
)
def test_multi_token_prediction_that_nobody_spoke_of_is_named(
    strategy: dict[str, Any], depths: int, is_noted: bool
) -> None:
    """Megatron-Bridge trains what Megatron-LM's command line leaves out."""
    job = resolve(
        Experiment(
            model={**MODEL, "num_nextn_predict_layers": depths},
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": TOKENS},
            strategy={"kind": "megatron", "moe_grouped_gemm": True, **strategy},
            parallelism={"expert": 4, "dispatcher": "all-to-all"},
        )
    )
    assert any("Megatron-Bridge trains it by default" in note for note in job.notes) == is_noted
