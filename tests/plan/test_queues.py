"""Which launches stand behind each other in the GPU's hardware queues."""

from __future__ import annotations

import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Copy, HostWork, Kernels, Op, Work
from zsim.plan.passes.hardware_queues import next_in_queue
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

KERNEL = Kernels((Kernel("copy", 0.0, 1e9),))
GATHER = Collective("all_gather", 1000, "bf16", "world")


def op(stream: str, work: Work | None = KERNEL) -> Op:
    return Op(stream, stream, work)


def test_one_queue_holds_all_launches_in_the_order_of_issue() -> None:
    ops = [op("compute"), op("gather", GATHER), op("compute"), op("reduce", GATHER)]
    assert next_in_queue(ops, 1) == [1, 2, 3, -1]


def test_streams_are_dealt_in_the_order_of_their_first_launch() -> None:
    """Two queues for three streams: compute and the third share one, the second has its own."""
    ops = [op("compute"), op("gather", GATHER), op("reduce", GATHER), op("gather", GATHER), op("compute")]
    assert next_in_queue(ops, 2) == [2, 3, 4, -1, -1]


def test_as_many_queues_as_streams_hold_nothing_up() -> None:
    ops = [op("compute"), op("gather", GATHER), op("reduce", GATHER)]
    assert next_in_queue(ops, 3) is None
    assert next_in_queue(ops, 2) is not None


def test_copies_have_queues_of_their_own_by_direction() -> None:
    """Two copies to the GPU on two streams share the one queue; the copy back, and kernels, do not."""
    ops = [
        op("compute"), op("fetch", Copy("h2d", 1)), op("back", Copy("d2h", 1)), op("compute"),
        op("more", Copy("h2d", 1)),
    ]  # fmt: skip
    assert next_in_queue(ops, 1) == [3, 4, -1, -1, -1]


def test_the_hosts_own_work_passes_through_no_queue() -> None:
    ops = [op("compute"), op("cpu", HostWork("copy", 1)), op("host", None), op("gather", GATHER)]
    assert next_in_queue(ops, 1) == [3, -1, -1, -1]


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 2},
        {"kind": "fsdp2", "replicate": 2},
        {"kind": "fsdp2", "cpu_offload": True},
        {"kind": "deepspeed", "config": {"zero_optimization": {"stage": 2, "overlap_comm": True}}},
        {"kind": "deepspeed", "stage": 3},
        {
            "kind": "deepspeed",
            "config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        },
    ],
)
def test_no_framework_has_more_streams_than_cuda_has_queues(strategy: dict[str, object]) -> None:
    """So nothing is held up with CUDA's 8; with one, everything is in one line."""
    training = {"micro_batch_size": 1}
    experiment = Experiment(
        model="gpt2", cluster="dgx-a100-80gb", nodes=2, training=training, strategy=strategy
    )
    job = resolve(experiment)
    plan = make_plan(job)
    assert next_in_queue(plan.ops, 8) is None
    assert next_in_queue(plan.ops, 1) is not None
