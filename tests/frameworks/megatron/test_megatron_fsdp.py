"""Megatron-FSDP: what it gathers, ahead of what, what it reduces, and what a rank keeps.

The toy has 15,520 elements: embedding 1600, 4 layers of 3072, norm 32 and head 1600, in rows of 16 (64 in a
layer, whose down projection has rows of 64).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import zsim
from tests.plan.steps import plan_step
from zsim.frameworks.megatron.fsdp.groups import arrange_rows, row_multiple
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.frameworks.megatron.settings.experts import HostEvents
from zsim.frameworks.megatron.settings.fsdp import MegatronFsdp
from zsim.plan.ops import Collective, Plan
from zsim.plan.workload.workload import make_workload

PlanFor = Callable[..., Plan]
BASE = MegatronConfig(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, param_dtype="bf16",
    grad_dtype="fp32", average_in_collective=False, bucket_size=None, optimizer_instances=1,
    is_contiguous=True, fuses_accumulation=True, checks_nan=False, host_events=HostEvents(block=None),
)  # fmt: skip
FSDP = MegatronFsdp(
    "optim_grads_params", "no_shard", overlaps_gradients=True, overlaps_parameters=True, bucket_size=1500,
    unit_size=8000, has_double_buffer=False, has_gather_group=False, scales_in_nccl=True,
    keeps_transposes=False,
)  # fmt: skip
LAYERS = [f"model.layers.{number}" for number in range(4)]


def toy_plan(
    toys: Any,
    fsdp: MegatronFsdp = FSDP,
    ranks: int = 8,
    strategy: dict[str, Any] | None = None,
    **training: Any,
) -> Plan:
    settings = toys.training(**{"optimizer": "adamw", **training})
    found = replace(BASE, fsdp=fsdp, **(strategy or {}))
    return plan_step(make_workload(toys.transformer(), settings), found, ranks)


def calls(plan: Plan, kind: str, *, since: str = "", until: str = "") -> list[str]:
    """What a kind of collective was issued for, between the ops of two names."""
    names = [op.name for op in plan.ops]
    first = names.index(since) if since else 0
    last = names.index(until) if until else len(names)
    part = plan.ops[first:last]
    return [
        op.name.removeprefix(f"{kind} ")
        for op in part
        if isinstance(op.work, Collective) and op.work.kind == kind
    ]


def held(plan: Plan, category: str) -> int:
    return sum(memory.bytes for memory in plan.programs[0].resident if memory.category == category)


# -- buffers ----------------------------------------------------------------------------------------------


def test_a_buffer_keeps_rows_whole() -> None:
    """Rows of 6 and 4: 12 elements are a multiple of both, and 3 are less than a row. 24 elements, then 16,
    which are no multiple of 12 and leave 8 behind the next multiple, 48; there the 3 go."""
    shapes = {"a": (4, 6), "b": (4, 4), "c": (3,)}
    assert row_multiple(list(shapes.values())) == 12
    assert arrange_rows(shapes, 12) == ({"a": (0, 24), "b": (24, 40), "c": (40, 43)}, 48)


def test_remainders_share_a_row() -> None:
    """Multiple 10: 14 elements leave 6, and the remainder 3 of 13 fits into it: from 17 to 30."""
    places, length = arrange_rows({"a": (14,), "b": (13,)}, 10)
    assert places == {"a": (0, 14), "b": (17, 30)}
    assert length == 30


@pytest.mark.parametrize(
    ("sharding", "parameters", "gradients", "states"),
    [
        ("no_shard", 31_040, 62_080, 62_080),
        ("optim", 31_744, 63_488, 7_936),
        ("optim_grads", 31_744, 7_936, 7_936),
        ("optim_grads_params", 3_904, 7_808, 7_808),
    ],
)
def test_what_is_sharded_is_an_eighth(
    toys: Any, sharding: Any, parameters: int, gradients: int, states: int
) -> None:
    """2, 4 and 4 bytes of 15,520 elements (main weights without moments, as SGD has none). As one bucket they
    are padded to 31 times 8 rows of 64; by layers the embedding is 1664 (13 times 8 rows of 16), norm and
    head are, too, and a layer is 3072."""
    bucket = 1500 if sharding == "optim_grads_params" else None
    plan = toy_plan(toys, replace(FSDP, sharding=sharding, bucket_size=bucket), optimizer="sgd")
    assert held(plan, "parameters") == parameters
    assert held(plan, "gradients") == gradients
    assert held(plan, "optimizer_states") == states


# -- parameters -------------------------------------------------------------------------------------------


def test_forward_looks_half_a_unit_ahead(toys: Any) -> None:
    """4000 elements ahead: before the embedding norm and head (1664) and layer 0 (4736 together), before
    layer 0 layers 1 and 2. The last norm is in front of all layers, so it looks ahead to layers 0 and 1."""
    plan = toy_plan(toys)
    assert calls(plan, "all_gather", until="model.layers.0.attn.qkv") == [
        "parameters 0", "parameters 1", *LAYERS[:3],
    ]  # fmt: skip
    assert calls(plan, "all_gather", since="model.layers.0.attn.qkv", until="model.norm backward") == [
        LAYERS[3], LAYERS[0], LAYERS[1],
    ]  # fmt: skip


def test_backward_looks_the_other_way(toys: Any) -> None:
    """Layer 3 with 2 and 1 in front of it, but layer 1 is there: the last norm has gathered it. It is dropped
    when layer 2 is gathered, and gathered again in front of layer 2, with layer 0."""
    behind = calls(toy_plan(toys), "all_gather", since="model.norm backward")
    assert behind == [LAYERS[2], LAYERS[3], LAYERS[0], LAYERS[1]]


def test_recomputation_gathers_its_layer_alone(toys: Any) -> None:
    plan = toy_plan(toys, activation_checkpointing="full")
    behind = calls(plan, "all_gather", since="model.norm backward")
    assert behind == [LAYERS[3], LAYERS[1], LAYERS[2], LAYERS[0]]


def test_a_double_buffer_looks_one_layer_ahead(toys: Any) -> None:
    """And its four buffers stay: two of 3072 bf16 parameters, two of as many fp32 gradients."""
    plan = toy_plan(toys, replace(FSDP, has_double_buffer=True))
    assert calls(plan, "all_gather", until="model.layers.0.attn.qkv") == [
        "parameters 0",
        "parameters 1",
        *LAYERS[:2],
    ]
    assert held(plan, "buffers") == 2 * 3072 * 2 + 2 * 3072 * 4


def test_whole_parameters_are_gathered_once_a_step(toys: Any) -> None:
    """In place, ahead of the modules that need them, or all behind the update: eight buckets of 1500 elements
    or more."""
    whole = replace(FSDP, sharding="optim_grads")
    names = calls(toy_plan(toys, whole, gradient_accumulation_steps=3), "all_gather")
    assert names == [f"parameters {number}" for number in range(8)]
    late = toy_plan(toys, replace(whole, overlaps_parameters=False))
    assert calls(late, "all_gather", since="optimizer step") == names


def test_gathers_may_have_a_communicator_of_their_own(toys: Any) -> None:
    """Else a gather waits for the reduction in front of it."""
    plan = toy_plan(toys, replace(FSDP, has_gather_group=True))
    groups = {op.work.kind: op.work.group for op in plan.ops if isinstance(op.work, Collective)}
    assert groups == {"all_gather": "gather", "reduce_scatter": "data"}


# -- gradients --------------------------------------------------------------------------------------------


def test_sharded_gradients_are_reduced_in_every_micro_batch(toys: Any) -> None:
    plan = toy_plan(toys, gradient_accumulation_steps=2)
    assert calls(plan, "reduce_scatter") == ["parameters 1", *LAYERS[::-1], "parameters 0"] * 2


@pytest.mark.parametrize(("sharding", "kind"), [("no_shard", "all_reduce"), ("optim", "reduce_scatter")])
def test_whole_gradients_are_reduced_once(toys: Any, sharding: Any, kind: str) -> None:
    """In buckets of 1500 elements or more: the embedding, then a layer's product or two each."""
    plan = toy_plan(toys, replace(FSDP, sharding=sharding), gradient_accumulation_steps=3)
    names = calls(plan, kind)
    assert names == [f"parameters {number}" for number in range(len(names))][::-1]
    late = toy_plan(toys, replace(FSDP, sharding="optim", overlaps_gradients=False, bucket_size=None))
    assert calls(late, "reduce_scatter", since="model.emb backward") == ["parameters 0"]


