"""The keys of a DeepSpeed JSON around `zero_optimization`, each once: its values, default and releases."""

# See [Note: annotations of tables].

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from zsim.frameworks.deepspeed.settings.json_types import (
    Amount,
    CommunicationDtype,
    Count,
    DtypeName,
    Elements,
    Integer,
    JsonBlock,
    Number,
    refuse_bool,
)
from zsim.frameworks.deepspeed.settings.keys import (
    Key,
    UnsimulatedBehavior,
    is_any_enabled,
    is_present,
    keys_of,
)
from zsim.frameworks.deepspeed.settings.zero_schema import ZeroBlock
from zsim.specs.lazy_model import Lazy

GONE_0_19_7, GONE_0_19_8 = Key(until=(0, 19, 7)), Key(until=(0, 19, 8))
MEASURES = Key(is_measuring=True)


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
    consecutive_hysteresis: Annotated[bool, Key(since=(0, 9, 3))] = False
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


class TensorSizesBlock(JsonBlock):
    """`tensor_parallel.tp`."""

    tp_size: Elements = 1
    tp_grain_size: Count = 1
    mpu: Any = None
    tp_group: Any = None


class TensorParallelBlock(JsonBlock):
    autotp_size: Elements = 0
    tp_overlap_comm: bool = False
    tensor_parallel: TensorSizesBlock | None = Field(None, alias="tp")
    dtype: Any = None
    injection_policy_tuple: Any = None
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = Field(False, alias="kernel_inject")
    partition_config: Any = None
    preset_model: str | None = None
    vocab_parallel_lm_head: bool | None = None
    vocab_parallel_ce_backend: str | None = None


class ExpertParallelBlock(JsonBlock):
    """`expert_parallel`: AutoEP (0.19.8 `module_inject/auto_ep_config.py`)."""

    enabled: bool = False
    autoep_size: Count = 1
    expert_tensor_parallel_size: Count = 1
    preset_model: str | None = None
    use_grouped_mm: bool = True
    comm_backend: Literal["comm", "deepep"] = "comm"
    comm_max_tokens_per_rank: Elements = 0
    gate_up_impl: Literal["separate", "fused"] = "separate"
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = "auto"
    score_apply: Literal["auto", "pre", "post"] = "auto"
    row_weighting_impl: Literal["auto", "eager", "fused"] = "auto"
    async_split_plan: bool = False
    load_balance_coeff: float | None = None
    comm_num_sm: Any = None
    comm_qp_margin: Any = None
    disable_triton_grouped_mm: Any = None
    expert_activation: Any = None
    expert_pattern: Any = None
    expert_w1: Any = None
    expert_w2: Any = None
    expert_w3: Any = None
    has_shared_experts: Any = None
    moe_layer_pattern: Any = None
    num_expert_groups: Any = None
    num_experts_attr: Any = None
    num_limited_groups: Any = None
    route_norm: Any = None
    route_scale: Any = None
    routed_scaling_factor: Any = None
    router_pattern: Any = None
    score_func: Any = None
    shared_experts_gate_pattern: Any = None
    shared_experts_pattern: Any = None
    top_k: Any = None
    top_k_attr: Any = None
    validate_folding_routing: Any = None


class CompileBlock(JsonBlock):
    """`compile`: DeepCompile (0.19.8 `compile/config.py`), and torch's compiler up to 0.14.4."""

    enabled: bool = False
    backend: Any = None
    kwargs: Any = None
    deepcompile: bool = False
    autoep_non_moe: bool = False
    free_activation: bool = False
    free_activation_threshold: Any = None
    debug_log: Any = None
    keep_int_input_tensors: Any = None
    keep_all_input_tensors: Any = None
    offload_activation: bool = False
    offload_activation_pin_memory: bool = True
    offload_opt_states: bool = False
    offload_parameters: bool = False
    double_buffer: bool = True
    symmetric_memory: bool = False
    sync_before_reduce: bool = False
    sync_after_reduce: bool = False
    sync_before_allgather: bool = False
    sync_after_allgather: bool = False
    passes: list[str] | None = None


