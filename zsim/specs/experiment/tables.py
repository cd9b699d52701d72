"""The tables of an experiment: which model, on which cluster, trained how.

`Experiment` has the shape of the file that people write. `resolve` (zsim.specs.experiment.resolve) looks
every name up and fills every default in.

`[trainer]` of an experiment: effects of the training loop and of its model code on the step.

[trainer]
metrics_per_micro_batch = 2        # composer: LanguageCrossEntropy and Perplexity, after each backward
holds_logits = "as they are"       # the logits stay referenced through backward
unpads_attention = true            # flash-attn 0.2's FlashMHA with a padding mask
reads_sequence_lengths = true      # the host asks the GPU before every attention
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from zsim.errors import InputError, NotSimulatedError, did_you_mean, expected_text
from zsim.specs.experiment.data.loading import DataTable
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.jitter import JitterTable
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.formats.detect import is_training_file, merge_training_file
from zsim.specs.key_index import nearest_key
from zsim.specs.lazy_model import Lazy, LazyKinds, LazyModel, StrictTable
from zsim.specs.messages import format_problems, mark_misplaced_booleans, problems_of
from zsim.specs.model.spec import Attention, Loss, ModelSpec, Module
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.registry import STRATEGIES, default_kind, is_strategy, meant_strategies
from zsim.specs.strategy.table import Count, StrategyTable
from zsim.specs.user_code import UserCode, load_user_models, unreadable_names
from zsim.units import Tokens, Watts

_Metrics = Annotated[int, Field(ge=0, le=100, strict=True)]


class TrainerTable(StrictTable):
    """`[trainer]`. Referenced logits stay until those of the next micro-batch replace them."""

    metrics_per_micro_batch: _Metrics = Field(
        default=0,
        description="extra computations of the loss per micro-batch, for logging",
    )
    holds_logits: Literal["no", "as they are", "in fp32"] = Field(
        default="no",
        description="held during backward: nothing, the logits, or their fp32 copy",
    )
    unpads_attention: bool = Field(
        default=False,
        description="attention gathers q, k, v by a padding mask",
    )
    reads_sequence_lengths: bool = Field(
        default=False,
        description="the host waits for the GPU before every attention",
    )

    @model_validator(mode="after")
    def _metrics_have_logits(self) -> Self:
        if self.metrics_per_micro_batch and self.holds_logits == "no":
            raise ValueError(
                f"metrics_per_micro_batch: found {self.metrics_per_micro_batch}, but the logits that they "
                "need are released before backward; expected holds_logits = 'as they are' or 'in fp32'"
            )
        return self


def apply_trainer(model: ModelSpec, table: TrainerTable) -> ModelSpec:
    """The model with the loss and attention that the trainer runs."""
    if table == TrainerTable.model_construct():
        return model
    loss = {"num_metrics": table.metrics_per_micro_batch, "holds_logits": table.holds_logits}
    attention = {"unpads": table.unpads_attention, "host_waits": table.reads_sequence_lengths}
    blocks = (
        replace(block, modules=_replace_op_specs(block.modules, Attention, attention))
        for block in model.blocks
    )
    return replace(model, after=_replace_op_specs(model.after, Loss, loss), blocks=tuple(blocks))


def _replace_op_specs(
    modules: tuple[Module, ...], kind: type[Any], changes: dict[str, Any]
) -> tuple[Module, ...]:
    return tuple(
        replace(module, op_spec=replace(module.op_spec, **changes))
        if isinstance(module.op_spec, kind)
        else module
        for module in modules
    )


def _whole(value: float) -> float:
    """Raises ValueError for a part of a sequence."""
    if value != int(value):
        raise ValueError(f"found {value:g}, expected a whole number")
    return value


class CostTable(StrictTable):
    """`[cost]`: prices and power."""

    gpu_hour_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="money per GPU and hour; left out: no bill"
    )
    currency: str = Field(default="USD", description="the money's name")
    tokens: Annotated[Tokens, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="tokens to train on; left out: the bill is of one step",
    )
    samples: Annotated[Tokens, Field(ge=1, allow_inf_nan=False), AfterValidator(_whole)] | None = Field(
        default=None,
        description="rows of the data set, of `training.sequences_per_sample` sequences each; left out: "
        "`tokens`",
    )
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=1.0, description="how often `tokens` or `samples` are trained on"
    )
    pue: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="power usage effectiveness: energy at the meter over energy at the servers",
    )
    node_power: Watts = Field(default=0.0, description="what a node draws besides its GPUs")

    @model_validator(mode="after")
    def _check_length(self) -> CostTable:
        """Raises ValueError for two lengths of one run, and for epochs without a length."""
        if self.tokens is not None and self.samples is not None:
            raise ValueError("found both tokens and samples; expected one of them")
        if "epochs" in self.model_fields_set and self.tokens is None and self.samples is None:
            raise ValueError("found epochs of no data set; expected tokens or samples beside them")
        return self

    def scale_samples(self, sequences_per_sample: int) -> CostTable:
        """The same run, with its samples counted in sequences."""
        if self.samples is None or sequences_per_sample == 1:
            return self
        return self.model_copy(update={"samples": self.samples * sequences_per_sample})

    @property
    def given_tokens(self) -> float | None:
        """Tokens of all epochs. None where `tokens` are not given."""
        return None if self.tokens is None else self.tokens * self.epochs

    def run_tokens(self, tokens_per_sequence: float) -> float | None:
        """Tokens of all epochs, of sequences of so many tokens. None where neither tokens nor samples are
        given.
        """
        return self.given_tokens if self.samples is None else self.samples * self.epochs * tokens_per_sequence


if TYPE_CHECKING:
    from zsim.specs.experiment.rl import RlTable as _RlTable
    from zsim.specs.experiment.run.run import TrainingRunTable as _RunTable
else:
    _RlTable = Annotated[Any, LazyModel("zsim.specs.experiment.rl:RlTable")]
    _RunTable = Annotated[Any, LazyModel("zsim.specs.experiment.run.run:TrainingRunTable")]


class _InstanceSchema:
    """Annotation of an object that no file spells. pydantic's `InstanceOf` describes all its fields too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: object) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(source)


