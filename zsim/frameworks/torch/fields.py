"""The settings of torch's two FSDPs on the page."""

from __future__ import annotations

from zsim.ui.field import STAGE, Field, optional_choices

FSDP_FIELDS = (
    Field("strategy.replicate", "Replicas", "groups of HSDP", is_half=True),
    Field(
        "strategy.cpu_offload", "Offload", "to host memory", choices={"no": False, "yes": True}, is_half=True
    ),
    Field(
        "strategy.wrapping", "Wrapping", "into units", is_half=True,
        choices=optional_choices("torchtitan", "torchtitan-0.1", "huggingface", "none"),
    ),
)  # fmt: skip


ZERO_STAGE = Field(
    STAGE,
    "ZeRO stage",
    choices={
        "3: parameters too": 3, "2: gradients too": 2, "1: optimizer states": 1, "0: nothing sharded": 0,
    },
)  # fmt: skip
