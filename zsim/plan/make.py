"""From a job to its plan."""

from __future__ import annotations

from dataclasses import replace

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


def is_offloaded(job: Job) -> bool:
    """Whether anything leaves the GPU: parameters, optimizer states or activation checkpoints."""
    return FRAMEWORKS[type(job.strategy)].is_offloaded(job.strategy)


def make_plan(job: Job) -> Plan:
    """What every rank does in one steady step; no hardware but what kind of device it is, no seconds."""
    workload = make_workload(job.model, job.training)
    copies = job.cluster.collectives.reduce_scatter == "all_reduce"
    is_cpu = job.cluster.gpu.vendor == "cpu"
    return plan_step(workload, job.strategy, job.world_size, is_cpu=is_cpu, copies_scatters=copies)


def plan_step(
    workload: Workload,
    strategy: Strategy,
    world_size: int,
    *,
    is_cpu: bool = False,
    copies_scatters: bool = False,
) -> Plan:
    """One steady step of `workload` on `world_size` ranks that all hold their part of the same data-parallel
    group; `is_cpu`: where the device is one, whose reduce-scatter may be an all-reduce and a copy.

    Raises InputError and NotSimulatedError as the framework's hooks do.
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
