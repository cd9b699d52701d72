"""Whole steps without a pipeline: of a workload, and of hooks that a test has made."""

from __future__ import annotations

from zsim.plan.actions import no_pipeline
from zsim.plan.hooks import Hooks
from zsim.plan.make import plan_stages
from zsim.plan.ops import Plan
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig


def walk_step(hooks: Hooks, num_micro_batches: int) -> None:
    """Issue the step to the hooks' builder."""
    (actions,) = no_pipeline(num_micro_batches)
    run_actions(hooks.builder, {0: hooks}, actions)


def plan_step(
    workload: Workload,
    strategy: StrategyConfig,
    world_size: int,
    *,
    is_cpu: bool = False,
    copies_scatters: bool = False,
) -> Plan:
    """The plan of one steady step of `workload` on a data-parallel group of `world_size` ranks. `is_cpu` and
    `copies_scatters` are those of `PlanBasis`.
    """
    parallelism = ParallelismConfig()
    return plan_stages(
        [workload], strategy, world_size, parallelism, is_cpu=is_cpu, copies_scatters=copies_scatters
    )
