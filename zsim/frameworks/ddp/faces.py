"""The settings of DDP on the page, and its typed table in notebooks."""

from __future__ import annotations

from typing import Literal

import pydantic

from zsim.frameworks.ddp.settings import DdpTable
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import Field, FrameworkFields

FIELDS = FrameworkFields("DDP", position=4, fields=(Field("strategy.bucket_cap_mb", "Bucket", "MiB"),))


class Ddp(TypedTable, DdpTable):
    """Torch's DistributedDataParallel: `zsim.Ddp(bucket_cap_mb=50)`."""

    kind: Literal["ddp"] = pydantic.Field(default="ddp", description="whose data parallelism")
