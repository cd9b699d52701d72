"""Megatron's part in a search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zsim.frameworks.megatron.parallelism import MEGATRON
from zsim.frameworks.megatron.settings.config import MegatronConfig, is_core_since
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.model.expert_layer import has_experts
from zsim.study.tune.axes import MICRO_BATCHES, PARALLELISM
from zsim.study.tune.axis import BLOCKS, CHECKPOINTING, RECOMPUTED, AxisChoice, Chosen, TunedAxis
from zsim.study.tune.base import Base
from zsim.study.tune.degrees import ORDER, PIPELINE, VIRTUAL, replicas_of
from zsim.study.tune.framework import FrameworkTuning

_MODULES = (0, 12)  # the release of Megatron-Core that brought --recompute-modules


def _optimizers(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Optimizer states on every rank or distributed, and the overlap of communication with forward
    and backward."""
    distributed, reduce = "strategy.distributed_optimizer", "strategy.overlap_grad_reduce"
    gather, bucket = "strategy.overlap_param_gather", "strategy.bucket_size"
    reset: dict[str, Any] = {bucket: None} if getattr(base.job.experiment.strategy, "bucket_size", 0) else {}
    return [
        AxisChoice("states on every rank", {distributed: False, reduce: False, gather: False, **reset}),
        AxisChoice("states on every rank, overlapped", {distributed: False, reduce: True, gather: False}),
        AxisChoice("distributed optimizer", {distributed: True, reduce: False, gather: False, **reset}),
        AxisChoice("distributed optimizer, overlapped", {distributed: True, reduce: True, gather: True}),
    ]


def _recomputations(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Nothing, the core of attention where it is not one kernel, the MLP or the experts'
    activation, the first half of every stage's layers, all layers.
    """
    training, split, strategy = base.job.training, base.job.parallelism, base.job.experiment.strategy
    assert isinstance(strategy, MegatronTable)
    reset: dict[str, Any] = {BLOCKS: {}} if training.block_checkpointing else {}

    def choice(name: str, granularity: str, *values: Any) -> AxisChoice:
        recompute_keys = dict(zip(RECOMPUTED, values or (None, None, None), strict=True))
        return AxisChoice(name, {CHECKPOINTING: granularity, **recompute_keys, **reset})

    choices = [choice("checkpointing none", "none")]
    if training.attention == "math":
        choices.append(choice("checkpointing selective", "selective"))
    if strategy.engine == "megatron" and is_core_since(strategy.version, _MODULES):
        name = "moe_act" if has_experts(base.job.model) else "mlp"
        choices.append(choice(f"recomputing {name}", "selective", [name], None, None))
    stages = chosen.get(PIPELINE, split.pipeline) * (chosen.get(VIRTUAL, split.virtual_stages) or 1)
    half = -(-len(base.job.model.blocks) // stages) // 2
    if half:
        layers = f"{half} layer{'s' if half > 1 else ''}{' a stage' if stages > 1 else ''}"
        choices.append(choice(f"checkpointing {layers}", "full", None, "block", half))
    return [*choices, choice("checkpointing full", "full")]


def _orders(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Which ranks are neighbours, data-parallel or pipeline ranks: who shares a node, and its links."""
    split = base.job.parallelism
    pipeline = chosen.get(PIPELINE, split.pipeline)
    if "parallelism" not in base.data or pipeline == 1 or replicas_of(base, chosen) == 1:
        return []
    return [AxisChoice("", {ORDER: None}), AxisChoice("order tp-cp-pp-dp", {ORDER: "tp-cp-pp-dp"})]


class MegatronTuning(FrameworkTuning[MegatronTable]):
    """Degrees, the optimizer's states, and what is recomputed."""

    label = "Megatron"
    structure = (
        PARALLELISM,
        TunedAxis("optimizer", _optimizers),
        TunedAxis("checkpointing", _recomputations),
        MICRO_BATCHES,
    )
    details = (TunedAxis("order", _orders),)
    schedules = MEGATRON.schedules

    def sizes(self, table: MegatronTable, config: MegatronConfig) -> dict[str, tuple[str, float, bool]]:
        if config.bucket_size is None:
            return {}
        return {"bucket_size": ("strategy.bucket_size", float(config.bucket_size), True)}


TUNING = MegatronTuning()
