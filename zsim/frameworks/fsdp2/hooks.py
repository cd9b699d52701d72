"""FSDP2's hooks in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.fsdp2.moments import fsdp2_moments
from zsim.frameworks.fsdp2.schedule import Fsdp2Schedule
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.torch.fsdp_hooks import FsdpHooks
from zsim.frameworks.torch.pipeline import TorchRuntime
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import ParallelismConfig


class Fsdp2Hooks(FsdpHooks[Fsdp2Config]):
    """The schedule of FSDP2, which offloads where its shards are on the host."""

    def make(self, stage: Stage, config: Fsdp2Config) -> Hooks:
        return Fsdp2Schedule(stage, config)

    def pipeline(self, config: Fsdp2Config, parallelism: ParallelismConfig) -> TorchRuntime:
        return TorchRuntime(parallelism, is_fsdp=True)

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return fsdp2_moments(state)


HOOKS = Fsdp2Hooks()