_Model = Annotated[
    ModelSpec, _InstanceSchema(), PlainSerializer(lambda model: model), WithJsonSchema({"type": "object"})
]


class SimulationTable(StrictTable):
    """`[simulation]`.

    Where not every micro-batch is simulated and torch's allocator runs short, eight are simulated, and the
    others are assumed to equal their mean. A job that is not known to fit also needs
    `framework_memory.allocator_margin` free before the allocator is simulated, and so does one that is known
    to fit with expandable segments, which leave no gaps: that it ran says that its tensors are overestimated.
    """

    every_micro_batch: bool = Field(
        default=True,
        description="false: simulate three micro-batches, the others like the third",
    )
    known_to_fit: bool = Field(
        default=False,
        description="the job has run, so torch's allocator gets all GPU memory",
    )


class ExperimentFile(StrictTable):
    """An experiment in the shape of its file."""

    is_explained: ClassVar[bool] = True  # `zsim explain TABLE` lists the keys of its tables

    @staticmethod
    def inner_tables() -> Mapping[str, type[BaseModel]]:
        """Tables that other files may hold, so that their keys' types do not show them."""
        from zsim.specs.cluster.cluster import Cluster

        return {"cluster": Cluster}

    model: str | dict[str, Any] | _Model = Field(
        description="preset, Hub id, or path to a Hugging Face config.json; a table `extends` one, or "
        "is a config.json; package.module:function with --allow-code"
    )
    cluster: str | dict[str, Any] = Field(description="preset, path to a topology TOML, or its tables")
    nodes: Count | None = Field(
        default=None,
        description="nodes, with all their GPUs; left out: by `gpus` or `placement`",
    )
    gpus: Count | None = Field(
        default=None, description="GPUs of the job, if not whole nodes; left out: all of `nodes`"
    )
    placement: Lazy[PlacementTable] = Field(
        default=PlacementTable.model_construct(), description="which nodes, and how many GPUs on each"
    )
    faults: Lazy[FaultsTable] = Field(
        default=FaultsTable.model_construct(), description="what is slow or broken"
    )
    jitter: Lazy[JitterTable] = Field(
        default=JitterTable.model_construct(), description="what varies from step to step"
    )
    jobs: dict[str, dict[str, Any]] = Field(default={}, description="other jobs on the same fabric, by name")
    training: TrainingTable = Field(
        default=TrainingTable.model_construct(),
        description="batch, precision, what is recomputed, the optimizer",
    )
    parallelism: Lazy[ParallelismTable] = Field(
        default=ParallelismTable.model_construct(),
        description="tensor, pipeline and context parallelism; data parallelism is what remains",
    )
    trainer: Lazy[TrainerTable] = Field(
        default=TrainerTable.model_construct(), description="what the training loop does around the model"
    )
    data: Lazy[DataTable] = Field(
        default=DataTable.model_construct(), description="how fast samples are loaded"
    )
    simulation: Lazy[SimulationTable] = Field(
        default=SimulationTable.model_construct(), description="how much is simulated"
    )
    strategy: Annotated[StrategyTable, LazyKinds(STRATEGIES)] = STRATEGIES[default_kind()].model_construct(
        kind=default_kind()
    )
    cost: Lazy[CostTable] | None = Field(default=None, description="prices and power, for money and energy")
    run: _RunTable | None = Field(
        default=None, description="over days, for zsim goodput; no step changes by it"
    )
    rl: _RlTable | None = Field(
        default=None,
        description="reinforcement learning: an engine's rollouts, then updates by this job",
    )
    notes: tuple[str, ...] = Field(default=(), description="notes that every report repeats")
    program: Program | None = Field(
        default=None,
        description="program whose file this was; limits what `zsim tune` proposes; left out: none",
    )


