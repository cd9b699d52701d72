"""FSDP2 in searches, whole runs, profiles and on the page: what to vary, bounds, saves, ranges, fields."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.torch.checkpoint import TorchCheckpoint
from zsim.frameworks.torch.parallelism import TORCH
from zsim.frameworks.torch.studies import FSDP_FIELDS, OFFLOAD, OFFLOADED, REDUCTIONS, replica_counts
from zsim.goodput.checkpoints.saved import ModelStates
from zsim.specs.experiment.job import Job
from zsim.study.tune.axes import (
    CHECKPOINTINGS,
    COMPILATIONS,
    DISPATCHERS,
    EXPERTS,
    LAYOUTS,
    LOSSES,
    MICRO_BATCHES,
    PARALLELISM,
    RECIPES,
    data_ranks,
)
from zsim.study.tune.framework import (
    AxisChoice,
    Base,
    Chosen,
    FrameworkBounds,
    FrameworkTuning,
    TunedAxis,
    key_axis,
)
from zsim.trace.readers.kineto.file import UnitRanges
from zsim.ui.field import DEFAULT, Field, FrameworkFields

_WRAPPING = ("torchtitan", "torchtitan-0.1", "huggingface")


def _reshards(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Reshard to all ranks, to the node, or not at all."""
    key, per_node = "strategy.reshard_after_forward", base.job.gpus_per_node
    choices = [AxisChoice("", {key: True}), AxisChoice("no reshard", {key: False})]
    shard = data_ranks(base, chosen) // chosen.get("strategy.replicate", 1)
    if 1 < per_node < shard and shard % per_node == 0:
        choices.append(AxisChoice(f"reshard to {per_node}", {key: per_node}))
    return choices


def _replicas(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    key = "strategy.replicate"
    for count in replica_counts(base):
        if data_ranks(base, chosen) % count:
            continue
        yield AxisChoice("" if count == 1 else f"{count} replicas", {key: count})


def _host_offload(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    return [AxisChoice("", {OFFLOAD: False}), AxisChoice(OFFLOADED, {OFFLOAD: True})]


class Fsdp2Tuning(FrameworkTuning[Fsdp2Table]):
    """Degrees, replicas, resharding and offloading."""

    label = "FSDP2"
    structure = (
        PARALLELISM,
        TunedAxis("replicas", _replicas),
        TunedAxis("reshard", _reshards),
        TunedAxis("offload", _host_offload),
        CHECKPOINTINGS,
        LOSSES,
        MICRO_BATCHES,
        REDUCTIONS,
    )
    details = (
        COMPILATIONS,
        key_axis("wrapping", "strategy.wrapping", *_WRAPPING),
        EXPERTS,
        DISPATCHERS,
        LAYOUTS,
    )
    numerics = (RECIPES,)
    schedules = TORCH.schedules
    is_usual = True


TUNING = Fsdp2Tuning()


class Fsdp2Bounds(FrameworkBounds[Fsdp2Config]):
    """The CPU updates shards that it holds. Shards and states are in the type that weights are kept in."""

    def updates_on_host(self, config: Fsdp2Config) -> bool:
        return config.cpu_offload

    def bytes_per_parameter(self, job: Job, config: Fsdp2Config, moments: int) -> float:
        if config.cpu_offload:
            return 0.0
        ranks = job.data_parallel_size * job.parallelism.context
        return DTYPE_BYTES[job.training.stored_dtype] * (1 + moments) * config.replicate / ranks


BOUNDS = Fsdp2Bounds()


class Fsdp2Checkpoint(TorchCheckpoint[Fsdp2Config]):
    """DTensors of shards in the type that weights are kept in."""

    def num_copies(self, config: Fsdp2Config, states: ModelStates) -> int:
        return config.replicate

    def is_on_host(self, config: Fsdp2Config) -> bool:
        return config.cpu_offload

    def looks_for_cycles(self, config: Fsdp2Config) -> bool:
        return not config.wrapping.startswith("torchtitan")

    def num_replicas(self, job: Job, config: Fsdp2Config) -> int:
        return config.replicate


CHECKPOINT = Fsdp2Checkpoint()


_UNIT = re.compile(r"^FSDP::\S+(?: for (?P<next>\S+)| \((?P<unit>.*)\))")
_ROOT = frozenset(
    f"FSDP::{name}"
    for name in (
        "pre_forward", "post_forward", "pre_backward", "all_gather", "all_gather_copy_out",
        "post_backward_accumulate", "post_backward_reshard", "post_backward_reduce",
        "post_backward_rs_wait",
    )
)  # fmt: skip
RANGES = UnitRanges(_UNIT, _ROOT)


_RESHARD = Field(
    "strategy.reshard_after_forward",
    "Reshard",
    "after forward",
    is_half=True,
    choices={DEFAULT: None, "yes": True, "no": False, "to groups of 4": 4, "to groups of 8": 8},
)


FIELDS = FrameworkFields("FSDP2", position=2, fields=(*FSDP_FIELDS, _RESHARD), has_degrees=True)
