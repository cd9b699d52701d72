"""FSDP1 in searches, whole runs and on the page: what to vary, bounds, what a save writes, its fields."""

from __future__ import annotations

from collections.abc import Iterable

from zsim.frameworks.fsdp1.settings import Fsdp1Config, Fsdp1Table
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.frameworks.torch.studies import FSDP_FIELDS, OFFLOAD, OFFLOADED, REDUCTIONS, replica_counts
from zsim.goodput.checkpoints.saved import ModelStates
from zsim.specs.experiment.job import Job
from zsim.study.tune.axes import CHECKPOINTINGS, COMPILATIONS, LOSSES, MICRO_BATCHES, RECIPES
from zsim.study.tune.framework import (
    AxisChoice,
    Base,
    Chosen,
    FrameworkBounds,
    FrameworkTuning,
    TunedAxis,
    key_axis,
)
from zsim.ui.field import Field, FrameworkFields, identity_choices

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


def _host_offload(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """On the host the newest reduced gradient replaces the others, so that micro-batches reduce together."""
    has_several = base.job.training.gradient_accumulation_steps > 1
    reduction = {"strategy.no_sync": True} if has_several else {}
    return [AxisChoice("", {OFFLOAD: False}), AxisChoice(OFFLOADED, {OFFLOAD: True, **reduction})]


class Fsdp1Tuning(FrameworkTuning[Fsdp1Table]):
    """The sharding strategy, offloading, and what is gathered ahead."""

    label = "FSDP1"
    structure = (
        TunedAxis("sharding", _shardings),
        TunedAxis("offload", _host_offload),
        CHECKPOINTINGS,
        LOSSES,
        MICRO_BATCHES,
        REDUCTIONS,
    )
    numerics = (RECIPES,)
    details = (
        COMPILATIONS,
        key_axis("backward prefetch", "strategy.backward_prefetch", *_PREFETCH),
        key_axis("forward prefetch", "strategy.forward_prefetch", True, False),
        key_axis("limit_all_gathers", "strategy.limit_all_gathers", True, False),
    )


TUNING = Fsdp1Tuning()


class Fsdp1Bounds(FrameworkBounds[Fsdp1Config]):
    """The CPU updates shards that it holds."""

    def updates_on_host(self, config: Fsdp1Config) -> bool:
        return config.cpu_offload


BOUNDS = Fsdp1Bounds()


class Fsdp1Checkpoint(TorchCheckpoint[Fsdp1Config]):
    """DTensors of the shards of flat parameters."""

    def num_copies(self, config: Fsdp1Config, states: ModelStates) -> int:
        return states.data_ranks if config.sharding_strategy == "NO_SHARD" else config.replicate

    def is_on_host(self, config: Fsdp1Config) -> bool:
        return config.cpu_offload

    def num_replicas(self, job: Job, config: Fsdp1Config) -> int:
        return config.replicate


CHECKPOINT = Fsdp1Checkpoint()


_SHARDING = Field(
    "strategy.sharding_strategy",
    "Sharding",
    choices=identity_choices(
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ),
)


FIELDS = FrameworkFields("FSDP1", position=3, fields=(_SHARDING, *FSDP_FIELDS))
