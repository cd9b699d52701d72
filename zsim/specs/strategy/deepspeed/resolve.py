"""What each block means for one release: defaults filled in, what DeepSpeed overrides overridden."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.specs.strategy.deepspeed.config import (
    ActivationCheckpointingConfig,
    AioConfig,
    Dtype,
    LeafModules,
    LossScaling,
    OptimizerChoice,
    OptimizerImplementation,
    OptimizerOffload,
    OptimizerWrapper,
    ParameterOffload,
    TrainingValues,
    ZeroConfig,
)
from zsim.specs.strategy.deepspeed.reader import Reading
from zsim.specs.strategy.deepspeed.release import Release
from zsim.specs.strategy.deepspeed.schema import (
    ActivationCheckpointingBlock,
    AioBlock,
    Bf16Block,
    DataTypesBlock,
    Fp16Block,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    OptimizerBlock,
    ZeroBlock,
)
from zsim.specs.strategy.training import Precision

# Mixture-of-experts blocks that stage 3 fetches whole unless told otherwise (since 0.18.0).
DEFAULT_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def resolve_zero(zero: ZeroBlock, release: Release) -> ZeroConfig:
    """Stages 1 and 2 copy gradients contiguously whenever the optimizer is offloaded; one all-gather per
    parameter leaves nothing to prefetch but the next one (bucket size 1). MiCS does not read what
    `IGNORED_BY_MICS` lists."""
    offload_param = _resolve_offload_param(zero.offload_param, zero.stage, release)
    offload_optimizer = _resolve_offload_optimizer(zero.offload_optimizer, zero.stage, release)
    multi_rank = zero.use_multi_rank_bucket_allreduce
    is_mics = zero.stage == 3 and zero.mics_shard_size > 0
    return ZeroConfig(
        stage=zero.stage,
        contiguous_gradients=zero.contiguous_gradients
        or (zero.stage in (1, 2) and offload_optimizer is not None),
        reduce_scatter=zero.reduce_scatter,
        reduce_bucket_size=zero.reduce_bucket_size,
        use_multi_rank_bucket_allreduce=(
            release.default_multi_rank_bucket_allreduce if multi_rank is None else multi_rank
        ),
        allgather_bucket_size=zero.allgather_bucket_size,
        gathers_step_in_buckets=release.gathers_step_in_buckets,
        overlap_comm=zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm,
        round_robin_gradients=zero.round_robin_gradients,
        compute_grad_norm=zero.compute_grad_norm,
        parameter_alignment=zero.parameter_alignment,
        sub_group_size=zero.sub_group_size,
        prefetch_bucket_size=1
        if zero.stage == 3 and zero.allgather_sequential and not is_mics
        else zero.prefetch_bucket_size,
        param_persistence_threshold=zero.param_persistence_threshold,
        model_persistence_threshold=zero.model_persistence_threshold,
        max_live_parameters=zero.max_live_parameters,
        max_reuse_distance=zero.max_reuse_distance,
        module_granularity_threshold=0 if is_mics else zero.module_granularity_threshold,
        use_all_reduce_for_fetch_params=zero.use_all_reduce_for_fetch_params and not is_mics,
        allgather_sequential=zero.allgather_sequential and not is_mics,
        gather_16bit_weights_on_model_save=zero.gather_16bit_weights_on_model_save,
        memory_efficient_linear=zero.memory_efficient_linear,
        enable_sanity_checks=zero.enable_sanity_checks and not is_mics,
        leaf_module=_resolve_leaf_modules(zero, release),
        zero_hpz_partition_size=zero.zero_hpz_partition_size,
        zero_quantized_weights=zero.zero_quantized_weights and not is_mics,
        zero_quantized_nontrainable_weights=zero.zero_quantized_nontrainable_weights,
        zero_quantized_gradients=zero.zero_quantized_gradients and not is_mics,
        has_loco=zero.zeropp_loco_param is not None,
        mics_shard_size=zero.mics_shard_size,
        mics_hierarchical_params_gather=zero.mics_hierarchical_params_gather,
        offload_param=offload_param,
        offload_optimizer=offload_optimizer,
        zenflow=zero.zenflow is not None,
    )


def _resolve_offload_param(
    block: OffloadParamBlock | None, stage: int, release: Release
) -> ParameterOffload | None:
    if block is None or block.device == "none" or stage != 3:
        return None
    return ParameterOffload(
        device=block.device,
        nvme_path=block.nvme_path,
        buffer_count=block.buffer_count,
        buffer_size=block.buffer_size,
        max_in_cpu=block.max_in_cpu,
        pin_memory=release.default_pin_memory if block.pin_memory is None else block.pin_memory,
    )


def _resolve_offload_optimizer(
    block: OffloadOptimizerBlock | None, stage: int, release: Release
) -> OptimizerOffload | None:
    if block is None or block.device == "none" or stage == 0:
        return None
    return OptimizerOffload(
        device=block.device if stage == 3 else "cpu",
        nvme_path=block.nvme_path,
        buffer_count=block.buffer_count,
        pin_memory=release.default_pin_memory if block.pin_memory is None else block.pin_memory,
        pipeline_read=block.pipeline_read,
        pipeline_write=block.pipeline_write,
        ratio=block.ratio,
        super_offload=block.super_offload,
        cpuadam_cores_fraction=block.cpuadam_cores_perc,
    )


def _resolve_leaf_modules(zero: ZeroBlock, release: Release) -> LeafModules:
    default = DEFAULT_LEAF_CLASSES if release.number >= (0, 18, 0) else ()
    block = zero.leaf_module
    if block is None:
        return LeafModules(default, (), ())
    classes = default if block.classes is None else tuple(dict.fromkeys(block.classes))
    return LeafModules(classes, tuple(dict.fromkeys(block.names)), tuple(dict.fromkeys(block.name_suffixes)))


def resolve_precision(reading: Reading, training: TrainingValues) -> tuple[Precision, Precision | None, str]:
    """(the precision, what the file itself says or None, where the answer comes from).

    The file says bf16 or fp16 by enabling it and fp32 by disabling both. fp8, which the experiment may ask
    for, is bf16 to DeepSpeed. Without any word DeepSpeed trains in fp32; "auto" is `training.auto_precision`
    where that block says so. Raises InputError where both blocks are enabled and where file and experiment
    disagree.
    """
    where, asked = reading.where, training.precision
    bf16, fp16 = reading.file.bf16 or Bf16Block(), reading.file.fp16 or Fp16Block()
    if bf16.enabled and fp16.enabled:
        raise InputError(f"{where}: bf16.enabled: bf16 and fp16 are both enabled; expected one of them")
    explicit: Precision | None = None
    if bf16.enabled:
        explicit = "bf16"
    elif fp16.enabled:
        explicit = "fp16"
    elif bf16.enabled is False and fp16.enabled is False:
        explicit = "fp32"
    if asked is None:
        if explicit is not None:
            return explicit, explicit, "file"
        choices: tuple[Precision, ...] = (training.auto_precision, "bf16", "fp16")
        for precision in choices:
            if f"{precision}.enabled" in reading.autos:
                return precision, None, "auto"
        return "fp32", None, "default"
    as_deepspeed = "bf16" if asked == "fp8" else asked
    if explicit is not None and explicit != as_deepspeed:
        raise InputError(
            f"{where}: {explicit if explicit != 'fp32' else as_deepspeed}.enabled: the file says {explicit}, "
            f"but [training] precision is '{asked}'; make them equal or leave one out"
        )
    enabled = {"bf16": bf16.enabled, "fp16": fp16.enabled}.get(as_deepspeed)
    if enabled is False:
        raise InputError(
            f"{where}: {as_deepspeed}.enabled: found false, but [training] precision is '{asked}'; "
            "make them equal or leave one out"
        )
    return asked, explicit, "file" if explicit is not None and asked != "fp8" else "experiment"


def resolve_wrapper(
    stage: int, param: Dtype, accumulate: Dtype, release: Release, *, is_cpu_offloaded: bool, where: str
) -> OptimizerWrapper:
    """Which of DeepSpeed's optimizer classes runs the step.

    bf16 with fp32 accumulation at stage 1 is BF16_Optimizer, unless offloaded to the CPU; without ZeRO bf16
    and fp16 are FP16_Optimizer, which shards nothing, and other mixtures are refused.
    """
    if stage == 1 and (param, accumulate) == ("bf16", "fp32") and not is_cpu_offloaded:
        return "fp16_optimizer" if release.mistakes_bf16_wrapper else "bf16_optimizer"
    if stage > 0:
        return "zero3" if stage == 3 else "zero12"
    if param == "bf16" and release.shards_bf16_without_zero:
        allowed = accumulate == "fp32"
        wrapper: OptimizerWrapper = "bf16_optimizer"
    elif param == "bf16" and accumulate == "fp32":
        allowed, wrapper = release.mistakes_bf16_wrapper, "fp16_optimizer"
    else:
        allowed, wrapper = param == accumulate, "none" if param == "fp32" else "fp16_optimizer"
    if not allowed:
        expected = "fp32" if wrapper == "bf16_optimizer" else param
        raise InputError(
            f"{where}: data_types.grad_accum_dtype: found {accumulate}, expected {expected} for {param} "
            f"weights at stage 0 of DeepSpeed {release}"
        )
    return wrapper


def resolve_grad_accum_dtype(block: DataTypesBlock, stage: int, param: Dtype, release: Release) -> Dtype:
    """The weights' type unless given; before 0.17.6 bf16 without ZeRO accumulated in fp32."""
    if block.grad_accum_dtype is not None:
        return block.grad_accum_dtype
    return "fp32" if stage == 0 and param == "bf16" and release.shards_bf16_without_zero else param


