"""The hooks of DeepSpeed's stages in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.deepspeed.moments import deepspeed_moments
from zsim.frameworks.deepspeed.pipeline import DeepSpeedRuntime
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.shared.originals import FrozenStorage
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig


class DeepSpeedHooks(FrameworkHooks[DeepSpeedConfig]):
    """The schedule of the optimizer's class. A run imports only that one."""

    def make(self, stage: Stage, config: DeepSpeedConfig) -> Hooks:
        if config.zero.is_mics:
            from zsim.frameworks.deepspeed.stage3.mics import MicsSchedule

            return MicsSchedule(stage, config)
        if config.optimizer_wrapper == "zero3":
            from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule

            return Zero3Schedule(stage, config)
        if config.optimizer_wrapper == "zero12":
            from zsim.frameworks.deepspeed.stage12.schedule import Zero12Schedule

            return Zero12Schedule(stage, config)
        from zsim.frameworks.deepspeed.stage0 import Zero0Schedule

        return Zero0Schedule(stage, config)

    def pipeline(self, config: DeepSpeedConfig, parallelism: ParallelismConfig) -> DeepSpeedRuntime:
        return DeepSpeedRuntime(parallelism, config.pipeline)

    def frozen_storage(self, config: DeepSpeedConfig, training: TrainingConfig, ranks: int) -> FrozenStorage:
        zero = config.zero
        shards = (zero.mics_shard_size if zero.is_mics else ranks) if config.stage == 3 else 1
        return FrozenStorage(config.param_dtype, shards, "gpu" if zero.offload_param is None else "host")

    def is_offloaded(self, config: DeepSpeedConfig) -> bool:
        zero = config.zero
        is_kept = zero.offload_param is None and zero.offload_optimizer is None
        return not is_kept or config.activation_checkpointing.cpu_checkpointing

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return deepspeed_moments(state)


HOOKS = DeepSpeedHooks()
