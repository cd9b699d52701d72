"""The settings that the page offers, as data: one `Field` per setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from zsim.specs.experiment.run.checkpoint import CheckpointMode
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.optimizers import OPTIMIZERS
from zsim.specs.strategy.parallelism_table import ScheduleName
from zsim.specs.strategy.registry import kinds, kinds_in_order
from zsim.specs.strategy.training import CheckpointOffload
from zsim.ui.field import (
    DEFAULT,
    TOKENS,
    Field,
    declared_field,
    fields_of,
    identity_choices,
    optional_choices,
)

KIND, LORA = "strategy.kind", "training.lora"
_OFFLOADED_CHECKPOINTS = {"no": None, **identity_choices(*get_args(CheckpointOffload))}


def _count(key: str, label: str, unit: str) -> Field:
    """A number of [parallelism]."""
    return Field(f"parallelism.{key}", label, unit, is_half=True)


def _training(key: str, label: str, unit: str, **changes: Any) -> Field:
    """A key of [training]."""
    return declared_field(TrainingTable, f"training.{key}", label, unit, **{"is_half": True, **changes})


def _adapters(key: str, label: str, unit: str, **changes: Any) -> Field:
    """A key of [training.lora]."""
    return declared_field(LoraTable, f"{LORA}.{key}", label, unit, **{"is_half": True, **changes})


TRAINING = (
    _training("sequence_length", "Sequence length", "tokens", is_half=False),
    _training("micro_batch_size", "Micro-batch", "sequences per GPU"),
    _training("gradient_accumulation_steps", "Accumulation", "micro-batches"),
    _training("activation_checkpointing", "Checkpointing", "of activations"),
    _training("checkpoint_offload", "Checkpoints", "in host memory", choices=_OFFLOADED_CHECKPOINTS),
    _training("precision", "Precision", "to compute in"),
    _training("optimizer", "Optimizer", "by name", choices=identity_choices(*OPTIMIZERS)),
    _training("cross_entropy", "Loss", "whose kernels"),
    _training("attention", "Attention", "whose kernels"),
    _training("compile", "Compile", "torch.compile"),
    _training("liger", "Liger", "fused kernels"),
)

ADAPTERS = (
    _adapters("rank", "LoRA rank", "empty: no adapters", opens=LORA),
    _adapters("targets", "Targets", "of adapters", choices=optional_choices("all-linear")),
    _adapters("quantized", "Quantisation", "of frozen weights", choices={"none": None, "nf4 (QLoRA)": "nf4"}),
)

RUN = (
    Field(TOKENS, "Tokens", "billions, to train on", scale=1e9),
    Field(
        "run.checkpoint.every", "Saves", "how often", is_half=True,
        choices={
            "best": "auto", "every 10 min": "10 min", "every 30 min": "30 min", "every 1 h": "1 h",
            "every 4 h": "4 h",
        },
    ),
    Field(
        "run.checkpoint.mode", "Save mode", "what training waits for", is_half=True,
        choices=identity_choices(*get_args(CheckpointMode)),
    ),
    Field("run.recovery.spares", "Spares", "nodes that wait", is_half=True),
    Field("cost.gpu_hour_price", "Price", "of a GPU-hour", is_half=True),
)  # fmt: skip

_DEGREES = (
    _count("tensor", "Tensor", "ranks share products"),
    _count("pipeline", "Pipeline", "ranks share layers"),
    _count("context", "Context", "ranks share sequences"),
    _count("virtual_stages", "Virtual stages", "on each pipeline rank"),
    Field(
        "parallelism.sequence_parallel", "Sequence parallel", "norms, residuals", is_half=True,
        choices={DEFAULT: None, "yes": True, "no": False},
    ),
    _count("expert", "Experts", "ranks share them"),
    _count("expert_tensor", "Expert tensor", "ranks share one"),
    Field(
        "parallelism.dispatcher", "Dispatcher", "of tokens", is_half=True,
        choices=optional_choices(*get_args(Dispatcher)),
    ),
    Field("parallelism.capacity_factor", "Capacity", "times the mean load", is_half=True),
    Field(
        "parallelism.schedule", "Schedule", "of the pipeline", is_half=True,
        choices=optional_choices(*get_args(ScheduleName)),
    ),
)  # fmt: skip


def strategy_fields() -> tuple[Field, ...]:
    """The fields of `[strategy]`. One that several frameworks have is there once."""
    frameworks = sorted((fields_of(kind).position, kind) for kind in kinds() if fields_of(kind).label)
    fields = {KIND: Field(KIND, "Framework", choices={fields_of(kind).label: kind for _, kind in frameworks})}
    for kind in kinds_in_order():
        for field in fields_of(kind).fields:
            merged = fields.get(field.key, field)
            fields[field.key] = replace(merged, kinds=(*merged.kinds, kind))
    return tuple(fields.values())


def degree_fields() -> tuple[Field, ...]:
    """The fields of `[parallelism]`."""
    with_degrees = tuple(kind for kind in kinds() if fields_of(kind).has_degrees)
    return tuple(replace(field, kinds=with_degrees) for field in _DEGREES)