def test_backward_waits_when_more_than_a_unit_is_on_its_way(toys: Any) -> None:
    """8000 elements: norm and head (1664) with layers 3 and 2 are 7808; layer 1 makes 10,880, so that the
    reduction of layer 0 waits for the first two, and with it what is computed next."""
    plan = toy_plan(toys)
    waits = {op.name: [plan.ops[event].name for event in op.after] for op in plan.ops}
    first = ["add gradient shard model.layers.3"]  # the second of one stream
    assert waits["model.emb backward"] == first
    assert not {"add gradient shard parameters 1", *first} & {
        wait for name, found in waits.items() if name != "model.emb backward" for wait in found
    }
    assert waits["optimizer step"] == ["add gradient shard parameters 0"]  # the last one


def test_instances_add_their_shards_in_the_last_micro_batch(toys: Any) -> None:
    """4 of 8 ranks are an instance: 4 bytes of a quarter of 15,552 elements (the embedding's 1600 are 25
    times 4 rows of 16, norm and head's 1632 are padded to 1664), in six calls, of the last micro-batch."""
    plan = toy_plan(toys, strategy={"optimizer_instances": 2}, gradient_accumulation_steps=2)
    sums = [
        op.work.bytes for op in plan.ops if isinstance(op.work, Collective) and op.work.group == "replicate"
    ]
    assert sum(sums) == 4 * 15_552 // 4
    assert len(sums) == 6


