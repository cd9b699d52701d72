"""Modules that Megatron runs once more before their backward: which, with which exchanges, what is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.host_time import extra_products, unfused_norms
from zsim.plan.make import make_plan, stages_of
from zsim.plan.memory.tensors import device_peaks
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

LAYERS, HIDDEN, WIDTH, TOP_K, TOKENS = 2, 1024, 512, 4, 2048
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 512,
    "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "num_experts": 16,
    "num_experts_per_tok": TOP_K, "tie_word_embeddings": False,
}  # fmt: skip
ROWS = LAYERS * TOKENS * TOP_K
OUTPUT = {"moe_act": ROWS * WIDTH * 2, "layernorm": LAYERS * TOKENS * HIDDEN * 2}  # bytes


def plan_of(*modules: str, graphs: tuple[str, ...] = (), **model: Any) -> Plan:
    recomputed = {"activation_checkpointing": "selective", "recompute_modules": list(modules)}
    training = {"sequence_length": TOKENS, **(recomputed if modules else {})}
    return make_plan(
        resolve(
            Experiment(
                model={**MODEL, **model},
                cluster="dgx-h100",
                gpus=8,
                training=training,
                strategy={
                    "kind": "megatron",
                    "moe_grouped_gemm": True,
                    "moe_permute_fusion": True,
                    **({"cuda_graph_modules": graphs} if graphs else {}),
                },
                parallelism={"expert": 8, "dispatcher": "all-to-all", "expert_imbalance": 1.0},
            )
        )
    )


def again(plan: Plan) -> list[str]:
    ops = plan.programs[0].ops
    return [op.name for op in ops if op.phase == "recompute" and isinstance(op.work, Kernels)]


def exchanges(plan: Plan, phase: str) -> Counter[tuple[str, int]]:
    works = [op.work for op in plan.programs[0].ops if op.phase == phase and isinstance(op.work, Collective)]
    return Counter((work.kind, work.bytes) for work in works if "expert" in work.group)


def flops(plan: Plan, phase: str, word: str) -> float:
    works = [op.work for op in plan.programs[0].ops if op.phase == phase and word in op.name]
    return sum(total_flops(work.kernels) for work in works if isinstance(work, Kernels))


@pytest.mark.parametrize("module", ["moe_act", "layernorm"])
def test_a_dropped_output_is_made_again_where_it_is_read(module: str) -> None:
    plan = plan_of(module)
    reader = {"moe_act": "down_proj", "layernorm": "gate"}[module]
    assert [name.endswith(f"{reader} recompute") for name in again(plan)] == [True] * LAYERS
    assert exchanges(plan, "recompute") == Counter()
    assert flops(plan, "recompute", "") == 0.0  # neither has products
    peaks = [one.programs[0].memoize(device_peaks)["gpu"] for one in (plan_of(), plan)]
    assert 0 < peaks[0] - peaks[1] <= OUTPUT[module]


def test_latent_attention_has_a_norm_of_its_own_that_is_made_again() -> None:
    """Its input is not normalised by a product, as other attention's is: two norms a layer, read by the first
    projection and by the shared experts."""
    latent: dict[str, Any] = {
        "model_type": "deepseek_v3", "n_routed_experts": 16, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 0, "kv_lora_rank": 64, "q_lora_rank": 96,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    plan = plan_of("layernorm", **latent)
    readers = Counter(name.removesuffix(" recompute").rpartition(".")[2] for name in again(plan))
    assert readers == {"q_a_proj": LAYERS, "linear_fc1": LAYERS}
    peaks = [one.programs[0].memoize(device_peaks)["gpu"] for one in (plan_of(**latent), plan)]
    assert 0 < peaks[0] - peaks[1] <= 2 * OUTPUT["layernorm"]


def test_a_graph_of_the_router_keeps_the_norm_before_it() -> None:
    """Its output is a static buffer of the graph; not where the graph sorts the rows as well."""
    assert again(plan_of("layernorm", graphs=("moe_router",))) == []
    assert len(again(plan_of("layernorm", graphs=("moe_router", "moe_preprocess")))) == LAYERS


def test_what_clamps_keep_is_made_again_with_the_activation() -> None:
    """gpt-oss keeps gate and up before the clamps; the activation's output and both clamped, three widths of
    each row, go."""
    model: dict[str, Any] = {
        "model_type": "gpt_oss",
        "intermediate_size": WIDTH,
        "num_local_experts": 16,
        "sliding_window": 64,
    }
    peaks = [
        plan_of(*names, **model).programs[0].memoize(device_peaks)["gpu"] for names in ((), ("moe_act",))
    ]
    one = ROWS // LAYERS * WIDTH * 2
    assert (2 * LAYERS - 1) * one <= peaks[0] - peaks[1] <= 3 * LAYERS * one


def test_a_whole_layer_of_experts_runs_with_its_exchanges() -> None:
    plain, plan = plan_of(), plan_of("moe")
    assert exchanges(plan, "recompute") == exchanges(plain, "forward")
    assert flops(plan, "recompute", "mlp") == flops(plain, "forward", "mlp")
    assert flops(plan, "recompute", "self_attn") == 0.0
    peaks = [one.programs[0].memoize(device_peaks)["gpu"] for one in (plain, plan)]
    assert peaks[1] < peaks[0]


def test_with_the_norm_its_output_is_not_even_held() -> None:
    alone, both = plan_of("moe"), plan_of("moe", "layernorm")
    assert len(again(both)) == len(again(alone)) + LAYERS
    peaks = [one.programs[0].memoize(device_peaks)["gpu"] for one in (alone, both)]
    assert peaks[1] <= peaks[0]


@pytest.mark.parametrize(
    ("shared", "names", "measured"),
    [
        (0, (), 1_329_152), (0, ("moe",), 656_384), (0, ("moe", "layernorm"), 0),
        (192, (), 1_624_064), (192, ("moe",), 656_384), (192, ("moe", "layernorm"), 0),
        (192, ("shared_experts",), 1_329_152),
    ],
)  # fmt: skip
def test_what_is_kept_is_what_megatron_core_keeps(shared: int, names: tuple[str, ...], measured: int) -> None:
    """Bytes from Megatron-Core 0.16.1 itself on a CPU (`python -m validation.recomputed_experts`), whose norm
    keeps two fp32 tensors and a number a token where it does not run once more, on a GPU its input alone.
    With "moe" one tensor is left, the layer's input. zsim has 3 KiB more of 256 tokens' scores."""
    model: dict[str, Any] = {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 512,
        **({"model_type": "qwen2_moe", "shared_expert_intermediate_size": shared} if shared else {}),
    }  # fmt: skip
    again = {"activation_checkpointing": "selective", "recompute_modules": list(names)} if names else {}
    job = resolve(
        Experiment(
            model={**MODEL, **model},
            cluster="dgx-h100",
            gpus=1,
            training={"sequence_length": 128, "micro_batch_size": 2, **again},
            strategy={"kind": "megatron"},
            parallelism={"dispatcher": "all-to-all"},
        )
    )
    segments = make_workload(stages_of(job.model, job.parallelism)[0], job.training).segments
    block = next(one for one in segments if one.kind == "block")
    behind = [call for call in block.calls if ".mlp" in call.name or ".post" in call.name]
    own = sum(call.work.saved_bytes for call in behind if call.name not in block.unsaved_calls)
    outputs = sum(sum(call.work.kept_outputs) for call in behind)
    norm = 256 * 256 * 2  # its input, which is the stream
    of_cpu = 0 if "layernorm" in names else 256 * (2 * 256 * 4 + 4)
    scores = 3072 if "moe" not in names else 0
    assert own + outputs - norm == measured - of_cpu + scores


@pytest.mark.parametrize("module", ["mlp", "shared_experts"])
def test_names_of_what_a_layer_lacks_change_nothing(module: str) -> None:
    """A layer of experts has no dense MLP, this model no shared expert."""
    assert [op.name for op in plan_of(module).programs[0].ops] == [
        op.name for op in plan_of().programs[0].ops
    ]


def test_a_dense_mlp_runs_once_more() -> None:
    plan = plan_of("mlp", mlp_only_layers=[0])
    assert flops(plan, "recompute", "mlp") == flops(plan_of(mlp_only_layers=[0]), "forward", "layers.0.mlp")


def spread_experts(strategy: dict[str, Any], dispatcher: str = "all-to-all") -> Job:
    """All experts on 8 GPUs, exchanged all to all."""
    return resolve(
        Experiment(
            model=MODEL,
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": TOKENS},
            strategy=strategy,
            parallelism={"expert": 8, "dispatcher": dispatcher, "expert_imbalance": 1.0},
        )
    )


@pytest.mark.parametrize(
    ("keys", "blocks", "experts", "router", "norms"),
    [
        ({}, "megatron_core_block", "megatron_core_routing", 2 * LAYERS, 3),
        (
            {"deterministic_mode": True},
            "megatron_core_deterministic_block",
            "megatron_core_experts",
            2 * LAYERS,
            3,
        ),
        (
            {"cuda_graph_modules": ["attn", "moe_router"]},
            "megatron_core_half_block",
            "megatron_core_routing",
            0,
            0,
        ),
        (
            {"cuda_graph_modules": ["moe_router", "moe_preprocess"]},
            "megatron_core_block",
            "megatron_core_fused_dispatch",
            0,
            2,
        ),
        ({"transformer_impl": "local"}, "megatron_core_block", "megatron_core_routing", 2 * LAYERS, 0),
        ({"cuda_graph": True}, "", "", 0, 0),
    ],
)
def test_layers_and_their_experts_take_the_host_forward_and_backward(
    keys: dict[str, Any], blocks: str, experts: str, router: int, norms: int
) -> None:
    """Every layer is entered twice, and so are its two products and, without a graph of it, its router; so
    are `norms` that are modules of their own: of queries and keys, and the router's. Of two experts on a rank
    the second has two products forward and four backward, which Transformer Engine launches."""
    job = spread_experts({"kind": "megatron", "moe_grouped_gemm": True, **keys})
    entered: Counter[str] = Counter()
    for op in make_plan(job).programs[0].ops:
        if op.overhead is not None and op.overhead.startswith("megatron_core"):
            entered[op.overhead] += op.events
    expected = {blocks: 2 * LAYERS, experts: 2 * 2 * LAYERS + router} if blocks else {}
    expected |= (
        {"megatron_core_product": (2 + 4) * LAYERS} if blocks and "transformer_impl" not in keys else {}
    )
    expected |= {"megatron_core_norm": 2 * norms * LAYERS} if norms else {}
    assert entered == expected


def test_deepep_dispatches_in_a_few_kernels() -> None:
    """The router's operators are those of an all-to-all, twice a layer, and dispatch and return are not."""
    job = spread_experts({"kind": "megatron", "moe_grouped_gemm": True}, dispatcher="deepep")
    entered: Counter[str] = Counter()
    for op in make_plan(job).programs[0].ops:
        entered[op.overhead or ""] += op.events
    assert entered["megatron_core_routing"] == 2 * LAYERS
    assert entered["megatron_core_fused_dispatch"] == 2 * 2 * LAYERS


