"""DDP's hooks in a plan."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.ddp.schedule import DdpSchedule
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.torch.moments import replicated_moments
from zsim.frameworks.torch.pipeline import TorchRuntime
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.moments import BetweenSteps, JobMoment
from zsim.plan.stage import Stage
from zsim.specs.strategy.parallelism import ParallelismConfig


class DdpHooks(FrameworkHooks[DdpConfig]):
    """DDP's buckets do not depend on the number of ranks."""

    is_independent_of_ranks = True
    pages_optimizer_states = True

    def make(self, stage: Stage, config: DdpConfig) -> Hooks:
        return DdpSchedule(stage, config)

    def pipeline(self, config: DdpConfig, parallelism: ParallelismConfig) -> TorchRuntime:
        return TorchRuntime(parallelism)

    def moments(self, state: BetweenSteps) -> Iterable[JobMoment]:
        return replicated_moments(state)


HOOKS = DdpHooks()
