"""FSDP1's part in a search."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.torch.tune import REDUCTIONS, replica_counts
from zsim.study.tune.axes import CHECKPOINTINGS, LOSSES, MICRO_BATCHES
from zsim.study.tune.axis import AxisChoice, Chosen, TunedAxis, key_axis
from zsim.study.tune.base import Base
from zsim.study.tune.framework import FrameworkTuning

_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "none")


def _shardings(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The sharding strategies, the hybrid ones with every group of whole nodes."""
    key, replicate = "strategy.sharding_strategy", "strategy.replicate"
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        yield AxisChoice(name, {key: name, replicate: None})
    for count in replica_counts(base):
        if count > 1 and base.world_size // count > 1:
            for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
                yield AxisChoice(f"{name} {count} replicas", {key: name, replicate: count})


class Fsdp1Tuning(FrameworkTuning[Fsdp1Table]):
    """The sharding strategy, and what is gathered ahead."""

    label = "FSDP1"
    structure = (TunedAxis("sharding", _shardings), CHECKPOINTINGS, LOSSES, MICRO_BATCHES, REDUCTIONS)
    details = (
        key_axis("backward prefetch", "strategy.backward_prefetch", *_PREFETCH),
        key_axis("forward prefetch", "strategy.forward_prefetch", True, False),
        key_axis("limit_all_gathers", "strategy.limit_all_gathers", True, False),
    )


TUNING = Fsdp1Tuning()
