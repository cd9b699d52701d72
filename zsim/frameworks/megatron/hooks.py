"""The hooks of Megatron, Megatron-FSDP and nanotron in a plan."""

from __future__ import annotations

from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.hooks import Hooks
from zsim.plan.stage import Stage


class MegatronHooks(FrameworkHooks[MegatronConfig]):
    """The schedule of the engine that is asked for. A run imports only that one."""

    def make(self, stage: Stage, config: MegatronConfig) -> Hooks:
        if config.fsdp is not None:
            from zsim.frameworks.megatron.fsdp.schedule import MegatronFsdpSchedule

            return MegatronFsdpSchedule(stage, config)
        if config.is_nanotron:
            from zsim.frameworks.megatron.nanotron import NanotronSchedule

            return NanotronSchedule(stage, config)
        if config.muon is not None:
            from zsim.frameworks.megatron.muon_schedule import MuonSchedule

            return MuonSchedule(stage, config)
        from zsim.frameworks.megatron.schedule import MegatronSchedule

        return MegatronSchedule(stage, config)


HOOKS = MegatronHooks()
