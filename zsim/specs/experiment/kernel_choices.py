"""The kernels that a training runs on, as `[training]` chooses them or by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.frameworks.megatron.settings.config import is_before_3, is_core_since
from zsim.frameworks.megatron.settings.table import CLIP_GRAD, Engine, MegatronTable
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu, select_attention_variant
from zsim.specs.experiment.tables import AttentionChoice, TrainingTable
from zsim.specs.model.spec import Attention, ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import AttentionKind, CrossEntropy, LayerKernels, Precision, TrainingConfig

_AMPERE, _HOPPER, _BLACKWELL = 8.0, 9.0, 10.0  # compute capability
_FULL_RECOMPUTATION = {"checkpoint_is_reentrant": True, "checkpoint_stops_early": False}


def attention_of(
    table: TrainingTable,
    strategy: StrategyTable,
    gpus: Sequence[Gpu],
    model: ModelSpec,
    parallelism: ParallelismConfig,
) -> AttentionChoice | None:
    """The generation of fused attention on GPUs of one kind, as chosen or by the program's default.

    Transformer Engine chooses under Megatron. Else torch's scaled_dot_product_attention does, on Hopper.
    """
    if isinstance(strategy, MegatronTable):
        if not strategy.runs_transformer_engine:
            return table.attention
        return _transformer_engine_choice(table, strategy, gpus, model)
    lengths = table.lengths  # documents apart are a mask; padded ones are too
    is_plain = lengths is None or (lengths.batching == "packed" and lengths.attention_by_document is False)
    is_torch = layer_kernels_of(table, strategy, parallelism) == "torch" and is_plain
    if table.attention is None and is_torch and _has_cudnn(gpus) and _is_hopper(gpus):
        return "cudnn" if _torch_takes_cudnn(model) else None
    return table.attention


def _transformer_engine_choice(
    table: TrainingTable, strategy: MegatronTable, gpus: Sequence[Gpu], model: ModelSpec
) -> AttentionChoice | None:
    """The generation of fused attention that Transformer Engine 1.2 to 2.18 chooses.

    It takes cuDNN's on Hopper, from 2.0 on also on Blackwell, in preference to FlashAttention-3 even where
    that is installed. In deterministic mode it takes FlashAttention-2's deterministic backward before Hopper.
    It also does on Blackwell where scores are dropped out, since cuDNN's deterministic backward there does
    not support that. On Blackwell, cuDNN's deterministic backward is assumed to be as fast as its other one,
    and to be available (cuDNN 9.18.1). On Hopper see `zsim.cost.rates.deterministic`.

    Sources: pytorch/attention.py, then pytorch/attention/dot_product_attention/utils.py
    `get_attention_backend`. common/fused_attn/fused_attn.cpp `nvte_get_fused_attn_backend`.
    """
    is_default = table.attention in (None, "flash")
    is_flash_2 = is_default or table.attention == "flash2"
    has_cudnn = _has_cudnn(gpus)
    is_older = all(gpu.vendor == "nvidia" and _is_before(gpu, _HOPPER) for gpu in gpus)
    is_refused = has_cudnn and not _is_hopper(gpus) and _drops_scores(model)
    if strategy.deterministic_mode and is_flash_2 and (is_older or is_refused):
        return "flash2-deterministic"
    is_cudnn = is_default or table.attention == "cudnn"
    if strategy.deterministic_mode and is_cudnn and has_cudnn and _is_hopper(gpus):
        return "cudnn-deterministic"
    return "cudnn" if is_default and has_cudnn else table.attention


def runs_flash_2(choice: AttentionChoice | None, strategy: StrategyTable, gpu: Gpu) -> bool:
    """Whether fused attention is FlashAttention-2's CUDA kernel.

    It is if asked for by name, in engines that call it (nanotron, InternEvo), and on GPUs from Ampere on. The
    exceptions are Hopper and Blackwell's data-centre GPUs, where torch's SDPA (2.13
    ATen/native/transformers/cuda/sdp_utils.cpp `check_prefer_cudnn_attention`) and Transformer Engine prefer
    cuDNN's.
    """
    if gpu.vendor != "nvidia" or _is_before(gpu, _AMPERE) or gpu.compute_capability is None:
        return False
    calls_it = isinstance(strategy, MegatronTable) and strategy.engine != "megatron"
    if choice in ("flash2", "flash2-deterministic") or (calls_it and choice in (None, "flash")):
        return True
    return choice in (None, "flash") and int(gpu.compute_capability) not in (_HOPPER, _BLACKWELL)


def _has_cudnn(gpus: Sequence[Gpu]) -> bool:
    return all(gpu.vendor == "nvidia" and "cudnn" in gpu.attention.variants for gpu in gpus)


def _is_hopper(gpus: Sequence[Gpu]) -> bool:
    return all(gpu.compute_capability == _HOPPER for gpu in gpus)


def _torch_takes_cudnn(model: ModelSpec) -> bool:
    """Whether torch's scaled_dot_product_attention gives all of the model's attention to cuDNN.

    It does from torch 2.11 on, whose wheel brings cuDNN 9.19
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp `check_prefer_cudnn_attention`: after 9.15.0, on
    compute capability 9 and 10). torch 2.10 has the same code and cuDNN 9.10. Dropout must be in sixteenths
    (`check_cudnn_dropout`, from 2.12). Heads may be up to 128 wide, or 192 with values of 128, in multiples
    of eight (`check_cudnn_tensor_shapes`). A window is a mask there, which no kernel skips. A softcap and
    sinks are not supported. Models with any of these keep the GPU's own curve.
    """
    attentions = _attentions(model)
    return bool(attentions) and all(_fits_cudnn(work) for work in attentions)


def _fits_cudnn(work: Attention) -> bool:
    widths = work.qk_head_dim, work.v_head_dim
    fits = widths == (192, 128) or (max(widths) <= 128 and not any(width % 8 for width in widths))
    is_plain = work.window is None and work.bias == "none" and not work.softcaps and not work.has_sinks
    return fits and is_plain and not work.unpads and (work.dropout * 16).is_integer()


def has_grouped_heads(model: ModelSpec) -> bool:
    """Whether several query heads of an attention have the same keys and values."""
    return any(work.num_kv_heads < work.num_heads for work in _attentions(model))


def _drops_scores(model: ModelSpec) -> bool:
    return any(work.dropout > 0 for work in _attentions(model))


def _attentions(model: ModelSpec) -> list[Attention]:
    block_modules = [module for block in model.unique_blocks for module in block.modules]
    op_specs = (module.op_spec for module in (*model.before, *block_modules, *model.after))
    return [work for work in op_specs if isinstance(work, Attention)]


def _is_before(gpu: Gpu, capability: float) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability < capability


def apply_attention(cluster: Cluster, choices: Sequence[AttentionChoice | None]) -> Cluster:
    """The cluster with its GPUs running each type's generation of fused attention.

    It is unchanged for None, "flash" and "math", and for "flash2" on GPUs whose files have that curve as
    their own, as those of NVIDIA's GPUs before Blackwell.
    """
    if all(choice in (None, "flash", "math") for choice in choices):
        return cluster
    return cluster.replace_gpus(
        [_apply_choice(gpu, choice) for gpu, choice in zip(cluster.gpus, choices, strict=True)]
    )


def _apply_choice(gpu: Gpu, choice: AttentionChoice | None) -> Gpu:
    if choice in (None, "flash", "math"):
        return gpu
    if choice == "flash2":
        return _flash_2_gpu(gpu)
    if choice == "flash2-deterministic":
        return _deterministic_flash_2_gpu(gpu)
    if choice == "cudnn-deterministic":
        return _deterministic_cudnn_gpu(gpu)
    try:
        return select_attention_variant(gpu, str(choice))
    except InputError as error:
        raise InputError(f"training.attention: {error}") from None


def _deterministic_flash_2_gpu(gpu: Gpu) -> Gpu:
    if gpu.vendor != "nvidia":
        raise InputError(
            f"training.attention: found 'flash2-deterministic' with GPU '{gpu.name}'; zsim knows the blocks "
            "of FlashAttention-2's CUDA kernel alone, expected 'flash' or 'math'"
        )
    gpu = _flash_2_gpu(gpu)
    return gpu.model_copy(update={"attention": gpu.attention.model_copy(update={"is_deterministic": True})})


def _deterministic_cudnn_gpu(gpu: Gpu) -> Gpu:
    if not (_has_cudnn([gpu]) and _is_hopper([gpu])):
        raise InputError(
            f"training.attention: found 'cudnn-deterministic' with GPU '{gpu.name}'; zsim knows cuDNN's "
            "deterministic backward on Hopper alone, expected 'cudnn', 'flash2-deterministic' or 'math'"
        )
    gpu = select_attention_variant(gpu, "cudnn")
    return gpu.model_copy(update={"attention": gpu.attention.model_copy(update={"writes_scores": True})})


def _flash_2_gpu(gpu: Gpu) -> Gpu:
    return select_attention_variant(gpu, "flash2") if "flash2" in gpu.attention.variants else gpu


def attention_kind(choice: str | None, cluster: Cluster, precision: Precision) -> AttentionKind:
    """The chosen kind of attention. The default is fused attention if all GPUs and the precision allow it."""
    gpu = next((gpu for gpu in cluster.gpus if not gpu.supports_flash_attention), cluster.gpu)
    if choice is None:
        is_possible = precision != "fp32" or gpu.vendor == "cpu"
        return "flash" if gpu.supports_flash_attention and is_possible else "math"
    if choice == "math":
        return "math"
    if not gpu.supports_flash_attention:
        raise InputError(f"training.attention: GPU '{gpu.name}' does not support 'flash'; expected 'math'")
    if precision == "fp32" and gpu.vendor != "cpu":
        raise InputError(
            f"training.attention: '{choice}' needs bf16 or fp16; expected 'math' with precision fp32"
        )
    return "flash"


def apply_megatron_defaults(table: TrainingTable, engine: Engine, version: str) -> TrainingTable:
    """`[training]` with Megatron's defaults.

    These are fused kernels (`layer_kernels_of` says which), a loss that works in place, gradients clipped at
    1, and checkpoints that run everything again (`CheckpointFunction` of core tensor_parallel/random.py, as
    in nanotron and InternEvo). An engine other than "megatron" keeps `compile` as it is.
    """
    clipping = CLIP_GRAD if table.gradient_clipping is None else table.gradient_clipping
    default_loss: CrossEntropy = (
        "megatron" if is_core_since(version) and engine == "megatron" else "megatron-before-0.8"
    )
    loss = table.cross_entropy or ("fused_linear" if table.liger else default_loss)
    return table.model_copy(
        update={
            "compile": table.compile or engine == "megatron",
            "gradient_clipping": clipping,
            "cross_entropy": loss,
            **{key: value for key, value in _FULL_RECOMPUTATION.items() if key not in table.model_fields_set},
        }
    )


def layer_kernels_of(
    table: TrainingTable, strategy: StrategyTable, parallelism: ParallelismConfig
) -> LayerKernels:
    """Whose kernels blocks have.

    The default is Megatron's under Megatron, and nanotron's and InternEvo's under their engines.
    Megatron-DeepSpeed's layers have those of Megatron-LM 2, from which it was forked.
    """
    if table.layer_kernels is not None:
        return table.layer_kernels
    if isinstance(strategy, MegatronTable) and strategy.engine == "megatron":
        return "megatron-2" if is_before_3(strategy.version) else "megatron"
    if isinstance(strategy, MegatronTable):
        return strategy.engine
    is_theirs = parallelism.style == "deepspeed" and parallelism.has_megatron_layers
    return "megatron-2" if is_theirs else "torch"


def resolve_reduce_overlap(
    parallelism: ParallelismConfig, strategy: StrategyTable, requested: ParallelismTable
) -> ParallelismConfig:
    """The parallelism with the reductions of inputs' gradients as requested, or as in the release of Megatron
    that the strategy names.

    Raises InputError where there are none to choose.
    """
    overlaps = requested.overlap_tensor_reduce
    if overlaps is None:
        is_old = isinstance(strategy, MegatronTable) and is_before_3(strategy.version)
        return replace(parallelism, overlap_tensor_reduce=not is_old)
    is_theirs = parallelism.style in ("megatron", "deepspeed") and parallelism.tensor > 1
    if not is_theirs or parallelism.sequence_parallel:
        raise InputError(
            f"parallelism.overlap_tensor_reduce: found {str(overlaps).lower()}, which is Megatron's "
            "--no-async-tensor-model-parallel-allreduce for tensor parallelism without sequence parallelism; "
            "expected it left out"
        )
    return replace(parallelism, overlap_tensor_reduce=overlaps)


def apply_megatron_deepspeed_defaults(table: TrainingTable) -> TrainingTable:
    """`[training]` with the kernels of Megatron-DeepSpeed's layers, which are Megatron's."""
    if table.liger or table.cross_entropy is not None:
        return table.model_copy(update={"compile": True})
    return table.model_copy(update={"compile": True, "cross_entropy": "megatron-before-0.8"})


def limit_device_connections(table: TrainingTable, cluster: Cluster) -> TrainingTable:
    """`[training]` with CUDA_DEVICE_MAX_CONNECTIONS = 1, unless it is set.

    Megatron's arguments.py asserts it before Blackwell if tensor or context parallelism is on (core 0.16.1
    `validate_args`).
    """
    capabilities = [gpu.compute_capability for gpu in cluster.gpus if gpu.compute_capability is not None]
    if "device_max_connections" in table.model_fields_set or not capabilities:
        return table
    capability = min(capabilities)
    return table if capability >= _BLACKWELL else table.model_copy(update={"device_max_connections": 1})


def cross_entropy_of(table: TrainingTable) -> CrossEntropy:
    """The chosen kernels of the loss. The default is fused with the LM head under Liger, and one kernel under
    torch.compile.
    """
    if table.cross_entropy is not None:
        return table.cross_entropy
    return "fused_linear" if table.liger else "fused" if table.compile else "eager"


def check_stored_types(training: TrainingConfig, table: TrainingTable, strategy: StrategyTable) -> None:
    """Raises InputError for an `autocast` or `stored_dtype` of `[training]` that its strategy does not have.

    Raises NotSimulatedError for settings that zsim lacks with weights that FSDP2 keeps in 16 bits.
    """
    kind = strategy.kind
    low = "bf16" if training.precision == "fp8" else training.precision
    if training.autocast and (kind != "fsdp1" or low == "fp32"):
        raise InputError(
            f"training.autocast: found true with strategy '{kind}' in {low}; expected 'fsdp1' in bf16 or "
            "fp16 (DDP is under autocast anyway)"
        )
    if training.stored_dtype == "fp32":
        return
    if kind not in ("ddp", "fsdp1", "fsdp2"):
        raise InputError(
            f"training.stored_dtype: strategy '{kind}' has its own; expected 'ddp', 'fsdp1' or 'fsdp2'"
        )
    if kind == "fsdp2":
        _check_stored_by_fsdp2(training, table, strategy)
    if training.stored_dtype != low:
        raise InputError(
            f"training.stored_dtype: found '{training.stored_dtype}' with precision {training.precision}; "
            "expected 'fp32', or precision bf16 or fp8"
        )


def _check_stored_by_fsdp2(training: TrainingConfig, table: TrainingTable, strategy: StrategyTable) -> None:
    assert isinstance(strategy, Fsdp2Table)
    conflicts = {
        f"training.optimizer '{training.optimizer}'": training.optimizer in ("muon", "adamw-bf16"),
        "training.lora": table.lora is not None,
        "strategy.cpu_offload": strategy.cpu_offload,
        "strategy.param_dtype 'fp8'": strategy.param_dtype == "fp8",
    }
    for conflict, is_so in conflicts.items():
        if is_so:
            raise NotSimulatedError(
                f"training.stored_dtype: found '{training.stored_dtype}' with {conflict} under FSDP2, which "
                "is not simulated; expected 'fp32', or another choice there"
            )
