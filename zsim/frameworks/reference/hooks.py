"""The reference engine's hooks in a plan."""

from __future__ import annotations

from zsim.frameworks.reference.schedule import ReferenceSchedule
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.stage import Stage


class ReferenceHooks(FrameworkHooks[ReferenceConfig]):
    """The schedule of the reference engine, which offloads what is not on the device."""

    def make(self, stage: Stage, config: ReferenceConfig) -> Hooks:
        return ReferenceSchedule(stage, config)

    def is_offloaded(self, config: ReferenceConfig) -> bool:
        return config.optimizer_place != "device" or config.parameter_place != "device"


HOOKS = ReferenceHooks()
