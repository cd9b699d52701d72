"""The settings of torch's two FSDPs on the page."""

from __future__ import annotations

from zsim.ui.field import Field, optional_choices

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