class Experiment(ExperimentFile):
    """An experiment to simulate. Build it from keywords of the file's shape, or with `load_experiment`.

    As in a file, `strategy.config` may be another program's training file or command line, which fills in the
    rest. Unlike in a file, a model `package.module:function` is imported and called.

    Raises InputError for an unknown key, a wrong value, or a key of another strategy's kind.
    """

    def __init__(self, *, origin: str = "experiment", **data: Any) -> None:
        self._fill(load_user_models(data, origin, UserCode()), origin)

    @classmethod
    def of_data(cls, data: Mapping[str, Any], *, origin: str = "experiment") -> Self:
        """The experiment of data, which runs no code, see [Note: who may run code]. zsim makes experiments in
        no other way. Raises InputError as `Experiment` does, and for a model that is a function.
        """
        experiment = cls.__new__(cls)
        experiment._fill(load_user_models(data, origin, None), origin)
        return experiment

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The experiment in the shape of its file. A captured model stays an object."""
        data = super().model_dump(**options)
        if options.get("mode", "python") == "python":
            if isinstance(self.model, ModelSpec) and "model" in data:
                data["model"] = self.model
            for name, table in data.get("jobs", {}).items():
                if isinstance(self.jobs[name].get("model"), ModelSpec):
                    table["model"] = self.jobs[name]["model"]
        return data

    def _fill(self, data: dict[str, Any], origin: str) -> None:
        refuse_parallelisms(f"{origin}: ", data)
        for name in ("training", "strategy", "parallelism"):
            table = data.get(name)
            refuse_parallelisms(f"{origin}: {name}.", table if isinstance(table, Mapping) else ())
        data, problems = _infer_strategy_kind(_merge_training_file(origin, data), ExperimentFile)
        if isinstance(data.get("model"), Mapping):
            from zsim.specs.experiment.overrides import extended_model

            data = {**data, "model": extended_model(data["model"], f"{origin}: model")}
        if isinstance(data.get("cluster"), list | tuple):
            raise NotSimulatedError(
                f"{origin}: cluster: a job on several clusters is not simulated; give one"
            )
        try:
            ExperimentFile.__init__(self, **mark_misplaced_booleans(data, [ExperimentFile]))
        except ValidationError as error:
            # without the kind that pydantic puts into the path
            kind = data["strategy"]["kind"] if isinstance(data.get("strategy"), Mapping) else ""
            sentences = problems_of(error, type(self), STRATEGIES[kind].model_fields if kind else None)
            problems += [sentence.replace(f"strategy.{kind}.", "strategy.") for sentence in sentences]
        if problems:
            raise InputError(format_problems(origin, [*unreadable_names(data), *problems])) from None
        _check_tokens(origin, self.run, self.cost)


def _merge_training_file(origin: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data with another program's training file, or command line, in place of `strategy.config`."""
    strategy = data.get("strategy")
    if not (isinstance(strategy, Mapping) and is_training_file(strategy.get("config"))):
        return data
    tables = {
        key: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for key, value in data.items()
    }
    return merge_training_file(tables, {}, origin=origin)[0]


