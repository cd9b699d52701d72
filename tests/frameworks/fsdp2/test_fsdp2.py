"""FSDP2: counts, order, what is exposed, how much is unsharded (torch's own runs: test_fsdp2_recorded.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.plan.steps import plan_step
from zsim.engine.simulate import simulate_job
from zsim.errors import InputError
from zsim.frameworks.fsdp2.param_groups import MeshInfo
from zsim.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.actions import no_pipeline
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Collective, Plan
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.stage import DataParallel, Stage
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import Trace

PlanFor = Callable[..., Plan]
BLOCK, ROOT = 202_383_360, 262_148_096  # Llama-2-7B


def fsdp2(**changes: Any) -> Fsdp2Config:
    values: dict[str, Any] = {
        "reshard_after_forward": None,
        "replicate": 1,
        "wrapping": "huggingface",
        "param_dtype": "fp32",
        "reduce_dtype": "fp32",
        "no_sync": False,
    }
    return Fsdp2Config(**{**values, **changes})


def toy_plan(toys: Any, model: Any, ranks: int = 2, training: Any = None, **changes: Any) -> Plan:
    training = training or toys.training()
    return plan_step(make_workload(model, training), fsdp2(**changes), ranks)


def order_of(plan: Plan, names: dict[int, str]) -> list[str]:
    """AG and RS with the unit's name by its elements."""
    short = {"all_gather": "AG", "reduce_scatter": "RS"}
    works = [op.work for op in plan.ops if isinstance(op.work, Collective)]
    return [f"{short[work.kind]} {names[work.bytes // 4]}" for work in works]


# -- golden runs on gloo ---------------------------------------------------------------------------------


def test_four_blocks_without_root_parameters_match_the_gloo_trace(toys: Any) -> None:
    """Two gloo ranks, 4 blocks of 524,288 fp32 elements, default resharding: per step 8 all-gathers of
    262,144 elements each and 4 reductions of 524,288 (gloo sends them as all-reduces); a root without
    parameters adds nothing."""
    plan = toy_plan(toys, toys.linear_blocks([(1024, 512)] * 4))
    works = toys.collectives_of(plan)
    assert Counter((work.kind, work.bytes // 4) for work in works) == {
        ("all_gather", 2 * 262_144): 8,
        ("reduce_scatter", 524_288): 4,
    }


def test_four_blocks_of_different_size_are_issued_in_the_recorded_order(toys: Any) -> None:
    """gloo, torch 2.13: block i has 512 (1024 + 64 i) elements, so that identities show in the sizes; the
    last block is not resharded."""
    shapes = [(1024 + 64 * i, 512) for i in range(4)]
    plan = toy_plan(toys, toys.linear_blocks(shapes, root=512), wrapping="torchtitan-0.1")
    names = {512: "root"} | {rows * 512: f"b{i}" for i, (rows, _) in enumerate(shapes)}
    recorded = "AG root,AG b0,AG b1,AG b2,AG b3,AG b2,RS b3,AG b1,RS b2,AG b0,RS b1,RS b0,RS root"
    assert order_of(plan, names) == recorded.split(",")


# -- counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapping", "gathers", "reductions"),
    [
        ("torchtitan-0.1", 2 * 32 - 1 + 1, 33),  # last block and root once
        ("huggingface", 2 * 32 + 1, 33),  # root once
        ("torchtitan", 2 * 33 + 1, 34),  # embedding and blocks twice, norm and head once
    ],
)
def test_wrappings_gather_and_reduce_as_often_as_they_should(
    plan_for: PlanFor, toys: Any, wrapping: str, gathers: int, reductions: int
) -> None:
    """Llama-2-7B: 32 blocks."""
    plan = plan_for(strategy={"kind": "fsdp2", "wrapping": wrapping})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": gathers, "reduce_scatter": reductions}


@pytest.mark.parametrize("buffers", [1, 2])
def test_backward_waits_for_an_earlier_reduction_before_it_packs_the_next(toys: Any, buffers: int) -> None:
    """`set_reduce_scatter_max_input_buffers`: with one, the reduce-scatter before; with two, the one before
    that."""
    plan = toy_plan(toys, toys.transformer(6), reduce_scatter_max_input_buffers=buffers)
    number = {op.name: position for position, op in enumerate(plan.ops)}
    for block in range(5 - buffers, -1, -1):
        waited = {
            plan.ops[i].name for i in plan.ops[number[f"reduce_scatter_copy_in model.layers.{block}"]].after
        }
        assert waited == {f"reduce_scatter model.layers.{block + buffers}"}


