"""DeepSpeed's Muon: its products, its states by stage, and who computes what; its calls are held to recorded
ones in `tests/validation/test_deepspeed_calls.py`."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.muon import head_matrices
from zsim.frameworks.deepspeed.muon_kernels import matrix_kernels, uses_muon
from zsim.plan.ops import Kernels
from zsim.specs.model.huggingface import load_model

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
# Two layers: q, o 256 x 256, k, v 64 x 256, three of 512 x 256, two norms; a norm, and 1000 x 256 twice
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = 2 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 512 * 256)
OTHERS = 5 * 256 + 2 * 1000 * 256


def asked(zero: dict[str, Any], gpus: int = 2, model: Any = MODEL, **top: Any) -> zsim.Experiment:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    return zsim.Experiment(
        model=model, cluster="dgx-h100", gpus=gpus,
        training={"sequence_length": 128, "precision": "bf16"},
        strategy={"kind": "deepspeed", "config": {**config, **MUON, **top}},
    )  # fmt: skip


def report(zero: dict[str, Any], gpus: int = 2, **top: Any) -> dict[str, Any]:
    return zsim.simulate(asked(zero, gpus, **top)).report.to_dict()


def test_the_gram_matrix_is_multiplied_where_it_is_smaller() -> None:
    """Of 256 x 1,024: 8 * 256^2 * 1024 + 28 * 256^3 FLOPs, in fp16; square ones and "standard" take torch's
    5 (4 m^2 n + 2 m^3), standard ones in bf16."""
    wide = matrix_kernels((256, 1024), "bf16")
    assert sum(one.flops for one in wide) == 8 * 256 * 256 * 1024 + 28 * 256**3 == 1_006_632_960
    assert {one.dtype for one in wide if one.kind == "gemm"} == {"fp16"}
    square = sum(one.flops for one in matrix_kernels((256, 256), "bf16"))
    assert square == 5 * (4 * 256**3 + 2 * 256**3)
    standard = matrix_kernels((1024, 256), "bf16", "standard")
    assert sum(one.flops for one in standard) == 5 * (4 * 256**2 * 1024 + 2 * 256**3)
    assert {one.dtype for one in standard if one.kind == "gemm"} == {"bf16"}
    stacked = matrix_kernels((3, 256, 1024), "bf16")
    assert sum(one.flops for one in stacked) == 3 * 1_006_632_960


@pytest.mark.parametrize(
    ("name", "shape", "is_its"),
    [("model.layers.0.mlp.up_proj.weight", (8, 8), True), ("model.embed_tokens.weight", (8, 8), False),
     ("lm_head.weight", (8, 8), False), ("model.norm.weight", (8,), False),
     ("transformer.wte.weight", (8, 8), True)],
)  # fmt: skip
def test_names_and_dimensions_decide_who_is_orthogonalised(
    name: str, shape: tuple[int, ...], is_its: bool
) -> None:
    """`set_optimizer_flags` looks for "embed" and "lm_head" only, so GPT-2's table is Muon's."""
    assert uses_muon(name, shape) is is_its


@pytest.mark.parametrize(("stage", "each"), [(1, 2), (2, 2)])
def test_momentum_is_of_whole_matrices_in_the_gradients_type(stage: int, each: int) -> None:
    """By shape four of 512 x 256 come first, then two of 256 x 512, four squares, four of 64 x 256.
    The first rank's half ends inside a matrix, which both then have whole. Masters take 4 bytes, the two
    moments of the rest 4 each."""
    peak = report({"stage": stage})["peak_bytes"]["gpu"]["optimizer_states"]
    sizes = [512 * 256] * 4 + [256 * 512] * 2 + [256 * 256] * 4 + [64 * 256] * 4
    half, whole, start = MATRICES // 2, [0, 0], 0
    for size in sizes:
        for rank in (0, 1):
            if start < (rank + 1) * half and start + size > rank * half:
                whole[rank] += size
        start += size
    masters = 4 * (MATRICES + OTHERS) // 2
    assert peak == masters + each * max(whole) + 2 * 4 * OTHERS // 2


def test_stage_3_keeps_the_momentum_of_its_shards() -> None:
    """Of half of the matrices one momentum in the type of communication, bf16."""
    peak = report({"stage": 3, "reduce_scatter": False})["peak_bytes"]["gpu"]["optimizer_states"]
    assert peak == (4 * (MATRICES + OTHERS) + 2 * MATRICES + 8 * OTHERS) // 2


def test_every_rank_orthogonalises_its_own_matrices_only() -> None:
    """Eight ranks take less time to it than two."""
    config = {"stage": 2, "overlap_comm": False}
    plans = [
        zsim.make_plan(
            zsim.Experiment(
                model=MODEL, cluster="dgx-h100", gpus=gpus,
                training={"sequence_length": 128, "precision": "bf16"},
                strategy={
                    "kind": "deepspeed",
                    "config": {
                        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
                        "zero_optimization": config, **MUON,
                    },
                },
            )
        )
        for gpus in (2, 8)
    ]  # fmt: skip
    counts = [sum("orthogonalise" in op.name for op in plan.programs[0].ops) for plan in plans]
    assert counts[0] > counts[1] >= 2


@pytest.mark.parametrize(
    ("zero", "error", "said"),
    [
        ({"stage": 3}, InputError, '"reduce_scatter": false'),
        ({"stage": 0}, NotSimulatedError, "at stage 0"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, NotSimulatedError, "offload_optimizer"),
        ({"stage": 1, "use_multi_rank_bucket_allreduce": False}, NotSimulatedError, "multi_rank"),
    ],
)
def test_what_it_does_not_go_with_is_said(zero: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        report(zero)


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, "reduce_scatter": False}])
def test_projections_of_attention_are_taken_head_by_head(zero: dict[str, Any]) -> None:
    """q has 8 heads of 32 x 256, k 2 of them, o none: 8 * 32^2 * 256 + 28 * 32^3 = 3,014,656 FLOPs a head, by
    one batched product after the other."""
    flops = {}
    for by_head in (False, True):
        params = {"lr": 0.02, "per_head_muon": by_head}
        plan = zsim.make_plan(asked(zero, gpus=1, optimizer={"type": "Muon", "params": params}))
        for op in plan.programs[0].ops:
            if isinstance(op.work, Kernels) and ("self_attn" in op.name and "orthogonalise" in op.name):
                leaf = op.name.split(".")[-2]
                flops[leaf, by_head] = sum(one.flops for one in op.work.kernels if one.kind == "gemm")
                assert all(one.is_batched == (by_head and leaf != "o_proj") for one in op.work.kernels[1:])
    assert flops["q_proj", True] == 8 * 3_014_656
    assert flops["k_proj", True] == flops["v_proj", True] == 2 * 3_014_656
    assert flops["q_proj", False] == flops["o_proj", False] == flops["o_proj", True]
    assert flops["k_proj", False] == 8 * 64 * 64 * 256 + 28 * 64**3


def test_heads_of_latent_attention_are_those_of_its_up_projections() -> None:
    """DeepSeek-V2-Lite: 16 heads of queries of 128 + 64, of keys and values of 128 + 128; down none."""
    found = head_matrices(load_model("deepseek-v2-lite"))
    of_first = {name.split(".")[-2]: shape for name, shape in found.items() if ".layers.0." in name}
    assert of_first == {"q_proj": (16, 192, 2048), "kv_b_proj": (16, 256, 512)}


def test_a_model_without_heads_apart_is_refused() -> None:
    """GPT-2's `c_attn` has all three in one."""
    params = {"lr": 0.02, "per_head_muon": True}
    with pytest.raises(InputError, match="per_head_muon: found true with 'gpt2'"):
        zsim.make_plan(asked({"stage": 1}, model="gpt2", optimizer={"type": "Muon", "params": params}))


def test_a_stage_without_matrices_is_refused() -> None:
    """It has one group of parameters where the others have two, and their norms are summed one by one."""
    model = {**MODEL, "num_hidden_layers": 4, "vocab_size": 8000}
    experiment = zsim.Experiment(
        model=model, cluster="dgx-h100", training={"sequence_length": 128, "precision": "bf16"},
        strategy={
            "kind": "deepspeed",
            "config": {
                "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **MUON,
                "zero_optimization": {"stage": 1},
            },
        },
        parallelism={"pipeline": 4},
    )  # fmt: skip
    with pytest.raises(NotSimulatedError, match="with stages of 0, 2, 2, 0 layers"):
        zsim.simulate(experiment)
