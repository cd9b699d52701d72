"""Checkpoints in host memory and MLPs in tiles, whatever shards the model.

Llama-3.2-1B: 16 blocks, h = 2,048, MLPs of f = 8,192. 4,096 tokens in bf16 are a stream of 16 MiB.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Copy, Kernels, Op, Plan
from zsim.plan.workload.reruns import tile_sizes

TOKENS, HIDDEN, WIDTH, BLOCKS = 4096, 2048, 8192, 16
STREAM = TOKENS * HIDDEN * 2
STRATEGIES: list[dict[str, Any]] = [
    {"kind": "ddp"},
    {"kind": "fsdp1"},
    {"kind": "fsdp2"},
    {"kind": "deepspeed", "stage": 3},
]


def plan_of(strategy: dict[str, Any], **training: Any) -> Plan:
    settings = {
        "sequence_length": TOKENS,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        **training,
    }
    return zsim.make_plan(
        zsim.Experiment(model="llama-3.2-1b", cluster="dgx-h100", training=settings, strategy=strategy)
    )


def copies(plan: Plan) -> list[Op]:
    return [op for op in plan.ops if op.name.startswith("checkpoint of")]


def check_nothing_is_left(plan: Plan) -> None:
    held: Counter[tuple[str, str]] = Counter()
    for change in plan.memory:
        held[change.category, change.device] += change.bytes
    assert not any(held.values())
    changes = tensor_changes(plan.program)
    assert {change.tensor for change in changes if change.bytes} == {
        change.tensor for change in changes if not change.bytes
    }


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
@pytest.mark.parametrize(("offload", "blocks"), [("pageable", 16), ("pinned", 16), ("stream", 15)])
def test_checkpoints_cross_the_bus_and_come_back_in_every_micro_batch(
    strategy: dict[str, Any], offload: str, blocks: int
) -> None:
    """On a stream of their own the newest of each micro-batch stays."""
    plan = plan_of(strategy, checkpoint_offload=offload, gradient_accumulation_steps=2)
    crossed: Counter[str] = Counter()
    for op in copies(plan):
        assert isinstance(op.work, Copy)
        assert op.work.is_pinned == (offload != "pageable")
        crossed[op.work.direction] += op.work.bytes
    assert crossed == {"d2h": 2 * blocks * STREAM, "h2d": 2 * blocks * STREAM}
    assert {op.stream for op in copies(plan)} == {"checkpoints" if offload == "stream" else "compute"}
    check_nothing_is_left(plan)


def test_only_pageable_copies_hold_the_host() -> None:
    def waits(offload: str) -> int:
        plan = plan_of({"kind": "fsdp2"}, checkpoint_offload=offload)
        numbers = {number for number, op in enumerate(plan.ops) if op.name.startswith("checkpoint of")}
        return len({wait for op in plan.ops for wait in op.host_waits} & numbers)

    assert (waits("pageable"), waits("pinned"), waits("stream")) == (2 * BLOCKS, 0, 0)


def test_what_the_gpu_no_longer_holds_after_forward_is_a_stream_for_every_block() -> None:
    """Layers x sequence x hidden x 2 bytes: transformers' pull request 48444 measured 128, 512 and 3,584 MiB
    less for 8 x 8k x 1,024, 16 x 16k x 1,024 and 28 x 32k x 2,048 on an H100, which is that to the MiB."""

    def level(offload: str | None) -> int:
        plan = plan_of({"kind": "ddp"}, checkpoint_offload=offload)
        first = next(number for number, op in enumerate(plan.ops) if op.phase == "backward")
        return sum(change.bytes for change in plan.memory if change.op < first and change.device == "gpu")

    assert level(None) - level("pinned") == BLOCKS * TOKENS * HIDDEN * 2


@pytest.mark.parametrize(
    ("training", "strategy", "error", "message"),
    [
        ({"activation_checkpointing": "none"}, {"kind": "fsdp2"}, InputError, "keeps no block's input alone"),
        ({}, {"kind": "megatron"}, NotSimulatedError, "whose own offload of activations"),
        (
            {},
            {
                "kind": "deepspeed",
                "config": {
                    "zero_optimization": {"stage": 1},
                    "activation_checkpointing": {"cpu_checkpointing": True},
                },
            },
            InputError,
            "activation_checkpointing.cpu_checkpointing, which is another way",
        ),
    ],
)
def test_an_offload_that_nothing_does_is_an_error(
    training: dict[str, Any], strategy: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"training.checkpoint_offload: .*{message}"):
        plan_of(strategy, **({"checkpoint_offload": "pinned"} | training))


# -- tiles ------------------------------------------------------------------------------------------------


def flops_of(plan: Plan, module: str) -> tuple[float, int]:
    """FLOPs and matrix products of all ops of the block's modules whose name ends in `module`."""
    kernels = [
        kernel
        for op in plan.ops
        if op.module.startswith("model.layers.3.") and op.module.endswith(module)
        if isinstance(op.work, Kernels)
        for kernel in op.work.kernels
        if kernel.flops
    ]
    return sum(kernel.flops for kernel in kernels), len(kernels)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_a_tiled_mlp_runs_forward_three_times_and_backward_once(strategy: dict[str, Any]) -> None:
    """In forward, in the block's recomputation, and in its own backward: 3 x 3 products of 2 T h f FLOPs a
    tile and 2 x 3 of backward, against 3 + 2 (the block's recomputation stops before the last) + 2 x 3.
    """
    product = 2 * TOKENS * HIDDEN * WIDTH

    def total(**training: Any) -> tuple[float, int]:
        plan = plan_of(strategy, **training)
        check_nothing_is_left(plan)
        parts = [flops_of(plan, name) for name in ("gate_proj", "up_proj", "down_proj")]
        return sum(flops for flops, _ in parts), sum(count for _, count in parts)

    assert total() == (11 * product, 11)
    assert total(mlp_tiles=4) == (15 * product, 15 * 4)
    assert total(mlp_tiles="auto") == (15 * product, 15 * 2)  # 4,096 / 2,048


