"""composer's metrics and log line: what is held and run after backward, and where the host waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from tests.expect import of_kind
from tests.plan.steps import walk_step
from zsim.plan.builder import PlanBuilder, move_kernels
from zsim.plan.hooks import Hooks
from zsim.plan.ops import Collective, Group, Kernels
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import METRICS, OUTPUTS, MetricLog, Workload, make_workload, metric_log
from zsim.specs.model.spec import Loss

LOGITS = 6 * 100 * 2  # the toy's tokens and words, in bf16


def logged(toys: Any, num_metrics: int = 2) -> Workload:
    """The toy with a loss of 100 words, logits that are held and so many metrics."""
    return holding(toys, Loss(100, num_metrics, "as they are"))


def holding(toys: Any, loss: Loss) -> Workload:
    model = toys.transformer(1)
    after = tuple(
        replace(module, op_spec=loss) if isinstance(module.op_spec, Loss) else module
        for module in model.after
    )
    return make_workload(replace(model, after=after), toys.training(cross_entropy="fused"))


def walked(workload: Workload, num_micro_batches: int = 1, ranks: int = 4) -> PlanBuilder:
    builder = PlanBuilder([Group.regular("world", ranks)])
    walk_step(Hooks(Stage(builder, workload)), num_micro_batches)
    return builder


def test_a_model_without_metrics_has_no_log(toys: Any) -> None:
    assert holding(toys, Loss(100)).logs is None
    assert metric_log(toys.linear_blocks([(8, 8)]), None, None) is None  # type: ignore[arg-type]


def test_a_trainer_without_metrics_may_hold_its_logits_all_the_same(toys: Any) -> None:
    """As they are, or cast by the model; and there is no line to log."""
    for held, element in (("as they are", 2), ("in fp32", 4)):
        builder = walked(holding(toys, Loss(100, holds_logits=held)), 2)  # type: ignore[arg-type]
        sizes = {abs(change.bytes) for change in builder.memory if change.owner == OUTPUTS}
        assert sizes == {6 * 100 * element}
        assert not [op for op in builder.ops if isinstance(op.work, Collective)]


def test_every_metric_is_torchs_loss_again_after_each_backward(toys: Any) -> None:
    """600 logits: log-softmax in 16 bits reads and writes once each (4 bytes), its output is cast (2 + 4)."""
    builder = walked(logged(toys), 2)
    names = [op.name for op in builder.ops]
    assert [names[i - 1] for i, name in enumerate(names) if name == METRICS] == [
        "model.emb backward", METRICS, "model.emb backward", METRICS,
    ]  # fmt: skip
    metrics = [of_kind(op.work, Kernels) for op in builder.ops if op.name == METRICS]
    assert sum(kernel.hbm_bytes for kernel in metrics[0].kernels) == 600 * 10


def test_the_outputs_stay_until_the_next_ones(toys: Any) -> None:
    """From the step before on, and never two of them: the loss's own are the trainer's."""
    builder = walked(logged(toys), 2)
    levels = list(accumulate(change.bytes for change in builder.memory if change.owner == OUTPUTS))
    assert levels == [LOGITS, 0, LOGITS, 0, LOGITS, 0]
    replaced = [builder.ops[change.op].name for change in builder.memory if change.owner == OUTPUTS]
    assert replaced[1:-1] == ["loss"] * 4
    passing = [change for change in builder.memory if change.owner == METRICS and change.bytes > 0]
    assert [change.tensors for change in passing] == [(LOGITS, 2 * LOGITS)] * 4


class Updating(Hooks):
    """An optimizer of one kernel."""

    def optimizer_step(self) -> None:
        self.builder.kernels("update", move_kernels(8, 8))


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_host_waits_for_the_loss_and_in_every_states_barrier(toys: Any, ranks: int) -> None:
    """After the update: loss, samples and time, then two metrics of two states, each with two launches and a
    turn of Python for every rank. A rank that is alone gathers from nobody."""
    builder = PlanBuilder([Group.regular("world", ranks)])
    walk_step(Updating(Stage(builder, logged(toys))), 1)
    names = [op.name for op in builder.ops]
    log = builder.ops[names.index("update") + 1 :]
    reductions = [op.name for op in log if isinstance(op.work, Collective)]
    per_state = ["all_reduce barrier", "all_gather"] if ranks > 1 else []
    first = ["all_reduce loss", "all_reduce samples", "all_reduce batch time"] if ranks > 1 else []
    assert reductions == first + per_state * 4
    reads = [op for op in log if op.name.startswith("read ")]
    assert len(reads) == 3 + (4 if ranks > 1 else 0)
    for op in reads:
        awaited = builder.ops[op.host_waits[0]].name
        assert awaited == (op.name.replace("read", "all_reduce") if ranks > 1 else "update")
    gathers = [op for op in log if op.name == "gather metric"]
    assert {(op.launches, op.events) for op in gathers} == ({(2 * ranks, ranks)} if ranks > 1 else set())
    assert all(op.phase == "optimizer" for op in log)
    freed = [change for change in builder.memory if change.owner == OUTPUTS][-1]
    assert freed.op > names.index("update"), "the outputs live through the update"


def test_a_log_is_of_all_ranks(toys: Any) -> None:
    """Groups that cross reach all of them; parts of the world are left alone; without groups there is one."""

    def gathered(*groups: Group) -> tuple[set[str], set[int]]:
        builder = PlanBuilder(list(groups))
        walk_step(Hooks(Stage(builder, logged(toys))), 1)
        over = {op.work.group for op in builder.ops if isinstance(op.work, Collective)}
        return over, {op.events for op in builder.ops if op.name == "gather metric"}

    assert gathered(Group.regular("shard", 32, 8), Group.regular("replicate", 32, 4, 8)) == (
        {"shard", "replicate"},
        {32},
    )
    assert gathered(Group.regular("secondary", 32, 8), Group.regular("world", 32)) == ({"world"}, {32})
    assert gathered() == (set(), set())


def test_the_log_knows_its_shape(toys: Any) -> None:
    log = logged(toys).logs
    assert isinstance(log, MetricLog)
    assert (log.bytes, log.num_metrics) == (LOGITS, 2)
