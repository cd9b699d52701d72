"""DDP in searches, whole runs and on the page: what to vary, bounds, what a save writes, its fields."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.goodput.checkpoints.saved import ModelStates
from zsim.specs.experiment.job import Job
from zsim.study.tune.axes import CHECKPOINTINGS, COMPILATIONS, LOSSES, MICRO_BATCHES, RECIPES
from zsim.study.tune.framework import FrameworkTuning, key_axis
from zsim.ui.field import Field, FrameworkFields


class DdpTuning(FrameworkTuning[DdpTable]):
    """Only the batch, checkpointing and buckets are DDP's to decide."""

    label = "DDP"
    structure = (CHECKPOINTINGS, LOSSES, MICRO_BATCHES)
    numerics = (RECIPES,)
    details = (
        COMPILATIONS,
        key_axis("buckets", "strategy.bucket_cap_mb", 25.0, 100.0, 400.0),
        key_axis("bucket view", "strategy.gradient_as_bucket_view", True, False),
    )

    def sizes(self, table: DdpTable, config: DdpConfig) -> dict[str, tuple[str, float, bool]]:
        return {"bucket_cap_mb": ("strategy.bucket_cap_mb", table.bucket_cap_mb, False)}


TUNING = DdpTuning()


class DdpCheckpoint(TorchCheckpoint[DdpConfig]):
    """Every rank holds all states."""

    formats = ("full", "dcp")

    def num_copies(self, config: DdpConfig, states: ModelStates) -> int:
        return states.data_ranks

    def num_replicas(self, job: Job, config: DdpConfig) -> int:
        return job.data_parallel_size


CHECKPOINT = DdpCheckpoint()


FIELDS = FrameworkFields("DDP", position=4, fields=(Field("strategy.bucket_cap_mb", "Bucket", "MiB"),))