def test_no_tensor_of_the_intermediate_width_is_whole() -> None:
    """In 16 tiles nothing of a block is larger than its stream, but for the weights' gradients (32 MiB)."""

    def largest(tiles: int | None) -> int:
        plan = plan_of({"kind": "ddp"}, mlp_tiles=tiles, cross_entropy="fused_linear")
        return max(
            size
            for change in plan.memory
            if change.category == "activations" and ".mlp." in change.owner and change.bytes > 0
            for size in change.tensors or (change.bytes,)
        )

    assert largest(None) == TOKENS * WIDTH * 2
    assert largest(16) == HIDDEN * WIDTH * 2


def test_a_frozen_mlp_in_tiles_asks_for_no_gradient_of_a_weight() -> None:
    """Adapters of the attention leave the MLP frozen: 0 bytes are no tensor."""
    training = {"sequence_length": 512, "mlp_tiles": 4, "lora": {"rank": 8}}
    plan = plan_of({"kind": "ddp"}, **training)
    assert all(min(change.tensors, default=1) > 0 for change in plan.memory)
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", gpus=2, training=training, strategy={"kind": "ddp"}
    )
    assert zsim.simulate(experiment).report.step_seconds > 0


def test_tiles_are_torchs_chunks() -> None:
    """torch.chunk(10 rows, 4) gives 3, 3, 3, 1, and of 10 rows in 6 chunks there are five of 2."""
    assert tile_sizes(10, 4) == [3, 3, 3, 1]
    assert tile_sizes(10, 6) == [2] * 5


