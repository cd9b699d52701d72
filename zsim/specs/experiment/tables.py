"""The tables of an experiment: which model, on which cluster, trained how.

`Experiment` has the shape of the file that people write. `resolve` (zsim.specs.experiment.resolve) looks
every name up and fills every default in.
"""

# See [Note: annotations of tables].

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from zsim.errors import InputError, NotSimulatedError, did_you_mean, expected_text
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.data.loading import DataTable
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.jitter import JitterTable
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.simulation import SimulationTable
from zsim.specs.experiment.trainer import TrainerTable
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.formats.detect import is_training_file, merge_training_file
from zsim.specs.key_index import nearest_key
from zsim.specs.lazy_model import Lazy, LazyKinds, LazyModel
from zsim.specs.messages import format_problems, mark_misplaced_booleans, problems_of
from zsim.specs.model.spec import ModelSpec
from zsim.specs.names import unreadable_names
from zsim.specs.strategy.foreign_keys import refuse_parallelisms
from zsim.specs.strategy.fp8 import Fp8Recipe
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.registry import STRATEGIES, is_strategy
from zsim.specs.strategy.table import Count, StrategyTable, StrictTable
from zsim.specs.strategy.training import (
    DEFAULT_CONNECTIONS,
    MAX_CONNECTIONS,
    Checkpointing,
    CrossEntropy,
    LayerKernels,
    Precision,
    RecomputeModule,
)
from zsim.specs.user_code import UserCode, load_user_models

if TYPE_CHECKING:
    from zsim.specs.experiment.rl.table import RlTable
    from zsim.specs.experiment.run.run import TrainingRunTable

    _RunTable = TrainingRunTable
    _RlTable = RlTable
else:
    _RlTable = Annotated[Any, LazyModel("zsim.specs.experiment.rl.table:RlTable")]
    _RunTable = Annotated[Any, LazyModel("zsim.specs.experiment.run.run:TrainingRunTable")]

AttentionChoice = Literal[
    "flash",
    "flash1",
    "flash1-triton",
    "flash2",
    "flash2-deterministic",
    "flash3",
    "flash4",
    "cudnn",
    "cudnn-deterministic",
    "math",
]