@pytest.mark.parametrize(
    ("model", "alone", "more"),
    [
        ("llama-3-8b", {(0, 0)}, {(0, 0)}),
        ("qwen3-8b", {(2, 0)}, {(0, 0)}),
        ("deepseek-v2-lite", {(1, 0), (1, 1)}, {(2, 0), (2, 2)}),
        ("deepseek-v3", {(1, 0), (1, 1)}, {(3, 0), (3, 2)}),
        ("mixtral-8x7b", {(0, 1)}, {(0, 0)}),
        ("bert-base", {(1, 0)}, {(0, 0)}),  # before the MLP's product, and behind it, the last of the block
    ],
)
def test_norms_and_products_of_a_layer_that_take_the_host_more(
    model: str, alone: set[tuple[int, int]], more: set[tuple[int, int]]
) -> None:
    """Norms of queries and keys stand alone, the first with latent attention, and a router's; others are part
    of a product. Latent attention has two further products, three with queries of low rank, shared experts
    two. DeepSeek's first layers are dense."""
    job = resolve(
        Experiment(
            model=model,
            cluster="dgx-h100",
            gpus=8,
            training={"sequence_length": 64},
            strategy={"kind": "megatron"},
            parallelism={"tensor": 2, "sequence_parallel": True},
        )
    )
    (stage,) = stages_of(job.model, job.parallelism)
    segments = make_workload(stage, job.training).segments
    blocks = [one for one in segments if one.kind == "block"]
    assert {unfused_norms(one) for one in blocks} == alone
    assert {extra_products(one) for one in blocks} == more


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"overlap_expert_parallel": True}, {"megatron_core_pairing": 2 * LAYERS}),
        (
            {"overlap_expert_parallel": True, "deterministic_mode": True},
            {"megatron_core_deterministic_pairing": 2 * LAYERS},
        ),
        ({"overlap_expert_parallel": True, "cuda_graph": True}, {}),
    ],
)
def test_layers_in_parts_take_the_host_more(keys: dict[str, Any], expected: dict[str, int]) -> None:
    """Every layer runs in parts forward and backward where exchanges lie beneath another micro-batch."""
    job = spread_experts({"kind": "megatron", "moe_grouped_gemm": True, **keys})
    found: Counter[str] = Counter()
    for op in make_plan(job).programs[0].ops:
        if op.overhead is not None and "pairing" in op.overhead:
            found[op.overhead] += op.events
    assert found == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"moe_grouped_gemm": False}, {"megatron_core_expert": 2 * 2 * LAYERS}),
        (
            {"moe_grouped_gemm": False, "deterministic_mode": True},
            {"megatron_core_deterministic_expert": 2 * 2 * LAYERS},
        ),
        (
            {"moe_grouped_gemm": False, "transformer_impl": "local"},
            {"megatron_core_expert": 2 * 2 * LAYERS},
        ),
        ({"moe_grouped_gemm": False, "cuda_graph": True}, {}),
        ({"moe_grouped_gemm": True, "deterministic_mode": True}, {"megatron_core_experts": 2 * 3 * LAYERS}),
        ({"moe_grouped_gemm": True, "transformer_impl": "local"}, {}),
    ],
)
def test_experts_one_after_the_other_take_the_host_each(
    keys: dict[str, Any], expected: dict[str, int]
) -> None:
    """EXPERTS of 4 ranks: so many local experts, whose two products are entered in every layer; of experts
    that run together the router and either product, forward and backward, in deterministic mode."""
    job = spread_experts({"kind": "megatron", **keys})
    found: Counter[str] = Counter()
    for op in make_plan(job).programs[0].ops:
        if op.overhead is not None and "expert" in op.overhead:
            found[op.overhead] += op.events
    assert found == expected


