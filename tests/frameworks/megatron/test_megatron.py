"""Megatron's data parallelism: what it sends, when, and what it keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.plan.steps import plan_step
from zsim.frameworks.megatron.host_time import enter_block, enter_chunk
from zsim.frameworks.megatron.parallelism import MEGATRON, NANOTRON
from zsim.frameworks.megatron.schedule import run_realtime_tests
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.experts import HostEvents
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Collective, Group, Kernels, Plan
from zsim.plan.workload.workload import make_workload
from zsim.specs.model.spec import Module, Norm, Parameter
from zsim.specs.strategy.parallelism import ParallelismConfig

PlanFor = Callable[..., Plan]
LLAMA_2_7B = 6_738_415_616
CORE = MegatronConfig(
    distributed_optimizer=False, overlap_grad_reduce=False, overlap_param_gather=False, param_dtype="bf16",
    grad_dtype="fp32", average_in_collective=False, bucket_size=None, optimizer_instances=1,
    is_contiguous=True, fuses_accumulation=True, checks_nan=True,
)  # fmt: skip
SHARDED = replace(CORE, distributed_optimizer=True)
AHEAD = replace(SHARDED, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=4000)


def toy_plan(
    toys: Any, strategy: MegatronConfig, ranks: int = 8, is_tied: bool = False, **training: Any
) -> Plan:
    """Of 15,520 elements (tied 13,920): embedding 1600, 4 blocks of 3072, norm 32, head 1600."""
    settings = toys.training(**{"optimizer": "adamw", **training})
    return plan_step(make_workload(toys.transformer(is_tied=is_tied), settings), strategy, ranks)


def named(plan: Plan, *beginnings: str) -> list[str]:
    return [op.name for op in plan.ops if op.name.startswith(beginnings)]


def position(plan: Plan, name: str) -> int:
    return next(number for number, op in enumerate(plan.ops) if op.name == name)


# -- bytes -----------------------------------------------------------------------------------------------


def test_gradients_are_all_reduced_once_in_fp32(plan_for: PlanFor, toys: Any) -> None:
    """Megatron's command line as it is: 4 bytes per parameter in one call behind backward."""
    works = toys.collectives_of(plan_for(strategy={"kind": "megatron"}))
    sent = [(work.kind, work.group, work.bytes) for work in works if work.bytes > 4]
    assert sent == [("all_reduce", "data", 4 * LLAMA_2_7B)]


def test_the_distributed_optimizer_scatters_fp32_gradients_and_gathers_bf16_parameters(
    plan_for: PlanFor, toys: Any
) -> None:
    """4 and 2 bytes per element; every tensor of Llama-2-7B is a multiple of 64 elements, all of them
    together of 128, so that 16 ranks pad nothing."""
    strategy = {"kind": "megatron", "distributed_optimizer": True}
    works = [work for work in toys.collectives_of(plan_for(strategy=strategy)) if work.bytes > 4]
    assert [(work.kind, work.dtype, work.bytes) for work in works] == [
        ("reduce_scatter", "fp32", 4 * LLAMA_2_7B),
        ("all_gather", "bf16", 2 * LLAMA_2_7B),
    ]