@pytest.mark.parametrize(
    ("wrapping", "is_tied", "is_after_loss"),
    [("torchtitan", False, True), ("torchtitan", True, True), ("huggingface", False, False)],
)
def test_backward_of_a_unit_that_puts_out_the_logits_begins_after_the_losss(
    toys: Any, wrapping: str, is_tied: bool, is_after_loss: bool
) -> None:
    """Its hook is on the logits; a Hugging Face root computes the loss itself. What shows is when the last
    block is gathered for backward."""
    plan = toy_plan(toys, toys.transformer(is_tied=is_tied), wrapping=wrapping)
    names = [op.name for op in plan.ops]
    loss = names.index("loss backward")
    assert ("all_gather model.layers.3" in names[loss:]) == is_after_loss


def test_volume_is_two_for_root_and_last_block_and_three_for_the_others(plan_for: PlanFor, toys: Any) -> None:
    """In units of elements moved: gathered once or twice, reduced once."""
    works = toys.collectives_of(plan_for(strategy={"kind": "fsdp2", "wrapping": "torchtitan-0.1"}))
    moved = sum(work.bytes // (2 if work.kind == "all_gather" else 4) for work in works)
    assert moved == 2 * (ROOT + BLOCK) + 3 * 31 * BLOCK


def test_volume_is_three_where_every_unit_is_resharded(toys: Any) -> None:
    """ZeRO-3's: blocks alone, each gathered for forward and for backward, and reduced."""
    works = toys.collectives_of(toy_plan(toys, toys.linear_blocks([(1024, 512)] * 4)))
    assert sum(work.bytes // 4 for work in works) == 3 * 4 * 524_288


def test_without_resharding_units_are_gathered_once(plan_for: PlanFor, toys: Any) -> None:
    plan = plan_for(strategy={"kind": "fsdp2", "reshard_after_forward": False})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": 34, "reduce_scatter": 34}


def test_resharding_to_a_group_gathers_there_in_backward(plan_for: PlanFor, toys: Any) -> None:
    """Groups of 8 of the 16 ranks: all but the last block come back from the node."""
    strategy = {"kind": "fsdp2", "wrapping": "torchtitan-0.1", "reshard_after_forward": 8}
    plan = plan_for(strategy=strategy)
    counts = Counter((work.kind, work.group) for work in toys.collectives_of(plan))
    assert counts == {
        ("all_gather", "shard"): 33,
        ("all_gather", "post_forward"): 31,
        ("reduce_scatter", "shard"): 33,
    }
    assert plan.groups["post_forward"].size == 8


def test_hsdp_all_reduces_each_shard_among_replicas(plan_for: PlanFor, toys: Any) -> None:
    plan = plan_for(strategy={"kind": "fsdp2", "replicate": 2, "wrapping": "huggingface"})
    counts = Counter((work.kind, work.group) for work in toys.collectives_of(plan))
    assert counts == {
        ("all_gather", "shard"): 65,
        ("reduce_scatter", "shard"): 33,
        ("all_reduce", "replicate"): 33,
    }
    shards = sum(work.bytes for work in toys.collectives_of(plan, "all_reduce"))
    assert shards == 4 * 6_738_415_616 // 8


def test_a_deferred_all_reduce_comes_once_a_step_behind_the_sum_of_its_replica(
    plan_for: PlanFor, toys: Any
) -> None:
    """Of three micro-batches each reduce-scatters its 33 units. The second adds to the sum of the first, the
    third adds the sum to its own shard before the all-reduce, on the stream of the reduce-scatter."""
    strategy = {"kind": "fsdp2", "replicate": 2, "wrapping": "huggingface", "defer_all_reduce": True}
    plan = plan_for(strategy=strategy, training={"gradient_accumulation_steps": 3})
    counts = Counter((work.kind, work.group) for work in toys.collectives_of(plan))
    assert counts == {
        ("all_gather", "shard"): 3 * 65,
        ("reduce_scatter", "shard"): 3 * 33,
        ("all_reduce", "replicate"): 33,
    }
    sums = [op for op in plan.ops if op.name.startswith("accumulate partial gradients")]
    assert len(sums) == 2 * 33
    assert {op.stream for op in sums} == {"reduce_scatter"}
    last = max(number for number, op in enumerate(plan.ops) if op.name.startswith("accumulate partial"))
    reduced = [number for number, op in enumerate(plan.ops) if op.name.startswith("all_reduce ")]
    assert last < max(reduced)
    assert min(reduced) > max(n for n, op in enumerate(plan.ops) if op.phase == "forward")


@pytest.mark.parametrize("more", [{}, {"replicate": 2, "no_sync": True}])
def test_there_must_be_an_all_reduce_to_defer(plan_for: PlanFor, more: dict[str, Any]) -> None:
    strategy = {"kind": "fsdp2", "wrapping": "huggingface", "defer_all_reduce": True, **more}
    with pytest.raises(InputError, match=r"strategy\.defer_all_reduce: found true with"):
        plan_for(strategy=strategy)


@pytest.mark.parametrize(("no_sync", "reductions"), [(False, 3 * 33), (True, 33)])
def test_accumulation_reduces_each_micro_batch_unless_told_otherwise(
    plan_for: PlanFor, toys: Any, no_sync: bool, reductions: int
) -> None:
    strategy = {"kind": "fsdp2", "wrapping": "huggingface", "no_sync": no_sync}
    plan = plan_for(strategy=strategy, training={"gradient_accumulation_steps": 3})
    counts = Counter(work.kind for work in toys.collectives_of(plan))
    assert counts == {"all_gather": 3 * 65, "reduce_scatter": reductions}


def test_the_all_gathers_of_a_micro_batch_belong_to_its_own_forward(plan_for: PlanFor) -> None:
    """The root's too: two forwards of 33 all-gathers."""
    training = {"gradient_accumulation_steps": 2}
    plan = plan_for(strategy={"kind": "fsdp2", "wrapping": "huggingface"}, training=training)
    phases = Counter(
        op.phase for op in plan.ops if isinstance(op.work, Collective) and op.work.kind == "all_gather"
    )
    assert phases == {"forward": 2 * 33, "backward": 2 * 32}


# -- PyTorch's own sentences -----------------------------------------------------------------------------


def run(plan: Plan) -> Trace:
    """On the GPUs of one DGX H100."""
    experiment = Experiment(model="llama-2-7b", cluster="dgx-h100", gpus=8)
    return simulate_job(resolve(experiment), plan=plan).trace


@pytest.fixture(scope="module")
def overlapping(toys: Any) -> tuple[Plan, Trace]:
    """Six blocks of 8192 x 8192 on eight GPUs, 8192 tokens: about 1.7 ms of forward per block against 134 MB
    to gather, 0.4 ms, and 268 MB to reduce."""
    training = toys.training(sequence_length=8192, micro_batch_size=1)
    workload = make_workload(toys.linear_blocks([(8192, 8192)] * 6), training)
    plan = plan_step(workload, fsdp2(param_dtype="bf16"), 8)
    return plan, run(plan)


def exposed(trace: Trace, phase: str) -> list[str]:
    """Ops of the compute stream that waited, after they were issued, for more than a kernel's launch."""
    rows = [
        i for i in range(len(trace.start_seconds)) if trace.infos[trace.info_indices[i]].stream == "compute"
    ]
    waits, free = [], 0.0
    for row in rows:
        info = trace.infos[trace.info_indices[row]]
        ready = max(free, trace.issue_seconds[row])
        if trace.start_seconds[row] - ready > 1e-6 and info.phase == phase:
            waits.append(info.name)
        free = trace.end_seconds[row]
    return waits


def test_only_the_first_all_gather_is_exposed_in_forward(overlapping: tuple[Plan, Trace]) -> None:
    """PyTorch's test_fully_shard_overlap.py says so, for compute longer than communication."""
    assert exposed(overlapping[1], "forward") == ["all_gather_copy_out layers.0"]


def test_only_the_last_reduction_is_exposed_in_backward_when_the_host_is_ahead(
    overlapping: tuple[Plan, Trace],
) -> None:
    """Same source: backward takes at most its compute, one all-gather and one reduce-scatter. Backward's
    first all-gather is issued while the last block is still in forward, and hides behind it. What waits for
    the last reduce-scatter is the optimizer's first kernel."""
    trace = overlapping[1]
    assert exposed(trace, "backward") == []
    assert exposed(trace, "optimizer") == ["optimizer step"]
    spans = {trace.infos[i].name: row for row, i in enumerate(trace.info_indices)}
    last = trace.end_seconds[spans["reduce_scatter layers.0"]]
    assert trace.start_seconds[spans["optimizer step"]] == pytest.approx(last, abs=1e-9)


def test_the_first_all_gather_of_backward_is_exposed_when_the_host_reads_the_loss(
    overlapping: tuple[Plan, Trace],
) -> None:
    """As where PyTorch's test times forward and backward apart: the host blocks on the loss in between."""
    plan, _trace = overlapping
    ops = list(plan.ops)
    loss = next(number for number, op in enumerate(ops) if op.name == "loss")
    first = next(number for number, op in enumerate(ops) if op.phase == "backward")
    ops[first] = ops[first]._replace(host_waits=(loss,))
    trace = run(plan.map_programs(lambda program: replace(program, ops=tuple(ops))))
    assert exposed(trace, "backward") == ["all_gather_copy_out layers.5"]


def test_reductions_run_behind_the_backward_of_the_next_block(overlapping: tuple[Plan, Trace]) -> None:
    trace = overlapping[1]
    spans = {trace.infos[i].name: row for row, i in enumerate(trace.info_indices)}
    for block in range(5, 0, -1):
        reduction, backward = (
            spans[f"reduce_scatter layers.{block}"],
            spans[f"layers.{block - 1}.linear backward"],
        )
        assert trace.start_seconds[reduction] < trace.end_seconds[backward]
        assert trace.end_seconds[reduction] > trace.start_seconds[backward]


def times_of(trace: Trace, name: str) -> list[tuple[float, float]]:
    rows = [row for row, i in enumerate(trace.info_indices) if trace.infos[i].name == name]
    return sorted((trace.start_seconds[row], trace.end_seconds[row]) for row in rows)


def most_at_once(intervals: list[tuple[float, float]]) -> int:
    changes = [(start, 1) for start, _end in intervals] + [(end, -1) for _start, end in intervals]
    return int(np.cumsum([change for _time, change in sorted(changes)]).max())


def test_one_unit_is_unsharded_and_two_are_gathered_ahead_at_most(overlapping: tuple[Plan, Trace]) -> None:
    """On the GPU's clock. Unsharded: from a unit's copy-out to the end of its forward or backward.
    Gathered: from its all-gather to its copy-out; the streams wait for the copy-out of the unit before the
    last, so that a second gathering can run while the first waits for its turn."""
    trace = overlapping[1]
    unsharded, gathered = [], []
    for block in range(6):
        uses = times_of(trace, f"layers.{block}.linear") + times_of(trace, f"layers.{block}.linear backward")
        copies = times_of(trace, f"all_gather_copy_out layers.{block}")
        unsharded += [(copy[0], use[1]) for copy, use in zip(copies, uses, strict=True)]
        gathers = times_of(trace, f"all_gather layers.{block}")
        gathered += [(gather[0], copy[0]) for gather, copy in zip(gathers, copies, strict=True)]
    assert most_at_once(unsharded) == 1
    assert most_at_once(gathered) == 2


def test_memory_of_units_is_two_in_forward_and_five_in_backward(
    overlapping: tuple[Plan, Trace], toys: Any
) -> None:
    """In bf16 blocks of 134,217,728 bytes, and the cast of a shard (1/8) before an all-gather. Forward: two
    (gathered and copied out, or two gathered). Backward: the unit, the next one gathered, its gradients, and
    the fp32 input of the reduction before (two)."""
    plan, _trace = overlapping
    block = 2 * 8192**2
    boundary = next(i for i, op in enumerate(plan.ops) if op.phase == "backward")
    levels, now = {"forward": 0, "backward": 0}, 0
    for change in plan.memory:
        if change.category == "buffers":
            now += change.bytes
            phase = "forward" if change.op < boundary else "backward"
            levels[phase] = max(levels[phase], now)
    assert levels == {"forward": 2 * block + block // 8, "backward": 5 * block}


# -- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapping", ["torchtitan-0.1", "torchtitan", "huggingface"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2, "no_sync": True},
        {"replicate": 3, "reduce_dtype": "bf16"},
        {"replicate": 3, "defers_all_reduce": True},
        {"replicate": 3, "defers_all_reduce": True, "reduce_dtype": "bf16"},
        {"param_dtype": "bf16", "no_sync": True, "reduce_scatter_max_input_buffers": 2},
    ],
    ids=str,
)
def test_memory_is_back_at_its_start_after_a_step(
    toys: Any, wrapping: str, steps: int, checkpointing: str, is_tied: bool, options: dict[str, Any]
) -> None:
    """On 12 ranks, so that dimensions of 16 and 100 are padded."""
    training = toys.training(gradient_accumulation_steps=steps, activation_checkpointing=checkpointing)
    model = toys.transformer(is_tied=is_tied)
    plan = toy_plan(toys, model, 12, training, wrapping=wrapping, **options)
    for category, levels in toys.host_levels(plan).items():
        assert levels[-1] == levels[0], category
        assert min(levels) >= 0, category


def test_one_rank_neither_gathers_nor_scatters(toys: Any) -> None:
    plan = toy_plan(toys, toys.transformer(), 1)
    assert toys.collectives_of(plan) == []


def test_clipping_reduces_one_norm_per_tensor(plan_for: PlanFor, toys: Any) -> None:
    """DTensors stack the norms first: Llama-2-7B has 291 tensors."""
    plan = plan_for(strategy={"kind": "fsdp2"}, training={"gradient_clipping": 1.0})
    assert [work.bytes for work in toys.collectives_of(plan, "all_reduce")] == [4 * 291]


def test_an_unknown_wrapping_is_refused(plan_for: PlanFor) -> None:
    with pytest.raises(Exception, match=r"unknown preset 'torchtitan-0\.2'; did you mean"):
        plan_for(strategy={"kind": "fsdp2", "wrapping": "torchtitan-0.2"})


# -- DTensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "event"), [("fused", "dtensor_in_list"), ("for_loop", "dtensor_update")]
)
def test_the_host_takes_every_dtensor_apart_once_per_list_or_for_every_operator(
    toys: Any, implementation: Any, event: str
) -> None:
    """Four blocks of one parameter each: the update, and before it the norm where gradients are clipped."""
    training = replace(toys.training(), optimizer_implementation=implementation, gradient_clipping=1.0)
    plan = toy_plan(toys, toys.linear_blocks([(64, 32)] * 4), training=training)
    found = [(op.name, op.overhead, op.events) for op in plan.ops if "DTensors" in op.name]
    assert found == [("norm of DTensors", "dtensor_in_list", 4), ("update of DTensors", event, 4)]


