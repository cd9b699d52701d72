"""FSDP1's checkpoints."""

from __future__ import annotations

from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class Fsdp1Checkpoint(TorchCheckpoint[Fsdp1Config]):
    """DTensors of the shards of flat parameters."""

    def num_copies(self, config: Fsdp1Config, states: ModelStates) -> int:
        return states.data_ranks if config.sharding_strategy == "NO_SHARD" else config.replicate

    def is_on_host(self, config: Fsdp1Config) -> bool:
        return config.cpu_offload

    def num_replicas(self, job: Job, config: Fsdp1Config) -> int:
        return config.replicate


CHECKPOINT = Fsdp1Checkpoint()
