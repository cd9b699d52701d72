"""What published runs differ in besides their strategy: what is recomputed, which types are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.steps import plan_step, walk_step
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.memory import selective_op_modules
from zsim.cost.rates.efficiency import gemm_fraction
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.operations import BACKWARD, FORWARD
from zsim.plan.builder import PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.stage import Stage
from zsim.plan.workload.issued_work import kernels_of
from zsim.plan.workload.workload import make_workload
from zsim.specs.cluster.files import load_gpu
from zsim.specs.model.huggingface import load_model
from zsim.specs.strategy.training import TrainingConfig

TRAINING = TrainingConfig(
    sequence_length=128, micro_batch_size=1, gradient_accumulation_steps=1, precision="bf16",
    activation_checkpointing="full", attention="flash", compile=False, optimizer="adamw",
    gradient_clipping=0.0,
)  # fmt: skip
LLAMA = load_model("llama-2-7b")


def test_every_second_block_is_checkpointed_when_asked() -> None:
    workload = make_workload(LLAMA, replace(TRAINING, checkpoint_every=2))
    flags = [segment.is_checkpointed for segment in workload.segments if segment.kind == "block"]
    assert flags == [False, True] * 16


def test_a_checkpoint_that_does_not_stop_early_runs_the_whole_block_again() -> None:
    """Llama's last product and the add after it are only needed by the next block."""
    whole = make_workload(LLAMA, replace(TRAINING, checkpoint_stops_early=False)).segments[1]
    early = make_workload(LLAMA, TRAINING).segments[1]
    names = [call.module.name for call in whole.calls]
    assert [call.module.name for call in whole.recomputed] == names
    assert [call.module.name for call in early.recomputed] == names[: names.index("mlp.down_proj")]


def test_selective_op_keeps_every_second_product_and_attention() -> None:
    """torchtitan: q, v, gate and down of the seven products stay; k, o and up run again. Kept per token: the
    block's input h, q h, v h, gate f, down h, attention h in bf16 and 4 bytes for each of 32 heads:
    2 (5 x 4096 + 11008) + 128 = 63,104 bytes."""
    kept = selective_op_modules(LLAMA.blocks[0], WorkOptions("bf16"))
    names = [module.name.rpartition(".")[2] for module in kept]
    assert names == ["q_proj", "v_proj", "gate_proj", "down_proj", "core"]
    segment = make_workload(LLAMA, replace(TRAINING, activation_checkpointing="selective-op")).segments[1]
    assert segment.checkpoint_bytes == 128 * 63_104
    again = {
        call.module.name: sum(k.flops for k in kernels_of(call.work.forward).kernels)
        for call in segment.recomputed
    }
    assert [name.rpartition(".")[2] for name, flops in again.items() if flops] == [
        "k_proj",
        "o_proj",
        "up_proj",
    ]


def test_selective_op_runs_every_product_in_fp8_again() -> None:
    """torchtitan's list of what to keep has `aten.mm` and not `aten._scaled_mm`: of products in fp8 none is
    kept, and all run again but the last, whose output backward does not read. torch 2.13 compiles a block of
    four products so: one runs again in bf16, three in fp8. Kept per token: the block's input and attention's
    output h in bf16, 4 bytes for each of 32 heads, and the inputs of q (k and v), o, gate (up) and down in 8
    bits: 2 x 2 x 4096 + 128 + 3 x 4096 + 11008 = 39,808 bytes."""
    kept = selective_op_modules(LLAMA.blocks[0], WorkOptions("fp8", compile=True))
    assert [module.name.rpartition(".")[2] for module in kept] == ["core"]
    training = replace(TRAINING, activation_checkpointing="selective-op", precision="fp8", compile=True)
    segment = make_workload(LLAMA, training).segments[1]
    again = [
        call.module.name.rpartition(".")[2]
        for call in segment.recomputed
        if any(kernel.kind == "gemm" for kernel in kernels_of(call.work.forward).kernels)
    ]
    assert again == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
    assert segment.checkpoint_bytes == 128 * 39_808


