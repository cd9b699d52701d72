"""The reference engine's checkpoints."""

from __future__ import annotations

from zsim.frameworks.reference.checkpoint_files import reference_files
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.goodput.checkpoints.framework import FrameworkCheckpoint, SaveOptions
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class ReferenceCheckpoint(FrameworkCheckpoint[ReferenceConfig]):
    """Masters and both moments of every unit, in fp32."""

    formats = ("reference",)
    has_fixed_states = True

    def files(
        self, job: Job, config: ReferenceConfig, states: ModelStates, options: SaveOptions
    ) -> SavedFiles:
        return reference_files(states, job.model)


CHECKPOINT = ReferenceCheckpoint()