class PipelineBlock(JsonBlock):
    """`pipeline`, as `get_pipeline_config` fills it. The number of stages is the script's own, too."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    stages: Count | Literal["auto"] = "auto"
    partition: str = "best"
    seed_layers: bool = False
    activation_checkpoint_interval: Elements = 0
    pipe_partitioned: bool = True
    grad_partitioned: bool = True
    use_reentrant: bool | None = None


class DeepSpeedFile(JsonBlock):
    """The whole file. Blocks that zsim does not interpret are `Any`."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: Amount | None = None
    zero_optimization: Lazy[ZeroBlock] | None = None
    bf16: Lazy[Bf16Block] | None = None
    fp16: Lazy[Fp16Block] | None = None
    data_types: Lazy[DataTypesBlock] | None = None
    communication_data_type: CommunicationDtype | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Annotated[float, BeforeValidator(refuse_bool), Field(gt=0)] = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    optimizer: Lazy[OptimizerBlock] | None = None
    aio: Lazy[AioBlock] | None = None
    activation_checkpointing: Lazy[ActivationCheckpointingBlock] | None = None
    tensor_parallel: Lazy[TensorParallelBlock] | None = None
    sequence_parallel_size: Count | None = None
    pipeline: Lazy[PipelineBlock] | None = None
    allgather_size: Elements | None = None
    managed_gradient_accumulation: bool = True
    wall_clock_breakdown: Annotated[Any, MEASURES] = None

    amp: Annotated[Any, GONE_0_19_8, UnsimulatedBehavior("Apex's mixed precision")] = None
    autotuning: Annotated[Any, UnsimulatedBehavior("DeepSpeed's own search over configurations")] = None
    checkpoint: Any = None
    comet: Any = None
    comms_logger: Annotated[Any, MEASURES] = None
    compile: Lazy[CompileBlock] | None = None
    compression_training: Annotated[
        Any, GONE_0_19_7, UnsimulatedBehavior("quantising or pruning while training", is_any_enabled)
    ] = None
    csv_monitor: Any = None
    curriculum_learning: Annotated[
        Any, GONE_0_19_8, UnsimulatedBehavior("sequence lengths that change from step to step")
    ] = None
    data_efficiency: Annotated[
        Any, UnsimulatedBehavior("sequence lengths and tokens that change from step to step")
    ] = None
    data_parallel_size: Any = None
    dataloader_drop_last: Any = None
    datastates_ckpt: Any = None
    disable_allgather: Any = None
    disable_python_gc: Any = None
    dump_state: Any = None
    eigenvalue: Annotated[Any, GONE_0_19_8] = None
    elasticity: Annotated[
        Any, GONE_0_19_8, UnsimulatedBehavior("batch sizes that follow the number of GPUs")
    ] = None
    expert_parallel: Annotated[Lazy[ExpertParallelBlock] | None, Key(since=(0, 19, 2))] = None
    flops_profiler: Annotated[Any, MEASURES] = None
    graph_harvesting: Annotated[
        Any, GONE_0_19_8, UnsimulatedBehavior("CUDA graphs of the optimizer step")
    ] = None
    hybrid_engine: Annotated[Any, UnsimulatedBehavior("generation between training steps")] = None
    log_level: Any = None
    memory_breakdown: Annotated[Any, MEASURES] = None
    monitor_config: Any = None
    nebula: Annotated[Any, GONE_0_19_7] = None
    progressive_layer_drop: Annotated[
        Any, GONE_0_19_8, UnsimulatedBehavior("layers that are left out at random")
    ] = None
    quantize_training: Annotated[
        Any, GONE_0_19_7, UnsimulatedBehavior("quantising while training", is_any_enabled)
    ] = None
    scheduler: Any = None
    seq_parallel_comm_data_type: Any = None
    seq_parallel_communication_data_type: CommunicationDtype | None = None
    sparse_attention: Annotated[
        Any, GONE_0_19_7, UnsimulatedBehavior("block-sparse attention", is_present)
    ] = None
    sparse_gradients: Annotated[bool, GONE_0_19_8, UnsimulatedBehavior("sparse embedding gradients")] = False
    steps_per_print: Any = None
    tensorboard: Any = None
    timers: Any = None
    torch_autocast: Annotated[Any, UnsimulatedBehavior("torch's autocast over fp32 weights")] = None
    use_data_before_expert_parallelism: bool | None = None
    vocabulary_size: Any = None
    wandb: Any = None
    weight_quantization: Annotated[Any, UnsimulatedBehavior("quantised weights", is_present)] = None
    zero_allow_untested_optimizer: Any = None
    zero_force_ds_cpu_optimizer: Annotated[Any, Key(since=(0, 8, 3))] = None


FILE_KEYS = keys_of(DeepSpeedFile)
# Every key that may ask for behaviour that zsim does not simulate, and that behaviour.
UNSIMULATED_KEYS = {
    name: entry
    for name, info in DeepSpeedFile.model_fields.items()
    for entry in info.metadata
    if isinstance(entry, UnsimulatedBehavior)
}
