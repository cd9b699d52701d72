"""FSDP1: what is wrapped, gathered, reduced, and where the host waits.

Sequences called recorded come from torch 2.13.0's own FSDP1 on a fake process group (run_torch.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.plan.steps import plan_step
from zsim.errors import InputError
from zsim.frameworks.fsdp1.reduce import predivide_factor
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp1.wrapping import make_flat_units, size_based_paths
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.workload.workload import make_workload

PlanFor = Callable[..., Plan]
BLOCK, ROOT = 202_383_360, 262_148_096  # Llama-2-7B
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


def fsdp1(**changes: Any) -> Fsdp1Config:
    values: dict[str, Any] = {
        "sharding_strategy": "FULL_SHARD",
        "replicate": 1,
        "wrapping": "huggingface",
        "backward_prefetch": "BACKWARD_PRE",
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "no_sync": False,
    }
    return Fsdp1Config(**{**values, **changes})


def toy_plan(toys: Any, ranks: int = 8, model: Any = None, training: Any = None, **changes: Any) -> Plan:
    training = training or toys.training()
    return plan_step(make_workload(model or toys.transformer(), training), fsdp1(**changes), ranks)


def calls_of(plan: Plan) -> list[str]:
    """Collectives by unit, "limit" where the host waits."""
    calls = []
    for op in plan.ops:
        calls += ["limit"] * len(op.host_waits)
        if isinstance(op.work, Collective):
            calls.append(f"{op.work.kind} {op.module.rpartition('.')[2] or 'root'}")
    return calls


# -- what goes over the wire -----------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_units_are_gathered_twice_but_for_the_root_and_reduced_once(
    plan_for: PlanFor, toys: Any, micro_batches: int
) -> None:
    """33 units: 2 x 33 - 1 all-gathers and 33 reduce-scatters in each micro-batch."""
    plan = plan_for(strategy={"kind": "fsdp1"}, training={"gradient_accumulation_steps": micro_batches})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": 65 * micro_batches, "reduce_scatter": 33 * micro_batches}


@pytest.mark.parametrize("model", ["gpt2-xl", "gemma2-9b", "falcon-7b", "opt-6.7b", "mpt-7b", "gpt-neox-20b"])
def test_a_checkpointed_block_is_not_gathered_again_for_its_recomputation(
    plan_for: PlanFor, toys: Any, model: str
) -> None:
    """Whatever a block ends with (a dropout, a norm, an add): the unit is in its backward by then."""
    training = {"activation_checkpointing": "full", "sequence_length": 512}
    plan = plan_for(model=model, strategy={"kind": "fsdp1"}, training=training)
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts["all_gather"] == 2 * counts["reduce_scatter"] - 1


def test_parameters_are_gathered_in_bf16_and_gradients_reduced_in_fp32(plan_for: PlanFor, toys: Any) -> None:
    """Llama-2-7B on 16 ranks: block and root divide by 16, so there is no padding."""
    works = toys.collectives_of(plan_for(strategy={"kind": "fsdp1"}))
    gathered = Counter((w.bytes, w.dtype) for w in works if w.kind == "all_gather")
    assert gathered == {(2 * ROOT, "bf16"): 1, (2 * BLOCK, "bf16"): 64}
    reduced = Counter((w.bytes, w.dtype) for w in works if w.kind == "reduce_scatter")
    assert reduced == {(4 * ROOT, "fp32"): 1, (4 * BLOCK, "fp32"): 32}


def test_padding_by_nothing_copies_the_gradient(toys: Any) -> None:
    """n elements on 8 ranks: the cast reads 4 n bytes and writes 2 n, the division by 4 before the sum reads
    and writes 2 n. torch 1.13 also copies, 2 n read and written, and sets a shard of 2 n / 8 to zero."""
    changes: dict[str, Any] = {"param_dtype": "fp32", "reduce_dtype": "bf16"}
    plain, padding = (toy_plan(toys, before_torch_2=pads, **changes) for pads in (False, True))
    numels = [op.work.bytes // 2 for op in plain.ops if op.name.startswith("reduce_scatter")]  # type: ignore[union-attr]
    assert prepared_bytes(plain) == [10 * n for n in numels]
    assert prepared_bytes(padding) == [14.25 * n for n in numels]
    copies = [
        change for change in padding.memory if change.category == "buffers" and len(change.tensors) == 2
    ]
    assert [change.tensors for change in copies] == [(2 * n, 2 * n) for n in numels]


def test_padding_fills_and_copies(toys: Any) -> None:
    """3072 elements on 7 ranks, to 3073, and 3232 of the root to 3234: all set to zero, the gradient read and
    written over it, then divided by 2 before the sum, read and written."""
    plan = toy_plan(toys, ranks=7, param_dtype="bf16", reduce_dtype="bf16")
    assert set(prepared_bytes(plan)) == {
        2 * (3073 + 2 * 3072 + 2 * 3073), 2 * (3234 + 2 * 3232 + 2 * 3234),
    }  # fmt: skip


def test_whole_gradients_are_never_padded(toys: Any) -> None:
    """`_post_backward_hook` of torch 1.12.1 and 1.13.1 pads and zeroes under `if param._is_sharded` alone."""
    changes: dict[str, Any] = {"sharding_strategy": "NO_SHARD", "param_dtype": "bf16"}
    plain, padding = (toy_plan(toys, before_torch_2=pads, **changes) for pads in (False, True))
    assert prepared_bytes(padding) == prepared_bytes(plain)
    assert [op.name for op in padding.ops] == [op.name for op in plain.ops]


@pytest.mark.parametrize(("before_torch_2", "stream"), [(False, "unshard"), (True, "compute")])
def test_gradients_are_flattened_on_the_stream_that_split_the_parameter(
    toys: Any, before_torch_2: bool, stream: str
) -> None:
    """4 blocks and the root, each after the last backward of the unit, and its reduction after it."""
    plan = toy_plan(toys, before_torch_2=before_torch_2)
    flattened = [n for n, op in enumerate(plan.ops) if op.name.startswith("flatten")]
    assert [plan.ops[n].stream for n in flattened] == [stream] * 5
    for number in flattened:
        backward = max(n for n in range(number) if plan.ops[n].stream == "compute")
        assert plan.ops[backward].name.endswith("backward")
        assert (backward in plan.ops[number].after) == (stream == "unshard")
        reading = next(op for op in plan.ops[number:] if op.stream == "post_backward")
        assert number in reading.after


def test_a_gather_prefetched_after_a_backward_waits_for_all_of_it(toys: Any) -> None:
    """BACKWARD_POST on one stream: flatten block 3, then gather block 2; BACKWARD_PRE has gathered it before
    block 3 went back. Under torch 1.13 nothing stands before the gather."""

    def unshard_stream(**changes: Any) -> list[str]:
        return [op.name for op in toy_plan(toys, **changes).ops if op.stream == "unshard"]

    def places(**changes: Any) -> tuple[int, int]:
        names = unshard_stream(**changes)
        gathers = [n for n, name in enumerate(names) if name == "all_gather model.layers.2"]
        return names.index("flatten gradients model.layers.3"), gathers[-1]

    flattened, gathered = places(backward_prefetch="BACKWARD_POST")
    assert gathered == flattened + 1
    flattened, gathered = places(backward_prefetch="BACKWARD_PRE")
    assert gathered < flattened
    names = unshard_stream(backward_prefetch="BACKWARD_POST", before_torch_2=True)
    assert not [name for name in names if name.startswith("flatten")]


@pytest.mark.parametrize(("before_torch_2", "stream"), [(False, "unshard"), (True, "compute")])
def test_whose_memory_gradients_are(toys: Any, before_torch_2: bool, stream: str) -> None:
    """A block of 3,072 in bf16: the views' gradients are the compute stream's, and protected if another
    stream copies them; the flat one is of the stream that makes it."""
    plan = toy_plan(toys, before_torch_2=before_torch_2)
    changes = tensor_changes(plan.program)
    made = {change.tensor: change for change in changes if change.bytes}
    number = next(n for n, op in enumerate(plan.ops) if op.name == "flatten gradients model.layers.3")
    *_, flat = (change for change in changes if change.op == number and change.bytes)
    assert (flat.bytes, flat.stream) == (2 * 3072, stream)
    freed = [change for change in changes if change.op == number + 1 and not change.bytes]
    views = [change for change in freed if made[change.tensor].bytes < 2 * 3072]
    assert sum(made[change.tensor].bytes for change in views) == 2 * 3072
    assert {made[change.tensor].stream for change in views} == {"compute"}
    assert {change.until for change in views} == {-1 if before_torch_2 else number}


def prepared_bytes(plan: Plan) -> list[float]:
    """What is read and written between a flat gradient and its reduction, by unit."""
    works = [op.work for op in plan.ops if op.name.startswith("prepare gradients")]
    return [sum(kernel.hbm_bytes for kernel in work.kernels) for work in works if isinstance(work, Kernels)]


def test_flat_parameters_are_padded_to_the_number_of_ranks(toys: Any) -> None:
    """3072 elements on 7 ranks are 7 x 439 = 3073, and 3232 of the root 7 x 462 = 3234."""
    works = toys.collectives_of(toy_plan(toys, ranks=7), "all_gather")
    assert {work.bytes for work in works} == {2 * 3073, 2 * 3234}


def test_shard_grad_op_gathers_every_unit_once(plan_for: PlanFor, toys: Any) -> None:
    plan = plan_for(strategy={"kind": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP"})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": 33, "reduce_scatter": 33}


def test_without_sync_shard_grad_op_keeps_the_parameters_of_all_micro_batches(
    plan_for: PlanFor, toys: Any
) -> None:
    """torch's heuristic: not resharded in backward either, so gathered once per step, not per micro-batch."""
    strategy = {"kind": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP", "no_sync": True}
    plan = plan_for(strategy=strategy, training={"gradient_accumulation_steps": 4})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": 33, "reduce_scatter": 33}


def test_no_shard_reduces_whole_gradients(plan_for: PlanFor, toys: Any) -> None:
    plan = plan_for(strategy={"kind": "fsdp1", "sharding_strategy": "NO_SHARD"})
    works = toys.collectives_of(plan)
    assert Counter(work.kind for work in works) == {"all_reduce": 33}
    assert sum(work.bytes for work in works) == 4 * 6_738_415_616
    assert plan.groups["replicate"].size == 16


def test_one_rank_is_no_shard(toys: Any) -> None:
    """FSDP switches to NO_SHARD for a world of one."""
    plan = toy_plan(toys, ranks=1)
    assert {work.kind for work in toys.collectives_of(plan)} == {"all_reduce"}


@pytest.mark.parametrize(("strategy", "gathers"), [("HYBRID_SHARD", 65), ("_HYBRID_SHARD_ZERO2", 33)])
def test_hybrid_shards_in_the_node_and_all_reduces_shards_across(
    plan_for: PlanFor, toys: Any, strategy: str, gathers: int
) -> None:
    """Two nodes of eight: groups of neighbours shard, equal local ranks are replicas."""
    plan = plan_for(strategy={"kind": "fsdp1", "sharding_strategy": strategy})
    counts = Counter((work.kind, work.group) for work in toys.collectives_of(plan))
    assert counts == {
        ("all_gather", "shard"): gathers,
        ("reduce_scatter", "shard"): 33,
        ("all_reduce", "replicate"): 33,
    }
    assert list(plan.groups["shard"].ranks_of(9)) == list(range(8, 16))
    assert list(plan.groups["replicate"].ranks_of(9)) == [1, 9]
    works = toys.collectives_of(plan, "all_reduce")
    assert sum(work.bytes for work in works) == 4 * 6_738_415_616 // 8


def test_hybrid_sharding_in_groups_of_one_is_refused(plan_for: PlanFor) -> None:
    strategy = {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 16}
    with pytest.raises(InputError, match=r"strategy\.replicate: found 16 on 16 GPUs"):
        plan_for(strategy=strategy)


# -- order -----------------------------------------------------------------------------------------------


def test_a_step_of_four_blocks_runs_as_recorded(toys: Any) -> None:
    """The steady step. Two waits stand before block 3's second gathering: the root's own unsharding passes
    the limiter too, although it has nothing to gather. Waits for what the step before freed cost nothing
    and are left out."""
    recorded = (
        "all_gather root,all_gather 0,all_gather 1,all_gather 2,limit,all_gather 3,"
        "limit,limit,all_gather 3,all_gather 2,reduce_scatter 3,limit,all_gather 1,reduce_scatter 2,"
        "limit,all_gather 0,reduce_scatter 1,reduce_scatter 0,reduce_scatter root"
    )
    assert calls_of(toy_plan(toys)) == recorded.split(",")


def test_forward_waits_for_the_block_three_before(toys: Any) -> None:
    """Four frees are left from the step before, so block 3's all-gather waits for block 0's, and so on."""
    plan = toy_plan(toys, model=toys.transformer(8))
    waits = {
        op.module: [plan.ops[event].module for event in op.host_waits]
        for op in plan.ops
        if op.phase == "forward" and op.host_waits
    }
    assert waits == {f"model.layers.{block}": [f"model.layers.{block - 3}.residual"] for block in range(3, 8)}


def test_passes_without_backward_wait_as_well(toys: Any) -> None:
    """Three frees are left, as the root's own unsharding takes one that nothing gives back: block 0 finds two
    of them, and block 2 waits for it."""
    calls = calls_of(toy_plan(toys, training=replace(toys.training(), forward_only=True)))
    recorded = "all_gather root,all_gather 0,all_gather 1,limit,all_gather 2,limit,all_gather 3"
    assert calls == recorded.split(",")


def test_without_the_limiter_the_host_never_waits(toys: Any) -> None:
    assert "limit" not in calls_of(toy_plan(toys, limit_all_gathers=False))


def test_without_prefetch_a_unit_is_gathered_when_its_backward_begins(toys: Any) -> None:
    calls = [c for c in calls_of(toy_plan(toys, backward_prefetch="none")) if c != "limit"]
    backward = "all_gather 3,reduce_scatter 3,all_gather 2,reduce_scatter 2,all_gather 1,reduce_scatter 1,"
    backward += "all_gather 0,reduce_scatter 0,reduce_scatter root"
    assert calls[5:] == backward.split(",")


def test_prefetch_after_backward_gathers_before_the_reduction(toys: Any) -> None:
    calls = [c for c in calls_of(toy_plan(toys, backward_prefetch="BACKWARD_POST")) if c != "limit"]
    backward = "all_gather 3,all_gather 2,reduce_scatter 3,all_gather 1,reduce_scatter 2,all_gather 0,"
    backward += "reduce_scatter 1,reduce_scatter 0,reduce_scatter root"
    assert calls[5:] == backward.split(",")


def test_forward_prefetch_gathers_the_next_unit_before_the_module_runs(toys: Any) -> None:
    plan = toy_plan(toys, forward_prefetch=True)
    names = [op.name for op in plan.ops]
    assert names.index("all_gather model.layers.0") < names.index("model.emb")
    assert names.index("all_gather model.layers.2") < names.index("model.layers.1.attn.qkv")


def test_the_compute_stream_waits_only_for_the_gathering_it_needs(toys: Any) -> None:
    """Block 1's first kernel after its own all-gather, with forward prefetch too."""
    for prefetch in (False, True):
        plan = toy_plan(toys, forward_prefetch=prefetch)
        number = {op.name: i for i, op in enumerate(plan.ops) if op.phase == "forward"}
        first = plan.ops[number["model.layers.1.attn.qkv"]]
        assert number["all_gather model.layers.1"] in first.after
        assert number["all_gather model.layers.2"] not in first.after


# -- wrapping --------------------------------------------------------------------------------------------


def units_of(toys: Any, wrapping: str, **model: Any) -> dict[str, int]:
    workload = make_workload(toys.transformer(**model), toys.training())
    return {unit.name: unit.numel for unit in make_flat_units(workload, fsdp1(wrapping=wrapping), 8, "fp32")}


def test_blocks_are_wrapped_and_the_root_holds_the_rest(toys: Any) -> None:
    """Embedding and head of 1600 each, a norm of 32."""
    expected = {"root": 3232, "model.layers.0": 3072, "model.layers.1": 3072}
    for wrapping in ("huggingface", "torchtitan-0.1", "torchtitan"):
        assert units_of(toys, wrapping, num_blocks=2) == expected
    assert units_of(toys, "none", num_blocks=2) == {"root": 2 * 3072 + 3232}


def test_size_based_wrapping_takes_remainders_up_the_tree(toys: Any) -> None:
    """At least 2000: each MLP (2048) is wrapped; a block's remainder (1024) is not, nor is the ModuleList;
    the decoder takes embedding, norm and all attention: 1600 + 32 + 2 x 1024; the head stays with the
    root."""
    assert units_of(toys, "size:2000", num_blocks=2) == {
        "root": 1600,
        "model": 3680,
        "model.layers.0.mlp": 2048,
        "model.layers.1.mlp": 2048,
    }


def test_size_based_wrapping_of_llama_2_7b_at_the_default_threshold(plan_for: PlanFor, toys: Any) -> None:
    """1e8 elements: MLP 135,266,304 yes, attention 67,108,864 no, embedding and head 131,072,000 yes; the
    decoder takes 32 attentions and 65 norms: 2,147,749,888. No root: 35 units, 70 all-gathers."""
    plan = plan_for(strategy={"kind": "fsdp1", "wrapping": "size:100000000"})
    gathered = Counter(work.bytes // 2 for work in toys.collectives_of(plan, "all_gather"))
    assert gathered == {135_266_304: 64, 131_072_000: 4, 2_147_749_888: 2}


def test_size_based_wrapping_by_hand() -> None:
    """a has 10 and 3 below it, b has 4 alone. Threshold 4: a.x (10) and b (4) are wrapped, a's remainder 3 is
    not. Threshold 11: only a (13). Threshold 18: nothing."""
    numels = {"a.x": 10, "a.y": 3, "b": 4}
    assert size_based_paths(numels, 4) == ["a.x", "b"]
    assert size_based_paths(numels, 11) == ["a"]
    assert size_based_paths(numels, 18) == []
    assert size_based_paths(numels, 11, module_lists=["a"]) == []
    assert size_based_paths({}, 1) == []


def test_units_below_a_checkpoint_are_gathered_for_recomputation_but_for_the_last(toys: Any) -> None:
    """Recorded: at 1000 elements attention, mlp.up and mlp.down are units of their own. The gradient reaches
    mlp.down first, which so is in its backward when its block is recomputed; the others are gathered three
    times. Three blocks: 3 x (3 + 3 + 2), the embedding and the head twice, the root (a norm) once."""
    training = toys.training(activation_checkpointing="full")
    model = toys.transformer(3)
    plan = toy_plan(toys, training=training, model=model, wrapping="size:1000")
    assert len(toys.collectives_of(plan, "all_gather")) == 3 * 8 + 4 + 1
    plan = toy_plan(toys, model=model, wrapping="size:1000")
    assert len(toys.collectives_of(plan, "all_gather")) == 3 * 6 + 4 + 1


def test_a_tied_weight_belongs_to_the_root_where_embedding_and_head_are_apart(toys: Any) -> None:
    """One unit can share it; the decoder (2 x 1024 + 32) takes the rest."""
    units = units_of(toys, "size:2000", num_blocks=2, is_tied=True)
    assert units["root"] == 1600
    assert units["model"] == 2 * 1024 + 32


@pytest.mark.parametrize("wrapping", ["size:", "size:0", "size:1e8", "size:-5", "huggingfaze", ""])
def test_an_unknown_wrapping_is_refused(toys: Any, wrapping: str) -> None:
    with pytest.raises(InputError, match=r"strategy\.wrapping"):
        units_of(toys, wrapping)


# -- gradients -------------------------------------------------------------------------------------------


def test_the_predivide_factor_is_about_the_root_of_the_ranks() -> None:
    """The smallest power of two whose square is not below the ranks, as long as it divides them."""
    factors = {ranks: predivide_factor(ranks) for ranks in (1, 2, 4, 6, 8, 16, 64, 1024, 7)}
    assert factors == {1: 1, 2: 2, 4: 2, 6: 4, 8: 4, 16: 4, 64: 8, 1024: 32, 7: 2}


def test_a_flat_gradient_is_concatenated_when_backward_leaves_the_unit(toys: Any) -> None:
    """The root, a norm here, has its gradient second of all, and still comes last: its views were made
    first."""
    names = [op.name for op in toy_plan(toys, wrapping="size:1000").ops]
    flattened = [name for name in names if name.startswith("flatten gradients")]
    assert flattened[0] == "flatten gradients lm_head"
    assert flattened[-2:] == ["flatten gradients model.emb", "flatten gradients root"]
    place = names.index("flatten gradients model.layers.2.mlp.up")
    assert names[place - 1] == "model.layers.2.mlp.up backward"


def test_gradients_without_sync_add_up_unsharded_in_the_gathered_type(plan_for: PlanFor, toys: Any) -> None:
    """Two bytes per parameter stay from micro-batch to micro-batch: 6.7e9 x 2."""
    training = {"gradient_accumulation_steps": 2}
    with_sync = plan_for(strategy={"kind": "fsdp1"}, training=training)
    without = plan_for(strategy={"kind": "fsdp1", "no_sync": True}, training=training)
    more = toys.host_peaks(without)["buffers"] - toys.host_peaks(with_sync)["buffers"]
    # At the peak of the last micro-batch a part of them is reduced already.
    assert 0.9 * 2 * 6_738_415_616 < more <= 2 * 6_738_415_616


def test_model_states_are_sharded(plan_for: PlanFor, toys: Any) -> None:
    """16 bytes per parameter over 16 ranks: one byte each."""
    peaks = toys.host_peaks(plan_for(strategy={"kind": "fsdp1"}))
    states = [peaks[name] for name in ("parameters", "gradients", "optimizer_states")]
    assert states == [6_738_415_616 // 4, 6_738_415_616 // 4, 6_738_415_616 // 2]


def test_torch_1_copies_shards_into_the_type_that_they_have(toys: Any) -> None:
    """composer names fp32; torch 2 sees that nothing is to be done."""
    for before_torch_2 in (False, True):
        plan = toy_plan(toys, 4, param_dtype="fp32", before_torch_2=before_torch_2)
        copies = [op for op in plan.ops if op.name.startswith("cast shard")]
        assert bool(copies) == before_torch_2


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("wrapping", ["huggingface", "size:1000", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_sync": True, "forward_prefetch": True},
        {"param_dtype": "fp32", "backward_prefetch": "none"},
        {"reduce_dtype": "bf16", "backward_prefetch": "BACKWARD_POST"},
        {"reduce_dtype": "bf16", "no_sync": True},
        {"param_dtype": "fp32", "reduce_dtype": "bf16", "before_torch_2": True},
    ],
    ids=str,
)
def test_memory_is_back_at_its_start_after_a_step(
    toys: Any, strategy: str, steps: int, checkpointing: str, wrapping: str, options: dict[str, Any]
) -> None:
    """On 12 ranks, so that flat parameters are padded."""
    training = toys.training(gradient_accumulation_steps=steps, activation_checkpointing=checkpointing)
    replicate = 3 if "HYBRID" in strategy else 1
    plan = toy_plan(
        toys,
        12,
        training=training,
        sharding_strategy=strategy,
        replicate=replicate,
        wrapping=wrapping,
        **options,
    )
    for category, levels in toys.host_levels(plan).items():
        assert levels[-1] == levels[0], category
        assert min(levels) >= 0, category


# -- the host's time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("use_orig_params", "hook"), [(True, "fsdp1_view"), (False, "fsdp1_flat_view")])
def test_every_gather_makes_the_views_of_the_units_parameters(
    toys: Any, use_orig_params: bool, hook: str
) -> None:
    """A unit's views are made where it is gathered, and a unit with original parameters has more to do.
    Forward has other hooks than backward."""
    plan = toy_plan(toys, use_orig_params=use_orig_params)
    units = make_flat_units(
        make_workload(toys.transformer(), toys.training()), fsdp1(use_orig_params=use_orig_params), 8, "fp32"
    )
    counts = {unit.path: unit.num_parameters for unit in units}
    gathers = [op for op in plan.ops if op.overhead in ("fsdp1_forward", "fsdp1_unshard")]
    views = [op for op in plan.ops if op.overhead == hook]
    assert [op.module for op in views] == [op.module for op in gathers]
    assert all(op.events == counts[op.module] for op in views)
    of_units = [op.module for op in plan.ops if op.overhead == "fsdp1_unit_views"]
    assert of_units == [op.module for op in gathers] * use_orig_params
    assert {op.phase: op.overhead for op in gathers} == {
        "forward": "fsdp1_forward",
        "backward": "fsdp1_unshard",
    }
    assert sum(counts.values()) == len([p for call in plan_parameters(toys) for p in call])


def plan_parameters(toys: Any) -> list[tuple[Any, ...]]:
    """The parameters of every module of the toy."""
    workload = make_workload(toys.transformer(), toys.training())
    return [call.parameters for segment in workload.segments for call in segment.calls]
