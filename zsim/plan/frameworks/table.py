"""The table of frameworks: for each type of strategy the constructor of a stage's hooks. A framework is
imported when its constructor is called, because a run needs only one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zsim.plan.hooks import Hooks
from zsim.plan.stage import Stage
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.frameworks import DdpConfig, Fsdp1Config, Fsdp2Config, ReferenceConfig
from zsim.specs.strategy.megatron import MegatronConfig

if TYPE_CHECKING:
    from zsim.plan.moments import BetweenSteps, JobMoment

Strategy = Any  # an instance of the key of `FRAMEWORKS`


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that zsim simulates."""

    name: str
    make: Callable[[Stage, Strategy], Hooks]
    """Returns the hooks of a stage under a strategy."""
    is_offloaded: Callable[[Strategy], bool]
    """Whether the strategy offloads parameters, gradients, optimizer states or activation checkpoints from
    the GPU.
    """
    moments: Callable[[BetweenSteps], Iterable[JobMoment]] = lambda state: ()
    """The memory that the job needs when it is not in its steady step."""
    is_independent_of_ranks: bool = False
    """Whether the ops and the memory of a rank are the same for any number of data-parallel ranks
    above one.
    """


def _ddp(stage: Stage, strategy: DdpConfig) -> Hooks:
    from zsim.plan.frameworks.ddp import DdpSchedule

    return DdpSchedule(stage, strategy)


def _fsdp1(stage: Stage, strategy: Fsdp1Config) -> Hooks:
    from zsim.plan.frameworks.fsdp1.schedule import Fsdp1Schedule

    return Fsdp1Schedule(stage, strategy)


def _fsdp2(stage: Stage, strategy: Fsdp2Config) -> Hooks:
    from zsim.plan.frameworks.fsdp2.schedule import Fsdp2Schedule

    return Fsdp2Schedule(stage, strategy)


def _megatron(stage: Stage, strategy: MegatronConfig) -> Hooks:
    if strategy.fsdp is not None:
        from zsim.plan.frameworks.megatron_fsdp.schedule import MegatronFsdpSchedule

        return MegatronFsdpSchedule(stage, strategy)
    if strategy.is_nanotron:
        from zsim.plan.frameworks.megatron.nanotron import NanotronSchedule

        return NanotronSchedule(stage, strategy)
    if strategy.muon is not None:
        from zsim.plan.frameworks.megatron.muon_schedule import MuonSchedule

        return MuonSchedule(stage, strategy)
    from zsim.plan.frameworks.megatron.schedule import MegatronSchedule

    return MegatronSchedule(stage, strategy)


def _reference(stage: Stage, strategy: ReferenceConfig) -> Hooks:
    from zsim.plan.frameworks.reference.schedule import ReferenceSchedule

    return ReferenceSchedule(stage, strategy)


def _deepspeed(stage: Stage, config: DeepSpeedConfig) -> Hooks:
    if config.zero.is_mics:
        from zsim.plan.frameworks.deepspeed.stage3.mics import MicsSchedule

        return MicsSchedule(stage, config)
    if config.optimizer_wrapper == "zero3":
        from zsim.plan.frameworks.deepspeed.stage3.schedule import Zero3Schedule

        return Zero3Schedule(stage, config)
    if config.optimizer_wrapper == "zero12":
        from zsim.plan.frameworks.deepspeed.stage12.schedule import Zero12Schedule

        return Zero12Schedule(stage, config)
    from zsim.plan.frameworks.deepspeed.stage0 import Zero0Schedule

    return Zero0Schedule(stage, config)


def _ddp_moments(state: BetweenSteps) -> Iterable[JobMoment]:
    from zsim.plan.shared.full_state import replicated_moments

    return replicated_moments(state)


def _fsdp1_moments(state: BetweenSteps) -> Iterable[JobMoment]:
    from zsim.plan.frameworks.fsdp1.moments import fsdp1_moments

    return fsdp1_moments(state)


def _fsdp2_moments(state: BetweenSteps) -> Iterable[JobMoment]:
    from zsim.plan.frameworks.fsdp2.moments import fsdp2_moments

    return fsdp2_moments(state)


def _deepspeed_moments(state: BetweenSteps) -> Iterable[JobMoment]:
    from zsim.plan.frameworks.deepspeed.moments import deepspeed_moments

    return deepspeed_moments(state)


def _deepspeed_offloads(config: DeepSpeedConfig) -> bool:
    zero = config.zero
    is_kept = zero.offload_param is None and zero.offload_optimizer is None
    return not is_kept or config.activation_checkpointing.cpu_checkpointing


def _reference_offloads(strategy: ReferenceConfig) -> bool:
    return strategy.optimizer_place != "device" or strategy.parameter_place != "device"


FRAMEWORKS: Mapping[type, Framework] = {
    DdpConfig: Framework("ddp", _ddp, lambda _: False, _ddp_moments, is_independent_of_ranks=True),
    Fsdp1Config: Framework("fsdp1", _fsdp1, lambda strategy: strategy.cpu_offload, _fsdp1_moments),
    Fsdp2Config: Framework("fsdp2", _fsdp2, lambda strategy: strategy.cpu_offload, _fsdp2_moments),
    MegatronConfig: Framework("megatron", _megatron, lambda _: False),
    ReferenceConfig: Framework("reference", _reference, _reference_offloads),
    DeepSpeedConfig: Framework("deepspeed", _deepspeed, _deepspeed_offloads, _deepspeed_moments),
}
