"""The lower bounds of DeepSpeed."""

from __future__ import annotations

from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.study.tune.framework_bounds import FrameworkBounds


class DeepSpeedBounds(FrameworkBounds[DeepSpeedConfig]):
    """The CPU updates states that are offloaded."""

    def leaves_checkpoints_on_host(self, config: DeepSpeedConfig) -> bool:
        return config.activation_checkpointing.cpu_checkpointing

    def updates_on_host(self, config: DeepSpeedConfig) -> bool:
        """All but those of MiCS, whose releases leave some on the GPU, and of an update a step late."""
        offload = config.zero.offload_optimizer
        is_whole = offload is not None and offload.ratio == 1
        return is_whole and not config.delayed_parameter_update and not config.zero.is_mics


BOUNDS = DeepSpeedBounds()
