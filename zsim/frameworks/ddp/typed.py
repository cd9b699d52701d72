"""`zsim.Ddp`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.ddp.settings import DdpTable
from zsim.notebook.settings import TypedTable


class DdpSettings(TypedTable, DdpTable):
    """Torch's DistributedDataParallel: `zsim.Ddp(bucket_cap_mb=50)`."""

    kind: Literal["ddp"] = Field(default="ddp", description="whose data parallelism")


Ddp = DdpSettings
