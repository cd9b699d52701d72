"""The settings that the page offers, as data: one `Field` per setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from zsim.errors import InputError
from zsim.specs.experiment.run.checkpoint import CheckpointMode
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.parallelism_table import ScheduleName

DEFAULT = "default"
KINDS = {
    "DeepSpeed ZeRO": "deepspeed", "FSDP2": "fsdp2", "FSDP1": "fsdp1", "DDP": "ddp", "Megatron": "megatron",
}  # fmt: skip
STAGE, OFFLOAD_STATES, OFFLOAD_PARAMETERS = "strategy.stage", "offload_optimizer", "offload_param"
TOKENS = "run.tokens"
_FSDP = ("fsdp1", "fsdp2")
_SPLIT = ("megatron", "fsdp2", "deepspeed")
_DEVICES = {"no": None, "host memory": "cpu", "NVMe": "nvme"}


@dataclass(frozen=True)
class Field:
    """One setting of the page."""

    key: str
    """The experiment's dotted key. DeepSpeed's two offload blocks have names instead."""
    label: str
    unit: str = ""
    choices: Mapping[str, Any] | None = None
    """Values by their label on the page. Without choices the field is a number, and an empty box leaves the
    value open.
    """
    kinds: tuple[str, ...] = ()
    """The strategies that have the setting (all when empty)."""
    stages: tuple[int, ...] = ()
    """The DeepSpeed stages that have the setting (all when empty)."""
    is_half: bool = False
    """Half as wide as the column."""
    scale: float = 1.0
    """The value that 1 on the page stands for."""

    @property
    def is_of_run(self) -> bool:
        """Whether it belongs to a complete run, and is displayed once there is one."""
        return self.key.startswith(("run.", "cost.")) and self.key != TOKENS

    def is_available(self, kind: str, stage: int) -> bool:
        """Whether the strategy has this setting."""
        return (not self.kinds or kind in self.kinds) and (not self.stages or stage in self.stages)

    @property
    def empty(self) -> Any:
        """The field's display when its value is left open."""
        return None if self.choices is None else next(iter(self.choices))

    def read(self, display: Any) -> Any:
        """The value of the field's display."""
        if self.choices is None:
            if display in (None, ""):
                return None
            return display if self.scale == 1 else display * self.scale
        if display not in self.choices:
            raise InputError(f"{self.key}: found {display!r}, expected one of {', '.join(self.choices)}")
        return self.choices[display]

    def show(self, value: Any) -> Any:
        """The display of a value that is among the choices."""
        if self.choices is None:
            return value if value is None or self.scale == 1 else round(value / self.scale, 9)
        return next(
            name for name, choice in self.choices.items() if choice == value and type(choice) is type(value)
        )

    def add_choice(self, value: Any) -> Field:
        """The field with `value` added to its choices."""
        if self.choices is None or any(
            choice == value and type(choice) is type(value) for choice in self.choices.values()
        ):
            return self
        if isinstance(value, ModelSpec):
            name = f"{value.function or value.name} (a torch module)"
        elif isinstance(value, Mapping):  # not the preset, although it may have the preset's name
            name = f"{value.get('_name_or_path', value.get('name', self.label))} (the experiment's own)"
        else:
            name = str(value)
        return replace(self, choices={**self.choices, name: value})


def _count(key: str, label: str, unit: str) -> Field:
    """A number of [parallelism]."""
    return Field(f"parallelism.{key}", label, unit, kinds=_SPLIT, is_half=True)


def _identity_choices(*names: str) -> dict[str, Any]:
    return {name: name for name in names}


def _optional_choices(*names: str) -> dict[str, Any]:
    return {DEFAULT: None, **_identity_choices(*names)}


TRAINING = (
    Field("training.sequence_length", "Sequence length", "tokens"),
    Field("training.micro_batch_size", "Micro-batch", "sequences per GPU", is_half=True),
    Field("training.gradient_accumulation_steps", "Accumulation", "micro-batches", is_half=True),
    Field(
        "training.activation_checkpointing", "Checkpointing", "of activations",
        choices=_identity_choices("none", "selective", "selective-op", "full"), is_half=True,
    ),
    Field(
        "training.precision", "Precision", "to compute in",
        choices=_optional_choices("bf16", "fp16", "fp32", "fp8"), is_half=True,
    ),
)  # fmt: skip

