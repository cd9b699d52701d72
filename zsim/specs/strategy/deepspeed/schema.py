"""The shape of a DeepSpeed JSON: which keys there are and what may stand behind them.

As in DeepSpeed, blocks refuse unknown keys, `stage3_x` and the bare `x` are the same key, and 5e8 is a whole
number. A default here is never used: what a key means when it is absent depends on the release and is decided
in `deepspeed_resolve`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zsim.dtypes import ELEMENT_TYPES


def _not_a_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, found {str(value).lower()}")
    return value


_DTYPE_NAMES = {
    spelling: name for name in ("bf16", "fp16", "fp32") for spelling in ELEMENT_TYPES[name].spellings
}


def _dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Elements = Annotated[int, BeforeValidator(_not_a_bool), Field(ge=0)]
Count = Annotated[int, BeforeValidator(_not_a_bool), Field(ge=1)]
Integer = Annotated[int, BeforeValidator(_not_a_bool)]
Number = Annotated[float, BeforeValidator(_not_a_bool)]
Amount = Annotated[float, BeforeValidator(_not_a_bool), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_not_a_bool), Field(ge=0, le=1)]
DtypeName = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_dtype)]
CommunicationDtype = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_lower)]
Device = Literal["none", "cpu", "nvme"]


class JsonBlock(BaseModel):
    """A JSON object whose keys are all known; validators are built when a file is first read."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, defer_build=True
    )


class OffloadParamBlock(JsonBlock):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Elements = 5
    buffer_size: Elements = 100_000_000
    max_in_cpu: Elements = 1_000_000_000
    pin_memory: bool | None = None


class OffloadOptimizerBlock(JsonBlock):
    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Elements = 4
    pin_memory: bool | None = None
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Fraction = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Fraction = 0.8


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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list)]


class LeafModuleBlock(JsonBlock):
    classes: Names | None = None
    names: Names = Field(default_factory=list)
    name_suffixes: Names = Field(default_factory=list)


class ZeroBlock(JsonBlock):
    """`zero_optimization`; sizes are elements."""

    stage: Annotated[int, BeforeValidator(_not_a_bool), Field(ge=0, le=3)] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Elements = Field(500_000_000, le=2**50)  # it is allocated
    use_multi_rank_bucket_allreduce: bool | None = None
    allgather_partitions: bool = True
    allgather_bucket_size: Elements = 500_000_000
    overlap_comm: bool | None = None
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParamBlock | None = None
    offload_optimizer: OffloadOptimizerBlock | None = None
    zenflow: ZenFlowBlock | None = None
    sub_group_size: Elements = 1_000_000_000
    cpu_offload_use_pin_memory: bool | None = None
    prefetch_bucket_size: Elements = Field(50_000_000, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: Elements = Field(100_000, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: Elements = Field(2**63 - 1, alias="stage3_model_persistence_threshold")
    max_live_parameters: Elements = Field(1_000_000_000, alias="stage3_max_live_parameters")
    max_reuse_distance: Elements = Field(1_000_000_000, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: Integer = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    zero_hpz_partition_size: Elements = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: LocoBlock | None = None
    mics_shard_size: Integer = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModuleBlock | None = None
    compute_grad_norm: bool = True
    parameter_alignment: bool = False


class Bf16Block(JsonBlock):
    enabled: bool | None = None
    immediate_grad_update: bool = False
    check_grad_overflow: bool | None = None
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class Fp16Block(JsonBlock):
    enabled: bool | None = None
    auto_cast: bool = False
    loss_scale: Amount = 0.0
    initial_scale_power: Integer = 16
    loss_scale_window: Count = 1000
    hysteresis: Integer = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Number = 1
    fp16_master_weights_and_grads: bool = False


class DataTypesBlock(JsonBlock):
    grad_accum_dtype: DtypeName | None = None
    param_dtype: DtypeName | None = None
    buffer_dtype: DtypeName | None = None
    keep_in_fp32_modules: list[str] | None = None


class OptimizerBlock(JsonBlock):
    type: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class AioBlock(JsonBlock):
    block_size: Count = 1_048_576
    queue_depth: Count = 8
    intra_op_parallelism: Count = 1
    thread_count: Count = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class ActivationCheckpointingBlock(JsonBlock):
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Count | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class TensorParallelBlock(JsonBlock):
    autotp_size: Elements = 0
    tp_overlap_comm: bool = False
    tensor_parallel: Any = Field(None, alias="tp")
    dtype: Any = None
    injection_policy_tuple: Any = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    partition_config: Any = None
    preset_model: str | None = None
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: str | None = None


class DeepSpeedFile(JsonBlock):
    """The whole file. Blocks that zsim does not look into are `Any`."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: Amount | None = None
    zero_optimization: ZeroBlock | None = None
    bf16: Bf16Block | None = None
    fp16: Fp16Block | None = None
    data_types: DataTypesBlock | None = None
    communication_data_type: CommunicationDtype | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, BeforeValidator(_not_a_bool), Field(gt=0)] = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    optimizer: OptimizerBlock | None = None
    aio: AioBlock | None = None
    activation_checkpointing: ActivationCheckpointingBlock | None = None
    tensor_parallel: TensorParallelBlock | None = None
    sequence_parallel_size: Count | None = None
    allgather_size: Elements | None = None
    sparse_gradients: bool = False
    managed_gradient_accumulation: bool = True

    amp: Any = None
    autotuning: Any = None
    checkpoint: Any = None
    comet: Any = None
    comms_logger: Any = None
    compile: Any = None
    compression_training: Any = None
    csv_monitor: Any = None
    curriculum_learning: Any = None
    data_efficiency: Any = None
    dataloader_drop_last: Any = None
    datastates_ckpt: Any = None
    disable_allgather: Any = None
    disable_python_gc: Any = None
    dump_state: Any = None
    eigenvalue: Any = None
    elasticity: Any = None
    expert_parallel: Any = None
    flops_profiler: Any = None
    graph_harvesting: Any = None
    hybrid_engine: Any = None
    log_level: Any = None
    memory_breakdown: Any = None
    monitor_config: Any = None
    nebula: Any = None
    pipeline: Any = None
    progressive_layer_drop: Any = None
    quantize_training: Any = None
    scheduler: Any = None
    seq_parallel_comm_data_type: Any = None
    seq_parallel_communication_data_type: Any = None
    sparse_attention: Any = None
    steps_per_print: Any = None
    tensorboard: Any = None
    timers: Any = None
    torch_autocast: Any = None
    use_data_before_expert_parallelism: Any = None
    vocabulary_size: Any = None
    wall_clock_breakdown: Any = None
    wandb: Any = None
    weight_quantization: Any = None
    zero_allow_untested_optimizer: Any = None
    zero_force_ds_cpu_optimizer: Any = None
