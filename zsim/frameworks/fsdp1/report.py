"""FSDP1 in reports."""

from __future__ import annotations

from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.labels import strategy_label


class Fsdp1Report(FrameworkReport[Fsdp1Config]):
    """The sharding strategies, of which the full one goes without saying."""

    title_alone = UNSHARDED
    strategy_names = ("FSDP1", "FSDP1 SHARD_GRAD_OP")
    offloading_names = ("FSDP1",)

    def strategy_name(self, job: Job, config: Fsdp1Config) -> str:
        return "HSDP" if config.replicate > 1 else strategy_label(job).removesuffix(" FULL_SHARD")


REPORT = Fsdp1Report()
