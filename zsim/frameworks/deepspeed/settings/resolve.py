"""Resolves each block for one release: defaults filled in, DeepSpeed's own overrides applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import (
    AioConfig,
    DeepSpeedConfig,
    Dtype,
    LeafModules,
    OptimizerChoice,
    OptimizerImplementation,
    OptimizerOffload,
    OptimizerWrapper,
    ParameterOffload,
    TrainingValues,
    ZeroConfig,
)
from zsim.frameworks.deepspeed.settings.json_types import JsonBlock
from zsim.frameworks.deepspeed.settings.keys import keys_of
from zsim.frameworks.deepspeed.settings.reader import Reading
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import (
    AioBlock,
    Bf16Block,
    DataTypesBlock,
    DeepSpeedFile,
    Fp16Block,
)
from zsim.frameworks.deepspeed.settings.zero_schema import (
    ZERO_KEYS,
    LeafModuleBlock,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    ZeroBlock,
)
from zsim.specs.strategy.training import Precision

# Mixture-of-experts blocks that stage 3 fetches whole unless told otherwise (since 0.18.0).
DEFAULT_LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)

# Class of the module of router and experts, by family (transformers 5.23; of V2 4.57 writes MoE).
EXPERT_BLOCKS = {
    "mixtral": DEFAULT_LEAF_CLASSES[0],
    "qwen2_moe": DEFAULT_LEAF_CLASSES[1],
    "qwen3_moe": DEFAULT_LEAF_CLASSES[2],
    "deepseek_v2": "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Moe",
    "deepseek_v3": "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE",
    "glm4_moe": "transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeMoE",
    "olmoe": "transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock",
    "phimoe": "transformers.models.phimoe.modeling_phimoe.PhimoeSparseMoeBlock",
}
# deepspeed.utils.set_z3_leaf_modules (pull request 4966).
_FIRST_WITH_LEAVES = (0, 13, 1)

_NO_RELEASE_HAS_IT = (
    "delayed parameter update: the CPU updates with the gradients of the step before, during forward and "
    "backward (ZeRO-Offload, section 5.2); no DeepSpeed release has it (DeepSpeed issue 1260)"
)

_NO_SUMS = (
    "no sums of gradients in host memory: ZeRO-Infinity as published (section 5); every DeepSpeed release "
    "keeps them"
)


def resolve_zero(zero: ZeroBlock, release: Release) -> ZeroConfig:
    """Every key as the file gives it, or as its `Key` says if DeepSpeed uses another value.

    Stages 1 and 2 copy gradients contiguously whenever the optimizer is offloaded. With one all-gather per
    parameter only the next parameter is prefetched (bucket size 1).
    """
    stage, values = zero.stage, _fill_defaults(zero, zero.stage, release)
    if stage == 3 and zero.mics_shard_size > 0:
        fields = ZeroBlock.model_fields
        values |= {bare: fields[bare].default for bare, key in ZERO_KEYS.items() if key.is_ignored_by_mics}
    values["offload_param"] = _param_offload(zero.offload_param, stage, release)
    values["leaf_module"] = _leaf_modules(zero.leaf_module or LeafModuleBlock.model_construct(), release)
    values["offload_optimizer"] = _optimizer_offload(zero.offload_optimizer, stage, release)
    values["contiguous_gradients"] |= stage in (1, 2) and values["offload_optimizer"] is not None
    if stage == 3 and values["allgather_sequential"]:
        values["prefetch_bucket_size"] = 1
    return ZeroConfig.model_construct(**values)


def _fill_defaults(block: JsonBlock, stage: int, release: Release) -> dict[str, Any]:
    """The block's values, with this release's defaults for those left open."""
    values = dict(block)
    for bare, key in keys_of(type(block)).items():
        if values[bare] is None and key.default is not None:
            values[bare] = key.default(stage, release)
    return values


def _param_offload(block: OffloadParamBlock | None, stage: int, release: Release) -> ParameterOffload | None:
    if block is None or block.device == "none" or stage != 3:
        return None
    return ParameterOffload.model_construct(**_fill_defaults(block, stage, release))


def _optimizer_offload(
    block: OffloadOptimizerBlock | None, stage: int, release: Release
) -> OptimizerOffload | None:
    if block is None or block.device == "none" or stage == 0:
        return None
    values = _fill_defaults(block, stage, release)
    return OptimizerOffload.model_construct(**values | ({} if stage == 3 else {"device": "cpu"}))


def _leaf_modules(block: LeafModuleBlock, release: Release) -> LeafModules:
    default = DEFAULT_LEAF_CLASSES if release.has_leaf_classes else ()
    classes = default if block.classes is None else tuple(map(_full_class_name, block.classes))
    return LeafModules.model_construct(**dict(block) | {"classes": classes})


def _full_class_name(name: str) -> str:
    """The block of `EXPERT_BLOCKS` that has this class name, else the name itself."""
    blocks = {block.rpartition(".")[2].lower(): block for block in EXPERT_BLOCKS.values()}
    return blocks.get(name.rpartition(".")[2].lower(), name)


def add_leaf_modules(config: DeepSpeedConfig, names: Sequence[str], family: str) -> DeepSpeedConfig:
    """The config with classes that the script makes leaf modules, by name or full name.

    At stages other than 3 a note says that they have no effect.

    Raises InputError for a release without the call, and for classes that are not the block of router and
    experts of `family`.
    """
    if not names:
        return config
    key, block = "strategy.leaf_modules", EXPERT_BLOCKS.get(family, "")
    if config.stage != 3:
        note = f"{key} is without effect at stage {config.stage}, which fetches no modules"
        return replace(config, notes=(*config.notes, note))
    if config.release.number < _FIRST_WITH_LEAVES:
        raise InputError(
            f"{key}: DeepSpeed {config.release} has no leaf modules; expected strategy.version from "
            f"{'.'.join(map(str, _FIRST_WITH_LEAVES))} on"
        )
    for name in names:
        if _full_class_name(name) != block:
            expectation = f"'{block.rpartition('.')[2]}'" if block else "it left out"
            raise InputError(
                f"{key}: found '{name}', which zsim knows for no module of a model of family '{family}'; "
                f"expected {expectation}"
            )
    leaf = config.zero.leaf_module
    wider = leaf.model_copy(update={"classes": (*leaf.classes, block)})
    return replace(config, zero=config.zero.model_copy(update={"leaf_module": wider}))


def delay_update(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """The config with ZeRO-Offload's one-step delayed parameter update: the CPU updates one step late.

    Raises InputError if nothing is updated on the CPU, or for a stage that the paper does not describe.
    """
    offload = config.zero.offload_optimizer
    if config.stage not in (1, 2) or offload is None:
        state = f"stage {config.stage}" + ("" if offload else " without offload_optimizer")
        raise InputError(
            f"strategy.delayed_parameter_update: found {state}; expected stage 1 or 2 with offload_optimizer "
            "on the CPU"
        )
    return replace(config, delayed_parameter_update=True, notes=(*config.notes, _NO_RELEASE_HAS_IT))


def drop_gradient_sums(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """The config with ZeRO-Infinity's gradients as published (arXiv 2104.07857), without sums in host memory.

    Raises InputError where no release has such sums, and where several micro-batches need them.
    """
    offload, where = config.zero.offload_optimizer, "strategy.host_gradient_sums: found false"
    if config.stage != 3 or offload is None or config.zero.is_mics or offload.super_offload:
        raise InputError(
            f"{where}, which is for stage 3 with offload_optimizer, without MiCS and super_offload; expected "
            "it left out"
        )
    steps = config.batch.gradient_accumulation_steps
    if steps > 1:
        raise InputError(
            f"{where} with gradient_accumulation_steps {steps}, which are summed there; expected 1, or true"
        )
    return replace(config, host_gradient_sums=False, notes=(*config.notes, _NO_SUMS))


def resolve_precision(reading: Reading, training: TrainingValues) -> tuple[Precision, str]:
    """(the precision, its origin).

    The file selects bf16 or fp16 by enabling it and fp32 by disabling both. fp8, which the experiment may ask
    for, is bf16 to DeepSpeed. Without either DeepSpeed trains in fp32. "auto" is `training.auto_precision` if
    that block says "auto".

    Raises InputError if both blocks are enabled, and if file and experiment disagree.
    """
    where, requested = reading.where, training.precision
    bf16, fp16 = (
        reading.file.bf16 or Bf16Block.model_construct(),
        reading.file.fp16 or Fp16Block.model_construct(),
    )
    if bf16.enabled and fp16.enabled:
        raise InputError(f"{where}: bf16.enabled: bf16 and fp16 are both enabled; expected one of them")
    explicit: Precision | None = None
    if bf16.enabled:
        explicit = "bf16"
    elif fp16.enabled:
        explicit = "fp16"
    elif bf16.enabled is False and fp16.enabled is False:
        explicit = "fp32"
    if requested is None:
        if explicit is not None:
            return explicit, "file"
        choices: tuple[Precision, ...] = (training.auto_precision, "bf16", "fp16")
        for precision in choices:
            if f"{precision}.enabled" in reading.autos:
                return precision, "auto"
        return "fp32", "default"
    deepspeed_precision = "bf16" if requested == "fp8" else requested
    if explicit is not None and explicit != deepspeed_precision:
        raise InputError(
            f"{where}: {explicit if explicit != 'fp32' else deepspeed_precision}.enabled: the file says "
            f"{explicit}, "
            f"but [training] precision is '{requested}'; make them equal or leave one out"
        )
    enabled = {"bf16": bf16.enabled, "fp16": fp16.enabled}.get(deepspeed_precision)
    if enabled is False:
        raise InputError(
            f"{where}: {deepspeed_precision}.enabled: found false, but [training] precision is "
            f"'{requested}'; "
            "make them equal or leave one out"
        )
    return requested, "file" if explicit is not None and requested != "fp8" else "experiment"


def resolve_wrapper(
    stage: int, param: Dtype, accumulate: Dtype, release: Release, *, is_cpu_offloaded: bool, where: str
) -> OptimizerWrapper:
    """The class of DeepSpeed that runs the optimizer's step.

    bf16 with fp32 accumulation at stage 1 is BF16_Optimizer, unless offloaded to the CPU. Without ZeRO bf16
    and fp16 are FP16_Optimizer, which shards nothing, and other mixtures are refused.
    """
    if stage == 1 and (param, accumulate) == ("bf16", "fp32") and not is_cpu_offloaded:
        return "fp16_optimizer" if release.mistakes_bf16_wrapper else "bf16_optimizer"
    if stage > 0:
        return "zero3" if stage == 3 else "zero12"
    if param == "bf16" and release.shards_bf16_without_zero:
        is_allowed = accumulate == "fp32"
        wrapper: OptimizerWrapper = "bf16_optimizer"
    elif param == "bf16" and accumulate == "fp32":
        is_allowed, wrapper = release.mistakes_bf16_wrapper, "fp16_optimizer"
    else:
        is_allowed, wrapper = param == accumulate, "none" if param == "fp32" else "fp16_optimizer"
    if not is_allowed:
        expected = "fp32" if wrapper == "bf16_optimizer" else param
        raise InputError(
            f"{where}: data_types.grad_accum_dtype: found {accumulate}, expected {expected} for {param} "
            f"weights at stage 0 of DeepSpeed {release}"
        )
    return wrapper


def resolve_grad_accum_dtype(block: DataTypesBlock, stage: int, param: Dtype, release: Release) -> Dtype:
    """`grad_accum_dtype`, by default the weights' type. Before 0.17.6 bf16 without ZeRO accumulated
    in fp32.
    """
    if block.grad_accum_dtype is not None:
        return block.grad_accum_dtype
    return "fp32" if stage == 0 and param == "bf16" and release.shards_bf16_without_zero else param


def default_communication_dtype(stage: int, param: Dtype, release: Release) -> Dtype:
    """The default of `communication_data_type`."""
    if release.reduces_in_fp16 and stage > 0:
        return "fp16"
    return "fp32" if release.reduces_bf16_in_fp32 and param == "bf16" else param


def resolve_overflow_check(
    wrapper: OptimizerWrapper, param: Dtype, bf16: Bf16Block, release: Release
) -> bool:
    """Whether the step looks for infinite gradients first.

    In fp16 it always does. In bf16 `bf16.check_grad_overflow` decides at stages 1 and 2. Stage 3 and
    BF16_Optimizer never do, and FP16_Optimizer always does.
    """
    if wrapper in ("none", "bf16_optimizer"):
        return False
    if wrapper == "fp16_optimizer" or param == "fp16" or release.checks_overflow_of_every_dtype:
        return True
    if wrapper == "zero3" or param == "fp32" or not release.has_bf16_overflow_key:
        return False
    configured = bf16.check_grad_overflow
    return release.default_bf16_check_grad_overflow if configured is None else configured


# `optimizer.type` in lower case -> `training.optimizer`; DeepSpeed's Adam is AdamW unless told otherwise.
TRAINING_NAMES = {
    "adam": "adamw", "adamw": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd",
    "adafactor": "adafactor", "muon": "muon", "onebitadam": "onebitadam", "onebitlamb": "onebitlamb",
    "zerooneadam": "zerooneadam",
}  # fmt: skip


def resolve_optimizer(file: DeepSpeedFile, zero: ZeroConfig) -> OptimizerChoice:
    """The optimizer and its kernel: DeepSpeed's fused one, torch's with `torch_adam`, the CPU's when
    offloaded."""
    block = file.optimizer
    name = None if block is None or block.type is None else block.type.lower()
    implementation: OptimizerImplementation = "fused"
    if zero.stage > 0 and zero.offload_optimizer is not None:
        implementation = "cpu"
    if block is not None and block.params.get("torch_adam") is True:
        implementation = "torch"
    training_name = TRAINING_NAMES.get(name or "")
    params = {} if block is None else block.params
    if training_name == "sgd" and block is not None and block.params.get("momentum"):
        training_name = "sgd_momentum"
    return OptimizerChoice(
        name,
        implementation,
        training_name,
        allows_untested=file.zero_allow_untested_optimizer is True,
        forces_cpu_optimizer=file.zero_force_ds_cpu_optimizer is not False,
        orthogonalisation="standard" if params.get("ns_method") == "standard" else "gram",
        by_head=name == "muon" and bool(params.get("per_head_muon", False)),
    )


def resolve_aio(block: AioBlock | None, release: Release) -> AioConfig:
    block = block or AioBlock.model_construct()
    threads = (
        block.intra_op_parallelism
        if release.aio_threads_key == "intra_op_parallelism"
        else block.thread_count
    )
    return AioConfig(
        block_size_bytes=block.block_size,
        queue_depth=block.queue_depth,
        intra_op_parallelism=threads,
        use_gds=block.use_gds,
    )


def resolve_state_dtypes(file: DeepSpeedFile, release: Release, *, is_offloaded: bool) -> tuple[Dtype, Dtype]:
    """(type of the master weights, of Adam's moments): fp32 unless set otherwise.

    On the GPU moments have the masters' type. DeepSpeedCPUAdam's are fp32 unless `fp32_optimizer_states` is
    false, which `bf16_optimizer_states` sets in releases that pass it on.
    """
    bf16, fp16 = file.bf16 or Bf16Block.model_construct(), file.fp16 or Fp16Block.model_construct()
    master: Dtype = "fp32"
    if fp16.fp16_master_weights_and_grads:
        master = "fp16"
    elif bf16.bf16_master_weights_and_grads:
        master = "bf16"
    params = {} if file.optimizer is None else file.optimizer.params
    is_narrow = params.get("fp32_optimizer_states") is False
    is_narrow |= bf16.bf16_optimizer_states and release.has_bf16_cpu_states
    return master, master if is_narrow or not is_offloaded else "fp32"
