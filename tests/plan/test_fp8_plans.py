"""Bytes on the wire and in memory of fp8 training."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Plan, PointToPoint
from zsim.report.memory import memory_profile
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

BLOCKS = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # weights of Llama-2-7B's products
REST = 6_738_415_616 - BLOCKS
# Of cuBLAS: two of torch's, one of Transformer Engine's; and its placeholders of the four shapes of weights.
WORKSPACES = 3 * 2**25 + 2 * (4 * 4096**2 + 3 * 4096 * 11008)
TOKENS = 4096


def plan(
    strategy: dict[str, Any], parallelism: Any = None, cluster: str = "dgx-h100", **training: Any
) -> Plan:
    values = {"sequence_length": TOKENS, "gradient_clipping": 0.0, **training}
    return make_plan(
        resolve(
            Experiment(
                model="llama-2-7b", cluster=cluster, nodes=1, training=values, strategy=strategy,
                parallelism=parallelism or {},
            )
        )
    )  # fmt: skip


def sent(made: Plan, kind: str, group: str = "") -> list[Collective]:
    works = [op.work for op in made.programs[0].ops if isinstance(op.work, Collective)]
    return [work for work in works if work.kind == kind and group in ("", work.group)]


def memory(made: Plan, category: str) -> int:
    return sum(one.bytes for one in made.programs[0].resident if one.category == category)


SHARDED = {"kind": "megatron", "distributed_optimizer": True, "check_for_nan": False}


@pytest.mark.parametrize(
    ("recipe", "cluster", "gathered", "parameters", "copies"),
    [
        ("delayed", "dgx-h100", BLOCKS, BLOCKS, BLOCKS),
        ("delayed", "hgx-b200", BLOCKS, BLOCKS, 0),
        ("block", "dgx-h100", BLOCKS, BLOCKS, BLOCKS + BLOCKS // 16),
        ("mxfp8", "hgx-b200", 2 * BLOCKS, 0, 2 * BLOCKS + BLOCKS // 16),
    ],
)
def test_fp8_parameters_are_gathered_in_8_bits_and_transposed_on_hopper(
    recipe: str, cluster: str, gathered: int, parameters: int, copies: int
) -> None:
    """Embedding, head and norms stay in 16 bits; mxfp8's two copies are what is left of its weights."""
    made = plan({**SHARDED, "fp8_param_gather": True}, cluster=cluster, fp8_recipe=recipe)
    (call,) = sent(made, "all_gather")
    assert call.bytes == gathered + 2 * REST
    assert memory(made, "parameters") == parameters + 2 * REST
    assert memory(made, "buffers") == copies + WORKSPACES


