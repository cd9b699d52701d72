"""The keys of `zero_optimization`, each once: its values, its default, and zsim's facts about it.

If the meaning of an absent key depends on the release, its `Key` says so.
"""

# See [Note: annotations of tables].

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zsim.frameworks.deepspeed.settings.json_types import (
    Count,
    Device,
    Elements,
    Fraction,
    Integer,
    JsonBlock,
    Names,
    refuse_bool,
)
from zsim.frameworks.deepspeed.settings.keys import SHARDED, STAGE_3, STAGES_1_2, Key, keys_of
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.specs.lazy_model import Lazy


def _default_pin_memory(_stage: int, release: Release) -> bool:
    return release.default_pin_memory


class OffloadParamBlock(JsonBlock):
    """`offload_param`. Sizes are elements."""

    device: Device = "none"
    pin_memory: Annotated[bool | None, Key(default=_default_pin_memory, is_exported=True)] = None
    nvme_path: Annotated[str | None, Key(is_exported=True)] = None
    buffer_count: Annotated[Elements, Key(is_exported=True)] = 5
    buffer_size: Annotated[Elements, Key(is_exported=True)] = 100_000_000
    max_in_cpu: Annotated[Elements, Key(is_exported=True)] = 1_000_000_000


class OffloadOptimizerBlock(JsonBlock):
    """`offload_optimizer`. `ratio` is the fraction of sub-groups that the CPU steps (stage 3)."""

    device: Device = "none"
    pin_memory: Annotated[bool | None, Key(default=_default_pin_memory, is_exported=True)] = None
    nvme_path: Annotated[str | None, Key(is_exported=True)] = None
    buffer_count: Annotated[Elements, Key(is_exported=True)] = 4
    pipeline_read: Annotated[bool, Key(is_exported=True)] = False
    pipeline_write: Annotated[bool, Key(is_exported=True)] = False
    fast_init: bool = False
    ratio: Annotated[Fraction, Key(since=(0, 12, 3))] = 1.0
    super_offload: Annotated[bool, Key(since=(0, 18, 0))] = False
    cpuadam_cores_perc: Annotated[Fraction, Key(since=(0, 18, 0))] = 0.8


class LocoBlock(JsonBlock):
    err_beta: Fraction = 0.8
    reset_T: Count = 1024


class ZenFlowBlock(JsonBlock):
    topk_ratio: Fraction = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Integer | None = None
    update_interval: Count | None = None
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: Fraction = 0.99
    full_warm_up_rounds: Elements = 0
    pt_reserved_cores_perc: Fraction = 0.5
    steps_per_epoch: Count | None = None


class LeafModuleBlock(JsonBlock):
    """Modules that stage 3 fetches as one unit: by class, by name, by the end of the name."""

    classes: Names | None = None
    names: Names = ()
    name_suffixes: Names = ()


