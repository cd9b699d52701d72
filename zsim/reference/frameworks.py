"""The frameworks that read a key of the experiment file, where not all do. The others refuse it by name.

`tests/reference/test_frameworks.py` asks every framework for every key.
"""

from __future__ import annotations

from collections.abc import Mapping

_MODEL_PARALLEL = ("fsdp2", "deepspeed", "megatron")
_PIPELINES = ("ddp", "fsdp2", "deepspeed", "megatron")
_TRAINERS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")

# Path of a key, or of a table for all keys in it -> kinds of `[strategy]`.
READERS: Mapping[str, tuple[str, ...]] = {
    "training.lora": _TRAINERS,
    "training.lora.preparation": ("ddp",),
    "training.frozen": _TRAINERS,
    "training.frozen_dtype": _TRAINERS,
    "training.autocast": ("fsdp1",),
    "training.stored_dtype": ("ddp", "fsdp1", "fsdp2"),
    "parallelism.tensor": _MODEL_PARALLEL,
    "parallelism.sequence_parallel": _MODEL_PARALLEL,
    "parallelism.async_tensor": ("fsdp2", "megatron"),
    "parallelism.gather_per_product": ("fsdp2",),
    "parallelism.pipeline": _PIPELINES,
    "parallelism.schedule": _PIPELINES,
    "parallelism.virtual_stages": ("ddp", "fsdp2", "megatron"),
    "parallelism.first_stage_less_layers": ("ddp", "fsdp2", "deepspeed"),
    "parallelism.last_stage_less_layers": ("ddp", "fsdp2", "deepspeed"),
    "parallelism.layers_per_stage": _PIPELINES,
    "parallelism.passes": _PIPELINES,
    "parallelism.context": _MODEL_PARALLEL,
    "parallelism.order": _MODEL_PARALLEL,
    "parallelism.expert": _MODEL_PARALLEL,
    "parallelism.expert_tensor": _MODEL_PARALLEL,
    "parallelism.dispatcher": _MODEL_PARALLEL,
    "parallelism.capacity_factor": ("deepspeed", "megatron"),
    "parallelism.expert_imbalance": _MODEL_PARALLEL,
    "parallelism.expert_padding": ("ddp", "fsdp1", "fsdp2", "reference"),
}


def frameworks_of(path: str) -> tuple[str, ...]:
    """The frameworks that read the key at `path`, or () where all do."""
    return READERS.get(path) or READERS.get(path.rpartition(".")[0], ())