@pytest.mark.parametrize(
    ("model", "extra", "error", "message"),
    [
        ("mixtral-8x7b", {}, NotSimulatedError, "tiles of routed experts"),
        ("bert-base", {}, NotSimulatedError, "MLP is not a module of products"),
        ("llama-3.2-1b", {"strategy": {"kind": "megatron"}}, InputError, "whose layers are its own"),
        ("llama-3.2-1b", {"parallelism": {"tensor": 2}}, NotSimulatedError, "with tensor parallelism"),
        (
            "llama-3.2-1b",
            {"training": {"lora": {"rank": 8, "targets": ["up_proj"]}}},
            NotSimulatedError,
            "an MLP with adapters",
        ),
        ("llama-3.2-1b", {"training": {"mlp_tiles": 513}}, InputError, "at most the 512 tokens"),
    ],
)
def test_an_mlp_that_cannot_be_tiled_is_an_error(
    model: str, extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    training = {"sequence_length": 512, "mlp_tiles": 4} | extra.pop("training", {})
    arguments = {"strategy": {"kind": "fsdp2"}, **extra}
    with pytest.raises(error, match=f"training.mlp_tiles: .*{message}"):
        zsim.make_plan(zsim.Experiment(model=model, cluster="dgx-h100", training=training, **arguments))


# -- the loss in tiles --------------------------------------------------------------------------------------


def test_logits_exist_a_gib_at_a_time_and_are_multiplied_three_times() -> None:
    """4 x 4,096 tokens of 128,256 logits are 7.8 GiB in fp32, so 8 tiles of 2,048: forward, the gradients of
    the input and of the weight, 2 T h V FLOPs each. A tile has its 16-bit logits, fp32 log-probabilities and
    two more tensors in fp32."""
    plan = plan_of({"kind": "ddp"}, micro_batch_size=4, cross_entropy="tiled")
    ops = [op for op in plan.ops if op.module == "lm_head" and isinstance(op.work, Kernels)]
    kernels = [kernel for op in ops if isinstance(op.work, Kernels) for kernel in op.work.kernels]
    products = [kernel for kernel in kernels if kernel.kind == "gemm"]
    assert len(products) == 3 * 8
    assert sum(kernel.flops for kernel in products) == 3 * 2 * 4 * TOKENS * HIDDEN * 128_256
    sizes = [
        size
        for change in plan.memory
        if change.owner == "lm_head" and change.category == "activations"
        for size in change.tensors
    ]
    logits = 2048 * 128_256
    assert sizes.count(logits * 2) == 3  # one is of logits; the weight's gradient happens to be as large
    assert sizes.count(logits * 4) == 3
    assert max(sizes) == logits * 4
    check_nothing_is_left(plan)


@pytest.mark.parametrize(
    ("loss", "sequences", "per_logit", "per_weight"),
    [
        ("torchtitan-chunked", 4, (2, 4, 4, 4), ()),
        ("torchtitan-chunked-fused", 4, (2, 2), ()),
        ("torchtitan-chunked-fused", 1, (), (2,)),
    ],
)
def test_torchtitan_runs_head_and_loss_in_eight_chunks(
    loss: str, sequences: int, per_logit: tuple[int, ...], per_weight: tuple[int, ...]
) -> None:
    """A chunk has 4 x 4,096 / 8 = 2,048 tokens. Eager, backward has the 16-bit logits, fp32 log-probabilities
    and two gradients in fp32. Compiled, it has the logits and their gradient. The gradients of 16,384 hidden
    states and of the weight are summed in fp32, and cast. Three products a chunk. FSDP2 has two tensors of
    the weight's size: the fp32 sum and a chunk's 16-bit gradient, which is the saved one, or the sum and the
    fp32 input of the reduction, 2 bytes more than the saved one, and more than a chunk of 512 tokens has."""
    plan = plan_of({"kind": "fsdp2"}, micro_batch_size=sequences, cross_entropy=loss)
    ops = [op for op in plan.ops if op.module == "lm_head" and isinstance(op.work, Kernels)]
    products = [
        kernel
        for op in ops
        if isinstance(op.work, Kernels)
        for kernel in op.work.kernels
        if kernel.kind == "gemm"
    ]
    assert len(products) == 3 * 8
    logits, weight, hidden = 2048 * 128_256, HIDDEN * 128_256, sequences * TOKENS * HIDDEN
    kept = [hidden * 2, weight * 2]
    expected = [*(logits * size for size in per_logit), *(weight * size for size in per_weight)]
    expected += [hidden * 4, weight * 4, *kept]
    made = [
        size
        for change in plan.memory
        if change.owner == "lm_head" and change.category == "activations" and change.bytes > 0
        for size in change.tensors
    ]
    assert sorted(made) == sorted(expected)
    check_nothing_is_left(plan)
