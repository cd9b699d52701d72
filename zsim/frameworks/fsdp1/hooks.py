"""FSDP1's hooks in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.fsdp1.moments import fsdp1_moments
from zsim.frameworks.fsdp1.schedule import Fsdp1Schedule
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.stage import Stage


class Fsdp1Hooks(FrameworkHooks[Fsdp1Config]):
    """The schedule of FSDP1, which offloads where its shards are on the host."""

    def make(self, stage: Stage, config: Fsdp1Config) -> Hooks:
        return Fsdp1Schedule(stage, config)

    def is_offloaded(self, config: Fsdp1Config) -> bool:
        return config.cpu_offload

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp1_moments(state)


HOOKS = Fsdp1Hooks()
