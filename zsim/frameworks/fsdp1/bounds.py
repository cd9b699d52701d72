"""The lower bounds of FSDP1."""

from __future__ import annotations

from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.study.tune.framework_bounds import FrameworkBounds


class Fsdp1Bounds(FrameworkBounds[Fsdp1Config]):
    """The CPU updates shards that it holds."""

    def updates_on_host(self, config: Fsdp1Config) -> bool:
        return config.cpu_offload


BOUNDS = Fsdp1Bounds()
