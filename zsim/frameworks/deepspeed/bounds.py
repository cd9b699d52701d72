"""The lower bounds of DeepSpeed."""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.experiment.job import Job
from zsim.study.tune.framework_bounds import FrameworkBounds


class DeepSpeedBounds(FrameworkBounds[DeepSpeedConfig]):
    """The CPU updates states that are offloaded."""

    def checkpoint_share(self, job: Job, config: DeepSpeedConfig) -> float:
        block = config.activation_checkpointing
        if block.cpu_checkpointing:
            return 0.0
        return 1 / job.parallelism.tensor if block.partition_activations else 1.0

    def updates_on_host(self, config: DeepSpeedConfig) -> bool:
        """All but those of MiCS, whose releases leave some on the GPU, and of an update a step late."""
        offload = config.zero.offload_optimizer
        is_whole = offload is not None and offload.ratio == 1
        return is_whole and not config.delayed_parameter_update and not config.zero.is_mics


BOUNDS = DeepSpeedBounds()