def _check_tokens(origin: str, run: _RunTable | None, cost: CostTable | None) -> None:
    """Raises InputError where a run and its price are for different numbers of tokens."""
    tokens = None if run is None else run.total_tokens
    priced_tokens = None if cost is None else cost.given_tokens
    if tokens is None or priced_tokens is None:
        return
    if not math.isclose(tokens, priced_tokens, rel_tol=1e-9):
        raise InputError(
            f"{origin}: run.tokens is {tokens:.6g} and cost.tokens {priced_tokens:.6g}; expected one number "
            "of tokens, in [run] alone or the same in both"
        )


def _infer_strategy_kind(data: dict[str, Any], file: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The data with the kind of `[strategy]`, and one sentence per problem.

    The kind is inferred from the keys if it is left out. Keys that the kind does not have are dropped. `file`
    is the model of the experiment's file.
    """
    table = data.get("strategy")
    if isinstance(table, str):
        problem = f"strategy: found '{table}', expected a table{_keys_meant(table)}"
        return {**data, "strategy": {"kind": default_kind()}}, [problem]
    if not isinstance(table, Mapping):
        return data, []
    keys = {str(key) for key in table} - {"kind"}
    kind = table.get("kind")
    if kind is None:
        kind = _infer_kind(keys)
    problems = []
    if kind is not None and not is_strategy(kind):
        problems.append(
            f"strategy.kind: found {kind!r}, expected one of {', '.join(STRATEGIES)}{_keys_meant(str(kind))}"
        )
        return {**data, "strategy": {"kind": default_kind()}}, problems
    known_keys = set(STRATEGIES[kind].model_fields) if kind else set()
    for key in sorted(keys - known_keys):
        owners = [name for name, model in STRATEGIES.items() if key in model.model_fields]
        options = known_keys or {name for model in STRATEGIES.values() for name in model.model_fields}
        if kind and owners:
            problems.append(
                f"strategy.{key} does not belong to kind '{kind}'; it is a key of {' and '.join(owners)}"
            )
        elif not owners:
            hint = nearest_key(key, table.get(key), sorted(options), file, strategy_keys=options)
            hint = hint or expected_text(key, sorted(options), "zsim explain strategy")
            problems.append(f"strategy: unknown key '{key}'{hint}")
    if kind is None:
        if not problems:
            problems.append(f"strategy.kind is missing; expected one of {', '.join(STRATEGIES)}")
        return {**data, "strategy": {"kind": default_kind()}}, problems
    kept_table = {key: value for key, value in table.items() if str(key) in known_keys}
    return {**data, "strategy": {**kept_table, "kind": kind}}, problems


def _keys_meant(name: str) -> str:
    """The end of an error message on a strategy's name: the keys of `[strategy]` that say what it means."""
    keys = (f'kind = "{name}"',) if is_strategy(name) else meant_strategies(name)
    return f"; write {', or '.join(keys)}" if keys else did_you_mean(name, STRATEGIES)


def _infer_kind(keys: set[str]) -> str | None:
    """The kind that has these keys. The default one if several have them, None if no kind has all."""
    candidates = [kind for kind, model in STRATEGIES.items() if keys <= set(model.model_fields)]
    if default_kind() in candidates:
        return default_kind()
    return candidates[0] if candidates else None


_KINDS = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "sp": "sequence",
    "etp": "expert tensor",
}
_KEYS = {
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "sequence": "sequence_parallel",
    "expert": "expert",
    "expert tensor": "expert_tensor",
}


def refuse_parallelisms(where: str, keys: Iterable[object]) -> None:
    """Raises InputError for the first key that asks for a parallelism by another program's name.

    The message gives zsim's own key. `where` names the file (and table).
    """
    for key in keys:
        kind = _kind(key)
        if kind is None or str(key) == "sequence_parallel":
            continue
        raise InputError(f"{where}{key}: unknown key; it is parallelism.{_KEYS[kind]} here")


def _kind(key: object) -> str | None:
    """The kind of parallelism of `tensor_parallel`, `tensor_model_parallel_size`, `tp_degree` and the like.

    None for any other key.
    """
    word = str(key).lower().removesuffix("_size").removesuffix("_degree")
    if word in _KINDS:
        return _KINDS[word]
    for ending in ("_model_parallel", "_model_parallelism", "_parallel", "_parallelism"):
        kind = word.removesuffix(ending).replace("_", " ")
        if word.endswith(ending) and kind in _KINDS.values():
            return kind
    return None
