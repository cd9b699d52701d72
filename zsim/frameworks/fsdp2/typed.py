"""`zsim.Fsdp2`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.notebook.settings import TypedTable


class Fsdp2Settings(TypedTable, Fsdp2Table):
    """Torch's `fully_shard`. `zsim.Fsdp2(replicate=8)` is hybrid sharding (HSDP) with 8 replicas."""

    kind: Literal["fsdp2"] = Field(default="fsdp2", description="whose data parallelism")


Fsdp2 = Fsdp2Settings
