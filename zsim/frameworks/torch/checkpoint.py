"""Checkpoints of torch's frameworks: torch.distributed.checkpoint, or one file of all states."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.torch.distributed_checkpoint import DcpLayout, dcp_files, full_file
from zsim.goodput.checkpoints.framework import Config, FrameworkCheckpoint, SaveOptions
from zsim.goodput.checkpoints.saved import SavedFiles
from zsim.goodput.checkpoints.tensors import ModelStates
from zsim.specs.experiment.job import Job


class TorchCheckpoint(FrameworkCheckpoint[Config]):
    """States that are cut over the ranks of a replica."""

    formats = ("dcp", "full")
    has_local_replicas = True

    def num_copies(self, config: Config, states: ModelStates) -> int:
        """Groups of ranks that hold the same states."""
        raise NotImplementedError

    def element_bytes(self, job: Job) -> int:
        """Bytes of an element of parameters and states."""
        return DTYPE_BYTES[job.training.stored_dtype]

    def is_on_host(self, config: Config) -> bool:
        """Whether states live in host memory."""
        return False

    def layout(
        self,
        job: Job,
        config: Config,
        states: ModelStates,
        *,
        threads: int = 1,
        single_file_per_rank: bool = True,
    ) -> DcpLayout:
        """How tensors are cut over ranks, and how ranks write them."""
        copies = self.num_copies(config, states)
        return DcpLayout(
            states.data_ranks // copies, copies, self.element_bytes(job), threads, single_file_per_rank,
            states.expert_data_ranks // copies, self.is_on_host(config),
        )  # fmt: skip

    def files(self, job: Job, config: Config, states: ModelStates, options: SaveOptions) -> SavedFiles:
        layout = self.layout(
            job, config, states, threads=options.threads, single_file_per_rank=options.single_file_per_rank
        )
        return full_file(states, layout) if options.format == "full" else dcp_files(states, layout)

    def num_shards(self, job: Job, config: Config, states: ModelStates) -> int:
        return self.layout(job, config, states).shards