@pytest.mark.parametrize(("ranks", "expected"), [(16, 40_000_000), (64, 64_000_000)])
def test_buckets_grow_with_the_ranks(plan_for: PlanFor, toys: Any, ranks: int, expected: int) -> None:
    """max(40e6, 1e6 d) elements or just more; the last takes the rest. The largest tensor, the embedding, has
    131 million."""
    strategy = {"kind": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True}
    plan = plan_for(strategy=strategy, nodes=None, gpus=ranks)
    sizes = [work.bytes // 4 for work in toys.collectives_of(plan, "reduce_scatter")]
    assert min(sizes[:-1]) >= expected
    assert sum(sizes) == LLAMA_2_7B


@pytest.mark.parametrize(
    ("strategy", "precision", "bytes_each"),
    [
        ({}, "bf16", 2 + 4 + 12),
        ({"distributed_optimizer": True}, "bf16", 6 + 12 / 16),
        ({"grad_reduce_dtype": "bf16"}, "bf16", 20),
        ({"grad_reduce_dtype": "fp16"}, "fp16", 20),
        ({"grad_reduce_dtype": "fp16", "distributed_optimizer": True}, "fp16", 4 + 16 / 16),
        ({}, "fp32", 16),
        ({"distributed_optimizer": True}, "fp32", 8 + 8 / 16),
    ],
)
def test_model_states_are_those_of_megatrons_table(
    plan_for: PlanFor, toys: Any, strategy: dict[str, Any], precision: str, bytes_each: float
) -> None:
    """Megatron-LM docs, dist_optimizer: 18, 20 and 16 bytes per parameter; 6 + 12/d, 4 + 16/d, 8 + 8/d
    distributed over d (16 here). The fp32 copies of 16-bit gradients are there only in the update."""
    plan = plan_for(strategy={"kind": "megatron", **strategy}, training={"precision": precision})
    peaks = toys.host_peaks(plan)
    states = peaks["parameters"] + peaks["gradients"] + peaks["optimizer_states"]
    assert states == bytes_each * LLAMA_2_7B


def test_replicas_of_the_optimizer_reduce_a_shard_among_themselves(toys: Any) -> None:
    """8 ranks in 2 instances of 4: a scatter of 15,616 padded elements (a multiple of 128) of 4 bytes in each
    4, then an all-reduce of a quarter in pairs that are 4 apart."""
    plan = toy_plan(toys, replace(SHARDED, optimizer_instances=2))
    works = [work for work in toys.collectives_of(plan) if work.bytes > 4]
    numel = plan.resident[1].bytes // 4
    assert numel % 128 == 0
    assert [(work.kind, work.group, work.bytes) for work in works] == [
        ("reduce_scatter", "data", 4 * numel),
        ("all_reduce", "replicate", numel),
        ("all_gather", "data", 2 * numel),
    ]
    assert list(plan.groups["replicate"].ranks_of(1)) == [1, 5]


def test_a_rank_alone_sends_nothing(toys: Any) -> None:
    assert not toys.collectives_of(toy_plan(toys, AHEAD, ranks=1))


# -- when ------------------------------------------------------------------------------------------------


def test_without_overlap_backward_ends_before_anything_is_sent(toys: Any) -> None:
    plan = toy_plan(toys, SHARDED)
    assert position(plan, "reduce_scatter bucket 0") > position(plan, "model.emb backward")
    assert position(plan, "all_gather parameters 0") > position(plan, "optimizer step")
    assert {op.stream for op in plan.ops if isinstance(op.work, Collective)} == {"compute"}


def test_a_bucket_is_scattered_when_its_last_gradient_is_there(toys: Any) -> None:
    """Buckets of 4,000: the head's 1600 end at 1600, the norm's 16 and 16 at 1616 and 1680, the last block's
    mlp.down (from 1728) and mlp.up at 2752 and 3776, and attn.o's 256 at 4032, which closes the first."""
    plan = toy_plan(toys, AHEAD)
    order = [name for name in named(plan, "model.", "reduce_scatter") if "backward" in name or "red" in name]
    first = order.index("reduce_scatter bucket 0")
    assert order[first - 1] == "model.layers.3.attn.o backward"
    assert position(plan, "reduce_scatter bucket 0") < position(plan, "model.layers.0.mlp.up backward")


def test_backward_waits_for_every_bucket_before_the_update(toys: Any) -> None:
    plan = toy_plan(toys, AHEAD)
    scattered = [number for number, op in enumerate(plan.ops) if op.name.startswith("reduce_scatter")]
    after = next(op.after for op in plan.ops if op.phase == "optimizer" and op.work is not None)
    assert len({plan.ops[number].stream for number in scattered}) == 1  # in order: the last one is all
    assert scattered[-1] in after


def test_only_the_last_micro_batch_is_reduced(toys: Any) -> None:
    one, three = toy_plan(toys, AHEAD), toy_plan(toys, AHEAD, gradient_accumulation_steps=3)
    assert named(one, "reduce_scatter") == named(three, "reduce_scatter")
    starts = [number for number, op in enumerate(three.ops) if op.name == "loss"]
    assert position(three, "reduce_scatter bucket 0") > starts[2]


def test_parameters_are_gathered_one_bucket_ahead(toys: Any) -> None:
    """The embedding is in the last bucket: it waits for that one, and starts the next; the first module of
    the next waits for it, and so on. Nothing is gathered behind the update."""
    plan = toy_plan(toys, AHEAD)
    gathers = named(plan, "all_gather")
    count = len(gathers)
    assert gathers == [f"all_gather parameters {number}" for number in reversed(range(count))]
    embedding = plan.ops[position(plan, "model.emb")]
    assert position(plan, gathers[0]) in embedding.after
    assert position(plan, gathers[1]) < position(plan, "model.emb") < position(plan, gathers[2])
    assert all(op.phase == "forward" for op in plan.ops if op.name.startswith("all_gather"))


def test_the_host_looks_at_every_buckets_norm_before_it_is_sent(toys: Any) -> None:
    plan = toy_plan(toys, AHEAD)
    reads = [op for op in plan.ops if op.name == "read bucket norm"]
    assert len(reads) == len(named(plan, "reduce_scatter"))
    assert all(op.host_waits for op in reads)
    assert not named(toy_plan(toys, replace(AHEAD, checks_nan=False)), "read bucket norm")


# -- gradients -------------------------------------------------------------------------------------------


def test_products_add_their_weights_gradients_themselves(toys: Any) -> None:
    """Of the toy only the norm's two and the embedding's are left to a hook; unfused every tensor is: 4 in
    each of 4 blocks, embedding, norm (two) and head."""
    fused, unfused = toy_plan(toys, CORE), toy_plan(toys, replace(CORE, fuses_accumulation=False))
    assert named(fused, "add gradient") == ["add gradient model.norm"] * 2 + ["add gradient model.emb"]
    assert len(named(unfused, "add gradient")) == 4 * 4 + 1 + 2 + 1


def test_early_releases_join_gradients_and_copy_the_sums_back(toys: Any) -> None:
    """Two bytes per element in one all-reduce that the host waits for, with a buffer as large."""
    early = replace(CORE, grad_dtype="bf16", is_contiguous=False, fuses_accumulation=False, checks_nan=False)
    plan = toy_plan(toys, early)
    order = named(plan, "join", "all_reduce", "average", "copy gradients back")
    assert order == ["join gradients", "all_reduce bucket 0", "average gradients", "copy gradients back"]
    numel = 4 * 3072 + 2 * 1600 + 32
    assert toys.collectives_of(plan)[0].bytes == 2 * numel
    assert max(toys.host_levels(plan)["buffers"]) >= 2 * numel
    assert plan.ops[position(plan, "average gradients")].host_waits


def test_another_engine_sums_on_all_ranks_and_copies_a_bucket_back_behind_the_next(toys: Any) -> None:
    """InternEvo's: the group of the sums is everyone; the four that share states own whole tensors and
    broadcast them behind the update, 2 bytes per element. A share is 3,880: embedding, qkv, o and up are
    3,648, and down would be too many; so is the next o, after 4,864, and the next up, after 3,328."""
    engine = replace(
        AHEAD, grad_dtype="bf16", is_contiguous=False, fuses_accumulation=False, checks_nan=False,
        has_whole_tensor_owners=True, average_in_collective=True, optimizer_instances=2,
        overlap_param_gather=False,
    )  # fmt: skip
    plan = toy_plan(toys, engine)
    sums = toys.collectives_of(plan, "all_reduce")
    assert {work.group for work in sums} == {"world"}
    broadcasts = [(work.group, work.bytes) for work in toys.collectives_of(plan, "broadcast")]
    assert broadcasts == [("data", 2 * numel) for numel in (3648, 4864, 3328, 3680)]
    assert not toys.collectives_of(plan, "all_gather")
    assert position(plan, "broadcast of owner 0") > position(plan, "optimizer step")
    states = sum(memory.bytes for memory in plan.resident if memory.category == "optimizer_states")
    assert states == 12 * 4864  # of the fullest rank
    back = position(plan, "copy gradients back")
    assert position(plan, "all_reduce bucket 1") < back < position(plan, "model.emb backward")
    assert len(named(plan, "copy gradients back")) == len(sums)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [
        CORE, SHARDED, AHEAD, replace(CORE, fuses_accumulation=False),
        replace(CORE, grad_dtype="bf16", is_contiguous=False, fuses_accumulation=False),
        replace(
            AHEAD, grad_dtype="bf16", is_contiguous=False, fuses_accumulation=False,
            has_whole_tensor_owners=True,
        ),
    ],
)  # fmt: skip
def test_memory_is_back_at_its_start_after_a_step(
    toys: Any, strategy: MegatronConfig, steps: int, checkpointing: str, is_tied: bool
) -> None:
    plan = toy_plan(
        toys, strategy, is_tied=is_tied, gradient_accumulation_steps=steps,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    for category, levels in toys.host_levels(plan).items():
        assert levels[-1] == levels[0], category
        assert min(levels) >= 0, category


def test_a_checkpointed_layer_is_entered_three_times(toys: Any) -> None:
    """Forward once, and again before backward; the host pays for each."""
    plan = toy_plan(toys, CORE, activation_checkpointing="full")
    events = [op.events for op in plan.ops if op.overhead == "megatron_core_block"]
    assert events == [1] * 4 + [2] * 4


def test_layers_that_share_a_checkpoint_run_again_together(toys: Any) -> None:
    """Of 4 layers 2 share one: the last two run again, then both backwards, then the first two."""
    whole: dict[str, Any] = {"activation_checkpointing": "full", "checkpoint_is_reentrant": True}
    plans = {
        count: toy_plan(toys, CORE, layers_per_checkpoint=count, checkpoint_stops_early=False, **whole)
        for count in (1, 2, 4)
    }
    turns: list[tuple[str, str]] = []
    for op in plans[2].ops:
        layer = re.search(r"layers\.(\d)", op.module)
        if layer and op.phase in ("recompute", "backward") and (op.phase[0], layer[1]) not in turns[-1:]:
            turns.append((op.phase[0], layer[1]))
    assert turns == [(way, layer) for way, layer in zip("rrbbrrbb", "23320110", strict=True)]
    works = [
        sorted((op.phase, op.name, op.work.kernels) for op in plan.ops if isinstance(op.work, Kernels))
        for plan in plans.values()
    ]
    assert works[0] == works[1] == works[2]


@pytest.mark.parametrize(("count", "held"), [(1, 4), (2, 2), (4, 1)])
def test_layers_that_share_a_checkpoint_hold_one_input_and_one_output(
    toys: Any, count: int, held: int
) -> None:
    """A checkpoint holds its first layer's input, 192 bytes, and while its layers run backward their output,
    as much."""
    plan = toy_plan(
        toys, CORE, activation_checkpointing="full", checkpoint_is_reentrant=True,
        checkpoint_stops_early=False, layers_per_checkpoint=count,
    )  # fmt: skip
    for what in (" checkpoint", " output"):
        changes = [change.bytes for change in plan.memory if change.owner.endswith(what)]
        assert sorted(changes) == [-192] * held + [192] * held
    levels = toys.host_levels(plan)["activations"]
    assert levels[-1] == levels[0]


@pytest.mark.parametrize(("tensor", "waits"), [(1, None), (2, 2), (8, 13), (32, 76)])
def test_nanotrons_blocks_wait_for_tensor_ranks_in_a_pipeline(
    toys: Any, tensor: int, waits: int | None
) -> None:
    """More than in proportion to them: n to the power of 1.25."""
    builder = PlanBuilder([])
    strategy = replace(CORE, host_events=HostEvents(block="nanotron_block"))
    split = ParallelismConfig(pipeline=2, tensor=tensor, style=NANOTRON)
    block = next(
        one for one in make_workload(toys.transformer(), toys.training()).segments if one.kind == "block"
    )
    enter_block(builder, strategy, split, block, 1)
    events = {op.overhead: op.events for op in builder.program([], "").ops}
    expected = {} if waits is None else {"nanotron_pipelined_rank": waits}
    assert events == {"nanotron_block": 1, **expected}


@pytest.mark.parametrize(
    ("split", "attention", "expected"),
    [
        (ParallelismConfig(), None, {}),
        (ParallelismConfig(), "megatron_core_unfused_attention", {"megatron_core_unfused_attention": 2}),
        (ParallelismConfig(context=4), None, {"megatron_core_hop": 8}),
        (
            ParallelismConfig(context=4, context_method="a2a+p2p", context_inner=2),
            None,
            {"megatron_core_hop": 4},
        ),
        (ParallelismConfig(context=4, context_method="all-to-all"), None, {}),
    ],
)
def test_attention_costs_a_megatron_block_more(
    toys: Any, split: ParallelismConfig, attention: str | None, expected: dict[str, int]
) -> None:
    """Two passes: each without a fused kernel, and each hop of a ring."""
    builder = PlanBuilder([])
    block = next(
        one for one in make_workload(toys.transformer(), toys.training()).segments if one.kind == "block"
    )
    strategy = replace(CORE, host_events=HostEvents(attention=attention))
    enter_block(builder, strategy, replace(split, style=MEGATRON), block, 2)
    events = {op.overhead: op.events for op in builder.program([], "").ops}
    assert events == {"megatron_core_block": 2, **expected}


def test_test_mode_compares_the_norms_of_queries_and_keys_of_all_ranks() -> None:
    """Of 2 data-parallel ranks and one tensor-parallel: 3 times 4 parameters, the host waits for each answer;
    gathered are 4 tensors of 8 elements of 2 bytes from both."""
    builder = PlanBuilder([])
    data = Group("data", np.arange(2).reshape(1, 2))
    builder.groups["data"] = data
    weights = tuple(Parameter(name, (8,)) for name in ("weight", "bias"))
    norm = Module("self_attention.k_layernorm", Norm(8, "layer"), weights)
    call = SimpleNamespace(module=norm, name="block.self_attention.k_layernorm")
    for test_mode in (False, True):
        run_realtime_tests(builder, replace(CORE, test_mode=test_mode), call, data)  # type: ignore[arg-type]
    ops = builder.program([], "").ops
    assert len([op for op in ops if op.host_waits]) == 12
    assert [op.work.bytes for op in ops if isinstance(op.work, Collective)] == [2 * 4 * 8 * 2]
    builder.phase = "recompute"  # the forward of a checkpointed layer, once more
    run_realtime_tests(builder, replace(CORE, test_mode=True), call, data)  # type: ignore[arg-type]
    assert len([op for op in builder.program([], "").ops if op.host_waits]) == 24


def test_timers_of_level_2_wait_around_every_forward_and_backward(toys: Any) -> None:
    """Two micro-batches: the host waits for compute in front of four passes and behind them. The first finds
    gradients being zeroed; in front of each later pass it waits for what the one before has waited for."""
    plan = toy_plan(
        toys, replace(CORE, synchronizes_timers=True, checks_nan=False), gradient_accumulation_steps=2
    )
    without = toy_plan(toys, replace(CORE, checks_nan=False), gradient_accumulation_steps=2)
    waits = [op for op in plan.ops if op.host_waits]
    assert len(waits) - len([op for op in without.ops if op.host_waits]) == 5
    assert [op.name for op in plan.ops] == [op.name for op in without.ops]


@pytest.mark.parametrize(
    ("virtual", "overhead", "style", "events"),
    [
        (2, "megatron_core_block", MEGATRON, 1),
        (1, "megatron_core_block", MEGATRON, 0),
        (2, None, MEGATRON, 0),  # in a CUDA graph
        (2, "nanotron_block", NANOTRON, 0),
    ],
)
def test_the_interleaved_schedule_pays_for_every_chunk(
    virtual: int, overhead: str | None, style: Any, events: int
) -> None:
    """But where timers wait for the messages."""
    builder = PlanBuilder([])
    strategy = replace(CORE, host_events=HostEvents(block=overhead))
    split = ParallelismConfig(pipeline=2, virtual_stages=virtual, style=style)
    enter_chunk(builder, replace(strategy, synchronizes_timers=True), split)
    enter_chunk(builder, strategy, split)
    assert [op.overhead for op in builder.program([], "").ops] == ["megatron_chunk"] * events


def test_a_skipped_update_ends_with_the_look_at_the_gradients(toys: Any) -> None:
    """fp16 whose scale still falls: fp32 copies, unscaling, the flag; no norm, no update, no cast."""
    early = replace(CORE, param_dtype="fp16", grad_dtype="fp16", skips_update=True)
    plan = toy_plan(toys, early, precision="fp16", gradient_clipping=1.0)
    last = [op.name for op in plan.ops if op.phase == "optimizer"]
    assert last == ["copy gradients to fp32", "unscale gradients", "read overflow"]
    levels = toys.host_levels(plan)["gradients"]
    assert levels[-1] == levels[0] < max(levels)
