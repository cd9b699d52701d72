"""Tensor, pipeline and context parallelism: the `[parallelism]` table, and its resolution for a framework.

Whatever is left out, besides degrees, is the framework's own default. torchtitan has sequence parallelism on,
one layer less on the first and last stage, and gathers K and V for context parallelism (torchtitan v0.2.2
`config/job_config.py`, `distributed/pipeline_parallel.py`). Megatron-Core has sequence parallelism off, equal
stages, and a ring (core 0.16.1 `training/arguments.py`). DeepSpeed's sequence parallelism is Ulysses
(`deepspeed/sequence/layer.py` of 0.19.8), and its split is that of `split_balanced_layers`. nanotron runs
all forwards first (`config/parallelism_config.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from zsim.arrays import Ints
from zsim.errors import InputError, NotSimulatedError
from zsim.reading import read_user_file
from zsim.specs.model.spec import ContextMethod
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism_table import ParallelismTable, ScheduleName, split_balanced_layers
from zsim.specs.strategy.requirement import alternatives
from zsim.specs.strategy.style import ModelParallelStyle

PIPELINE, DATA, CONTEXT, TENSOR = "pipeline", "data", "context", "tensor"
EXPERT, EXPERT_TENSOR, EXPERT_DATA = "expert", "expert_tensor", "expert_data"


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 to n - 1 as a box."""

    axes: tuple[tuple[str, int], ...]
    """(name, size) from the slowest to the fastest, as torch's DeviceMesh has them. Along the last axis ranks
    are adjacent.
    """

    @property
    def world_size(self) -> int:
        return prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def _box(self) -> Ints:
        sizes = [size for _, size in self.axes]
        return np.arange(self.world_size, dtype=np.int64).reshape(sizes)

    def size(self, *axes: str) -> int:
        """Number of ranks along all the named axes."""
        return prod(size for name, size in self.axes if name in axes)

    def groups(self, *axes: str) -> Ints:
        """The ranks that differ in the named axes only, of shape [number of groups, ranks of a group].

        There is one row per group, in rank order within a row.
        """
        outer = [axis_index for axis_index, name in enumerate(self.names) if name not in axes]
        inner = [axis_index for axis_index, name in enumerate(self.names) if name in axes]
        return self._box.transpose([*outer, *inner]).reshape(-1, self.size(*axes))

    def coordinate(self, axis: str) -> Ints:
        """The coordinate of every rank along an axis, which may have several parts in the box."""
        assert axis in self.names, axis
        coordinates = np.zeros(self._box.shape, dtype=np.int64)
        for number, (name, size) in enumerate(self.axes):
            if name == axis:
                along = np.arange(size, dtype=np.int64)
                coordinates = coordinates * size + along.reshape([-1] + [1] * (len(self.axes) - number - 1))
        return coordinates.reshape(-1)


SINGLE_STAGE: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
V_SHAPED: tuple[ScheduleName, ...] = ("zbv-zero-bubble", "dualpipe-v")
_AXES = {"tp": TENSOR, "cp": CONTEXT, "dp": DATA, "pp": PIPELINE}
_ORDER = "tp-cp-dp-pp"  # fastest first, as Megatron's --use-tp-pp-dp-mapping has it with "tp-cp-pp-dp"


