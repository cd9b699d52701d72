"""The tables of `[strategy]`, one for each kind, in the shape of their files."""

# See [Note: annotations of tables].

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from zsim.specs.strategy.megatron_table import MegatronTable

Count = Annotated[int, Field(gt=0, strict=True)]
Dtype = Literal["bf16", "fp16", "fp32", "fp8"]


class StrictTable(BaseModel):
    """A table that people write: frozen, and without keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DdpTable(StrictTable):
    """`kind = "ddp"`: torch DistributedDataParallel."""

    kind: Literal["ddp"] = Field(
        description="whose data parallelism: torch's DDP, FSDP1 or FSDP2, DeepSpeed's ZeRO, "
        "Megatron's, or ZeRO as in its paper"
    )
    bucket_cap_mb: float = Field(default=25.0, gt=0, le=1e9, description="MiB of gradients in a bucket")
    gradient_as_bucket_view: bool = Field(
        default=False, description="gradients live in the buckets, not beside them"
    )
    no_sync: bool = Field(default=True, description="gradients are reduced after the last micro-batch only")


class DeepSpeedTable(StrictTable):
    """`kind = "deepspeed"`: a stage with DeepSpeed's defaults, or the user's file.

    `tile_numel` is that of `deepspeed.zero.TiledLinear`, and `zero_init` is `deepspeed.zero.Init`.
    `delayed_parameter_update` is ZeRO-Offload's (arXiv 2101.06840, section 5.2) and in no release of
    DeepSpeed.
    """

    kind: Literal["deepspeed"] = Field(description="whose data parallelism")
    stage: Literal[0, 1, 2, 3] | None = Field(
        default=None,
        description="the ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters; left "
        "out: as `config` says, which is then needed",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="DeepSpeed's JSON file, or its content as a table; left out: DeepSpeed's defaults at "
        "`stage`",
    )
    config_name: str | None = Field(
        default=None, description="what messages call a `config` that is a table; left out: DeepSpeed config"
    )
    version: str = Field(default="0.19.8", description="the release whose behaviour and defaults apply")
    fetches_one_by_one: bool = Field(
        default=False, description="stage 3 gathers parameters one after the other, as before 0.6"
    )

    @field_validator("version", mode="before")
    @classmethod
    def _check_version_is_text(cls, value: object) -> object:
        if isinstance(value, int | float):
            raise ValueError(f'found the number {value}, expected a release in quotes, as in "0.19.8"')
        return value

    leaf_modules: tuple[str, ...] = Field(
        default=(),
        description="classes that the script has stage 3 fetch whole, `deepspeed.utils.set_z3_leaf_modules` "
        'or Accelerate\'s `deepspeed_moe_layer_cls_names`: "MixtralSparseMoeBlock"',
    )
    tile_numel: Count | None = Field(
        default=None,
        description="linear layers with more weights are `deepspeed.zero.TiledLinear`, with tiles of at "
        "most this many; left out: none are",
    )
    zero_init: bool = Field(
        default=True,
        description="a stage-3 model is built sharded, as transformers' Trainer does; false: every "
        "GPU first holds all of it",
    )
    delayed_parameter_update: bool = Field(
        default=False,
        description="the CPU's update runs a step late, beside the next step (ZeRO-Offload, "
        "section 5.2); in no release",
    )
    expert_layer: Literal["autoep", "moe"] | None = Field(
        default=None,
        description="whose layer has the routed experts: AutoEP's, or `deepspeed.moe.layer.MoE`; left out: "
        "AutoEP's if the file enables it, else the latter if experts are spread over ranks",
    )
    drops_tokens: bool = Field(
        default=True,
        description="`drop_tokens` of `deepspeed.moe.layer.MoE`; false: every expert is filled up to the "
        "fullest",
    )


class _FsdpTable(StrictTable):
    wrapping: str = Field(
        default="torchtitan",
        description='what is a unit: "torchtitan" or "huggingface" (a block, and the rest), or '
        '"size:N" elements',
    )
    param_dtype: Dtype | None = Field(
        default=None,
        description="the type in which parameters are gathered; left out: that of training.precision",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="the type in which gradients are reduced; left out: the framework's own"
    )
    replicate: Count | None = Field(
        default=None,
        description="replicas of the sharded group (hybrid sharding, HSDP); left out: 1; with FSDP1's "
        "hybrid strategies the nodes",
    )
    no_sync: bool = Field(
        default=False, description="gradients are kept whole until the last micro-batch, and reduced then"
    )
    cpu_offload: bool = Field(
        default=False, description="shards live in host memory, where the optimizer updates them"
    )


class Fsdp1Table(_FsdpTable):
    """`kind = "fsdp1"`: torch FullyShardedDataParallel."""

    kind: Literal["fsdp1"] = Field(description="whose data parallelism")
    wrapping: str = Field(
        default="huggingface",
        description='what is a unit: "huggingface" (a block, and the rest), or "size:N" elements',
    )
    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ] = Field(
        default="FULL_SHARD",
        description="torch's name of what is sharded, and whether it is gathered again for backward",
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "none"] = Field(
        default="BACKWARD_PRE",
        description="when the next unit is gathered in backward: before or after the current "
        "unit's, or when it is needed",
    )
    forward_prefetch: bool = Field(
        default=False, description="the next unit is gathered before the current one is computed"
    )
    limit_all_gathers: bool = Field(
        default=True, description="the host waits so that at most two gathered units exist"
    )
    use_orig_params: bool = Field(
        default=True, description="frozen and trained parameters may share a flat one, as Accelerate has it"
    )
    before_torch_2: bool = Field(
        default=False, description="as in torch 1.12 and 1.13: pads and splits every flat gradient"
    )


class Fsdp2Table(_FsdpTable):
    """`kind = "fsdp2"`: torch `fully_shard`. `replicate` > 1 is HSDP."""

    kind: Literal["fsdp2"] = Field(description="whose data parallelism")
    reshard_after_forward: StrictBool | Count | None = Field(
        default=None,
        description="whether a unit is freed between forward and backward; a number: kept sharded "
        "over so many ranks; left out: all but the last",
    )

    precompute_fp8_scales: bool = Field(
        default=False, description="the scales of all fp8 weights are agreed on at once, behind the update"
    )

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _check_reshard_value(cls, value: object) -> object:
        is_group = isinstance(value, int) and value >= 1
        if not (value is None or isinstance(value, bool) or is_group):
            raise ValueError(f"expected true, false or a group size, found {value!r}")
        return value


class ReferenceTable(StrictTable):
    """`kind = "reference"`: ZeRO as in the paper, as the engine in `validation/zero` runs it.

    It has one flat partition per block and fp32 master weights, and none of a framework's additions. In
    16-bit training the model states are the paper's 2 + 2 + 12 bytes per parameter. Gradients that are
    reduced and kept in fp32 (`reduce_dtype`) make them 18.
    """

    kind: Literal["reference"] = Field(description="whose data parallelism")
    stage: Literal[0, 1, 2, 3] = Field(default=3, description="the ZeRO stage")
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="the type of parameters in forward and backward; left out: that of training.precision",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="the type in which gradients are reduced and kept; left out: that of parameters",
    )
    bucket_bytes: int = Field(
        default=0,
        ge=0,
        description="gradients are reduced once so many bytes are there; 0: a block's at a time",
    )
    prefetch: int = Field(default=1, ge=0, description="how many units are gathered ahead")
    max_reductions_in_flight: Count = Field(
        default=2, description="reductions that have not ended before the host waits"
    )
    keep_gathered: bool = Field(
        default=True, description="stage 3 keeps the root and the last block from forward to backward"
    )
    optimizer_place: Literal["device", "host", "nvme"] = Field(
        default="device", description="where optimizer states and reduced gradients are kept"
    )
    parameter_place: Literal["device", "host", "nvme"] = Field(
        default="device", description="where stage 3 keeps its shards"
    )


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