class _InstanceSchema:
    """Annotation of an object that no file spells. pydantic's `InstanceOf` describes all its fields too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: object) -> core_schema.CoreSchema:
        return core_schema.is_instance_schema(source)


_Model = Annotated[
    ModelSpec, _InstanceSchema(), PlainSerializer(lambda model: model), WithJsonSchema({"type": "object"})
]


class TrainingTable(StrictTable):
    """`[training]`. `liger` is linkedin/Liger-Kernel."""

    @model_validator(mode="before")
    @classmethod
    def _sizes_by_type(cls, data: Any) -> Any:
        """`micro_batch_size = { dgx-h100 = 4, dgx-a100-80gb = 2 }` is `micro_batch_sizes`."""
        if isinstance(data, Mapping) and isinstance(data.get("micro_batch_size"), Mapping):
            other_keys = {key: value for key, value in data.items() if key != "micro_batch_size"}
            return {"micro_batch_sizes": data["micro_batch_size"], **other_keys}
        return data

    @field_validator("transformers", mode="before")
    @classmethod
    def _reads_numbers(cls, value: object) -> object:
        """Turns a release without quotes, such as 4.51, into text. Only its major number is read."""
        return str(value) if type(value) in (int, float) else value

    sequence_length: Count | None = Field(
        default=None, description="tokens of a sequence; left out: the model's longest up to 4096"
    )
    micro_batch_size: Count | None = Field(
        default=None,
        description="sequences that a data-parallel rank computes at a time; left out: 1, or as DeepSpeed's "
        "JSON says",
    )
    micro_batch_sizes: dict[str, Count] = Field(
        default={}, description="sequences in a micro-batch by type of the cluster's nodes, where they differ"
    )
    gradient_accumulation_steps: Count | None = Field(
        default=None,
        description="micro-batches of a step; of a pipeline, its micro-batches; left out: 1, what "
        "`global_batch_size` takes, or as DeepSpeed's JSON says",
    )
    global_batch_size: Count | None = Field(
        default=None,
        description="sequences in a step of all ranks: how many micro-batches, and how small the last one "
        "is; left out: what the sizes above make",
    )
    precision: Precision | None = Field(
        default=None, description="the type of products; left out: bf16 where the GPU has it"
    )
    fp8_recipe: Fp8Recipe | None = Field(
        default=None,
        description='how products are cast with precision "fp8": the scales, and whose kernels; left out: '
        '"delayed" under Megatron, else "torchao-tensorwise"',
    )
    """A given recipe implies precision "fp8". The default under Megatron is that of its command line."""
    lengths: Lazy[LengthsTable] | None = Field(
        default=None, description="documents of different lengths, packed or padded"
    )
    bf16_first_layers: int = Field(default=0, ge=0, strict=True, description="layers that fp8 leaves out")
    bf16_last_layers: int = Field(default=0, ge=0, strict=True, description="the same, at the end")
    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="what backward computes again: nothing, the core of attention, every second "
        "product, or whole blocks",
    )
    attention: AttentionChoice | None = Field(
        default=None,
        description="fused attention, of a generation by name, or written out; left out: the best "
        "that the GPU's file knows",
    )
    """The default is flash where the GPU supports it, of the generation that its file is calibrated for. That
    is FlashAttention-2 on NVIDIA's GPUs. "flash3" on Hopper and "flash4" on Blackwell are asked for by name.
    The default is "cudnn" under Megatron on Hopper and Blackwell. It is also "cudnn" under torch on Hopper
    where torch's scaled_dot_product_attention takes cuDNN's. That is so in torch 2.11 and later for attention
    that is causal or has no mask, without documents kept apart, with heads up to 128 wide or 192 with values
    of 128, and with dropout in sixteenths. Under Megatron in deterministic mode the default is
    "flash2-deterministic" before Hopper, and on Blackwell where scores are dropped out. On Hopper it is
    "cudnn-deterministic".
    """
    transformers: str | None = Field(
        default=None,
        description="the release of Hugging Face's transformers that runs routed experts: up to 4.57 one by "
        "one, each three linear layers, from 5 on stacked; left out: 5, or 4 beside a DeepSpeed of before "
        "2026",
    )
    compile: bool = Field(default=False, description="blocks are compiled, so that elementwise work is fused")
    layer_kernels: LayerKernels | None = Field(
        default=None,
        description="whose fused kernels compiled blocks have: torch.compile's, Megatron-LM's, or those of "
        "its releases before 3.0; with `liger`, nanotron's or InternEvo's; left out: the framework's",
    )
    liger: bool = Field(
        default=False, description="Liger's fused kernels, as transformers' `use_liger_kernel`"
    )
    cross_entropy: CrossEntropy | None = Field(
        default=None, description="whose kernels compute the loss; left out: those of the framework"
    )
    """The default is "fused_linear" with Liger, "megatron" under Megatron, "fused" with `compile`, and else
    "eager".
    """
    optimizer: str = Field(default="adamw", description="by name, as docs/recipes/28 lists them")
    lora: Lazy[LoraTable] | None = None
    frozen: tuple[str, ...] = Field(
        default=(),
        description='what is not trained, by name with wildcards: "model.embed_tokens"',
    )
    frozen_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="what frozen weights are kept in; left out: as the weights that are trained; under LoRA "
        "in the type of products",
    )
    paged_states: Literal["gpu", "host"] | None = Field(
        default=None,
        description="where a paged optimizer's states are between steps; left out: on the GPU where they "
        "have room, else in host memory",
    )
    stochastic_rounding: bool = Field(default=False, description="torchao's optimizers write bf16 weights so")
    gradient_clipping: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="norm that gradients are clipped to, 0 for none; left out: off, 1.0 under "
        "Megatron, as DeepSpeed's release has it",
    )
    checkpoint_every: Count = Field(default=1, description="checkpoint every n-th block")
    block_checkpointing: dict[str, Checkpointing] = Field(
        default={}, description='blocks of another policy, by number: {"0-15" = "full", "16,18" = "none"}'
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = Field(
        default=None,
        description='modules that "selective" runs again, by Megatron\'s names; left out: the core of '
        "attention",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None,
        description='"full" in groups of layers, or for the first layers of every stage; left out: every '
        "layer by itself",
    )
    recompute_layers: Count | None = Field(
        default=None, description="how many layers a group, or the first of a stage, are; left out: 1"
    )
    checkpoint_stops_early: bool = Field(
        default=True, description="recompute only until all that backward needs is there"
    )
    checkpoint_is_reentrant: bool = Field(
        default=False, description="hold a block's second output during its backward: `use_reentrant=True`"
    )
    optimizer_implementation: Literal["fused", "foreach", "for_loop"] = Field(
        default="fused", description="torch's kernels of the optimizer; DeepSpeed brings its own"
    )
    autocast: bool = Field(
        default=False, description="FSDP1 leaves weights in fp32, and torch.autocast casts at every product"
    )
    stored_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="what DDP and FSDP keep weights, gradients and optimizer states in"
    )
    expandable_segments: bool = Field(
        default=False, description="the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    device_max_connections: int = Field(
        default=DEFAULT_CONNECTIONS, ge=1, le=MAX_CONNECTIONS, strict=True,
        description="the run has CUDA_DEVICE_MAX_CONNECTIONS so: hardware queues that its streams share",
    )  # fmt: skip


class ExperimentFile(StrictTable):
    """An experiment in the shape of its file."""

    is_explained: ClassVar[bool] = True  # `zsim explain TABLE` lists the keys of its tables

    @staticmethod
    def inner_tables() -> Mapping[str, type[BaseModel]]:
        """Tables that other files may hold, so that their keys' types do not show them."""
        from zsim.specs.cluster.cluster import Cluster

        return {"cluster": Cluster}

    model: str | dict[str, Any] | _Model = Field(
        description="preset, or path to a Hugging Face config.json; package.module:function (a torch module) "
        "with --allow-code"
    )
    cluster: str | dict[str, Any] = Field(description="preset, path to a topology TOML, or its tables")
    nodes: Count | None = Field(
        default=None,
        description="nodes of the job; their GPUs are all used; left out: as many as `gpus` fill, or "
        "`placement` names",
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
    jobs: dict[str, dict[str, Any]] = Field(default={}, description="others on the same fabric, by name")
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
    strategy: Annotated[StrategyTable, LazyKinds(STRATEGIES)] = Fsdp2Table.model_construct(kind="fsdp2")
    cost: Lazy[CostTable] | None = Field(default=None, description="prices and power, for money and energy")
    run: _RunTable | None = Field(
        default=None, description="over days, for zsim goodput; no step changes by it"
    )
    rl: _RlTable | None = Field(
        default=None, description="reinforcement learning with this job's trainer: rollouts, then updates"
    )
    notes: tuple[str, ...] = Field(default=(), description="said again by every report")
    program: Program | None = Field(
        default=None,
        description="the program whose file it was; zsim tune proposes what that can be told; left out: "
        "zsim's own file",
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
        if isinstance(data.get("cluster"), list | tuple):
            raise NotSimulatedError(
                f"{origin}: cluster: a job on several clusters is not simulated; give one"
            )
        try:
            ExperimentFile.__init__(self, **mark_misplaced_booleans(data, [ExperimentFile]))
        except ValidationError as error:
            # without the kind that pydantic puts into the path
            kind = data["strategy"]["kind"] if isinstance(data.get("strategy"), Mapping) else ""
            sentences = problems_of(error, type(self))
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
    if tokens is None or cost is None or cost.tokens is None:
        return
    if not math.isclose(tokens, cost.tokens, rel_tol=1e-9):
        raise InputError(
            f"{origin}: run.tokens is {tokens:.6g} and cost.tokens {cost.tokens:.6g}; expected one number of "
            "tokens, in [run] alone or the same in both"
        )


def _infer_strategy_kind(data: dict[str, Any], file: type[BaseModel]) -> tuple[dict[str, Any], list[str]]:
    """The data with the kind of `[strategy]`, and one sentence per problem.

    The kind is inferred from the keys if it is left out. Keys that the kind does not have are dropped. `file`
    is the model of the experiment's file.
    """
    table = data.get("strategy")
    if not isinstance(table, Mapping):
        return data, []
    keys = {str(key) for key in table} - {"kind"}
    kind = table.get("kind")
    if kind is None:
        kind = _infer_kind(keys)
    problems = []
    if kind is not None and not is_strategy(kind):
        problems.append(
            f"strategy.kind: found {kind!r}, expected one of {', '.join(STRATEGIES)}"
            f"{did_you_mean(str(kind), STRATEGIES)}"
        )
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    known_keys = set(STRATEGIES[kind].model_fields) if kind else set()
    for key in sorted(keys - known_keys):
        owners = [name for name, model in STRATEGIES.items() if key in model.model_fields]
        options = known_keys or {name for model in STRATEGIES.values() for name in model.model_fields}
        if kind and owners:
            problems.append(
                f"strategy.{key} does not belong to kind '{kind}'; it is a key of {' and '.join(owners)}"
            )
        elif not owners:
            hint = nearest_key(key, table.get(key), sorted(options), file)
            hint = hint or expected_text(key, sorted(options), "zsim explain strategy")
            problems.append(f"strategy: unknown key '{key}'{hint}")
    if kind is None:
        if not problems:
            problems.append(f"strategy.kind is missing; expected one of {', '.join(STRATEGIES)}")
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    kept_table = {key: value for key, value in table.items() if str(key) in known_keys}
    return {**data, "strategy": {**kept_table, "kind": kind}}, problems


def _infer_kind(keys: set[str]) -> str | None:
    """The kind that has these keys. FSDP2 if several have them, None if no kind has all."""
    candidates = [kind for kind, model in STRATEGIES.items() if keys <= set(model.model_fields)]
    return "fsdp2" if "fsdp2" in candidates else candidates[0] if candidates else None