@dataclass(frozen=True, slots=True)
class ParallelismConfig:
    """`[parallelism]`, resolved: degrees, and how `style`, the framework, runs them."""

    tensor: int = 1
    sequence_parallel: bool = False
    async_tensor: bool = False
    overlap_tensor_reduce: bool = True
    gather_per_product: bool = False
    loss_parallel: bool = True
    pipeline: int = 1
    schedule: ScheduleName = "1f1b"
    schedule_csv: str = ""
    """The file of a schedule. Empty for the named schedule."""
    schedule_text: str = ""
    """The content of `schedule_csv`."""
    virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    """One number per virtual stage, in model order. Empty without a pipeline."""
    passes: int = 1
    context: int = 1
    context_method: ContextMethod = "p2p"
    context_inner: int = 1
    """The ranks of a context group that exchange heads with "a2a+p2p", which are those on one node."""
    context_masks: bool = False
    """torch's context parallelism is that of FlexAttention, for windows."""
    tensor_grain: int = 1
    """The number of features of which AutoTP's parts are multiples."""
    order: tuple[str, ...] = (PIPELINE, DATA, CONTEXT, TENSOR)
    """The axes of the mesh from the slowest to the fastest."""
    buffered_micro_batches: int = 0
    """The micro-batches of a step of which fewer are simulated: torch's stages keep a buffer for each. 0 if
    all are simulated.
    """
    style: ModelParallelStyle = field(default_factory=ModelParallelStyle)
    experts: ExpertSplit = field(default_factory=ExpertSplit)
    """The split of a mixture of experts."""

    @property
    def is_trivial(self) -> bool:
        """Whether data parallelism is the only kind."""
        return self.model_ranks == 1 and self.experts.members == 1

    @property
    def model_ranks(self) -> int:
        """Ranks that jointly train on one micro-batch."""
        return self.tensor * self.pipeline * self.context

    @property
    def fuses_projections(self) -> bool:
        """Whether projections of one input are one product."""
        fused = self.style.fused_projections
        return fused == "always" or (fused == "with tensor ranks" and self.tensor > 1)

    @property
    def has_dtensors(self) -> bool:
        """Whether the parameters of tensor-parallel ranks are torch's DTensors."""
        return self.style.has_dtensors and self.tensor > 1

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pipeline * self.virtual_stages

    @property
    def is_v_schedule(self) -> bool:
        """Whether the first pipeline rank holds the first and the last stage."""
        return self.schedule in V_SHAPED

    @property
    def token_shards(self) -> int:
        """The number of parts into which the tokens of the residual stream are cut."""
        return self.context * (self.tensor if self.sequence_parallel else 1)

    @property
    def ring_hops(self) -> int:
        """Parts of keys and values that attention goes through one after the other. It is 1 without a
        ring.
        """
        return self.context // self.context_inner if self.context_method in ("p2p", "a2a+p2p") else 1

    def mesh(self, world_size: int) -> Mesh:
        """All ranks. `world_size` is a multiple of `model_ranks`."""
        sizes = {
            TENSOR: self.tensor,
            CONTEXT: self.context,
            PIPELINE: self.pipeline,
            DATA: world_size // self.model_ranks,
        }
        return Mesh(tuple((axis, sizes[axis]) for axis in self.order))

    def expert_mesh(self, world_size: int) -> Mesh:
        """All ranks by routed experts.

        Experts' ranks take the place of those of tensor and context parallelism and of a part of data
        parallelism (the second generator of Megatron-Core 0.16.1 core/parallel_state.py, and torchtitan 0.2.2
        distributed/parallel_dims.py). With lanes, a group of experts has one tensor index, and ranks of all
        indices have the same experts (DeepSpeed 0.19.8 utils/groups.py `_create_expert_and_data_parallel`),
        unless they share an expert's products (`_create_expert_data_and_model_parallel`).
        """
        experts, members = self.experts, self.experts.members
        tensor = EXPERT_TENSOR, experts.tensor
        if experts.library.has_tensor_lanes and experts.tensor == 1:
            tensor, members = (EXPERT_DATA, self.tensor), members * self.tensor
        axes = {
            PIPELINE: (PIPELINE, self.pipeline),
            DATA: (EXPERT_DATA, world_size // (self.pipeline * members)),
            CONTEXT: (EXPERT, experts.ranks),
            TENSOR: tensor,
        }
        return Mesh(tuple(axes[axis] for axis in self.order))


def _nearest_degree(degrees: Mapping[str, int], world_size: int, num_layers: int) -> str:
    """The single degree whose smallest change, in proportion, makes the product divide the GPUs.

    A pipeline's must divide the layers. One of tensor and context is a power of two or divides the one asked
    for, since heads and sequences rarely divide by others.
    Where no single degree does, it is the nearest number of GPUs.
    """
    product = math.prod(degrees.values())
    candidates = [
        (max(replacement, degree) / min(replacement, degree), key, replacement)
        for key, degree in degrees.items()
        for replacement in range(1, world_size + 1)
        if degree > 1 and world_size % (product // degree * replacement) == 0
        if (
            num_layers % replacement == 0
            if key == "pipeline"
            else replacement.bit_count() == 1 or degree % replacement == 0
        )
    ]
    if not candidates:
        return f"the nearest number of GPUs is {max(1, round(world_size / product)) * product:,}"
    _, key, replacement = min(candidates)
    return f"{key} {replacement} would"


def resolve_parallelism(
    table: ParallelismTable,
    style: ModelParallelStyle,
    kind: str,
    world_size: int,
    num_layers: int,
    weights: Sequence[int] = (),
) -> ParallelismConfig:
    """The table resolved for a framework.

    `kind` is its name in an experiment. `weights` are the model's `layer_weights`, where a framework deals
    layers out by them.

    Raises InputError for degrees that do not divide the GPUs or the layers, and for what the framework
    refuses. Raises NotSimulatedError for what the framework has and zsim lacks.
    """
    degrees = {"tensor": table.tensor, "pipeline": table.pipeline, "context": table.context}
    if not style.splits_models:
        for key, degree in degrees.items():
            if degree > 1:
                raise NotSimulatedError(
                    f"parallelism.{key}: found {degree} with strategy '{kind}', whose data parallelism zsim "
                    f"simulates alone; expected {alternatives('parallelism of models')}"
                )
        return ParallelismConfig(style=style)
    model_ranks = table.tensor * table.pipeline * table.context
    if world_size % model_ranks:
        raise InputError(
            f"parallelism: {_product(degrees)} = {model_ranks:,} ranks share a model, but {model_ranks:,} "
            f"does not divide {world_size:,} GPUs; {_nearest_degree(degrees, world_size, num_layers)}"
        )
    parallelism = ParallelismConfig(
        tensor=table.tensor,
        sequence_parallel=_sequence_parallel(table, style),
        async_tensor=table.async_tensor,
        gather_per_product=table.gather_per_product,
        loss_parallel=table.loss_parallel,
        pipeline=table.pipeline,
        passes=table.passes,
        context=table.context,
        context_method=_context_method(table, style),
        order=_order(table.order),
        style=style,
    )
    if table.pipeline == 1:
        _refuse_pipeline_keys(table)
        return parallelism
    schedule, virtual_stages = _schedule(table, style)
    parallelism = replace(parallelism, schedule=schedule, virtual_stages=virtual_stages)
    if table.schedule_csv is not None:
        text = read_user_file(Path(table.schedule_csv)).decode(errors="replace")
        parallelism = replace(parallelism, schedule_csv=table.schedule_csv, schedule_text=text)
    split_keys = table.layers_per_stage, table.first_stage_less_layers, table.last_stage_less_layers
    if style.balances_stages and weights and split_keys == (None, None, None):
        layers = split_balanced_layers(weights, num_layers, table.pipeline, by_blocks=table.tensor > 1)
        return replace(parallelism, layers_per_stage=layers)
    return replace(parallelism, layers_per_stage=_stage_layers(table, parallelism, num_layers))


def _product(degrees: Mapping[str, int]) -> str:
    return " x ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)


def _sequence_parallel(table: ParallelismTable, style: ModelParallelStyle) -> bool:
    if table.sequence_parallel and not style.has_sequence_parallelism:
        raise InputError(
            f"parallelism.sequence_parallel: {style.title} has none; expected false, or context = "
            f"{table.tensor} for Ulysses"
        )
    requested = style.is_sequence_parallel if table.sequence_parallel is None else table.sequence_parallel
    return requested and table.tensor > 1


def _context_method(table: ParallelismTable, style: ModelParallelStyle) -> ContextMethod:
    methods = style.context_methods
    if table.context_method is None:
        return methods[0]
    if table.context_method not in methods:
        raise InputError(
            f"parallelism.context_method: {style.title} has no '{table.context_method}'; expected "
            f"{' or '.join(repr(method) for method in methods)}"
        )
    return table.context_method


def _order(text: str | None) -> tuple[str, ...]:
    names = (text or _ORDER).replace("ep-", "").replace("-ep", "").split("-")
    if sorted(names) != sorted(_AXES):
        raise InputError(
            f"parallelism.order: found '{text}', expected tp, cp, dp and pp in some order, the fastest "
            f"first, as in '{_ORDER}'"
        )
    return tuple(_AXES[name] for name in reversed(names))


def _refuse_pipeline_keys(table: ParallelismTable) -> None:
    keys = {
        "schedule": table.schedule,
        "schedule_csv": table.schedule_csv,
        "virtual_stages": None if table.virtual_stages == 1 else table.virtual_stages,
        "first_stage_less_layers": table.first_stage_less_layers,
        "last_stage_less_layers": table.last_stage_less_layers,
        "layers_per_stage": table.layers_per_stage,
    }
    for key, value in keys.items():
        if value is not None:
            raise InputError(f"parallelism.{key}: has no effect with pipeline = 1; expected pipeline above 1")


def _schedule(table: ParallelismTable, style: ModelParallelStyle) -> tuple[ScheduleName, int]:
    """The schedule and the virtual stages per pipeline rank."""
    virtual_stages, schedules = table.virtual_stages, style.schedules
    if table.schedule_csv is not None:
        if not style.reads_schedule_files:
            raise InputError(
                f"parallelism.schedule_csv: {style.title} reads none; expected "
                f"{alternatives('parallelism.schedule_csv')}"
            )
        return table.schedule or "interleaved-1f1b", virtual_stages or 1
    schedule = table.schedule or ("interleaved-1f1b" if (virtual_stages or 1) > 1 else style.schedule)
    if schedule not in schedules:
        raise InputError(
            f"parallelism.schedule: {style.title} has no '{schedule}'; expected "
            f"{' or '.join(repr(candidate) for candidate in schedules)}"
        )
    if schedule in SINGLE_STAGE:
        if (virtual_stages or 1) > 1:
            raise InputError(
                f"parallelism.virtual_stages: found {virtual_stages} with schedule '{schedule}', which has "
                "one stage per rank; expected 1, or schedule 'interleaved-1f1b'"
            )
        return schedule, 1
    if schedule in V_SHAPED and virtual_stages not in (None, 2):
        raise InputError(
            f"parallelism.virtual_stages: found {virtual_stages} with schedule '{schedule}', expected 2"
        )
    if virtual_stages == 1:
        raise InputError(
            f"parallelism.virtual_stages: found 1 with schedule '{schedule}', expected 2 or more"
        )
    return schedule, virtual_stages or 2


def _stage_layers(
    table: ParallelismTable, parallelism: ParallelismConfig, num_layers: int
) -> tuple[int, ...]:
    """Layers of every virtual stage.

    They are counted as by torchtitan's `generate_llm_fqn_per_model_part` (v0.2.2): the ends' missing layers
    are added, all are dealt out evenly, the remainder to the first stages, and the missing ones are taken off
    again. Megatron refuses a remainder. Both leave an end without layers that is dealt no more than it holds
    instead (Megatron-Core 0.16 `get_num_layers_to_build`), as Llama 3 405B was trained on 128 stages.
    """
    stages = parallelism.num_stages
    if table.layers_per_stage is not None:
        layers_per_stage = table.layers_per_stage
        if len(layers_per_stage) != stages or sum(layers_per_stage) != num_layers:
            raise InputError(
                f"parallelism.layers_per_stage: found {len(layers_per_stage)} stages of "
                f"{sum(layers_per_stage)} layers in all; expected {stages} numbers ({parallelism.pipeline} "
                f"pipeline ranks x {parallelism.virtual_stages} virtual stages) that add up to the model's "
                f"{num_layers} layers"
            )
        return layers_per_stage
    default = parallelism.style.missing_end_layers
    first = default if table.first_stage_less_layers is None else table.first_stage_less_layers
    last = default if table.last_stage_less_layers is None else table.last_stage_less_layers
    total = num_layers + first + last
    if total % stages and parallelism.style.has_equal_stages:
        hint = _nearest_split(num_layers, parallelism, first, last)
        raise InputError(
            f"parallelism.pipeline: {num_layers} layers{_describe_ends(first, last)} do not divide by "
            f"{stages} stages, which {parallelism.style.title} refuses; {hint}"
        )
    if not _can_shorten_ends(total // stages, first, last):
        fewer = range(stages - 1, 1, -1)
        max_stages = next((count for count in fewer if _can_split(count, total, parallelism, first, last)), 1)
        raise InputError(
            f"parallelism.pipeline: {num_layers} layers{_describe_ends(first, last)} are too few for "
            f"{stages} stages; expected at most {max_stages} stage{'s' if max_stages > 1 else ''}"
        )
    base_layers, remainder = divmod(total, stages)
    layers = [base_layers + (stage < remainder) for stage in range(stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def _can_shorten_ends(layers_per_stage: int, first: int, last: int) -> bool:
    """Whether the ends may lack so many of a stage's `layers_per_stage` layers.

    An end may hold the embedding, or the head, alone.
    """
    return layers_per_stage >= max(1, first, last)


def _can_split(stages: int, total: int, parallelism: ParallelismConfig, first: int, last: int) -> bool:
    """Whether the framework deals `total` layers, including the ends' missing ones, out to so many stages."""
    is_even = not parallelism.style.has_equal_stages or total % stages == 0
    return is_even and _can_shorten_ends(total // stages, first, last)


def _describe_ends(first: int, last: int) -> str:
    return f" (the first stage {first} less, the last {last} less)" if first or last else ""


_MOST_LESS = 2  # layers that a proposal takes off an end


def _nearest_split(layers: int, parallelism: ParallelismConfig, first: int, last: int) -> str:
    stages = parallelism.num_stages
    missing = -layers % stages
    for ends in ((0, 0), (1, 1), (0, 1), (1, 0), (missing // 2, missing - missing // 2)):
        if (
            max(ends) <= _MOST_LESS
            and ends != (first, last)
            and _can_split(stages, layers + sum(ends), parallelism, *ends)
        ):
            return f"they do with first_stage_less_layers = {ends[0]} and last_stage_less_layers = {ends[1]}"
    total = layers + first + last
    counts = [count for count in range(2, total + 1) if _can_split(count, total, parallelism, first, last)]
    nearest = min(counts, key=lambda count: abs(count - stages), default=1)
    return f"the nearest number of stages that divides them is {nearest}"