def test_selective_op_makes_each_kept_output_where_its_module_runs() -> None:
    """q, v, attention and its log-sum-exp, gate, down; the block's input comes first."""
    builder = PlanBuilder([])
    training = replace(TRAINING, activation_checkpointing="selective-op")
    walk_step(Hooks(Stage(builder, make_workload(LLAMA, training))), 1)
    changes = [change for change in builder.memory if change.owner == "model.layers.0 checkpoint"]
    made = [
        (builder.ops[change.op].name.rpartition(".")[2], change.bytes // 128 // 2, len(change.tensors))
        for change in changes
        if change.bytes > 0
    ]
    assert made == [
        ("input_layernorm", 4096, 0),
        ("q_proj", 4096, 1),
        ("v_proj", 4096, 1),
        ("core", 4096 + 64, 2),
        ("gate_proj", 11008, 1),
        ("down_proj", 4096, 1),
    ]
    assert sum(change.bytes for change in changes) == 0


@pytest.mark.parametrize(("policy", "reuses"), [("none", False), ("full", True), ("selective-op", True)])
def test_a_compiled_activation_writes_over_what_it_need_not_keep(policy: Any, *, reuses: bool) -> None:
    """In the first forward; in recomputation backward waits for all of them."""
    training = replace(TRAINING, activation_checkpointing=policy, compile=True)
    segment = make_workload(LLAMA, training).segments[1]
    passing = [
        call.work.forward_extra_bytes
        for calls in (segment.calls, segment.recomputed)
        for call in calls
        if call.module.name == "mlp.act_fn"
    ]
    assert passing == ([0, 128 * 11008 * 2] if reuses else [128 * 11008 * 2])


def test_autocast_keeps_the_residual_stream_in_fp32() -> None:
    """The add reads 4 + 2 and writes 4 bytes per element, not 6; a product first casts its weight, 6 each."""
    block, shape = LLAMA.blocks[0], BatchShape(1, 128)
    add = next(module for module in block.modules if "residual" in module.name)
    low, cast = WorkOptions(), WorkOptions(autocast=True)
    assert sum(kernel.hbm_bytes for kernel in add.kernels(FORWARD, shape, low)) == 6 * 128 * 4096
    assert sum(kernel.hbm_bytes for kernel in add.kernels(FORWARD, shape, cast)) == 10 * 128 * 4096
    product = block.modules[1]
    extra = product.kernels(FORWARD, shape, cast)[0]
    assert (extra.kind, extra.hbm_bytes) == ("elementwise", 6 * 4096 * 4096)


def test_autocast_keeps_embeddings_and_gradients_of_the_stream_in_fp32() -> None:
    """128 rows of 4096 and 8-byte indices, 4 + 4 bytes an element; backward the whole table of 32,000 rows
    in 4, and 3 x 4 a row. The add of two gradients reads 4 + 4, writes 4, and the branch's is cast, 4 + 2."""
    embed, shape, cast = LLAMA.before[0], BatchShape(1, 128), WorkOptions(autocast=True)
    (forward,) = embed.kernels(FORWARD, shape, cast)
    (backward,) = embed.kernels(BACKWARD, shape, cast)
    assert forward.hbm_bytes == 128 * (8 * 4096 + 8)
    assert backward.hbm_bytes == 32_000 * 4096 * 4 + 128 * (12 * 4096 + 32)
    add = next(module for module in LLAMA.blocks[0].modules if "residual" in module.name)
    assert [kernel.hbm_bytes / (128 * 4096) for kernel in add.kernels(BACKWARD, shape, cast)] == [12, 6]


def test_an_odd_vocabulary_costs_its_products_their_alignment() -> None:
    gemm = load_gpu("a100-sxm-80gb").gemm
    aligned = gemm.model_copy(update={"unaligned_fraction": 1.0})
    odd = [gemm_fraction(8192, 50257, 768, 1, "bf16", curve, 108) for curve in (gemm, aligned)]
    even = [gemm_fraction(8192, 50304, 768, 1, "bf16", curve, 108) for curve in (gemm, aligned)]
    assert odd[0] == pytest.approx(0.43 * odd[1])
    assert even[0] == even[1]


@pytest.mark.parametrize(("dtype", "resident", "peak"), [("bf16", 6, 10), ("fp32", 12, 20)])
def test_one_rank_peaks_at_the_foreach_update(dtype: Any, resident: int, peak: int) -> None:
    """fms-acceleration measured 6 bytes per parameter after a step in bf16 throughout and 10 at its peak
    (gradients 2, square roots 2); in fp32 12, and 20."""
    model = load_model("llama-3.2-1b")
    training: Any = replace(
        TRAINING, stored_dtype=dtype, precision=dtype, optimizer_implementation="foreach", attention="flash"
    )
    plan = plan_step(make_workload(model, training), DdpConfig(), 1)
    start = sum(memory.bytes for memory in plan.resident)
    assert start == resident * model.numel
    level = highest = start
    for change in plan.memory:
        level += change.bytes
        highest = max(highest, level)
    assert highest == peak * model.numel
    assert level == start
