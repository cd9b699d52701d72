"""Tensor parallelism: one rank's work, its collectives and its activations, against published formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.plan.make import make_plan, stages_of
from zsim.plan.ops import Collective, Kernels, Plan, PointToPoint
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.model.spec import Attention

HIDDEN, HEADS, LENGTH, BATCH = 1024, 16, 1024, 2
GPT = {
    "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 4, "n_head": HEADS, "n_positions": LENGTH,
    "vocab_size": 51200, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip


def job_of(
    model: dict[str, Any],
    parallelism: dict[str, Any],
    kind: str = "megatron",
    *,
    gpus: int = 8,
    **training: Any,
) -> Job:
    strategy = {"kind": kind, **({"stage": 1} if kind == "deepspeed" else {})}
    given = {"sequence_length": LENGTH, "micro_batch_size": BATCH, **training}
    experiment = zsim.Experiment(
        model=model, cluster="dgx-a100-80gb", gpus=gpus, parallelism=parallelism, strategy=strategy,
        training=given,
    )  # fmt: skip
    return resolve(experiment)


@pytest.mark.parametrize(
    ("tensor", "is_split", "policy", "per_token_and_width"),
    [
        (1, False, "none", 34 + 5 * HEADS * LENGTH / HIDDEN),
        (4, False, "none", 10 + 24 / 4 + 5 * HEADS * LENGTH / (4 * HIDDEN)),
        (4, True, "none", (34 + 5 * HEADS * LENGTH / HIDDEN) / 4),
        (4, True, "selective", 34 / 4),
        (4, False, "full", 2),
        (4, True, "full", 2 / 4),
    ],
)
def test_a_layer_keeps_the_activations_of_korthikanti(
    tensor: int, is_split: bool, policy: str, per_token_and_width: float
) -> None:
    """arXiv 2205.05198, table 2, in units of s b h bytes."""
    parallelism = {"tensor": tensor, "sequence_parallel": is_split, "pipeline": 2}
    job = job_of(
        GPT, parallelism, attention="math", precision="fp16", activation_checkpointing=policy,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    block = make_workload(stages_of(job.model, job.parallelism)[0], job.training).segments[1]
    saved = sum(call.work.saved_bytes for call in block.calls)
    kept = block.checkpoint_bytes if block.is_checkpointed else saved
    assert kept / (LENGTH * BATCH * HIDDEN) == per_token_and_width


FULL = LENGTH * BATCH * HIDDEN * 2  # bytes of all tokens of a layer's input


def per_layer(model: dict[str, Any], job: Job) -> Counter[str]:
    """Full bytes of tensor collectives of activations, by kind, that one more layer adds."""
    key = "n_layer" if "n_layer" in model else "num_hidden_layers"
    found: Counter[str] = Counter()
    for layers, sign in ((2, 1), (1, -1)):
        one = resolve(job.experiment.model_copy(update={"model": {**model, key: layers}}))
        for op in make_plan(one).ops:
            if not isinstance(op.work, Collective) or op.work.group != "tensor":
                continue
            if op.work.bytes >= FULL:  # not the norms' gradients, nor the loss's statistics
                found[f"{op.work.kind} {op.phase}"] += sign * op.work.bytes
    return +found


@pytest.mark.parametrize(
    ("kind", "parallelism", "policy", "expected"),
    [
        ("megatron", {}, "none", {"all_reduce forward": 2, "all_reduce backward": 2}),
        (
            "megatron",
            {"sequence_parallel": True},
            "none",
            {
                "all_gather forward": 2, "reduce_scatter forward": 2, "all_gather backward": 4,
                "reduce_scatter backward": 2,
            },
        ),
        (
            "fsdp2",
            {"sequence_parallel": True},
            "none",
            {
                "all_gather forward": 2, "reduce_scatter forward": 2, "all_gather backward": 2,
                "reduce_scatter backward": 2,
            },
        ),
        ("fsdp2", {"sequence_parallel": False}, "none", {"all_reduce forward": 2, "all_reduce backward": 2}),
    ],
)  # fmt: skip
def test_bytes_per_layer(
    kind: str, parallelism: dict[str, Any], policy: str, expected: dict[str, int]
) -> None:
    """Full tensors of one layer: Korthikanti section 4.2.2; Megatron gathers its inputs again in
    backward, DTensors are kept gathered."""
    job = job_of(LLAMA, {"tensor": 4, **parallelism}, kind, activation_checkpointing=policy)
    found = per_layer(LLAMA, job)
    assert {key: size / FULL for key, size in found.items()} == expected


def test_full_recomputation_repeats_the_forwards_collectives() -> None:
    job = job_of(LLAMA, {"tensor": 4, "sequence_parallel": True}, activation_checkpointing="full")
    found = per_layer(LLAMA, job)
    assert found["all_gather recompute"] == 2 * FULL
    assert found["reduce_scatter recompute"] >= FULL  # torch stops before the last one


def test_products_are_of_local_shapes() -> None:
    """Columns have 1/t of the outputs, rows 1/t of the inputs; q, k and v are one product, gate and up
    another."""
    job = job_of(LLAMA, {"tensor": 4})
    (model,) = stages_of(job.model, job.parallelism)
    shapes = {
        module.name: module.parameters[0].shape for module in model.blocks[0].modules if module.parameters
    }
    assert shapes == {
        "input_layernorm": (1024,),
        "self_attn.linear_qkv": (512, 1024),
        "self_attn.o_proj": (1024, 256),
        "post_attention_layernorm": (1024,),
        "mlp.linear_fc1": (1408, 1024),
        "mlp.down_proj": (1024, 704),
    }
    assert model.before[0].numel == 32256 // 4 * 1024  # padded to 128 x 4


def test_parameters_add_up_to_the_model() -> None:
    """What is cut adds up; norms are whole on every rank."""
    job = job_of(LLAMA, {"tensor": 4, "pipeline": 2}, gradient_accumulation_steps=2)
    stages = stages_of(job.model, job.parallelism)
    norms = (2 * 4 + 1) * HIDDEN
    assert 4 * (sum(stage.numel for stage in stages) - norms) + norms == job.model.numel


def test_a_rank_with_fewer_key_value_heads_than_ranks_keeps_one() -> None:
    """Megatron repeats key/value heads where ranks outnumber them; torchtitan refuses."""
    model = {**LLAMA, "num_key_value_heads": 2}
    job = job_of(model, {"tensor": 4})
    (local,) = stages_of(job.model, job.parallelism)
    core = next(module.op_spec for module in local.blocks[0].modules if module.name == "self_attn.core")
    assert isinstance(core, Attention)
    assert (core.num_heads, core.num_kv_heads) == (4, 1)


def reductions(plan: Plan, group: str) -> list[str]:
    """The collectives of the first program on a group, by name."""
    ops = plan.programs[0].ops
    return [op.name for op in ops if isinstance(op.work, Collective) and op.work.group == group]


def test_what_a_step_ends_with() -> None:
    """Reductions, then the partial gradients of norms as one tensor, then the shared embedding, then one norm
    over all ranks of a model (without the distributed optimizer)."""
    parallelism = {"tensor": 2, "pipeline": 2, "sequence_parallel": True}
    job = job_of(GPT, parallelism, gradient_accumulation_steps=2)
    plan = make_plan(job)
    assert reductions(plan, "data") == ["all_reduce bucket 0"]
    assert reductions(plan, "tensor")[-1] == "all_reduce partial gradients"
    assert reductions(plan, "embedding") == ["all_reduce tied embedding"]
    assert reductions(plan, "model") == ["all_reduce gradient norm"]
    work = {op.name: op.work for op in plan.programs[0].ops if isinstance(op.work, Collective)}
    partial = work["all_reduce partial gradients"]
    # two norms of two layers, with bias, and the biases of the two row products
    assert partial.bytes == 4 * 2 * (2 * 2 * HIDDEN + 2 * HIDDEN)
    assert work["all_reduce tied embedding"].bytes == 4 * 51200 // 2 * HIDDEN


def test_old_megatron_sends_a_part_from_each_rank() -> None:
    """Narayanan et al. 2021, section 4.1: 1/t of the bytes between nodes, and a gather behind."""
    sent = {}
    for version in ("2.5", "0.16.1"):
        experiment = job_of(GPT, {"tensor": 4, "pipeline": 2}, gradient_accumulation_steps=2).experiment
        table = experiment.strategy.model_copy(update={"version": version})
        plan = make_plan(resolve(experiment.model_copy(update={"strategy": table})))
        works = [op.work for op in plan.programs[0].ops]
        messages = [work for work in works if isinstance(work, PointToPoint)]
        sent[version] = sum(one.bytes for work in messages for one in work.messages)
        gathers = [name for name in reductions(plan, "tensor") if name.startswith("all_gather")]
        assert gathers == (["all_gather gradient of stage 0"] * 2 if version == "2.5" else [])
    assert sent["2.5"] * 4 == sent["0.16.1"] == 2 * 2 * FULL


def test_products_in_pieces_send_what_whole_ones_send() -> None:
    """Userbuffers: rings of t - 1 steps bring the same tokens, four pieces scatter the same output, and the
    arithmetic is the same."""
    kinds: dict[bool, Counter[str]] = {}
    flops = {}
    for in_pieces in (False, True):
        layout = {"tensor": 4, "sequence_parallel": True, "async_tensor": in_pieces}
        ops = make_plan(job_of(LLAMA, layout)).ops
        found: Counter[str] = Counter()
        for op in ops:
            if isinstance(op.work, PointToPoint):
                found["gathered"] += op.work.messages[0].bytes * 4  # of each of three steps, 1/4
            elif isinstance(op.work, Collective) and op.work.group == "tensor":
                if op.work.kind == "all_gather":
                    found["gathered"] += op.work.bytes * 3
                elif op.work.kind == "reduce_scatter":
                    found["scattered"] += op.work.bytes
        kinds[in_pieces] = found
        works = [op.work for op in ops if isinstance(op.work, Kernels)]
        flops[in_pieces] = sum(kernel.flops for work in works for kernel in work.kernels)
    assert kinds[True] == kinds[False]
    assert flops[True] == pytest.approx(flops[False], rel=1e-12)


def test_pieces_run_at_the_rate_of_the_whole_product() -> None:
    """They are launched on several streams, so that one fills what the last wave of the other leaves idle."""
    products: dict[bool, dict[tuple[int, ...], float]] = {}
    for in_pieces in (False, True):
        layout = {"tensor": 4, "sequence_parallel": True, "async_tensor": in_pieces}
        found = products[in_pieces] = {}
        for op in make_plan(job_of(LLAMA, layout)).ops:
            for kernel in op.work.kernels if isinstance(op.work, Kernels) else ():
                if kernel.kind == "gemm":
                    found[kernel.shape] = found.get(kernel.shape, 0.0) + kernel.flops
    assert products[True] == pytest.approx(products[False], rel=1e-12)


@pytest.mark.parametrize(("version", "names"), [("2.6", ["all_reduce"]), ("3.0", [])])
def test_before_3_the_gradient_of_an_input_was_reduced_behind_both_products(
    version: str, names: list[str]
) -> None:
    """Megatron-LM's commit 16c90445 (September 2021) put the sum beneath the product for the weight."""
    experiment = zsim.Experiment(
        model=GPT, cluster="dgx-a100-80gb", gpus=8, parallelism={"tensor": 4},
        strategy={"kind": "megatron", "version": version}, training={"sequence_length": LENGTH},
    )  # fmt: skip
    ops = [
        op
        for op in make_plan(resolve(experiment)).ops
        if "h.1.mlp.c_fc" in op.name and op.phase == "backward"
    ]
    in_line = [op.name for op in ops if op.name.endswith("all_reduce backward")]
    beneath = [op.name for op in ops if op.name.endswith("reduce input's gradient")]
    assert (len(in_line), len(beneath)) == (len(names), 1 - len(names))


def test_the_place_of_the_reduction_is_only_asked_of_megatrons_layers() -> None:
    with pytest.raises(zsim.InputError, match=r"parallelism.overlap_tensor_reduce: found false"):
        job_of(GPT, {"tensor": 4, "sequence_parallel": True, "overlap_tensor_reduce": False})
    assert not job_of(GPT, {"tensor": 4, "overlap_tensor_reduce": False}).parallelism.overlap_tensor_reduce