def test_what_frozen_modules_do_not_keep_is_refused_by_name() -> None:
    with pytest.raises(NotSimulatedError, match="recompute_modules"):
        make_plan(
            resolve(
                Experiment(
                    model="deepseek-v2-lite",
                    cluster="dgx-h100",
                    gpus=8,
                    training={
                        "sequence_length": 64,
                        "activation_checkpointing": "selective",
                        "recompute_modules": ["layernorm"],
                        "frozen": ["model.embed_tokens", "model.layers.0"],
                    },
                    strategy={"kind": "megatron"},
                )
            )
        )


@pytest.mark.parametrize("model", ["gemma2-9b", "olmo2-7b"])
def test_an_mlp_that_a_norm_follows_is_refused_where_nothing_would_run_again(model: str) -> None:
    def planned(name: str) -> Plan:
        recomputed = {"activation_checkpointing": "selective", "recompute_modules": [name]}
        return make_plan(
            resolve(
                Experiment(
                    model=model, cluster="dgx-h100", gpus=8,
                    training={"sequence_length": 64, **recomputed}, strategy={"kind": "megatron"},
                )
            )
        )  # fmt: skip

    with pytest.raises(NotSimulatedError, match=r"'mlp' of a model whose MLP is followed by a norm"):
        planned("mlp")
    assert planned("core_attn") is not None
