"""Megatron-Core's checkpoints."""

from __future__ import annotations

from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.checkpoint_files import megatron_files
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.goodput.checkpoints.framework import STATE_MEASURED, FrameworkCheckpoint, SaveOptions
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class MegatronCheckpoint(FrameworkCheckpoint[MegatronConfig]):
    """The files of `--ckpt-format torch_dist`."""

    formats = ("megatron",)

    def files(
        self, job: Job, config: MegatronConfig, states: ModelStates, options: SaveOptions
    ) -> SavedFiles:
        if config.has_whole_tensor_owners:
            raise NotSimulatedError(
                f"run.checkpoint: the files of engine 'internevo' are not known; {STATE_MEASURED}"
            )
        if config.fsdp is not None:
            raise NotSimulatedError(
                "run.checkpoint: the files of Megatron-FSDP (--ckpt-format fsdp_dtensor) are not known; "
                f"{STATE_MEASURED}"
            )
        if config.offload is not None:
            raise NotSimulatedError(
                f"run.checkpoint: a save of states that the CPU holds is not known; {STATE_MEASURED}"
            )
        return megatron_files(states, config)


CHECKPOINT = MegatronCheckpoint()
