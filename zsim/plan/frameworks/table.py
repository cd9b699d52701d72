"""The table of frameworks: by type of strategy, the constructor of a stage's hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.plan.frameworks.ddp import DdpSchedule
from zsim.plan.frameworks.deepspeed.stage0 import Zero0Schedule
from zsim.plan.frameworks.deepspeed.stage3.mics import MicsSchedule
from zsim.plan.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.plan.frameworks.deepspeed.stage12.schedule import Zero12Schedule
from zsim.plan.frameworks.fsdp1.schedule import Fsdp1Schedule
from zsim.plan.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.plan.frameworks.megatron.schedule import MegatronSchedule
from zsim.plan.frameworks.reference.schedule import ReferenceSchedule
from zsim.plan.hooks import Hooks
from zsim.plan.stage import Stage
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import Ddp, Fsdp1, Fsdp2, Reference
from zsim.specs.strategy.megatron import Megatron

Strategy = Any  # an instance of the key of `FRAMEWORKS`


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework. `make`: returns the hooks of a stage under a strategy; `is_offloaded`: whether the
    strategy offloads parameters, gradients, optimizer states or activation checkpoints from the GPU."""

    name: str
    make: Callable[[Stage, Strategy], Hooks]
    is_offloaded: Callable[[Strategy], bool]


_DEEPSPEED: Mapping[str, Callable[[Stage, DeepSpeedConfig], Hooks]] = {
    "none": Zero0Schedule,
    "fp16_optimizer": Zero0Schedule,
    "bf16_optimizer": Zero0Schedule,
    "zero12": Zero12Schedule,
    "zero3": Zero3Schedule,
    "mics": MicsSchedule,
}


def _deepspeed(stage: Stage, config: DeepSpeedConfig) -> Hooks:
    return _DEEPSPEED["mics" if config.zero.is_mics else config.optimizer_wrapper](stage, config)


def _deepspeed_offloads(config: DeepSpeedConfig) -> bool:
    zero = config.zero
    is_kept = zero.offload_param is None and zero.offload_optimizer is None
    return not is_kept or config.activation_checkpointing.cpu_checkpointing


def _reference_offloads(strategy: Reference) -> bool:
    return strategy.optimizer_place != "device" or strategy.parameter_place != "device"


FRAMEWORKS: Mapping[type, Framework] = {
    Ddp: Framework("ddp", DdpSchedule, lambda _: False),
    Fsdp1: Framework("fsdp1", Fsdp1Schedule, lambda strategy: strategy.cpu_offload),
    Fsdp2: Framework("fsdp2", Fsdp2Schedule, lambda strategy: strategy.cpu_offload),
    Megatron: Framework("megatron", MegatronSchedule, lambda _: False),
    Reference: Framework("reference", ReferenceSchedule, _reference_offloads),
    DeepSpeedConfig: Framework("deepspeed", _deepspeed, _deepspeed_offloads),
}
