"""From a job to its plan: one function per kind of strategy."""

from __future__ import annotations

from zsim.plan.fsdp2 import fsdp2_plan
from zsim.plan.ops import Plan
from zsim.plan.workload import make_workload
from zsim.specs.importers.deepspeed import DeepSpeedConfig
from zsim.specs.job import Job
from zsim.specs.strategy import Ddp, Fsdp1, Fsdp2


def make_plan(job: Job) -> Plan:
    """What every rank does in one steady step; no hardware, no seconds."""
    workload = make_workload(job.model, job.training)
    strategy = job.strategy
    if isinstance(strategy, Fsdp2):
        return fsdp2_plan(workload, strategy, job.training, job.world_size)
    raise AssertionError(f"no plan for {strategy!r}")
