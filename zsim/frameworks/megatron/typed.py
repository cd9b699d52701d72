"""`zsim.Megatron`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.notebook.settings import TypedTable


class MegatronSettings(TypedTable, MegatronTable):
    """Megatron-Core's data parallelism: `zsim.Megatron(distributed_optimizer=True)`."""

    kind: Literal["megatron"] = Field(default="megatron", description="whose data parallelism")


Megatron = MegatronSettings
