"""From a job to its plan: one function per kind of strategy."""

from __future__ import annotations

from dataclasses import replace

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError
from zsim.plan.frameworks.ddp import ddp_plan
from zsim.plan.frameworks.deepspeed.stage0 import zero0_plan
from zsim.plan.frameworks.deepspeed.stage3.mics import mics_plan
from zsim.plan.frameworks.deepspeed.stage3.offload import offloaded_zero3_plan
from zsim.plan.frameworks.deepspeed.stage3.schedule import zero3_plan
from zsim.plan.frameworks.deepspeed.stage12.offload import offloaded_zero12_plan
from zsim.plan.frameworks.deepspeed.stage12.schedule import zero12_plan
from zsim.plan.frameworks.fsdp1.offload import offloaded_fsdp1_plan
from zsim.plan.frameworks.fsdp1.schedule import fsdp1_plan
from zsim.plan.frameworks.fsdp2.offload import offloaded_fsdp2_plan
from zsim.plan.frameworks.fsdp2.schedule import fsdp2_plan
from zsim.plan.frameworks.megatron.schedule import megatron_plan
from zsim.plan.frameworks.reference.offload import offloaded_reference_plan
from zsim.plan.frameworks.reference.schedule import reference_plan
from zsim.plan.ops import Plan
from zsim.plan.passes.one_thread import in_one_thread
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.job import Job
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import Ddp, Fsdp1, Fsdp2, Reference
from zsim.specs.strategy.megatron import Megatron

_DEEPSPEED = {
    "none": zero0_plan,
    "fp16_optimizer": zero0_plan,
    "bf16_optimizer": zero0_plan,
    "zero12": zero12_plan,
    "zero3": zero3_plan,
}

_OFFLOADED = {"zero12": offloaded_zero12_plan, "zero3": offloaded_zero3_plan}


def is_offloaded(job: Job) -> bool:
    """Whether anything leaves the GPU: parameters, optimizer states or activation checkpoints."""
    strategy = job.strategy
    if isinstance(strategy, DeepSpeedConfig):
        zero = strategy.zero
        kept = zero.offload_param is None and zero.offload_optimizer is None
        return not kept or strategy.activation_checkpointing.cpu_checkpointing
    if isinstance(strategy, Reference):
        return strategy.optimizer_place != "device" or strategy.parameter_place != "device"
    return isinstance(strategy, Fsdp1 | Fsdp2) and strategy.cpu_offload


def make_plan(job: Job) -> Plan:
    """What every rank does in one steady step; no hardware but what kind of device it is, no seconds."""
    plan = _plan(job)
    if job.cluster.gpu.vendor == "cpu":
        copies = job.cluster.collectives.reduce_scatter == "all_reduce"
        plan = in_one_thread(plan, job.strategy, copies_scatters=copies)
    startup = startup_bytes(job)
    return plan.with_programs(lambda program: replace(program, startup_bytes=startup))


def startup_bytes(job: Job) -> int:
    """GPU bytes before the first step: all 16-bit weights where ZeRO-3 gets a model that was built without
    `deepspeed.zero.Init` (DeepSpeed 0.19.8 engine.py, `_configure_distributed_model`: it moves whole)."""
    strategy = job.strategy
    if not isinstance(strategy, DeepSpeedConfig) or strategy.stage != 3 or strategy.zero_init:
        return 0
    return job.model.numel * DTYPE_BYTES[strategy.param_dtype]


def _plan(job: Job) -> Plan:
    workload = make_workload(job.model, job.training)
    strategy = job.strategy
    if isinstance(strategy, Fsdp2):
        if is_offloaded(job):
            return offloaded_fsdp2_plan(workload, strategy, job.training, job.world_size)
        return fsdp2_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Reference) and is_offloaded(job):
        return offloaded_reference_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Reference):
        return reference_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Ddp):
        return ddp_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Megatron):
        return megatron_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Fsdp1) and strategy.cpu_offload:
        return offloaded_fsdp1_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, Fsdp1):
        return fsdp1_plan(workload, strategy, job.training, job.world_size)
    if isinstance(strategy, DeepSpeedConfig):
        if strategy.zero.is_mics:
            if is_offloaded(job):
                raise NotSimulatedError(f"{strategy.name}: zsim does not simulate MiCS with offloading yet")
            return mics_plan(workload, strategy, job.training, job.world_size)
        wrapper = strategy.optimizer_wrapper
        make = _OFFLOADED.get(wrapper) if is_offloaded(job) else None
        make = make or _DEEPSPEED[wrapper]
        return make(workload, strategy, job.training, job.world_size)
    raise AssertionError(f"no plan for {strategy!r}")