STRATEGY = (
    Field("strategy.kind", "Framework", choices=KINDS),
    Field(
        STAGE, "ZeRO stage", kinds=("deepspeed", "reference"),
        choices={
            "3: parameters too": 3, "2: gradients too": 2, "1: optimizer states": 1, "0: nothing sharded": 0,
        },
    ),
    Field(
        OFFLOAD_STATES, "Offload", "optimizer states", choices=_DEVICES, kinds=("deepspeed",), is_half=True,
    ),
    Field(
        OFFLOAD_PARAMETERS, "Offload", "parameters", choices=_DEVICES, kinds=("deepspeed",), stages=(3,),
        is_half=True,
    ),
    Field(
        "strategy.sharding_strategy", "Sharding", kinds=("fsdp1",),
        choices=_identity_choices(
            "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
        ),
    ),
    Field("strategy.replicate", "Replicas", "groups of HSDP", kinds=_FSDP, is_half=True),
    Field(
        "strategy.cpu_offload", "Offload", "to host memory", choices={"no": False, "yes": True}, kinds=_FSDP,
        is_half=True,
    ),
    Field(
        "strategy.wrapping", "Wrapping", "into units", kinds=_FSDP, is_half=True,
        choices=_optional_choices("torchtitan", "torchtitan-0.1", "huggingface", "none"),
    ),
    Field(
        "strategy.reshard_after_forward", "Reshard", "after forward", kinds=("fsdp2",), is_half=True,
        choices={DEFAULT: None, "yes": True, "no": False, "to groups of 4": 4, "to groups of 8": 8},
    ),
    Field("strategy.bucket_cap_mb", "Bucket", "MiB", kinds=("ddp",)),
    Field(
        "strategy.distributed_optimizer", "Optimizer", "states over the ranks", kinds=("megatron",),
        choices={"on every rank": False, "distributed": True},
    ),
    Field(
        "strategy.overlap_grad_reduce", "Reduction", "of gradients", kinds=("megatron",), is_half=True,
        choices={"after backward": False, "overlapped": True},
    ),
    Field(
        "strategy.overlap_param_gather", "Gather", "of parameters", kinds=("megatron",), is_half=True,
        choices={"after the update": False, "overlapped": True},
    ),
)  # fmt: skip

PARALLELISM = (
    _count("tensor", "Tensor", "ranks share products"),
    _count("pipeline", "Pipeline", "ranks share layers"),
    _count("context", "Context", "ranks share sequences"),
    _count("virtual_stages", "Virtual stages", "on each pipeline rank"),
    Field(
        "parallelism.sequence_parallel", "Sequence parallel", "norms, residuals", kinds=_SPLIT, is_half=True,
        choices={DEFAULT: None, "yes": True, "no": False},
    ),
    _count("expert", "Experts", "ranks share them"),
    _count("expert_tensor", "Expert tensor", "ranks share one"),
    Field(
        "parallelism.dispatcher", "Dispatcher", "of tokens", kinds=_SPLIT, is_half=True,
        choices=_optional_choices(*get_args(Dispatcher)),
    ),
    Field("parallelism.capacity_factor", "Capacity", "times the mean load", kinds=_SPLIT, is_half=True),
    Field(
        "parallelism.schedule", "Schedule", "of the pipeline", kinds=_SPLIT, is_half=True,
        choices=_optional_choices(*get_args(ScheduleName)),
    ),
)  # fmt: skip

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
        choices=_identity_choices(*get_args(CheckpointMode)),
    ),
    Field("run.recovery.spares", "Spares", "nodes that wait", is_half=True),
    Field("cost.gpu_hour_price", "Price", "of a GPU-hour", is_half=True),
)  # fmt: skip
