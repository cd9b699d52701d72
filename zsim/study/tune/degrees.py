"""The axis of model parallelism: degrees of tensor, pipeline and context parallelism, and virtual stages.

Degrees are powers of two (frameworks refuse others for nearly all models): tensor parallelism inside a node,
pipeline and context parallelism up to the number of nodes. A split of the layers that the framework refuses
is refused like any other contradiction. Megatron's stages may count the embedding and the loss as a layer
each. Schedules are all that the framework has for so many stages on a rank. The order of the mesh is a detail
(`zsim.study.tune.axes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zsim.specs.strategy.parallelism import SINGLE_STAGE, V_SHAPED
from zsim.study.tune.base import Base
from zsim.study.tune.framework import tuning_of

TENSOR, PIPELINE, CONTEXT = "parallelism.tensor", "parallelism.pipeline", "parallelism.context"
VIRTUAL, SCHEDULE = "parallelism.virtual_stages", "parallelism.schedule"
SPLIT, ORDER = "parallelism.sequence_parallel", "parallelism.order"
FIRST, LAST = "parallelism.first_stage_less_layers", "parallelism.last_stage_less_layers"
_LONG = 32_768  # tokens of a sequence from which on it is shared
_MAX_VIRTUAL = 8

Overrides = dict[str, Any]


def degrees(base: Base) -> Iterable[tuple[str, Overrides]]:
    """Labels and overrides of all combinations that divide the GPUs, the heads, the layers and the batch."""
    gpus, sequences = base.world_size, base.batch_sequences
    for tensor in _powers(base.job.gpus_per_node):
        for context in _powers(gpus // base.job.gpus_per_node if _is_long(base) else 1):
            for pipeline in _powers(base.job.num_nodes * base.job.gpus_per_node // tensor):
                replicas, remainder = divmod(gpus, tensor * context * pipeline)
                if remainder or replicas == 0 or sequences % replicas:
                    continue
                for layers in _splits(base, pipeline):
                    yield _choice(tensor, context, layers)


def data_ranks(base: Base, chosen: Mapping[str, Any]) -> int:
    """Ranks over which data parallelism shards states, under the chosen degrees."""
    split = base.job.parallelism
    model_ranks: int = chosen.get(TENSOR, split.tensor) * chosen.get(PIPELINE, split.pipeline)
    return base.world_size // model_ranks


def replicas_of(base: Base, chosen: Mapping[str, Any]) -> int:
    """Replicas of the model under the chosen degrees."""
    context: int = chosen.get(CONTEXT, base.job.parallelism.context)
    return data_ranks(base, chosen) // context


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]


def _is_long(base: Base) -> bool:
    return base.job.training.sequence_length >= _LONG


def _splits(base: Base, pipeline: int) -> Iterable[Overrides]:
    """Virtual stages and the split of the layers on `pipeline` ranks. Megatron wants stages of equal layers,
    with embedding and loss counted as a layer each if that makes them so.
    """
    layers = len(base.job.model.blocks)
    if pipeline == 1:
        yield {PIPELINE: 1, VIRTUAL: None, FIRST: None, LAST: None, SCHEDULE: None}
        return
    for virtual in _powers(_MAX_VIRTUAL):
        stages = pipeline * virtual
        for ends in (0, 1):
            if (layers + 2 * ends) % stages == 0 and (layers + 2 * ends) // stages > ends:
                for schedule in schedules_of(base.kind, virtual):
                    yield {
                        PIPELINE: pipeline,
                        VIRTUAL: virtual,
                        SCHEDULE: schedule,
                        FIRST: ends,
                        LAST: ends,
                    }
                break


def schedules_of(kind: str, virtual: int) -> list[str]:
    """The schedules of a strategy's framework for so many stages on a rank, its usual one first."""
    schedules = [name for name in tuning_of(kind).schedules if (virtual == 1) == (name in SINGLE_STAGE)]
    schedules = [name for name in schedules if virtual == 2 or name not in V_SHAPED]
    usual = "1f1b" if virtual == 1 else "interleaved-1f1b"
    return sorted(schedules, key=lambda name: name != usual)


def _choice(tensor: int, context: int, layers: Overrides) -> tuple[str, Overrides]:
    overrides = {TENSOR: tensor, SPLIT: True if tensor > 1 else None, CONTEXT: context, **layers}
    labels = [f"TP {tensor}"] if tensor > 1 else []
    labels += [f"CP {context}"] if context > 1 else []
    if layers[PIPELINE] > 1:
        virtual, schedule = layers[VIRTUAL], layers[SCHEDULE]
        labels.append(f"PP {layers[PIPELINE]}" + (f" x {virtual} stages" if virtual > 1 else ""))
        labels += [] if schedule in ("1f1b", "interleaved-1f1b") else [schedule]
    return " ".join(labels) or "data parallel", overrides