def resolve_overflow_check(
    wrapper: OptimizerWrapper, param: Dtype, bf16: Bf16Block, release: Release
) -> bool:
    """Whether the step looks for infinite gradients first: always in fp16; in bf16 stages 1 and 2 ask
    `bf16.check_grad_overflow`, stage 3 never does, FP16_Optimizer always does, BF16_Optimizer never."""
    if wrapper in ("none", "bf16_optimizer"):
        return False
    if wrapper == "fp16_optimizer" or param == "fp16" or release.checks_overflow_of_every_dtype:
        return True
    if wrapper == "zero3" or param == "fp32" or not release.has_bf16_overflow_key:
        return False
    given = bf16.check_grad_overflow
    return release.default_bf16_check_grad_overflow if given is None else given


def resolve_loss_scaling(block: Fp16Block, enabled: bool) -> LossScaling:
    return LossScaling(
        enabled=enabled,
        auto_cast=block.auto_cast,
        loss_scale=block.loss_scale or None,
        initial_scale_power=block.initial_scale_power,
        loss_scale_window=block.loss_scale_window,
        hysteresis=block.hysteresis,
        min_loss_scale=int(block.min_loss_scale),
    )


def resolve_optimizer(block: OptimizerBlock | None, zero: ZeroConfig) -> OptimizerChoice:
    """Adam and AdamW are DeepSpeed's fused kernel, torch's with `torch_adam`, the CPU's when offloaded."""
    name = None if block is None or block.type is None else block.type.lower()
    implementation: OptimizerImplementation = "fused"
    if zero.stage > 0 and zero.offload_optimizer is not None:
        implementation = "cpu"
    if block is not None and block.params.get("torch_adam") is True:
        implementation = "torch"
    return OptimizerChoice(name, implementation)


