"""`zsim.Fsdp1`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.notebook.settings import TypedTable


class Fsdp1Settings(TypedTable, Fsdp1Table):
    """Torch's FullyShardedDataParallel: `zsim.Fsdp1(sharding_strategy="SHARD_GRAD_OP")`."""

    kind: Literal["fsdp1"] = Field(default="fsdp1", description="whose data parallelism")


Fsdp1 = Fsdp1Settings
