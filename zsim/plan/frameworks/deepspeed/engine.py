"""The hooks that DeepSpeed's engine has under every optimizer."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.frameworks.deepspeed.cpu_checkpointing import CheckpointsInHostMemory
from zsim.plan.hooks import Hooks
from zsim.plan.parts.host_side import HostSide
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Segment
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig


class DeepSpeedEngine(Hooks):
    """Base class of the hooks of all stages of ZeRO; `checkpoints`: offloads activation checkpoints, with
    `cpu_checkpointing`."""

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        super().__init__(stage)
        self.config, self.zero = config, config.zero
        self.workload, self.training = stage.workload, stage.training
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.checkpoints: CheckpointsInHostMemory | None = None
        if config.activation_checkpointing.cpu_checkpointing:
            self.checkpoints = CheckpointsInHostMemory(HostSide(stage.builder), config)

    def after_forward(self, segment: Segment) -> None:
        if self.checkpoints is not None:
            self.checkpoints.save(segment)

    def before_backward(self, segment: Segment) -> None:
        if self.checkpoints is not None:
            self.checkpoints.restore(segment)

    def after_backward(self, segment: Segment) -> None:
        if self.checkpoints is not None:
            self.checkpoints.drop(segment)
