"""The settings of Megatron on the page, and its typed table in notebooks."""

from __future__ import annotations

from typing import Literal

import pydantic

from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.experiment.typed_tables import TypedTable
from zsim.ui.field import Field, FrameworkFields

FIELDS = FrameworkFields(
    "Megatron",
    position=5,
    has_degrees=True,
    fields=(
        Field(
            "strategy.distributed_optimizer",
            "Optimizer",
            "states over the ranks",
            choices={"on every rank": False, "distributed": True},
        ),
        Field(
            "strategy.overlap_grad_reduce",
            "Reduction",
            "of gradients",
            is_half=True,
            choices={"after backward": False, "overlapped": True},
        ),
        Field(
            "strategy.overlap_param_gather",
            "Gather",
            "of parameters",
            is_half=True,
            choices={"after the update": False, "overlapped": True},
        ),
    ),
)


class Megatron(TypedTable, MegatronTable):
    """Megatron-Core's data parallelism: `zsim.Megatron(distributed_optimizer=True)`."""

    kind: Literal["megatron"] = pydantic.Field(default="megatron", description="whose data parallelism")
