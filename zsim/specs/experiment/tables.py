"""The tables of an experiment: which model, on which cluster, trained how.

`Experiment` has the shape of the file that people write; `resolve` (zsim.specs.experiment.resolve) looks
every name up and fills every default in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.specs.experiment.data.lengths import LengthsTable
from zsim.specs.experiment.data.loading import DataTable
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.jitter import JitterTable
from zsim.specs.experiment.placement import PlacementTable
from zsim.specs.experiment.programs import Program
from zsim.specs.experiment.run.run import TrainingRunTable
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.experiment.simulation import SimulationTable
from zsim.specs.experiment.trainer import TrainerTable
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.messages import listed, problems_of
from zsim.specs.names import unreadable
from zsim.specs.strategy.foreign_keys import refuse_parallelisms
from zsim.specs.strategy.fp8 import Fp8Recipe
from zsim.specs.strategy.megatron import MegatronTable
from zsim.specs.strategy.parallelism import ParallelismTable
from zsim.specs.strategy.training import (
    DEFAULT_CONNECTIONS,
    MAX_CONNECTIONS,
    Checkpointing,
    CrossEntropy,
    Precision,
    RecomputeModule,
)

Count = Annotated[int, Field(gt=0, strict=True)]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
AttentionChoice = Literal["flash", "flash1", "flash1-triton", "flash2", "flash3", "flash4", "math"]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class TrainingTable(_Table):
    """`[training]`. Defaults: `sequence_length` the model's longest up to 4096; `precision` bf16 where the
    GPU has it; `attention` flash where the GPU supports it, of the generation that its file is calibrated for
    (FlashAttention-2 on NVIDIA's; "flash3" on Hopper, "flash4" on Blackwell are asked for by name);
    `gradient_clipping` off, 1.0 under Megatron, or as DeepSpeed's version has it. `liger`:
    linkedin/Liger-Kernel, as transformers' `use_liger_kernel`. `cross_entropy`: "fused_linear" with Liger,
    "megatron" under Megatron, "fused" with `compile`, else "eager". `fp8_recipe`: "delayed" under Megatron,
    as on its command line, else "torchao-tensorwise"; given, it says precision "fp8" as well."""

    @model_validator(mode="before")
    @classmethod
    def _sizes_by_type(cls, data: Any) -> Any:
        """`micro_batch_size = { dgx-h100 = 4, dgx-a100-80gb = 2 }` is `micro_batch_sizes`."""
        if isinstance(data, Mapping) and isinstance(data.get("micro_batch_size"), Mapping):
            rest = {key: value for key, value in data.items() if key != "micro_batch_size"}
            return {"micro_batch_sizes": data["micro_batch_size"], **rest}
        return data

    sequence_length: Count | None = None
    micro_batch_size: Count | None = None
    micro_batch_sizes: dict[str, Count] = Field(
        default={}, description="sequences in a micro-batch by type of the cluster's nodes, where they differ"
    )
    gradient_accumulation_steps: Count | None = None
    global_batch_size: Count | None = Field(
        default=None,
        description="sequences in a step of all ranks: how many micro-batches, and how small the last one is",
    )
    precision: Precision | None = None
    fp8_recipe: Fp8Recipe | None = Field(
        default=None, description='how products are cast with precision "fp8": the scales, and whose kernels'
    )
    lengths: LengthsTable | None = None
    bf16_first_layers: int = Field(default=0, ge=0, strict=True, description="layers that fp8 leaves out")
    bf16_last_layers: int = Field(default=0, ge=0, strict=True, description="the same, at the end")
    activation_checkpointing: Checkpointing = "none"
    attention: AttentionChoice | None = None
    compile: bool = False
    liger: bool = False
    cross_entropy: CrossEntropy | None = None
    optimizer: str = Field(default="adamw", description="by name, as docs/recipes/28 lists them")
    lora: LoraTable | None = None
    frozen: tuple[str, ...] = Field(
        default=(),
        description='what is not trained, by name with wildcards: "model.embed_tokens"',
    )
    frozen_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="what frozen weights are kept in"
    )
    paged_states: Literal["gpu", "host"] = Field(
        default="gpu", description="where a paged optimizer's states are between steps"
    )
    stochastic_rounding: bool = Field(default=False, description="torchao's optimizers write bf16 weights so")
    gradient_clipping: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    checkpoint_every: Count = Field(default=1, description="checkpoint every n-th block")
    block_checkpointing: dict[str, Checkpointing] = Field(
        default={}, description='blocks of another policy, by number: {"0-15" = "full", "16,18" = "none"}'
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = Field(
        default=None, description='modules that "selective" runs again, by Megatron\'s names'
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        default=None, description='"full" in groups of layers, or for the first layers of every stage'
    )
    recompute_layers: Count | None = Field(
        default=None, description="how many layers a group, or the first of a stage, are"
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
        default="fp32", description="what DDP and FSDP1 keep weights, gradients and optimizer states in"
    )
    expandable_segments: bool = Field(
        default=False, description="the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    device_max_connections: int = Field(
        default=DEFAULT_CONNECTIONS, ge=1, le=MAX_CONNECTIONS, strict=True,
        description="the run has CUDA_DEVICE_MAX_CONNECTIONS so: hardware queues that its streams share",
    )  # fmt: skip


class DdpTable(_Table):
    """`kind = "ddp"`: torch DistributedDataParallel."""

    kind: Literal["ddp"]
    bucket_cap_mb: float = Field(default=25.0, gt=0, le=1e9)
    gradient_as_bucket_view: bool = False
    no_sync: bool = True


class DeepSpeedTable(_Table):
    """`kind = "deepspeed"`: a stage with DeepSpeed's defaults, or the user's file. `config_name`: name of a
    `config` that is a table, in messages and reports. `tile_numel`: linear layers with more weights are
    `deepspeed.zero.TiledLinear` with tiles of at most this many. `zero_init`: a stage-3 model is built
    sharded (`deepspeed.zero.Init`, as transformers' Trainer does); without it every GPU first holds the whole
    model. `delayed_parameter_update`: stages 1 and 2 with the optimizer on the CPU update one step late,
    during the next forward and backward (ZeRO-Offload, arXiv 2101.06840, section 5.2); no DeepSpeed release
    has it."""

    kind: Literal["deepspeed"]
    stage: Literal[0, 1, 2, 3] | None = None
    config: str | dict[str, Any] | None = None
    config_name: str | None = None
    version: str = "0.19.8"
    fetches_one_by_one: bool = Field(
        default=False, description="stage 3 gathers parameters one after the other, as before 0.6"
    )

    @field_validator("version", mode="before")
    @classmethod
    def _is_quoted(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f'found the number {value}, expected a release in quotes, as in "0.19.8"')
        return value

    tile_numel: Count | None = None
    zero_init: bool = True
    delayed_parameter_update: bool = False


class _FsdpTable(_Table):
    wrapping: str = "torchtitan"
    param_dtype: Dtype | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    replicate: Count | None = None
    no_sync: bool = False
    cpu_offload: bool = False


class Fsdp1Table(_FsdpTable):
    """`kind = "fsdp1"`: torch FullyShardedDataParallel."""

    kind: Literal["fsdp1"]
    wrapping: str = "huggingface"
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ] = "FULL_SHARD"
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = Field(
        default=True, description="frozen and trained parameters may share a flat one, as Accelerate has it"
    )
    before_torch_2: bool = Field(
        default=False, description="as in torch 1.12 and 1.13: pads and splits every flat gradient"
    )


class Fsdp2Table(_FsdpTable):
    """`kind = "fsdp2"`: torch `fully_shard`; `replicate` > 1 is HSDP. `param_dtype` "fp8": the weights of fp8
    products are gathered in fp8, by scales that `precompute_fp8_scales` has ready for all of them."""

    kind: Literal["fsdp2"]
    precompute_fp8_scales: StrictBool = False
    reshard_after_forward: StrictBool | Count | None = None

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _group_or_flag(cls, value: object) -> object:
        is_group = isinstance(value, int) and value >= 1
        if not (value is None or isinstance(value, bool) or is_group):
            raise ValueError(f"expected true, false or a group size, found {value!r}")
        return value


class ReferenceTable(_Table):
    """`kind = "reference"`: ZeRO as in the paper, as the engine in `validation/zero` runs it: one flat
    partition per block, fp32 master weights, none of a framework's additions. `keep_gathered`: stage 3 keeps
    the root and the last block from forward to backward. `optimizer_place`: where states and reduced
    gradients are; `parameter_place`: where stage 3's shards are."""

    kind: Literal["reference"]
    stage: Literal[0, 1, 2, 3] = 3
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    bucket_bytes: int = Field(default=0, ge=0)
    prefetch: int = Field(default=1, ge=0)
    max_reductions_in_flight: Count = 2
    keep_gathered: bool = True
    optimizer_place: Literal["device", "host", "nvme"] = "device"
    parameter_place: Literal["device", "host", "nvme"] = "device"


STRATEGIES: dict[str, type[BaseModel]] = {
    "ddp": DdpTable,
    "deepspeed": DeepSpeedTable,
    "fsdp1": Fsdp1Table,
    "fsdp2": Fsdp2Table,
    "megatron": MegatronTable,
    "reference": ReferenceTable,
}
StrategyTable = DdpTable | DeepSpeedTable | Fsdp1Table | Fsdp2Table | MegatronTable | ReferenceTable


def is_strategy(kind: object) -> bool:
    """Whether `kind`, which may be any value of a file, is a known strategy."""
    return isinstance(kind, str) and kind in STRATEGIES


class _ExperimentFile(_Table):
    """An experiment in the shape of its file."""

    model: str | dict[str, Any] = Field(description="preset, or path to a Hugging Face config.json")
    cluster: str | dict[str, Any] = Field(description="preset, path to a topology TOML, or its tables")
    nodes: Count | None = None
    gpus: Count | None = None
    placement: PlacementTable = PlacementTable()
    faults: FaultsTable = FaultsTable()
    jitter: JitterTable = JitterTable()
    data: DataTable = DataTable()
    jobs: dict[str, dict[str, Any]] = Field(default={}, description="others on the same fabric, by name")
    training: TrainingTable = TrainingTable()
    parallelism: ParallelismTable = ParallelismTable()
    trainer: TrainerTable = TrainerTable()
    simulation: SimulationTable = SimulationTable()
    strategy: Annotated[StrategyTable, Field(discriminator="kind")] = Fsdp2Table(kind="fsdp2")
    cost: CostTable | None = None
    run: TrainingRunTable | None = Field(
        default=None, description="over days, for zsim goodput; no step changes by it"
    )
    notes: tuple[str, ...] = Field(default=(), description="said again by every report")
    program: Program | None = Field(
        default=None, description="the program whose file it was; zsim tune proposes what that can be told"
    )


class Experiment(_ExperimentFile):
    """An experiment to simulate. Build it from keywords of the file's shape, or with `load_experiment`.

    Raises InputError for an unknown key, a wrong value, or a key of another strategy's kind.
    """

    def __init__(self, *, origin: str = "experiment", **data: Any) -> None:
        refuse_parallelisms(f"{origin}: ", data)
        for name in ("training", "strategy", "parallelism"):
            table = data.get(name)
            refuse_parallelisms(f"{origin}: {name}.", table if isinstance(table, Mapping) else ())
        data, problems = _with_strategy_kind(data)
        if isinstance(data.get("cluster"), list | tuple):
            raise NotSimulatedError(
                f"{origin}: cluster: a job on several clusters is not simulated; give one"
            )
        try:
            super().__init__(**data)
        except ValidationError as error:
            # without the kind that pydantic puts into the path
            kind = data["strategy"]["kind"] if isinstance(data.get("strategy"), Mapping) else ""
            found = problems_of(error, type(self))
            problems += [sentence.replace(f"strategy.{kind}.", "strategy.") for sentence in found]
        if problems:
            raise InputError(listed(origin, [*unreadable(data), *problems])) from None
        _check_tokens(origin, self.run, self.cost)


def _check_tokens(origin: str, run: TrainingRunTable | None, cost: CostTable | None) -> None:
    """Raises InputError where a run and its price are for different tokens."""
    asked = None if run is None else run.total_tokens
    if asked is None or cost is None or cost.tokens is None:
        return
    if not math.isclose(asked, cost.tokens, rel_tol=1e-9):
        raise InputError(
            f"{origin}: run.tokens is {asked:.6g} and cost.tokens {cost.tokens:.6g}; expected one number of "
            "tokens, in [run] alone or the same in both"
        )


def _with_strategy_kind(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The data with the kind of `[strategy]`, inferred from its keys if left out, and without keys that the
    kind does not have; and one sentence per problem."""
    table = data.get("strategy")
    if not isinstance(table, Mapping):
        return data, []
    keys = {str(key) for key in table} - {"kind"}
    fitting = [kind for kind, model in STRATEGIES.items() if keys <= set(model.model_fields)]
    kind = table.get("kind")
    if kind is None:
        kind = "fsdp2" if "fsdp2" in fitting else fitting[0] if fitting else None
    problems = []
    if kind is not None and not is_strategy(kind):
        problems.append(
            f"strategy.kind: found {kind!r}, expected one of {', '.join(STRATEGIES)}"
            f"{did_you_mean(str(kind), STRATEGIES)}"
        )
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    known = set(STRATEGIES[kind].model_fields) if kind else set()
    for key in sorted(keys - known):
        owners = [name for name, model in STRATEGIES.items() if key in model.model_fields]
        options = known or {name for model in STRATEGIES.values() for name in model.model_fields}
        if kind and owners:
            problems.append(
                f"strategy.{key} does not belong to kind '{kind}'; it is a key of {' and '.join(owners)}"
            )
        elif not owners:
            expected = did_you_mean(key, options) or f"; expected one of {', '.join(sorted(options))}"
            problems.append(f"strategy: unknown key '{key}'{expected}")
    if kind is None:
        if not problems:
            problems.append(f"strategy.kind is missing; expected one of {', '.join(STRATEGIES)}")
        return {**data, "strategy": {"kind": "fsdp2"}}, problems
    kept = {key: value for key, value in table.items() if str(key) in known}
    return {**data, "strategy": {**kept, "kind": kind}}, problems
