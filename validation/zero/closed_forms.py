"""The bytes that a rank holds and sends, by arithmetic: the numbers that the engine must reproduce.

Letters: P elements of a flat tensor, padded to the number of ranks W; c bytes of the compute dtype, r of
the reduce dtype; 4-byte master weights and moments. From Rajbhandari et al. 2020, sections 5 (memory) and 7
(communication volume), with padding and frozen parameters added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from validation.zero.config import ZeroConfig
from validation.zero.files import padded
from validation.zero.nvme import SECTIONS


@dataclass(frozen=True)
class FlatSize:
    """A flat tensor: its unit, padded elements, and whether its unit stays gathered between the passes."""

    padded_numel: int
    shard_numel: int
    is_trainable: bool = True
    is_kept: bool = False


def held_bytes(
    flats: Iterable[FlatSize], config: ZeroConfig, *, with_gradients: bool
) -> dict[str, dict[str, int]]:
    """Model states of one rank by place and category, outside of forward and backward.

    Stage 3's parameters are the shards (gathered ones are buffers). In fp32, weights and states on the device
    share one copy, so there is no separate master. Reduced gradients live in the optimizer's place. Stage 1
    also holds all of the rank's unreduced gradients on the device; there, the reduced shard lies among them.
    """
    compute, reduce = config.compute_dtype.itemsize, config.reduce_dtype.itemsize
    stage, states_place = config.stage, config.optimizer_place
    is_own_master = (
        config.compute_dtype is torch.float32 and states_place == config.parameter_place == "device"
    )
    held: dict[str, dict[str, int]] = {"device": {}, "host": {}, "nvme": {}}

    def add(place: str, category: str, count: int) -> None:
        if count:
            held[place][category] = held[place].get(category, 0) + count

    for flat in flats:
        owned = flat.padded_numel if stage == 0 else flat.shard_numel
        parameter_bytes = (owned if stage == 3 else flat.padded_numel) * compute
        is_file = config.parameter_place == "nvme"
        add(config.parameter_place, "parameters", padded(parameter_bytes) if is_file else parameter_bytes)
        if not flat.is_trainable:
            continue
        if states_place == "nvme":
            add("nvme", "optimizer_states", SECTIONS * padded(4 * owned))
        else:
            add(states_place, "optimizer_states", (8 if is_own_master else 12) * owned)
        if with_gradients:
            if stage <= 1:
                add("device", "gradients", flat.padded_numel * reduce)
            if stage >= 2 or states_place == "host":
                add(states_place, "gradients", owned * reduce if states_place != "nvme" else 0)
    return held


def volume_bytes(flats: Iterable[FlatSize], config: ZeroConfig) -> dict[str, int]:
    """Full tensor bytes of one step's collectives by kind, without the gradient norm and buffers."""
    compute, reduce = config.compute_dtype.itemsize, config.reduce_dtype.itemsize
    steps, stage = config.accumulation_steps, config.stage
    volume: dict[str, int] = {}
    for flat in flats:
        if stage == 3:
            gathers = 1 if flat.is_kept else 2
            volume["all_gather"] = volume.get("all_gather", 0) + steps * gathers * flat.padded_numel * compute
        elif stage and flat.is_trainable:
            volume["all_gather"] = volume.get("all_gather", 0) + flat.padded_numel * compute
        if flat.is_trainable:
            kind = "reduce_scatter" if stage else "all_reduce"
            times = steps if stage >= 2 else 1
            volume[kind] = volume.get(kind, 0) + times * flat.padded_numel * reduce
    return volume


def wire_bytes(volume: dict[str, int], world_size: int, reduce_scatter: str = "all_to_all") -> int:
    """Bytes that one rank sends (and receives) for this volume.

    An all-gather or a true reduce-scatter moves (W - 1) / W of the full tensor. An all-reduce moves twice as
    much, and so does gloo's native reduce-scatter."""
    twice = {"all_reduce"} | ({"reduce_scatter"} if reduce_scatter == "native" else set())
    total = sum((2 if kind in twice else 1) * count for kind, count in volume.items())
    return total * (world_size - 1) // world_size
