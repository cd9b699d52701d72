"""DDP's checkpoints, of full tensors."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class DdpCheckpoint(TorchCheckpoint[DdpConfig]):
    """Every rank holds all states."""

    formats = ("full", "dcp")

    def num_copies(self, config: DdpConfig, states: ModelStates) -> int:
        return states.data_ranks

    def num_replicas(self, job: Job, config: DdpConfig) -> int:
        return job.data_parallel_size


CHECKPOINT = DdpCheckpoint()
