"""Make the plan of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.errors import NotSimulatedError
from zsim.plan.builder import PlanBuilder
from zsim.plan.checks import check_plan
from zsim.plan.frameworks.table import FRAMEWORKS, Strategy
from zsim.plan.ops import Plan
from zsim.plan.passes.one_thread import in_one_thread
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.pipeline.schedules import no_pipeline
from zsim.plan.stage import DataParallel, Stage
from zsim.plan.workload.workload import Workload, make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.training import Training


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """All inputs of a plan: jobs with equal bases have the same plan, whatever their hardware.

    `is_cpu`: the ranks are CPUs, which run every op in the thread that issues it. `copies_scatters`: the CPU
    backend implements a reduce-scatter as an all-reduce of a copy (False on GPUs).
    """

    world_size: int
    is_cpu: bool
    copies_scatters: bool
    training: Training
    strategy: Strategy
    model: ModelSpec


def plan_basis(job: Job) -> PlanBasis:
    """The inputs of a job's plan. Raises NotSimulatedError for model parallelism."""
    if not job.parallelism.is_trivial:
        raise NotSimulatedError("[parallelism]: zsim does not simulate it yet")
    is_cpu = job.cluster.gpu.vendor == "cpu"
    copies = is_cpu and job.cluster.collectives.reduce_scatter == "all_reduce"
    return PlanBasis(job.world_size, is_cpu, copies, job.training, job.strategy, job.model)


def is_offloaded(job: Job) -> bool:
    """Whether parameters, optimizer states or activation checkpoints are offloaded from the GPU."""
    return FRAMEWORKS[type(job.strategy)].is_offloaded(job.strategy)


def make_plan(job: Job) -> Plan:
    """The plan of one steady step of the job. Its only hardware dependence is the kind of device."""
    return plan_of(plan_basis(job))


def plan_of(basis: PlanBasis) -> Plan:
    """The plan of all jobs with this basis. Raises what `plan_step` raises."""
    return plan_step(
        make_workload(basis.model, basis.training),
        basis.strategy,
        basis.world_size,
        is_cpu=basis.is_cpu,
        copies_scatters=basis.copies_scatters,
    )


def plan_step(
    workload: Workload,
    strategy: Strategy,
    world_size: int,
    *,
    is_cpu: bool = False,
    copies_scatters: bool = False,
) -> Plan:
    """The plan of one steady step of `workload` on a data-parallel group of `world_size` ranks; `is_cpu` and
    `copies_scatters` as in `PlanBasis`.

    Raises what the framework's hooks raise: InputError and NotSimulatedError.
    """
    builder, framework = PlanBuilder([]), FRAMEWORKS[type(strategy)]
    owner = framework.make(Stage(builder, workload, DataParallel(world_size)), strategy)
    (actions,) = no_pipeline(workload.training.gradient_accumulation_steps)
    run_actions(builder, {0: owner}, actions)
    plan = builder.finish(framework.name, world_size, owner.resident())
    if is_cpu:
        plan = in_one_thread(plan, owner.asynchronous, copies_scatters=copies_scatters)
    plan = plan.with_programs(lambda program: replace(program, startup_bytes=owner.startup_bytes))
    check_plan(plan)
    return plan
