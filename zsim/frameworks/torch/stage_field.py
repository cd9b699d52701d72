"""The field of a ZeRO stage, which several engines have."""

from __future__ import annotations

from zsim.ui.field import STAGE, Field

ZERO_STAGE = Field(
    STAGE,
    "ZeRO stage",
    choices={
        "3: parameters too": 3, "2: gradients too": 2, "1: optimizer states": 1, "0: nothing sharded": 0,
    },
)  # fmt: skip
