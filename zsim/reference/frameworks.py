"""Which frameworks read a key of the experiment file, where not all do; the others refuse it by name.

`tests/reference/test_frameworks.py` asks every framework for every key.
"""

from __future__ import annotations

from collections.abc import Mapping

_DENSE = ("fsdp2", "deepspeed", "megatron")
_PIPELINES = ("ddp", "fsdp2", "deepspeed", "megatron")
_EXPERTS = ("fsdp2", "megatron")
_TRAINERS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")

# Path of a key, or of a table for all keys in it -> kinds of `[strategy]`.
READERS: Mapping[str, tuple[str, ...]] = {
    "training.lora": _TRAINERS,
    "training.frozen": _TRAINERS,
    "training.frozen_dtype": _TRAINERS,
    "training.autocast": ("fsdp1",),
    "training.stored_dtype": ("ddp", "fsdp1"),
    "parallelism.tensor": _DENSE,
    "parallelism.sequence_parallel": _DENSE,
    "parallelism.async_tensor": _EXPERTS,
    "parallelism.pipeline": _PIPELINES,
    "parallelism.schedule": _PIPELINES,
    "parallelism.virtual_stages": ("ddp", "fsdp2", "megatron"),
    "parallelism.first_stage_less_layers": ("ddp", "fsdp2", "deepspeed"),
    "parallelism.last_stage_less_layers": ("ddp", "fsdp2", "deepspeed"),
    "parallelism.layers_per_stage": _PIPELINES,
    "parallelism.passes": _PIPELINES,
    "parallelism.context": _DENSE,
    "parallelism.order": _DENSE,
    "parallelism.expert": _EXPERTS,
    "parallelism.expert_tensor": _EXPERTS,
    "parallelism.dispatcher": _EXPERTS,
    "parallelism.capacity_factor": ("megatron",),
    "parallelism.expert_imbalance": _EXPERTS,
}


def frameworks_of(path: str) -> tuple[str, ...]:
    """The frameworks that read the key at `path`; () where all do."""
    return READERS.get(path) or READERS.get(path.rpartition(".")[0], ())
