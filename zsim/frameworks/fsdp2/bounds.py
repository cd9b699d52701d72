"""The lower bounds of FSDP2."""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.specs.experiment.job import Job
from zsim.study.tune.framework_bounds import FrameworkBounds


class Fsdp2Bounds(FrameworkBounds[Fsdp2Config]):
    """The CPU updates shards that it holds. Shards and states are in the type that weights are kept in."""

    def updates_on_host(self, config: Fsdp2Config) -> bool:
        return config.cpu_offload

    def bytes_per_parameter(self, job: Job, config: Fsdp2Config, moments: int) -> float:
        if config.cpu_offload:
            return 0.0
        ranks = job.data_parallel_size * job.parallelism.context
        return DTYPE_BYTES[job.training.stored_dtype] * (1 + moments) * config.replicate / ranks


BOUNDS = Fsdp2Bounds()