class ZeroBlock(JsonBlock):
    """`zero_optimization`. Sizes are elements. The report lists the keys with an effect in this order."""

    stage: Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=3), Key("what is sharded")] = 0
    contiguous_gradients: Annotated[
        bool, Key("gradients copied into a bucket of their own", SHARDED, is_exported=True)
    ] = True
    reduce_scatter: Annotated[bool, Key("how a bucket is reduced", SHARDED, is_exported=True)] = True
    reduce_bucket_size: Annotated[
        Elements,
        Field(le=2**50),  # a buffer of this size is allocated
        Key("elements reduced at a time", SHARDED, is_exported=True, is_size=True),
    ] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[
        bool | None,
        Key(
            "one all-reduce per bucket, or one reduce per owner",
            STAGES_1_2,
            since=(0, 12, 4),
            default=lambda _stage, release: release.default_multi_rank_bucket_allreduce,
            is_exported=True,
        ),
    ] = None
    overlap_comm: Annotated[
        bool | None,
        Key(
            "reductions beside the backward, on a stream of their own",
            SHARDED,
            default=lambda stage, _release: stage == 3,
            is_exported=True,
        ),
    ] = None
    round_robin_gradients: Annotated[
        bool, Key("which rank owns which gradients", STAGES_1_2, is_exported=True)
    ] = False
    compute_grad_norm: Annotated[bool, Key("the norm of the gradients", STAGES_1_2, since=(0, 19, 7))] = True
    parameter_alignment: Annotated[
        bool, Key("parameters start at 16 bytes in the flat buffer", STAGES_1_2, since=(0, 19, 7))
    ] = False
    allgather_partitions: Annotated[bool, Key("how the step gathers", idle="read by nothing")] = True
    allgather_bucket_size: Annotated[
        Elements,
        Key(
            "elements that the step gathers at a time",
            STAGES_1_2,
            idle="the step gathers in one piece since 0.12.4",
            is_idle=lambda release: not release.gathers_step_in_buckets,
            is_size=True,
        ),
    ] = 500_000_000
    sub_group_size: Annotated[
        Elements, Key("elements the optimizer steps at a time", STAGE_3, is_exported=True, is_size=True)
    ] = 1_000_000_000
    prefetch_bucket_size: Annotated[
        Elements, Key("elements gathered ahead of need", STAGE_3, is_exported=True, is_size=True)
    ] = Field(50_000_000, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: Annotated[
        Elements, Key("parameters up to this size stay gathered", STAGE_3, is_exported=True, is_size=True)
    ] = Field(100_000, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: Annotated[
        Elements, Key("elements that may stay gathered in all", STAGE_3)
    ] = Field(2**63 - 1, alias="stage3_model_persistence_threshold")
    max_live_parameters: Annotated[
        Elements, Key("elements gathered at once, for prefetching", STAGE_3, is_exported=True, is_size=True)
    ] = Field(1_000_000_000, alias="stage3_max_live_parameters")
    max_reuse_distance: Annotated[
        Elements,
        Key("a parameter used again within this stays gathered", STAGE_3, is_exported=True, is_size=True),
    ] = Field(1_000_000_000, alias="stage3_max_reuse_distance")
    module_granularity_threshold: Annotated[
        Integer, Key("small modules are fetched as one", STAGE_3, since=(0, 16, 0), is_ignored_by_mics=True)
    ] = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: Annotated[
        bool,
        Key("fetch by all-reduce: twice the volume", STAGE_3, since=(0, 14, 1), is_ignored_by_mics=True),
    ] = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: Annotated[
        bool, Key("one all-gather per parameter", STAGE_3, since=(0, 18, 5), is_ignored_by_mics=True)
    ] = Field(False, alias="stage3_allgather_sequential")
    gather_16bit_weights_on_model_save: Annotated[bool, Key("gathers all weights when saving", STAGE_3)] = (
        Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    )
    memory_efficient_linear: Annotated[
        bool, Key("linear layers keep no second reference to weights", STAGE_3, since=(0, 9, 0))
    ] = True
    enable_sanity_checks: Annotated[
        bool,
        Key("a small all-reduce before each reduction", STAGE_3, since=(0, 17, 6), is_ignored_by_mics=True),
    ] = False
    leaf_module: Annotated[
        Lazy[LeafModuleBlock] | None, Key("modules fetched as one", STAGE_3, since=(0, 18, 0))
    ] = None
    zero_hpz_partition_size: Annotated[
        Elements, Key("secondary shards inside groups of this size (hpZ)", STAGE_3, since=(0, 10, 0))
    ] = 1
    zero_quantized_weights: Annotated[
        bool, Key("int8 all-gather (qwZ)", STAGE_3, since=(0, 10, 0), is_ignored_by_mics=True)
    ] = False
    zero_quantized_nontrainable_weights: Annotated[
        bool, Key("frozen weights in int8", STAGE_3, since=(0, 10, 2))
    ] = False
    zero_quantized_gradients: Annotated[
        bool, Key("int4 all-to-all reduction (qgZ)", STAGE_3, since=(0, 10, 0), is_ignored_by_mics=True)
    ] = False
    zeropp_loco_param: Annotated[
        Lazy[LocoBlock] | None,
        Key("error feedback for qgZ", STAGE_3, since=(0, 16, 1), until=(0, 19, 8), is_ignored_by_mics=True),
    ] = None
    mics_shard_size: Annotated[
        Integer, Key("shards inside groups of this size", STAGE_3, since=(0, 9, 2), until=(0, 19, 7))
    ] = -1
    mics_hierarchical_params_gather: Annotated[
        bool, Key("gathers in two stages", STAGE_3, since=(0, 9, 2), until=(0, 19, 7))
    ] = False
    offload_param: Annotated[
        Lazy[OffloadParamBlock] | None, Key("where the shards of the parameters live", STAGE_3)
    ] = None
    offload_optimizer: Annotated[
        Lazy[OffloadOptimizerBlock] | None, Key("where the optimizer states live and step", SHARDED)
    ] = None
    zenflow: Annotated[
        Lazy[ZenFlowBlock] | None, Key("asynchronous updates on the CPU", SHARDED, since=(0, 17, 3))
    ] = None

    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    cpu_offload_use_pin_memory: bool | None = None
    pipeline_loading_checkpoint: Annotated[bool, Key(since=(0, 10, 1))] = False
    override_module_apply: Annotated[bool, Key(since=(0, 10, 1))] = True
    log_trace_cache_warnings: Annotated[bool, Key(since=(0, 16, 1))] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, Key(since=(0, 18, 6))] = False


ZERO_KEYS = keys_of(ZeroBlock)  # by bare name


def json_key(bare: str) -> str:
    """A key of `zero_optimization` as files usually spell it, with DeepSpeed's prefix `stage3_`, if any."""
    info = ZeroBlock.model_fields.get(bare)
    return info.alias if info is not None and info.alias else bare
