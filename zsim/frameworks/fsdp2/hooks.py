"""FSDP2's hooks in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.fsdp2.moments import fsdp2_moments
from zsim.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.stage import Stage


class Fsdp2Hooks(FrameworkHooks[Fsdp2Config]):
    """The schedule of FSDP2, which offloads where its shards are on the host."""

    def make(self, stage: Stage, config: Fsdp2Config) -> Hooks:
        return Fsdp2Schedule(stage, config)

    def is_offloaded(self, config: Fsdp2Config) -> bool:
        return config.cpu_offload

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp2_moments(state)


HOOKS = Fsdp2Hooks()
