"""The decisions of the search that frameworks have in common, as data, and those of each framework in order.

The structure decides where states are kept and how the batch is cut. Every combination is considered, except
for the loss, which is varied only for the best few and where memory requires it (`zsim.study.tune.search`).
Details are sizes and switches that improve a good structure slightly. They are refined one after the other.
What changes the numbers that training computes is decided apart, for the best of a search (`numerics` of
`FrameworkTuning`). A framework's own decisions stand in its folder.

The axis of model parallelism: degrees of tensor, pipeline, context and expert parallelism, virtual stages.

Degrees are powers of two (frameworks refuse others for nearly all models): tensor parallelism inside a node,
pipeline and context parallelism up to the number of nodes. A split of the layers that the framework refuses
is refused like any other contradiction. Megatron's stages may count the embedding and the loss as a layer
each. Schedules are all that the framework has for so many stages on a rank. Experts are whole, shared by the
ranks of a node, or by all ranks of a stage. Details of a good split are decided afterwards, one by one: the
order of the mesh, degrees of expert parallelism between these, the dispatcher, and stages of unequal layers.

# [Note: stages of equal work]
The head and its loss are products with the vocabulary, as long as some blocks. A pipeline is as slow as its
slowest stage, so the last one takes so many blocks less that all have the same FLOPs. Stages of 1F1B keep the
more micro-batches the earlier they are, so a layout with fewer blocks on the first stage is tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.programs import find_config_mapping
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.fp8 import recipes_of
from zsim.specs.model.expert_layer import num_experts
from zsim.specs.model.spec import Module
from zsim.specs.strategy.parallelism import SINGLE_STAGE, V_SHAPED
from zsim.specs.strategy.registry import kinds
from zsim.study.tune.framework import (
    ACCUMULATION,
    BLOCKS,
    CHECKPOINTING,
    EVERY,
    LOSS,
    MICRO_BATCH,
    PRECISION,
    RECIPE,
    RECOMPUTED,
    AxisChoice,
    Base,
    Chosen,
    TunedAxis,
    tuning_of,
)

TENSOR, PIPELINE, CONTEXT = "parallelism.tensor", "parallelism.pipeline", "parallelism.context"
VIRTUAL, SCHEDULE = "parallelism.virtual_stages", "parallelism.schedule"
SPLIT, ORDER = "parallelism.sequence_parallel", "parallelism.order"
FIRST, LAST = "parallelism.first_stage_less_layers", "parallelism.last_stage_less_layers"
LAYERS, EXPERT, EXPERT_TENSOR, DISPATCHER = (
    f"parallelism.{key}" for key in ("layers_per_stage", "expert", "expert_tensor", "dispatcher")
)
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
                    for expert in _expert_degrees(base, gpus // pipeline):
                        yield _choice(tensor, context, layers, expert)


def data_ranks(base: Base, chosen: Mapping[str, Any]) -> int:
    """Ranks over which data parallelism shards states, under the chosen degrees."""
    split = base.job.parallelism
    model_ranks: int = chosen.get(TENSOR, split.tensor) * chosen.get(PIPELINE, split.pipeline)
    return base.world_size // model_ranks


def replicas_of(base: Base, chosen: Mapping[str, Any]) -> int:
    """Replicas of the model under the chosen degrees."""
    context: int = chosen.get(CONTEXT, base.job.parallelism.context)
    return data_ranks(base, chosen) // context


def _expert_degrees(base: Base, ranks: int) -> list[int]:
    """Ranks of a stage that may share the experts: one, those of a node, or all that experts divide among."""
    most_ranks = max(power for power in _powers(ranks) if num_experts(base.job.model) % power == 0)
    return sorted({1, min(most_ranks, base.job.gpus_per_node), most_ranks})


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
                    yield {PIPELINE: pipeline, VIRTUAL: virtual, SCHEDULE: schedule, FIRST: ends, LAST: ends}
                break


def schedules_of(kind: str, virtual: int) -> list[str]:
    """The schedules of a strategy's framework for so many stages on a rank, its usual one first."""
    schedules = [name for name in tuning_of(kind).schedules if (virtual == 1) == (name in SINGLE_STAGE)]
    schedules = [name for name in schedules if virtual == 2 or name not in V_SHAPED]
    usual = "1f1b" if virtual == 1 else "interleaved-1f1b"
    return sorted(schedules, key=lambda name: name != usual)


