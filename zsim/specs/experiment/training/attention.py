"""Fused attention: the generation that a training chooses, or its framework, and the GPUs that run it."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError
from zsim.operations.attention.attention import Attention
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu, select_attention_variant
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import AttentionChoice, TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import AttentionKind, Precision

HOPPER = 9.0
_AMPERE, _BLACKWELL = 8.0, 10.0  # compute capability


def attention_of(
    table: TrainingTable,
    strategy: StrategyTable,
    gpus: Sequence[Gpu],
    model: ModelSpec,
    parallelism: ParallelismConfig,
) -> AttentionChoice | None:
    """The generation of fused attention on GPUs of one kind, as chosen or by the program's default.

    torch's scaled_dot_product_attention chooses on Hopper, unless the framework's layers choose themselves.
    """
    framework = training_of(strategy.kind)
    if framework.calls_torch_attention and table.attention is None:
        lengths = table.lengths  # documents apart are a mask; padded ones are too
        is_plain = lengths is None or (
            lengths.batching == "packed" and lengths.attention_by_document is False
        )
        kernels = table.layer_kernels or framework.layer_kernels(strategy, parallelism)
        if kernels == "torch" and is_plain and has_cudnn_attention(gpus) and is_hopper(gpus):
            return "cudnn" if _torch_takes_cudnn(model) else None
    return framework.choose_attention(table, strategy, gpus, model)


def runs_flash_2(choice: AttentionChoice | None, strategy: StrategyTable, gpu: Gpu) -> bool:
    """Whether fused attention is FlashAttention-2's CUDA kernel.

    It is if asked for by name, in engines that call it (nanotron, InternEvo), and on GPUs from Ampere on. The
    exceptions are Hopper and Blackwell's data-centre GPUs, where torch's SDPA (2.13
    ATen/native/transformers/cuda/sdp_utils.cpp `check_prefer_cudnn_attention`) and Transformer Engine prefer
    cuDNN's.
    """
    if gpu.vendor != "nvidia" or is_before(gpu, _AMPERE) or gpu.compute_capability is None:
        return False
    calls_it = training_of(strategy.kind).calls_flash_2(strategy)
    if choice in ("flash2", "flash2-deterministic") or (calls_it and choice in (None, "flash")):
        return True
    return choice in (None, "flash") and int(gpu.compute_capability) not in (HOPPER, _BLACKWELL)


def has_cudnn_attention(gpus: Sequence[Gpu]) -> bool:
    """Whether the GPUs' files have curves of cuDNN's fused attention."""
    return all(gpu.vendor == "nvidia" and "cudnn" in gpu.attention.variants for gpu in gpus)


def is_hopper(gpus: Sequence[Gpu]) -> bool:
    """Whether all GPUs are Hopper's."""
    return all(gpu.compute_capability == HOPPER for gpu in gpus)


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


def has_dropped_scores(model: ModelSpec) -> bool:
    """Whether scores of an attention are dropped out."""
    return any(work.dropout > 0 for work in _attentions(model))


def _attentions(model: ModelSpec) -> list[Attention]:
    block_modules = [module for block in model.unique_blocks for module in block.modules]
    op_specs = (module.op_spec for module in (*model.before, *block_modules, *model.after))
    return [work for work in op_specs if isinstance(work, Attention)]


def is_before(gpu: Gpu, capability: float) -> bool:
    """Whether a GPU's compute capability is known and lower."""
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
    if not (has_cudnn_attention([gpu]) and is_hopper([gpu])):
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
