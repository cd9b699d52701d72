"""Adapters under Megatron's parallelisms, as Megatron-Bridge 0.6.0 cuts them (peft/utils.py
`ParallelLinearAdapter`), call by call.

T = 512 tokens, h = 4096, rank 16, Llama 3 8B with 4 tensor-parallel ranks: queries, keys and values are 6144
wide, the first product of the MLP 28672; each of 4 adapters has both weights cut in 4.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

TOKENS, HIDDEN, RANK, LAYERS, QKV, FC1, FEATURES = 512, 4096, 16, 32, 6144, 28672, 14336


def job_of(
    lora: dict[str, Any], parallelism: dict[str, Any], strategy: dict[str, Any] | None = None, **training: Any
) -> Job:
    return resolve(
        Experiment(
            model="llama-3-8b",
            cluster="dgx-h100",
            gpus=8,
            strategy={"kind": "megatron", **(strategy or {})},
            training={
                "sequence_length": TOKENS, "activation_checkpointing": "none", "lora": {"rank": RANK, **lora},
                **training,
            },
            parallelism=parallelism,
        )
    )  # fmt: skip


def calls(job: Job, phase: str, module: str) -> list[tuple[str, int]]:
    """(kind, bytes) of the second block's calls in a phase around one product, in order."""
    found: list[tuple[str, int]] = []
    for op in make_plan(job).programs[0].ops:
        is_here = op.phase == phase and f"layers.1.{module}" in f"{op.name} {op.module}"
        if is_here and isinstance(op.work, Collective):
            found.append((op.work.kind, op.work.bytes))
    return found


def test_megatrons_four_products_are_adapted() -> None:
    """A: r x h, r x h, r x h, r x f; B: 6144 r, h r, 28672 r, h r."""
    numel = LAYERS * RANK * (3 * HIDDEN + FEATURES + QKV + 2 * HIDDEN + FC1)
    assert job_of({}, {"tensor": 4}).model.trainable_numel == numel
    named = job_of({"targets": ["linear_qkv", "linear_proj"]}, {}).model
    assert named.trainable_numel == LAYERS * RANK * (2 * HIDDEN + QKV + HIDDEN)


@pytest.mark.parametrize(
    ("parallelism", "origin"),
    [({}, "beside names of Megatron"), ({"tensor": 2}, "with Megatron's parallelisms")],
)
def test_a_target_that_megatrons_layers_lack_is_named(parallelism: dict[str, Any], origin: str) -> None:
    with pytest.raises(InputError, match=f"found 'q_proj' {origin}, whose layers have the products"):
        job_of({"targets": ["q_proj", "linear_fc1"]}, parallelism)


def test_a_rank_has_a_part_of_both_weights() -> None:
    """The optimizer has 12 bytes, and the buffer 4, for a quarter of the adapters."""
    whole, cut = job_of({}, {}), job_of({}, {"tensor": 4})
    assert whole.model.trainable_numel != cut.model.trainable_numel  # PEFT's default is q and v
    named = job_of({"targets": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}, {})
    assert named.model.trainable_numel == cut.model.trainable_numel
    gradients = [
        sum(one.bytes for one in make_plan(job).programs[0].resident if one.category == "gradients")
        for job in (named, cut)
    ]
    assert gradients[0] == 4 * gradients[1]


def test_with_sequence_parallelism_an_adapter_on_a_column_gathers_its_low_rank() -> None:
    """The column gathers its input once, for both; T r are gathered behind A. Backward: T r reduced behind B,
    the input's gradient scattered with the column's; the frozen column gathers nothing again."""
    job = job_of({}, {"tensor": 4, "sequence_parallel": True})
    low, wide = TOKENS * RANK * 2, TOKENS * HIDDEN * 2
    assert calls(job, "forward", "self_attn.linear_qkv") == [("all_gather", wide), ("all_gather", low)]
    assert calls(job, "backward", "self_attn.linear_qkv") == [("all_reduce", low), ("reduce_scatter", wide)]


def test_without_it_the_input_gradients_are_reduced_one_by_one() -> None:
    """Of B, T r; of A, and of the column, T h."""
    job = job_of({}, {"tensor": 4})
    low, wide = TOKENS * RANK * 2, TOKENS * HIDDEN * 2
    assert calls(job, "forward", "mlp.linear_fc1") == [("all_gather", low)]
    assert calls(job, "backward", "mlp.linear_fc1") == [
        ("all_reduce", low),
        ("all_reduce", wide),
        ("all_reduce", wide),
    ]


def test_an_adapter_on_a_row_reduces_its_low_rank_and_gathers_its_output() -> None:
    """Forward: the row's sum scattered, T r reduced, T h gathered. Backward: the gradient of the adapter's
    part gathered over the tokens, T r reduced, the row's gathered."""
    job = job_of({}, {"tensor": 4, "sequence_parallel": True})
    low, wide = TOKENS * RANK * 2, TOKENS * HIDDEN * 2
    assert calls(job, "forward", "mlp.linear_fc2") == [
        ("reduce_scatter", wide),
        ("all_reduce", low),
        ("all_gather", wide),
    ]
    assert calls(job, "backward", "mlp.linear_fc2") == [
        ("all_gather", wide),
        ("all_reduce", low),
        ("all_gather", wide),
    ]


