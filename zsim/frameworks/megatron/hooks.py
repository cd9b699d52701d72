"""The hooks of Megatron, Megatron-FSDP and nanotron in a plan."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.frameworks.megatron.buffer import placeholders
from zsim.frameworks.megatron.nanotron import NanotronRuntime
from zsim.frameworks.megatron.pipeline_runtime import MegatronRuntime
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.framework_hooks import FrameworkHooks, FrozenStorage
from zsim.plan.hooks import Hooks
from zsim.plan.ops import Memory
from zsim.plan.pipeline.run_actions import PipelineRuntime
from zsim.plan.shared.checkpoints import PartitionedCheckpoints
from zsim.plan.stage import Stage
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import TENSOR, ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig


class MegatronHooks(FrameworkHooks[MegatronConfig]):
    """The schedule of the engine that is asked for. A run imports only that one."""

    def make(self, stage: Stage, config: MegatronConfig) -> Hooks:
        """The schedule. The copies of `--distribute-saved-activations` are made after a layer's forward, and
        gathered into new tensors (Megatron-Core 0.16.1 core/tensor_parallel/random.py `CheckpointFunction`).
        """
        hooks = self._make_schedule(stage, config)
        if config.distributes_checkpoints:
            tensor = stage.parallelism.tensor
            hooks.checkpoints = PartitionedCheckpoints(stage.builder, stage.workload, TENSOR, tensor)
        return hooks

    def _make_schedule(self, stage: Stage, config: MegatronConfig) -> Hooks:
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

    def frozen_storage(self, config: MegatronConfig, training: TrainingConfig, ranks: int) -> FrozenStorage:
        return FrozenStorage(config.param_dtype)

    def is_offloaded(self, config: MegatronConfig) -> bool:
        return config.offload is not None

    def fuses_whole_layers(self, config: MegatronConfig) -> bool:
        """InternEvo's layers are left as they are."""
        return not config.has_whole_tensor_owners

    def pipeline(self, config: MegatronConfig, parallelism: ParallelismConfig) -> PipelineRuntime:
        if config.is_nanotron:
            return NanotronRuntime(parallelism)
        return MegatronRuntime(parallelism, settings=config)

    def resident(self, config: MegatronConfig, models: Sequence[ModelSpec]) -> list[Memory]:
        memories = [Memory("buffers", size) for size in config.workspaces]
        return memories + (placeholders(models, config.param_dtype) if config.keeps_placeholders else [])


HOOKS = MegatronHooks()
