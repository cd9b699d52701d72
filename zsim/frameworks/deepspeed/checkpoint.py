"""DeepSpeed's checkpoints, and those that any number of ranks loads."""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.checkpoint_files import deepspeed_files
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.goodput.checkpoints.framework import STATE_MEASURED, FrameworkCheckpoint, SaveOptions
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class DeepSpeedCheckpoint(FrameworkCheckpoint[DeepSpeedConfig]):
    """The files of `save_checkpoint`."""

    formats = ("deepspeed", "universal")

    def files(
        self, job: Job, config: DeepSpeedConfig, states: ModelStates, options: SaveOptions
    ) -> SavedFiles:
        if job.parallelism.experts.library.has_expert_groups:
            raise NotSimulatedError(
                "run.checkpoint: the files of experts in DeepSpeed's layers (a file per expert) are not "
                f"known; {STATE_MEASURED}"
            )
        return deepspeed_files(
            states,
            config,
            saves_16bit_model=options.saves_16bit_model,
            is_universal=options.format == "universal",
        )

    def check_elastic_load(self, config: DeepSpeedConfig, format: str | None) -> None:
        """DeepSpeed 0.19.8 runtime/engine.py `_load_zero_checkpoint`."""
        if config.stage and format != "universal":
            raise InputError(
                "run.recovery.policy: found 'shrink', but DeepSpeed loads a checkpoint of ZeRO on as many "
                "ranks as saved it; expected run.checkpoint.format 'universal', or policy 'restart'"
            )


CHECKPOINT = DeepSpeedCheckpoint()