def _choice(tensor: int, context: int, layers: Overrides, expert: int) -> tuple[str, Overrides]:
    overrides = {TENSOR: tensor, SPLIT: True if tensor > 1 else None, CONTEXT: context, **layers}
    overrides |= {EXPERT: expert, **({EXPERT_TENSOR: 1} if expert > 1 else {})}
    labels = [f"TP {tensor}"] if tensor > 1 else []
    labels += [f"CP {context}"] if context > 1 else []
    labels += [f"EP {expert}"] if expert > 1 else []
    if layers[PIPELINE] > 1:
        virtual, schedule = layers[VIRTUAL], layers[SCHEDULE]
        labels.append(f"PP {layers[PIPELINE]}" + (f" x {virtual} stages" if virtual > 1 else ""))
        labels += [] if schedule in ("1f1b", "interleaved-1f1b") else [schedule]
    return " ".join(labels) or "data parallel", overrides


def _experts(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Half and twice the ranks that share the experts, of the chosen degree."""
    split = base.job.parallelism
    degree = chosen.get(EXPERT, split.experts.members)
    experts, ranks = num_experts(base.job.model), base.world_size // chosen.get(PIPELINE, split.pipeline)
    if "parallelism" not in base.data or experts == 1:
        return
    for count in (degree // 2, degree * 2):
        if count >= 1 and experts % count == 0 and ranks % count == 0:
            yield AxisChoice(f"EP {count}", {EXPERT: count})


def _dispatchers(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The dispatchers that the framework has, where several ranks share the experts."""
    split = base.job.parallelism
    if chosen.get(EXPERT, split.experts.members) == 1:
        return
    for name in split.style.dispatchers:
        yield AxisChoice(f"dispatcher {name}", {DISPATCHER: name})


def _layouts(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Stages of unequal layers. See [Note: stages of equal work]."""
    split, model = base.job.parallelism, base.job.model
    pipeline, virtual = chosen.get(PIPELINE, split.pipeline), chosen.get(VIRTUAL, split.virtual_stages) or 1
    stages = pipeline * virtual
    if "parallelism" not in base.data or pipeline == 1 or len(model.blocks) <= stages:
        return
    head = _flops(base, model.after) / _flops(base, model.blocks[len(model.blocks) // 2].modules)
    for first in (0, 1):
        layers = even_layers(len(model.blocks), stages, first, head)
        yield AxisChoice(layers_label(layers), {LAYERS: layers, FIRST: None, LAST: None})


def _flops(base: Base, modules: Iterable[Module]) -> float:
    return sum(module.forward_flops(base.job.training.sequence_length) for module in modules)


def layers_label(layers: Sequence[int]) -> str:
    """E.g. "layers 11, 6 x 12, 10"."""
    runs = [(count, len(list(group))) for count, group in groupby(layers)]
    return "layers " + ", ".join(str(count) if times == 1 else f"{times} x {count}" for count, times in runs)


def even_layers(layers: int, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, as equal as whole ones allow, where the first and the last stage have more work,
    worth so many layers. Remainders go to the stages after the first, which keep fewer micro-batches.
    """
    share = (layers + first + last) / stages
    ends = [max(0, round(share - first)), max(0, round(share - last))]
    if stages < 3:
        return (layers - ends[1], ends[1]) if stages == 2 else (layers,)
    size, more = divmod(layers - sum(ends), stages - 2)
    return (ends[0], *(size + (number < more) for number in range(stages - 2)), ends[1])


EXPERTS = TunedAxis("experts", _experts, changes_kernels=True)
DISPATCHERS = TunedAxis("dispatcher", _dispatchers, changes_kernels=True)
LAYOUTS = TunedAxis("layers", _layouts, changes_kernels=True)


# what a key of [parallelism] means where it is left out
_UNSET = {
    "parallelism.virtual_stages": 1,
    "parallelism.schedule": "1f1b",
    "parallelism.sequence_parallel": False,
    "parallelism.first_stage_less_layers": 0,
    "parallelism.last_stage_less_layers": 0,
}
_UNRESOLVED = (*RECOMPUTED, RECIPE)  # keys of [training] that a job has in another form
_RESOLVED = ("virtual_stages", "schedule", "sequence_parallel")


def base_of(experiment: Experiment, simulator: Simulator | None = None) -> Base:
    """The experiment as a base, its batch sizes moved to [training]. `simulator` has read some files already.

    Raises InputError and NotSimulatedError as `resolve` does.
    """
    job = resolve(experiment) if simulator is None else simulator.job(experiment)
    data = _open_settings(experiment, job)
    steps = job.training.gradient_accumulation_steps
    return Base(data, job, job.training.micro_batch_size * steps)


def resize_base(base: Base, nodes: int, gpus: int) -> Base:
    """The base with the same global batch on another number of GPUs. Raises InputError if the GPUs do not
    divide the batch.
    """
    total, model_ranks = base.batch_sequences, base.job.parallelism.model_ranks
    if gpus % model_ranks or total % (gpus // model_ranks):
        raise InputError(f"gpus: {total} sequences per step do not divide among {gpus} GPUs")
    per_rank = total // (gpus // model_ranks)
    training = {**base.data["training"], "micro_batch_size": 1, "gradient_accumulation_steps": per_rank}
    data = {**base.data, "nodes": nodes, "gpus": gpus, "training": training}
    return Base(data, resolve(build_experiment(data, {}, origin="tune")), per_rank)


def change_kind(base: Base, kind: str, simulator: Simulator | None = None) -> Base:
    """The base with another kind of strategy, at its defaults, for the same training. `simulator` is as in
    `base_of`.
    """
    if kind == base.kind:
        return base
    strategy = {"kind": kind, **tuning_of(kind).start}
    training = base.job.training
    training_keys = {"precision": training.precision, "gradient_clipping": training.gradient_clipping}
    data = {**base.data, "training": {**base.data["training"], **training_keys}, "strategy": strategy}
    return base_of(build_experiment(data, {}, origin="tune"), simulator)


def _open_settings(experiment: Experiment, job: Job) -> dict[str, Any]:
    data = experiment.model_dump(exclude_defaults=True)
    data.pop("run", None)  # of days, beside the step that is searched
    training = dict(data.get("training", {}))
    training["micro_batch_size"] = job.training.micro_batch_size
    training["gradient_accumulation_steps"] = job.training.gradient_accumulation_steps
    if job.sequences is None:
        training.pop("global_batch_size", None)  # the same as the two, which a search may change
    strategy = {"kind": job.kind, **data.get("strategy", {})}
    opened = {**data, "training": training, "strategy": strategy}
    return tuning_of(job.kind).open_settings(experiment.strategy, job, opened)


def value_of(base: Base, overrides: Mapping[str, Any], key: str) -> Any:
    """The effective value of a dotted key: from `overrides`, else from the base's data, else the default."""
    tuning = tuning_of(base.kind)
    if key in overrides:
        return _comparable(base, key, overrides[key])
    value: Any = base.data
    *parents, last = key.split(".")
    for parent in parents:
        value = value.get(parent) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        for spelling in tuning.spellings(last):
            if spelling in value and value[spelling] != "auto":
                return _comparable(base, key, value[spelling])
    job = base.job
    if parents[:2] == ["training", "lora"]:
        return getattr(job.experiment.training.lora, last, None)
    if parents[:1] == ["training"]:
        return getattr(job.experiment.training if key in _UNRESOLVED else job.training, last)
    if parents[:1] == ["parallelism"]:
        setting = getattr(job.experiment.parallelism, last)
        return (
            getattr(job.parallelism, last)
            if setting is None and last in _RESOLVED
            else _comparable(base, key, setting)
        )
    return _comparable(base, key, tuning.resolved_value(job, key))


def is_current(base: Base, key: str, value: Any) -> bool:
    """Whether a dotted key has this value in the base. Offloads to one device are alike."""
    return bool(_comparable(base, key, value) == value_of(base, {}, key))


def _comparable(base: Base, key: str, value: Any) -> Any:
    """The value in comparable form."""
    if value is None and key in _UNSET:
        return _UNSET[key]
    return tuning_of(base.kind).comparable(key, value)


_MAX_MICRO_BATCHES = 512
COARSE_TOKENS = 8192  # of a coarse search's larger micro-batch: products of so many rows are near their best
COMPILE = "training.compile"


def divisors(count: int) -> list[int]:
    small = [number for number in range(1, int(count**0.5) + 1) if count % number == 0]
    return sorted({*small, *(count // number for number in small)})


def _micro_batches(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Every division of a replica's sequences into equal micro-batches."""
    sequences = base.batch_sequences // replicas_of(base, chosen)
    length = base.job.training.sequence_length
    sizes = [size for size in divisors(sequences) if sequences // size <= _MAX_MICRO_BATCHES]
    largest = max((size for size in sizes if size * length <= COARSE_TOKENS), default=0)
    for size in sizes:
        yield micro_batch_choice(size, sequences // size, is_coarse=size in (sizes[0], largest))


def micro_batch_choice(size: int, steps: int, *, is_coarse: bool = True) -> AxisChoice:
    """The choice of `steps` micro-batches of `size` sequences."""
    suffix = f" x {steps}" if steps > 1 else ""
    return AxisChoice(f"micro-batch {size}{suffix}", {MICRO_BATCH: size, ACCUMULATION: steps}, is_coarse)


def _checkpointings(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """No checkpointing, whole blocks, every second block, and a form in between: selective by op where
    attention is one op whose output can be saved, else the core of attention alone."""
    intermediate = "selective" if base.job.training.attention == "math" else "selective-op"
    reset: dict[str, Any] = {BLOCKS: {}} if base.job.training.block_checkpointing else {}
    names = ("none", intermediate, "full")
    forms = [AxisChoice(f"checkpointing {name}", {CHECKPOINTING: name, EVERY: 1, **reset}) for name in names]
    second = {CHECKPOINTING: "full", EVERY: 2, **reset}
    forms.insert(-1, AxisChoice("checkpointing every 2nd block", second, is_coarse=False))
    return forms


def _losses(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The configured loss, one that is one kernel, and one that never holds all logits. Where the program
    casts the logits before every loss, as transformers does, the one kernel is Liger's on the cast copy.
    """
    configured = base.job.training.cross_entropy
    has_fused = find_config_mapping(base.program, base.kind, LOSS, "fused") is not None
    for name in dict.fromkeys((configured, "fused" if has_fused else "liger", "fused_linear")):
        is_first, is_least = name == configured, name == "fused_linear"
        label = "" if is_first else f"cross entropy {name}"
        yield AxisChoice(label, {LOSS: name}, is_coarse=is_first or is_least)


def _compilations(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Blocks as they are, and compiled. A loss that stays is said, since its default depends on it."""
    loss = {} if LOSS in chosen else {LOSS: base.job.training.cross_entropy}
    return [AxisChoice("", {COMPILE: False, **loss}), AxisChoice("compiled", {COMPILE: True, **loss})]


def _recipes(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The recipes of 8 bits or fewer that the framework has on the GPUs, but for the job's own."""
    experiment, training = base.job.experiment, base.job.training
    job_recipe = training.fp8.recipe if training.precision == "fp8" else None
    for recipe in recipes_of(experiment.training, experiment.strategy, base.job.cluster.gpus):
        if recipe != job_recipe:
            yield AxisChoice(f"precision {recipe}", {PRECISION: "fp8", RECIPE: recipe})


def _degrees(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Degrees of the experiments that have a `[parallelism]` table, or are asked to search it."""
    splits = degrees(base) if "parallelism" in base.data else []
    return [AxisChoice(label, overrides) for label, overrides in splits]


PARALLELISM = TunedAxis("parallelism", _degrees)
CHECKPOINTINGS = TunedAxis("checkpointing", _checkpointings)
LOSSES = TunedAxis("cross-entropy", _losses, changes_kernels=True)
COMPILATIONS = TunedAxis("compile", _compilations, changes_kernels=True)
RECIPES = TunedAxis("precision", _recipes, changes_kernels=True)
MICRO_BATCHES = TunedAxis("micro-batch", _micro_batches)


def choices_of(axis: TunedAxis, base: Base, chosen: Chosen) -> list[AxisChoice]:
    """The choices of an axis.

    Those that the configuration of the experiment's program cannot express are left out, unless the
    configuration has them already.
    """
    return [choice for choice in axis.choices(base, chosen) if _is_expressible(base, choice)]


def coarse_choices(base: Base, axes: Iterable[TunedAxis]) -> dict[str, list[AxisChoice]]:
    """The choices of a coarse search on each of the axes, from the least to the most."""
    return {axis.name: [choice for choice in choices_of(axis, base, {}) if choice.is_coarse] for axis in axes}


def _is_expressible(base: Base, choice: AxisChoice) -> bool:
    return all(
        find_config_mapping(base.program, base.kind, key, value) is not None
        or value == value_of(base, {}, key)
        for key, value in choice.overrides.items()
    )


def axis_names() -> set[str]:
    """The names of all decisions on structure and details, of all frameworks."""
    tunings = [tuning_of(kind) for kind in kinds()]
    return {
        axis.name for tuning in tunings for axis in (*tuning.structure, *tuning.details, *tuning.numerics)
    }


@dataclass(frozen=True)
class Candidate:
    """One configuration: the choice on each axis."""

    base: Base
    choices: Mapping[str, AxisChoice]
    number: int
    """The position in the space."""

    @property
    def overrides(self) -> dict[str, Any]:
        return {key: value for choice in self.choices.values() for key, value in choice.overrides.items()}

    def key(self, without: Collection[str] = ()) -> str:
        """A key shared by candidates of one base that set the same, but for the keys `without`."""
        overrides = sorted((key, str(value)) for key, value in self.overrides.items() if key not in without)
        return f"{self.base.key} {overrides}"

    def experiment(self) -> Experiment:
        """The candidate as an experiment. Raises InputError where the choices contradict the rest."""
        return self.base.experiment(self.overrides)

    def replace_choice(self, axis: str, choice: AxisChoice, number: int) -> Candidate:
        return Candidate(self.base, {**self.choices, axis: choice}, number)

    @property
    def label(self) -> str:
        """A label, e.g. "ZeRO-3, micro-batch 2, checkpointing full"."""
        labels = [tuning_of(self.base.kind).label, *(choice.label for choice in self.choices.values())]
        return ", ".join(label for label in labels if label)


def structure_of(kind: str) -> Sequence[TunedAxis]:
    """The decisions on where states are kept and how the batch is cut."""
    return tuning_of(kind).structure


def candidates(
    bases: Sequence[Base],
    axes_of: Callable[[str], Sequence[TunedAxis]] = structure_of,
    keep: Sequence[str] = (),
) -> list[Candidate]:
    """The whole space, with the last axis varying fastest. Axes named in `keep` stay at the base's values.

    `axes_of` says the axes of a kind of strategy.
    """
    space: list[Candidate] = []
    for base in bases:
        axes = [axis for axis in axes_of(base.kind) if axis.name not in keep]
        for choices in _combinations(base, axes, {}, {}):
            space.append(Candidate(base, choices, len(space)))
    return space


def _combinations(
    base: Base, axes: Sequence[TunedAxis], choices: dict[str, AxisChoice], chosen: dict[str, Any]
) -> Iterator[dict[str, AxisChoice]]:
    if not axes:
        yield choices
        return
    axis, *other_axes = axes
    options = choices_of(axis, base, chosen)
    if not options:
        yield from _combinations(base, other_axes, choices, chosen)
    for option in options:
        yield from _combinations(
            base, other_axes, {**choices, axis.name: option}, {**chosen, **option.overrides}
        )
