"""A setting that the page offers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel

from zsim.errors import InputError, expected_text
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.run.checkpoint import CheckpointMode
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import Dispatcher
from zsim.specs.strategy.optimizers import OPTIMIZERS
from zsim.specs.strategy.parallelism_table import ScheduleName
from zsim.specs.strategy.registry import kinds, kinds_in_order, role_of
from zsim.specs.strategy.training import CheckpointOffload

DEFAULT = "default"
STAGE, TOKENS = "strategy.stage", "run.tokens"


@dataclass(frozen=True)
class Field:
    """One setting of the page."""

    key: str
    """The experiment's dotted key, or a name for what the framework writes in another form."""
    label: str
    unit: str = ""
    choices: Mapping[str, Any] | None = None
    """Values by their label on the page. Without choices the field is a number, and an empty box leaves the
    value open.
    """
    other_names: Mapping[str, Sequence[str]] | None = None
    """Further names of a choice, by which typing in the list finds it."""
    kinds: tuple[str, ...] = ()
    """The strategies that have the setting (all when empty)."""
    stages: tuple[int, ...] = ()
    """The stages that have the setting (all when empty)."""
    is_half: bool = False
    """Half as wide as the column."""
    scale: float = 1.0
    """The value that 1 on the page stands for."""
    opens: str = ""
    """The table that this number asks for. An empty box leaves the table out and hides its other fields."""
    sentence: str = ""
    """What the setting means, as its declaration says."""

    def options(self) -> list[dict[str, str]]:
        """The choices as a list of the page has them, each with the text that is searched."""
        others = self.other_names or {}
        return [
            {"label": name, "value": name, "search": " ".join((name, *others.get(name, ())))}
            for name in self.choices or ()
        ]

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
            name = str(display or "")
            raise InputError(f"{self.key}: unknown '{name}'{expected_text(name, self.choices)}")
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
        elif isinstance(value, list | tuple):
            name = ", ".join(map(str, value))
        else:
            name = str(value)
        return replace(self, choices={**self.choices, name: value})


def identity_choices(*names: str) -> dict[str, Any]:
    """Choices whose labels are their values."""
    return {name: name for name in names}


def optional_choices(*names: str) -> dict[str, Any]:
    """The same, with one that leaves the value open."""
    return {DEFAULT: None, **identity_choices(*names)}


def declared_field(table: type[BaseModel], key: str, label: str, unit: str = "", **changes: Any) -> Field:
    """The field of a key as its `table` declares it: its sentence, and its choices where it has some.

    A flag is "no" or "yes". A choice that may be left open is so at first, and one that may not is at its
    default. A key of another type is a number, unless `changes` has choices.
    """
    declaration = table.model_fields[key.rpartition(".")[2]]
    choices = _declared_choices(declaration.annotation, declaration.default)
    return Field(
        key, label, unit, **{"choices": choices, "sentence": declaration.description or "", **changes}
    )


def _declared_choices(annotation: Any, default: Any) -> dict[str, Any] | None:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if bool in kinds:
        choices: dict[str, Any] = {"no": False, "yes": True}
    elif values:
        choices = identity_choices(*values)
    else:
        return None
    if NoneType in kinds:
        return {DEFAULT: None, **choices}
    return dict(sorted(choices.items(), key=lambda choice: choice[1] != default))


# -- The questions that a framework answers for the page ---------------------------------------------------


@dataclass(frozen=True)
class FrameworkFields:
    """A framework's settings on the page.

    `FIELDS` in the module of a framework's role `fields`. The answers here are those of a framework without
    anything special.
    """

    label: str = ""
    """Its name in the page's list of frameworks, which it is not in without one."""
    position: int = 0
    """Its place in that list."""
    fields: tuple[Field, ...] = ()
    """Its settings of `[strategy]`."""
    has_degrees: bool = False
    """Whether the degrees of model parallelism are among its settings."""
    reads_bare_files: bool = False
    """Whether a file that is no program's is taken for its own."""

    def values(self, job: Job) -> Iterable[tuple[str, Any]]:
        """The values of fields that are no keys of `[strategy]`, by key."""
        return ()

    def translate(
        self, data: Mapping[str, Any], changes: Mapping[str, Any], job_with: Callable[[Any], Job]
    ) -> dict[str, Any]:
        """`changes` of fields under the keys that the file-shaped `data` of an experiment has for them.

        `job_with` is the job with some changes.
        """
        return dict(changes)

    def shown(self, key: str, value: Any) -> tuple[str, Any]:
        """The key of the field that shows a dotted key, and its value there."""
        return key, value

    def shown_keys(self) -> frozenset[str]:
        """Dotted keys of `[strategy]` that fields show under other keys."""
        return frozenset()

    def unstated_settings(self, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        """Settings of a file that says `values` and leaves them out, where the page has them otherwise."""
        return ()


def fields_of(kind: str) -> FrameworkFields:
    """The settings of the framework of a kind on the page."""
    return cast(FrameworkFields, role_of(kind, "fields", "FIELDS", FrameworkFields()))


def kind_of_bare_files() -> str:
    """The kind of strategy that a file is of which no program recognises."""
    return next(kind for kind in kinds() if fields_of(kind).reads_bare_files)


# -- The settings that the page offers, as data: one `Field` per setting -----------------------------------


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
