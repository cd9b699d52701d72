"""A stage's process groups, where ranks between those of one group may belong to other parallelisms."""

from __future__ import annotations

from typing import Any

from tests.plan.steps import walk_step
from zsim.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Collective
from zsim.plan.stage import DataParallel, Stage
from zsim.plan.workload.workload import make_workload


def test_groups_are_those_of_the_data_parallel_ranks() -> None:
    """16 ranks: two pipeline stages of 4 x 2, data times tensor. Data-parallel ranks are every other one, of
    all stages; in pairs of neighbours among them, and with those that are two apart."""
    ranks = DataParallel.regular(4, stride=2, world_size=16)
    assert ranks.group("world", 4, 1).members.tolist() == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert ranks.group("shard", 2, 1).members.tolist() == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert ranks.group("replicate", 2, 2).members.tolist()[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_framework_shards_among_the_ranks_that_it_is_handed(toys: Any) -> None:
    """HSDP on 8 of 16 ranks: its shard groups are 4 x 2 apart, its replicas 8 apart, and nothing else of the
    plan differs from 8 ranks that are alone."""
    strategy = Fsdp2Config(None, 2, "huggingface", "fp32", "fp32", no_sync=True)
    workload = make_workload(toys.transformer(), toys.training())

    def builder_of(ranks: DataParallel) -> PlanBuilder:
        builder = PlanBuilder([])
        walk_step(Fsdp2Schedule(Stage(builder, workload, ranks), strategy), 1)
        return builder

    between, alone = builder_of(DataParallel.regular(8, stride=2)), builder_of(DataParallel.regular(8))
    assert between.groups["shard"].members.tolist()[0] == [0, 2, 4, 6]
    assert between.groups["replicate"].members.tolist()[0] == [0, 8]
    assert between.ops == alone.ops
    assert {op.work.group for op in between.ops if isinstance(op.work, Collective)} == {"shard", "replicate"}