def resolve_aio(block: AioBlock | None, release: Release) -> AioConfig:
    block = block or AioBlock()
    threads = (
        block.intra_op_parallelism
        if release.aio_threads_key == "intra_op_parallelism"
        else block.thread_count
    )
    return AioConfig(
        block_size_bytes=block.block_size,
        queue_depth=block.queue_depth,
        intra_op_parallelism=threads,
        single_submit=block.single_submit,
        overlap_events=block.overlap_events,
        use_gds=block.use_gds,
    )


def resolve_checkpointing(block: ActivationCheckpointingBlock | None) -> ActivationCheckpointingConfig:
    block = block or ActivationCheckpointingBlock()
    return ActivationCheckpointingConfig(
        partition_activations=block.partition_activations,
        cpu_checkpointing=block.cpu_checkpointing,
        contiguous_memory_optimization=block.contiguous_memory_optimization,
        number_checkpoints=block.number_checkpoints,
    )


def resolve_state_dtypes(bf16: Bf16Block, fp16: Fp16Block) -> tuple[Dtype, Dtype]:
    """(of the master weights, of Adam's moments): fp32 unless asked otherwise."""
    if fp16.fp16_master_weights_and_grads:
        return "fp16", "fp32"
    if bf16.bf16_master_weights_and_grads:
        return "bf16", "bf16" if bf16.bf16_optimizer_states else "fp32"
    return "fp32", "fp32"
