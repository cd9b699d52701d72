"""FSDP2 in reports."""

from __future__ import annotations

from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.torch.names import UNSHARDED
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.labels import strategy_label


class Fsdp2Report(FrameworkReport[Fsdp2Config]):
    """FSDP2, which is HSDP with several replicas."""

    title_alone = UNSHARDED
    strategy_names = ("FSDP2", "HSDP")
    offloading_names = ("FSDP2",)

    def strategy_name(self, job: Job, config: Fsdp2Config) -> str:
        return self.headline(job, config)

    def headline(self, job: Job, config: Fsdp2Config) -> str:
        return "HSDP" if config.replicate > 1 else strategy_label(job)


REPORT = Fsdp2Report()