def test_states_may_be_sharded_over_the_instances(toys: Any) -> None:
    """Main weights are an eighth, parameters and gradients stay a quarter; shards are gathered over the
    instances in the first micro-batch, forward and backward, and scattered in the last."""
    outer = replace(FSDP, outer_sharding="optim")
    plan = toy_plan(toys, outer, strategy={"optimizer_instances": 2}, optimizer="sgd")
    assert held(plan, "optimizer_states") == 4 * 15_616 // 8
    assert held(plan, "gradients") == 4 * 15_616 // 4
    across = [
        op.work.kind for op in plan.ops if isinstance(op.work, Collective) and op.work.group == "replicate"
    ]
    assert set(across) == {"all_gather", "reduce_scatter"}


def test_bf16_gradients_are_scaled_before_the_sum(toys: Any) -> None:
    """NCCL multiplies fp32 as it sums."""
    scaled = [
        op.name for op in toy_plan(toys, strategy={"grad_dtype": "bf16"}).ops if op.name.startswith("scale")
    ]
    assert len(scaled) == 6
    assert not [op for op in toy_plan(toys).ops if op.name.startswith("scale")]


# -- real models ------------------------------------------------------------------------------------------


def test_a_layer_with_experts_is_gathered_in_two_calls(plan_for: PlanFor) -> None:
    """Dense parameters over all ranks, routed experts over those that hold the same ones."""
    plan = plan_for(
        model="mixtral-8x7b", cluster="dgx-h100", nodes=2, parallelism={"expert": 4},
        strategy={
            "kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim_grads_params",
            "overlap_grad_reduce": True, "moe_grouped_gemm": True,
        },
    )  # fmt: skip
    works = {op.name: op.work for op in plan.ops if isinstance(op.work, Collective)}
    dense = works["all_gather model.layers.0"]
    experts = works["all_gather model.layers.0 experts"]
    assert (plan.groups[dense.group].size, plan.groups[experts.group].size) == (16, 4)
    assert experts.bytes == 2 * 3 * 4096 * 14336 * 2


def test_tensor_ranks_gather_their_own_part(plan_for: PlanFor) -> None:
    """Half of a layer over half of the ranks. 218,112,000 elements in rows of 4096 and 14,336 are padded to
    951 times 8 times 28,672, their least common multiple; halves of the products, with rows of 2048 and 7168
    as well, and both norms whole, to 951 times 4 times as many."""
    settings = {"kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim_grads_params"}
    plans = [
        plan_for(
            model="llama-3-8b", cluster="dgx-h100", nodes=1, strategy=settings,
            parallelism={"tensor": tensor, "sequence_parallel": tensor > 1},
        )
        for tensor in (1, 2)
    ]  # fmt: skip
    one, two = (next(op.work for op in plan.ops if op.name == "all_gather model.layers.0") for plan in plans)
    assert isinstance(one, Collective)
    assert isinstance(two, Collective)
    assert one.bytes == 2 * 951 * 8 * 28_672
    assert two.bytes == 2 * 951 * 4 * 28_672


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism": {"tensor": 2, "sequence_parallel": True}},
        {"parallelism": {"context": 2}},
        {"parallelism": {"pipeline": 2}, "training": {"gradient_accumulation_steps": 4}},
        {"strategy": {"optimizer_instances": 2, "fsdp_outer_sharding": "optim"}},
        {"model": "mixtral-8x7b", "parallelism": {"expert": 4}},
    ],
)
def test_folded_is_unfolded(changes: dict[str, Any]) -> None:
    """One lane per class of ranks takes as long as all 16."""
    data: dict[str, Any] = {
        "model": "llama-3.2-1b", "cluster": "dgx-h100", "nodes": 2,
        "training": {"sequence_length": 1024, "activation_checkpointing": "full"},
        **changes,
        "strategy": {
            "kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim_grads_params",
            "overlap_grad_reduce": True, "overlap_param_gather": True, **changes.get("strategy", {}),
        },
    }  # fmt: skip
    experiment = zsim.Experiment.model_validate(data)
    folded, unfolded = (zsim.simulate(experiment, unfold=unfold) for unfold in (False, True))
    assert folded.report.step_seconds == pytest.approx(unfolded.report.step_seconds, rel=1e-9)


@pytest.mark.parametrize(("sharding", "times"), [("optim_grads_params", 1), ("optim_grads", 0)])
def test_the_host_runs_the_hooks_of_sharded_layers(toys: Any, sharding: str, times: int) -> None:
    """Four layers, forward and backward, of four modules with a parameter each: in front of the modules
    forward, behind their gradients backward. Hooks were timed where parameters are sharded."""
    fsdp: Any = {"sharding": sharding}
    plan = toy_plan(toys, replace(FSDP, **fsdp), strategy={"host_events": HostEvents()})
    entered: Counter[str] = Counter()
    for op in plan.ops:
        if op.overhead is not None and op.overhead.startswith("megatron_fsdp"):
            entered[op.overhead] += op.events
    events = {"megatron_fsdp_unit": 8, "megatron_fsdp_module": 16, "megatron_fsdp_gradient": 16}
    assert entered == {name: times * count for name, count in events.items() if times}
