"""FSDP1's hooks in a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from zsim.frameworks.fsdp1.moments import fsdp1_moments
from zsim.frameworks.fsdp1.schedule import Fsdp1Schedule
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.torch.fsdp_hooks import FsdpHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.shared.originals import FrozenStorage
from zsim.plan.stage import Stage
from zsim.specs.strategy.training import TrainingConfig


class Fsdp1Hooks(FsdpHooks[Fsdp1Config]):
    """The schedule of FSDP1, which offloads where its shards are on the host."""

    pages_optimizer_states = True

    def make(self, stage: Stage, config: Fsdp1Config) -> Hooks:
        return Fsdp1Schedule(stage, config)

    def frozen_storage(self, config: Fsdp1Config, training: TrainingConfig, ranks: int) -> FrozenStorage:
        storage = super().frozen_storage(config, training, ranks)
        return replace(storage, shards=1) if config.sharding_strategy == "NO_SHARD" else storage

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp1_moments(state)


HOOKS = Fsdp1Hooks()
