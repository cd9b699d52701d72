"""Fused attention: the generation that a training chooses, or its framework, and the GPUs that run it."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.errors import InputError
from zsim.operations.attention.attention import Attention
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu, select_attention_variant
from zsim.specs.experiment.data.lengths import has_padding
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import AttentionChoice, TrainingTable
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import AttentionKind, PaddingMask, Precision

HOPPER = 9.0
_AMPERE, _BLACKWELL = 8.0, 10.0  # compute capability
_ALWAYS_MASKED = ("llama", "gemma", "cohere")  # families whose transformers 4.38 and 4.39 mask every batch


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
    if padding_mask_of(table, strategy, parallelism, model) is not None:
        takes_cudnn = table.attention is None and has_cudnn_attention(gpus) and _prefers_cudnn(gpus)
        return "cudnn" if takes_cudnn and _torch_takes_cudnn(model) else "efficient"
    if framework.calls_torch_attention and table.attention is None:
        lengths = table.lengths  # documents apart are a mask; padded ones are too
        is_plain = lengths is None or (
            lengths.batching == "packed" and lengths.attention_by_document is False
        )
        kernels = table.layer_kernels or framework.layer_kernels(strategy, parallelism)
        if kernels == "torch" and is_plain and has_cudnn_attention(gpus) and is_hopper(gpus):
            return "cudnn" if _torch_takes_cudnn(model) else None
    return framework.choose_attention(table, strategy, gpus, model)


def padding_mask_of(
    table: TrainingTable, strategy: StrategyTable, parallelism: ParallelismConfig, model: ModelSpec
) -> PaddingMask | None:
    """The mask that transformers hands to torch's scaled_dot_product_attention. None where it hands none.

    It makes a mask of a batch with padding, and none where every token is real, so that FlashAttention may
    run (4.36 to 5.x `_ignore_causal_mask_sdpa`, modeling_attn_mask_utils.py, masking_utils.py from 4.53 on).
    FlashAttention takes no mask (torch sdp_utils_cpp.h `check_for_attn_mask`): the memory-efficient kernel
    does, and cuDNN's, which torch prefers on Hopper and Blackwell's data-centre GPUs from 2.11 on. Before
    4.53 the mask is one of scores, made once (modeling_llama.py `_update_causal_mask`), later of booleans
    (masking_utils.py `sdpa_mask`). That a padded micro-batch may have no padding by chance is neglected.

    Llama, Gemma and Cohere make one of every batch in 4.38 and 4.39 (modeling_llama.py
    `_update_causal_mask`, until huggingface/transformers #30070).
    """
    is_asked_for = table.attention is not None and "attention" in table.model_fields_set
    is_eager = table.attention == "math" or table.transformers is None or table.compile
    is_theirs = training_of(strategy.kind).calls_torch_attention and parallelism.context == 1
    if not is_theirs or is_eager or (is_asked_for and table.attention != "efficient"):
        return None
    release = release_number(table.transformers or "")
    is_always_masked = model.language_family in _ALWAYS_MASKED and (4, 38) <= release < (4, 40)
    if not is_always_masked and not _is_padded(table):
        return None
    return "bool" if release >= (4, 53) else "scores"


def _is_padded(table: TrainingTable) -> bool:
    lengths, count = table.lengths, table.micro_batch_size or 1
    return lengths is not None and has_padding(lengths, count, table.sequence_length)


def padding_note(
    mask: PaddingMask | None, choices: Sequence[AttentionChoice | None], table: TrainingTable
) -> tuple[str, ...]:
    """The note of the kernels that run under a mask, and of what would run without one."""
    if mask is None:
        return ()
    names = {"efficient": "torch's memory-efficient kernel", "cudnn": "cuDNN's kernel"}
    kernels = " and ".join(dict.fromkeys(names[choice] for choice in choices if choice in names))
    batches, remedy = (
        (" of padded micro-batches", 'training.lengths.batching = "packed"')
        if _is_padded(table)
        else (f" under transformers {table.transformers}", "transformers 4.40")
    )
    return (
        f"attention{batches} is given a mask and runs in {kernels} over all pairs of tokens, "
        f"with keys and values repeated for all heads; {remedy}, or "
        'training.attention = "flash2", would leave half of the pairs or fewer',
    )


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


def release_number(release: str) -> tuple[int, ...]:
    """The numbers of a release."""
    return tuple(int(part) for part in release.split("."))


def has_efficient_default(gpus: Sequence[Gpu]) -> bool:
    """Whether torch's scaled_dot_product_attention runs the memory-efficient kernel, masked or not: NVIDIA's
    GPUs before Ampere (sdp_utils.cpp `check_flash_attention_hardware_support`)."""
    return all(gpu.vendor == "nvidia" and is_before(gpu, _AMPERE) for gpu in gpus)


def has_cudnn_attention(gpus: Sequence[Gpu]) -> bool:
    """Whether the GPUs' files have curves of cuDNN's fused attention."""
    return all(gpu.vendor == "nvidia" and "cudnn" in gpu.attention.variants for gpu in gpus)


def _prefers_cudnn(gpus: Sequence[Gpu]) -> bool:
    return all(int(gpu.compute_capability or 0) in (HOPPER, _BLACKWELL) for gpu in gpus)


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

    It is unchanged for None, "flash" and "math", for "flash2" on GPUs whose files have that curve as their
    own, as those of NVIDIA's GPUs before Blackwell, and for "efficient" on those before Ampere.
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
    has_curve = gpu.vendor == "nvidia" and "efficient" in gpu.attention.variants
    if choice == "efficient" and (not has_curve or is_before(gpu, _AMPERE)):
        return gpu  # the curve of its file is that kernel's, or stands for it
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
    if choice == "efficient" and all(gpu.vendor in ("nvidia", "amd") for gpu in cluster.gpus):
        return "flash"
    if not gpu.supports_flash_attention:
        raise InputError(f"training.attention: GPU '{gpu.name}' does not support 'flash'; expected 'math'")
    if precision == "fp32" and gpu.vendor != "cpu":
        raise InputError(
            f"training.attention: '{choice}' needs bf16 or fp16; expected 'math' with precision fp32"
        )
    return "flash"