def test_each_group_of_parameters_has_its_own_ranks(toys: Any) -> None:
    """As experts on a mesh of their own: blocks of 10 x 4 in fp32 on eight ranks, of which the second is
    sharded over every other rank (4 x 3 rows) and replicated on neighbours, the others over all (8 x 2). Two
    gathers and a reduction of each, at its own padded size in its own group."""
    builder = PlanBuilder([])
    workload = make_workload(toys.linear_blocks([(10, 4)] * 3), toys.training())
    stage = Stage(builder, workload, DataParallel.regular(8))
    owner = Fsdp2Schedule(stage, fsdp2(param_dtype="fp32"))
    experts = MeshInfo(stage.group("efsdp", 4, 2), stage.group("ereplicate", 2))
    owner.units[1].mesh = experts
    run_actions(builder, {0: owner}, no_pipeline(1)[0])
    calls = Counter(
        (op.work.kind, op.work.group, op.work.bytes)
        for op in builder.ops
        if isinstance(op.work, Collective) and op.phase != "optimizer"
    )
    all_rows, padded = 4 * 8 * 2 * 4, 4 * 4 * 3 * 4
    assert calls == {
        ("all_gather", "shard", all_rows): 4, ("reduce_scatter", "shard", all_rows): 2,
        ("all_gather", "efsdp", padded): 2, ("reduce_scatter", "efsdp", padded): 1,
        ("all_reduce", "ereplicate", padded // 4): 1,
    }  # fmt: skip
    assert sum(change.bytes for change in builder.memory) == 0


def test_a_plan_says_where_padding_multiplies_what_is_gathered(toys: Any) -> None:
    """4 rows on 32 ranks are 32, eight times as many; on 2 ranks none is added."""
    model = toys.linear_blocks([(4, 16)] * 3)
    (note,) = toy_plan(toys, model, 32).notes
    assert "the 4 of a weight in" in note
    assert "are padded to 32, and 8 times the parameters are gathered" in note
    assert toy_plan(toys, model, 2).notes == ()
