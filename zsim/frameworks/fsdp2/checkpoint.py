"""FSDP2's checkpoints."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class Fsdp2Checkpoint(TorchCheckpoint[Fsdp2Config]):
    """DTensors of shards in the type that weights are kept in."""

    def num_copies(self, config: Fsdp2Config, states: ModelStates) -> int:
        return config.replicate

    def element_bytes(self, job: Job) -> int:
        return DTYPE_BYTES[job.training.stored_dtype]

    def is_on_host(self, config: Fsdp2Config) -> bool:
        return config.cpu_offload

    def looks_for_cycles(self, config: Fsdp2Config) -> bool:
        return not config.wrapping.startswith("torchtitan")

    def num_replicas(self, job: Job, config: Fsdp2Config) -> int:
        return config.replicate


CHECKPOINT = Fsdp2Checkpoint()