def test_a_frozen_base_stays_in_8_bits_and_its_products_keep_no_input() -> None:
    """Adapters of rank 16 on q, k, v and o: 32 x 4 x 2 x 16 x 4,096 in 16 bits. Only they have masters, so no
    maxima are taken of the base. Its seven products would keep 8-bit inputs of a token in each layer, 4,096
    for q, k and v, for o, for gate and up, and 11,008 for down."""
    adapters = 32 * 4 * 2 * 16 * 4096
    lora = {"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    made = plan({**SHARDED, "fp8_param_gather": True}, cluster="hgx-b200", fp8_recipe="current", lora=lora)
    (call,) = sent(made, "all_gather")
    assert call.bytes == 2 * adapters
    assert memory(made, "parameters") == BLOCKS + 2 * (REST + adapters)
    trained = plan({**SHARDED, "fp8_param_gather": True}, cluster="hgx-b200", fp8_recipe="current")
    maxima = [
        any("maxima of fp8 weights" in op.name for op in one.programs[0].ops) for one in (trained, made)
    ]
    assert maxima == [True, False]
    kept = [
        memory_profile(one).kept_for_backward.get(("activations", "model.layers.0.mlp.down_proj"), 0)
        for one in (trained, made)
    ]
    assert kept == [TOKENS * 11_008, 0]


def test_weights_beside_parameters_in_16_bits_are_copies_for_two_directions() -> None:
    made = plan(SHARDED, precision="fp8")
    (call,) = sent(made, "all_gather")
    assert (call.bytes, call.dtype) == (2 * (BLOCKS + REST), "bf16")
    assert memory(made, "buffers") == 2 * BLOCKS + WORKSPACES
    assert memory(plan(SHARDED, precision="bf16"), "buffers") == WORKSPACES


def test_delayed_maxima_are_summed_up_after_every_forward_and_backward() -> None:
    """Four products in each of 32 layers: three tensors of each forward, two backward, 4 bytes."""
    made = plan(SHARDED, precision="fp8", gradient_accumulation_steps=2)
    calls = [work.bytes for work in sent(made, "all_reduce", "amaxes")]
    assert calls == [4 * 3 * 128, 4 * 2 * 128] * 2
    assert sent(plan(SHARDED, fp8_recipe="current"), "all_reduce", "amaxes") == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_transformer_engines_layers_send_weights_in_16_bits_under_ddp_and_fsdp(kind: str) -> None:
    """Its products cast gathered weights (`layer_kernels = "megatron"`), so that gathers and reductions are
    those of bf16. The maxima of 7 products of 32 layers are summed behind forward, then backward: three
    tensors, then two, of 4 bytes."""
    layers: dict[str, Any] = {"layer_kernels": "megatron"}
    made, plain = plan({"kind": kind}, **layers, fp8_recipe="delayed"), plan({"kind": kind}, **layers)
    for name in ("all_gather", "reduce_scatter"):
        assert [work.bytes for work in sent(made, name)] == [work.bytes for work in sent(plain, name)]
    maxima = [(op.phase, op.work.bytes) for op in made.ops if op.name == "all_reduce amaxes"]  # type: ignore[union-attr]
    assert maxima == [("forward", 4 * 3 * 224), ("backward", 4 * 2 * 224)]
    buckets = [work.bytes for work in sent(plain, "all_reduce")]
    assert sum(buckets) == (4 * (BLOCKS + REST) if kind == "ddp" else 0)


def test_maxima_of_a_tensor_parallel_group_alone() -> None:
    split = {"tensor": 4, "sequence_parallel": True}
    made = plan({**SHARDED, "tp_only_amax_red": True}, split, precision="fp8")
    assert made.groups["amaxes"].size == 4
    assert plan(SHARDED, split, precision="fp8").groups["amaxes"].size == 8


@pytest.mark.parametrize(
    ("recipe", "cluster", "forward", "backward"),
    [
        ("delayed", "dgx-h100", 1.0, 1.0),
        ("block", "dgx-h100", 33 / 32, 33 / 16),
        ("nvfp4", "hgx-b200", 9 / 16, 9 / 8),
    ],
)
def test_sequence_parallel_ranks_gather_what_is_quantised(
    recipe: str, cluster: str, forward: float, backward: float
) -> None:
    """The input of two products a block, forward and again backward; the gradient of two outputs, with blocks
    in both directions. The head's input is gathered in 16 bits both times."""
    split = {"tensor": 8, "sequence_parallel": True}
    made = plan(SHARDED, split, cluster, fp8_recipe=recipe)
    full = TOKENS * 4096
    found = [work.bytes / full for work in sent(made, "all_gather", "tensor")]
    assert sorted(found) == sorted([forward] * 4 * 32 + [backward] * 2 * 32 + [2.0] * 3)


def test_current_scales_agree_before_a_gather() -> None:
    """Two inputs and two gradients a block."""
    split = {"tensor": 8, "sequence_parallel": True}
    maxima = [
        work
        for work in sent(plan(SHARDED, split, fp8_recipe="current"), "all_reduce", "tensor")
        if work.bytes == 4
    ]
    assert len(maxima) == 4 * 32
    assert not [
        w for w in sent(plan(SHARDED, split, precision="fp8"), "all_reduce", "tensor") if w.bytes == 4
    ]


def test_rowwise_scales_are_gathered_around_in_16_bits() -> None:
    split = {"tensor": 8}
    fsdp2 = {"kind": "fsdp2"}
    full = TOKENS * 4096
    for recipe, element in (("torchao-tensorwise", 1), ("torchao-rowwise", 2)):
        calls = sent(plan(fsdp2, split, fp8_recipe=recipe), "all_gather", "tensor")
        assert {work.bytes // full for work in calls[:-1]} <= {element, 2}
        assert [work.bytes // full for work in calls].count(element) >= 4 * 32


def test_pieces_of_a_product_share_one_cast_of_its_weight() -> None:
    """Eight pieces of the first product of a layer, on an eighth of the tokens each."""
    split = {"tensor": 8, "sequence_parallel": True, "async_tensor": True}
    made = plan(SHARDED, split, precision="fp8")
    ops = [op for op in made.programs[0].ops if op.name.startswith("model.layers.0.self_attn.linear_qkv ")]
    forward = [op.name.rpartition(" ")[2] for op in ops if op.phase == "forward"]
    assert forward.count("casts") == 1
    assert forward.count("piece") == 8
    steps = [op.work for op in ops if op.phase == "forward" and isinstance(op.work, PointToPoint)]
    assert {step.messages[0].bytes for step in steps} == {TOKENS * 4096 // 8}


def test_fsdp2_gathers_the_weights_of_fp8_products_in_8_bits_and_the_rest_in_16() -> None:
    """The norms of a block stay in bf16; gradients are reduced as ever."""
    fsdp2 = {"kind": "fsdp2", "param_dtype": "fp8"}
    made, plain = plan(fsdp2, precision="fp8"), plan({"kind": "fsdp2"}, precision="fp8")
    block = BLOCKS // 32 + 2 * 2 * 4096
    assert block in [work.bytes for work in sent(made, "all_gather")]
    assert sum(work.bytes for work in sent(made, "all_gather")) < sum(
        work.bytes for work in sent(plain, "all_gather")
    )
    assert [w.bytes for w in sent(made, "reduce_scatter")] == [w.bytes for w in sent(plain, "reduce_scatter")]


def test_fsdp2s_scales_are_agreed_on_before_every_gather_or_once_a_step() -> None:
    """Seven weights a block, forward and backward (the last block is kept); or 224 behind the update."""
    alone = sent(plan({"kind": "fsdp2", "param_dtype": "fp8"}, precision="fp8"), "all_reduce")
    assert {work.bytes for work in alone} == {4}
    assert len(alone) == 7 * (32 + 32)
    ready = {"kind": "fsdp2", "param_dtype": "fp8", "precompute_fp8_scales": True}
    assert [work.bytes for work in sent(plan(ready, precision="fp8"), "all_reduce")] == [4 * 7 * 32]
