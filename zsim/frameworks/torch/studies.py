"""The decisions of a search that torch's two FSDPs have in common."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.study.tune.framework import ACCUMULATION, AxisChoice, Base, Chosen, TunedAxis
from zsim.ui.field import STAGE, Field, optional_choices


def replica_counts(base: Base) -> list[int]:
    """Possible replica counts: 1, and replicas of whole nodes (powers of two and the number of nodes)."""
    nodes = base.job.num_nodes
    counts = {1, nodes} | {2**power for power in range(nodes.bit_length()) if nodes % 2**power == 0}
    return sorted(counts)


def _reductions(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Whether several micro-batches reduce after each one, or after the last."""
    key = "strategy.no_sync"
    if chosen.get(ACCUMULATION, base.job.training.gradient_accumulation_steps) == 1:
        return [AxisChoice("", {key: False})]
    return [AxisChoice("", {key: False}), AxisChoice("no_sync", {key: True})]


OFFLOAD, OFFLOADED = "strategy.cpu_offload", "parameters, states on CPU"
REDUCTIONS = TunedAxis("no_sync", _reductions)


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