def test_only_adapters_are_reduced_over_the_replicas() -> None:
    """fp32 sums of a quarter of the adapters, over the two ranks that have them."""
    job = job_of({}, {"tensor": 4})
    sent = Counter(
        (op.work.group, op.work.kind)
        for op in make_plan(job).programs[0].ops
        if isinstance(op.work, Collective) and op.work.group == "data"
    )
    assert sent["data", "all_reduce"] >= 1
    total = sum(
        op.work.bytes
        for op in make_plan(job).programs[0].ops
        if isinstance(op.work, Collective) and op.work.group == "data" and op.work.kind == "all_reduce"
    )
    assert total == pytest.approx(job.model.trainable_numel // 4 * 4, rel=1e-3)


@pytest.mark.parametrize(
    "parallelism", [{"pipeline": 4}, {"context": 2}, {"pipeline": 2, "tensor": 2, "context": 2}]
)
def test_pipelines_and_rings_carry_adapters(parallelism: dict[str, Any]) -> None:
    """No gradient of a frozen weight is made: what is reduced are the adapters of the rank's own stage."""
    plan = make_plan(job_of({}, parallelism, gradient_accumulation_steps=4))
    trained = sum(
        one.bytes for program in plan.programs for one in program.resident if one.category == "gradients"
    )
    whole = make_plan(job_of({"targets": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}, {}))
    alone = sum(one.bytes for one in whole.programs[0].resident if one.category == "gradients")
    assert trained == pytest.approx(alone / parallelism.get("tensor", 1), rel=1e-3)


def test_a_stage_runs_backward_to_what_it_received() -> None:
    """With only the last block trained the first stage's blocks have no backward, the others' run to their
    input, as Megatron asks it for a gradient."""
    frozen = ["model.embed_tokens", *(f"model.layers.{n}" for n in range(31))]
    experiment = Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        gpus=8,
        strategy={"kind": "megatron"},
        training={"sequence_length": TOKENS, "activation_checkpointing": "none", "frozen": frozen},
        parallelism={"pipeline": 2},
    )
    plan = make_plan(resolve(experiment))
    backward = [
        sum(op.phase == "backward" and op.module.startswith("model.layers") for op in program.ops)
        for program in plan.programs
    ]
    assert backward[0] < backward[1] // 4


def test_frozen_experts_have_no_gradients() -> None:
    """Mixtral's 45 billion weights of experts, on 8 ranks, are in no buffer of Megatron's."""
    job = resolve(
        Experiment(
            model="mixtral-8x7b",
            cluster="dgx-h100",
            gpus=16,
            strategy={"kind": "megatron", "distributed_optimizer": True},
            training={"sequence_length": TOKENS, "lora": {"rank": RANK, "targets": ["linear_qkv"]}},
            parallelism={"expert": 8},
        )
    )
    gradients = [one.bytes for one in make_plan(job).programs[0].resident if one.category == "gradients"]
    assert sum(gradients) == pytest.approx(4 * job.model.trainable_numel, rel=1e-3)


@pytest.mark.parametrize(
    ("lora", "parallelism", "kind", "error", "message"),
    [
        (
            {"rank": 6},
            {"tensor": 4},
            "megatron",
            InputError,
            r"rank: found 6, .* the nearest that they do is 8",
        ),
        ({"targets": ["q_proj"]}, {"tensor": 4}, "megatron", InputError, "linear_qkv, linear_proj"),
        ({}, {"pipeline": 2}, "fsdp2", NotSimulatedError, "not simulated with pipeline parallelism"),
        ({}, {"context": 2}, "deepspeed", NotSimulatedError, "not simulated with context parallelism"),
    ],
)
def test_what_is_refused(
    lora: dict[str, Any], parallelism: dict[str, Any], kind: str, error: type[Exception], message: str
) -> None:
    strategy = {"kind": kind} | ({"stage": 2} if kind == "deepspeed" else {})
    with pytest.raises(error, match=message):
        job_of(lora, parallelism, strategy)


@pytest.mark.parametrize(
    ("is_sequence_parallel", "wide", "back"),
    [
        (True, (["all_gather"], ["reduce_scatter"]), (["reduce_scatter"], ["all_gather"])),
        (False, ([], ["all_reduce"]), (["all_reduce"], [])),
    ],
)
def test_dtensors_sum_an_adapter_with_its_row(
    is_sequence_parallel: bool, wide: tuple[list[str], list[str]], back: tuple[list[str], list[str]]
) -> None:
    """NeMo AutoModel 0.5 parallel_styles.py: on a column T r are gathered behind A, and their gradient
    scattered. On a row T r are scattered behind A, and their gradient gathered. Neither adds to what the
    product itself sends, T h.
    """
    parallelism = {"tensor": 4, "sequence_parallel": is_sequence_parallel}
    job = job_of({"targets": "all-linear"}, parallelism, {"kind": "fsdp2"})
    low, high = TOKENS * RANK * 2, TOKENS * HIDDEN * 2
    column, row = [[(kind, high) for kind in kinds] for kinds in wide]
    assert calls(job, "forward", "mlp.gate_proj") == [*column, ("all_gather", low)]
    assert calls(job, "forward", "mlp.down_proj") == [*row, ("reduce_scatter", low)]
    column, row = [[(kind, high) for kind in kinds] for kinds in back]
    assert calls(job, "backward", "mlp.gate_proj") == [("reduce_scatter", low), *column]
    assert calls(job, "backward", "mlp.down_proj") == [("all_gather", low), *row]
