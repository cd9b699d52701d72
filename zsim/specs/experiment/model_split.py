"""Checks that a model and a batch divide among the ranks of `[parallelism]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.mixers.rwkv7 import GeneralizedDelta
from zsim.operations.operation import operations_of
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.framework_resolver import FrameworkResolver
from zsim.specs.model.spec import Activation, Attention, Block, ContextMethod, ModelSpec
from zsim.specs.strategy.parallelism import CONTEXT, ParallelismConfig
from zsim.specs.strategy.requirement import alternatives, phrase
from zsim.specs.strategy.training import TrainingConfig, layer_kernel_sets

_WINDOW_METHODS: tuple[ContextMethod, ...] = ("all-gather", "all-to-all")  # that know windows
_MASK_BLOCK = 128  # torch.nn.attention.flex_attention._DEFAULT_SPARSE_BLOCK_SIZE


def check_split(
    framework: FrameworkResolver[Any, Any],
    model: ModelSpec,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> None:
    """Raises InputError for heads, widths or micro-batches that do not divide among the ranks.

    It also raises for parallelism that the framework refuses.
    """
    _check_loss(parallelism)
    _check_gathers(parallelism)
    _check_encoder_decoder(model, parallelism)
    _check_stages(model, parallelism)
    framework.check_split(model, training, parallelism)
    if parallelism.tensor > 1 and not parallelism.style.cuts_unevenly:
        cut_blocks = list(model.unique_blocks)
        if parallelism.style.cuts_towers:
            cut_blocks += [block for tower in model.towers for block in tower.blocks[:1]]
        for block in cut_blocks:
            _check_block(block, model, parallelism)
    _check_lenders(framework, model, parallelism)
    _check_mixers(model, parallelism)
    _check_sparse(model, training)
    if parallelism.context > 1:
        _check_context(model, training, parallelism)
    steps, passes = training.gradient_accumulation_steps, parallelism.passes
    if steps % passes:
        raise InputError(
            f"parallelism.passes: found {passes}, which does not divide {steps} micro-batches "
            "(training.gradient_accumulation_steps)"
        )


def check_tokens(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for a sequence that cannot be cut into equal parts for its ranks."""
    shards = parallelism.token_shards * (2 if parallelism.context > 1 and parallelism.style.has_zigzag else 1)
    if training.sequence_length % shards:
        nearest = max(shards, round(training.sequence_length / shards) * shards)
        raise InputError(
            f"training.sequence_length: found {training.sequence_length:,}, which is cut into {shards} equal "
            f"parts (tensor {parallelism.tensor}, context {parallelism.context}); the nearest that divides "
            f"is {nearest:,}"
        )


def _check_encoder_decoder(model: ModelSpec, parallelism: ParallelismConfig) -> None:
    """An encoder and a decoder share no residual stream that could be cut."""
    degrees = {name: getattr(parallelism, name) for name in ("tensor", "pipeline", "context")}
    axis = next((name for name, degree in degrees.items() if degree > 1), None)
    if model.has_encoder and axis:
        raise NotSimulatedError(
            f"parallelism.{axis}: found {degrees[axis]}, but '{model.name}' is an encoder with a decoder, "
            "of which zsim simulates data parallelism only; expected 1"
        )


def _check_stages(model: ModelSpec, parallelism: ParallelismConfig) -> None:
    """A stage sends its residual stream alone to the next."""
    modules = [module for block in model.unique_blocks for module in block.modules]
    read = "keys and values" if any(work.reads_keys for work in operations_of(modules, Attention)) else ""
    if any(work.reads_values for work in operations_of(modules, GeneralizedDelta)):
        read = "values"
    if parallelism.pipeline > 1 and read:
        raise NotSimulatedError(
            f"parallelism.pipeline: found {parallelism.pipeline}, but layers of '{model.name}' read {read} "
            "of earlier layers, which zsim does not simulate being sent between stages; expected 1"
        )


def _check_lenders(
    framework: FrameworkResolver[Any, Any], model: ModelSpec, parallelism: ParallelismConfig
) -> None:
    """Raises NotSimulatedError for layers that share a block, where a framework gathers layer by layer or has
    layers of its own. FSDP2 refuses a parameter of two groups (torch 2.13
    distributed/fsdp/_fully_shard/_fsdp_state.py `_validate_no_duplicate_params`).
    """
    shares = any(module.lender for block in model.unique_blocks for module in block.modules)
    if shares and not (framework.has_lenders and parallelism.is_trivial):
        raise NotSimulatedError(
            f"model '{model.name}' has layers that share a block of attention, which zsim simulates with "
            f"{alternatives('shared blocks')}"
        )


def _check_loss(parallelism: ParallelismConfig) -> None:
    if not parallelism.loss_parallel and not parallelism.has_dtensors:
        raise InputError(
            f"parallelism.loss_parallel: found false, which {phrase('parallelism.loss_parallel')} alone has, "
            f"for tensor ranks; expected true, or {alternatives('parallelism.loss_parallel')}"
        )


def _check_gathers(parallelism: ParallelismConfig) -> None:
    if not parallelism.gather_per_product:
        return
    if not parallelism.has_dtensors:
        raise InputError(
            "parallelism.gather_per_product: found true, which torch's DTensors alone have, for tensor "
            f"ranks; expected false, or {alternatives('parallelism.gather_per_product')}"
        )
    if parallelism.async_tensor:
        raise NotSimulatedError(
            "parallelism.gather_per_product: found true with async_tensor, which zsim simulates with one "
            "gathering for all products of an input; expected false"
        )


def _check_block(block: Block, model: ModelSpec, parallelism: ParallelismConfig) -> None:
    tensor, name = parallelism.tensor, parallelism.style.title
    for module in block.modules:
        work = module.op_spec
        if isinstance(work, Attention):
            heads, groups = work.num_heads, work.num_kv_heads
            _check_divides("heads", heads, tensor, model)
            if parallelism.style.repeats_kv_heads:
                if groups % tensor and tensor % groups:
                    raise InputError(
                        f"parallelism.tensor: '{model.name}' has {groups} key/value heads, and {name} wants "
                        f"one of {groups} and {tensor} to divide the other; the nearest is "
                        f"{_nearest_divisor(groups, tensor)}"
                    )
            else:
                _check_divides("key/value heads", groups, tensor, model)
        elif isinstance(work, Activation):
            _check_divides("features of the MLP", work.width, tensor, model)


def _check_mixers(model: ModelSpec, parallelism: ParallelismConfig) -> None:
    """Raises NotSimulatedError for mixers that a framework has no tensor or context parallelism of, and
    InputError for heads that do not divide among the ranks.
    """
    style = parallelism.style
    axes = (
        ("tensor", parallelism.tensor, style.tensor_mixers),
        ("context", parallelism.context, style.context_mixers),
    )
    for work in (module.op_spec for block in model.unique_blocks for module in block.modules):
        if work.mixer_title and style.mixers is not None and work.mixer_title not in style.mixers:
            raise NotSimulatedError(
                f"model '{model.name}' has {work.mixer_title}, of which {style.title} has no layer; expected "
                f"{alternatives('mixers')}"
            )
        for axis, degree, mixers in axes:
            if work.mixer_title and degree > 1 and work.mixer_title not in mixers:
                raise NotSimulatedError(
                    f"parallelism.{axis}: found {degree}, but '{model.name}' has {work.mixer_title}, of "
                    f"which {style.title} has no {axis} parallelism that zsim knows; expected 1"
                )
        ranks = parallelism.tensor * parallelism.context
        for name, count in work.split_counts if ranks > 1 else ():
            shares_groups = name.startswith("groups") and ranks % count == 0
            if count % ranks and not shares_groups:
                raise InputError(
                    f"parallelism: tensor {parallelism.tensor} x context {parallelism.context} does not "
                    f"divide the {count:,} {name} of '{model.name}'; the nearest product that does is "
                    f"{_nearest_divisor(count, ranks)}"
                )


def _check_sparse(model: ModelSpec, training: TrainingConfig) -> None:
    """Raises NotSimulatedError for attention over chosen keys where all scores are computed under a mask."""
    operations = (module.op_spec for block in model.unique_blocks for module in block.modules)
    sparse = next((operation for operation in operations if operation.needs_sparse_kernels), None)
    if sparse is not None and not layer_kernel_sets()[training.layer_kernels].has_sparse_attention:
        raise NotSimulatedError(
            f"model '{model.name}' has {sparse.mixer_title}, all scores of which transformers' code computes "
            "under a mask, while zsim simulates kernels of the chosen ones alone; expected "
            f"{alternatives('sparse attention')}"
        )


def _check_divides(dimension: str, count: int, tensor: int, model: ModelSpec) -> None:
    if count % tensor:
        raise InputError(
            f"parallelism.tensor: found {tensor}, which does not divide the {count:,} {dimension} of "
            f"'{model.name}'; the nearest that does is {_nearest_divisor(count, tensor)}"
        )


def resolve_context_inner(
    parallelism: ParallelismConfig, world_size: int, gpus_per_node: int
) -> ParallelismConfig:
    """The parallelism with the number of ranks of a context group that exchange heads under "a2a+p2p".

    It is the largest number that divides the group and is on one node of `gpus_per_node` GPUs. If all ranks
    are on one node, or each is on a node of its own, only one of the two methods is left
    (`attn_forward_func_with_cp`, TransformerEngine 2.17.1).
    """
    if parallelism.context_method != "a2a+p2p" or parallelism.context == 1:
        return parallelism
    stride, ranks = 1, parallelism.context
    mesh = parallelism.mesh(world_size)
    for axis, size in reversed(mesh.axes):
        if axis == CONTEXT:
            break
        stride *= size
    max_inner = max(1, gpus_per_node // stride)
    inner = max(count for count in range(1, min(ranks, max_inner) + 1) if ranks % count == 0)
    if inner == 1:
        return replace(parallelism, context_method="p2p")
    return replace(
        parallelism, context_method="all-to-all" if inner == ranks else "a2a+p2p", context_inner=inner
    )


def resolve_context_masks(
    parallelism: ParallelismConfig, model: ModelSpec, sequence_length: int
) -> ParallelismConfig:
    """The parallelism with torch's FlexAttention in place of its ring where a layer has a window."""
    op_specs = [module.op_spec for block in model.unique_blocks for module in block.modules]
    has_windows = any(isinstance(work, Attention) and _has_window(work, sequence_length) for work in op_specs)
    uses_masks = parallelism.style.masks_windows and parallelism.context > 1 and has_windows
    return replace(parallelism, context_masks=uses_masks)


def flex_note(
    parallelism: ParallelismConfig, gpus: Sequence[Gpu], model: ModelSpec, training: TrainingConfig
) -> str | None:
    """The note about the rates that FlexAttention is simulated with, since no GPU's file has a curve of it.

    Fused attention in chunks is torch's FlexAttention too. transformers' Llama 4 does not use FlashAttention,
    and its SDPA computes all scores under a mask (5.24 models/llama4/modeling_llama4.py
    `_supports_flash_attn`, masking_utils.py `_ignore_causal_mask_sdpa`). torchtitan uses FlexAttention for
    it.
    """
    op_specs = [module.op_spec for block in model.unique_blocks for module in block.modules]
    has_chunks = training.attention == "flash" and any(
        isinstance(work, Attention) and work.chunk is not None and work.chunk < training.sequence_length
        for work in op_specs
    )
    if not parallelism.context_masks and not has_chunks:
        return None
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    where = "with a window" if parallelism.context_masks else "in chunks"
    suffix = " under context parallelism" if parallelism.context_masks else ""
    return (
        f"attention {where} is torch's FlexAttention{suffix}, of which no curve was measured on {names}: it "
        "is taken to be as fast as the fused attention of the GPU's file"
    )


def _has_window(work: Attention, sequence_length: int) -> bool:
    return work.window is not None and work.window < sequence_length


def _check_context(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for heads that the ranks cannot exchange and for attention that is not fused.

    Raises NotSimulatedError for windows, and for behaviour of a framework that zsim does not know.
    """
    name = parallelism.style.title
    if not parallelism.style.has_simulated_context:
        raise NotSimulatedError(f"parallelism.context: zsim does not simulate {name}'s ring attention")
    if training.attention == "math":
        raise InputError(
            f"training.attention: found 'math' with parallelism.context = {parallelism.context}, but {name} "
            "shares sequences among ranks by fused kernels only; expected 'flash'"
        )
    for block in model.unique_blocks:
        for attention in operations_of(block.modules, Attention):
            _check_attention(attention, model, training, parallelism)


def _check_attention(
    work: Attention, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    method, name = parallelism.context_method, parallelism.style.title
    if work.unpads:
        raise NotSimulatedError(
            f"parallelism.context: zsim does not simulate it with the padding mask of '{model.name}'"
        )
    trait = _unshared_trait(work, training.sequence_length)
    if trait:
        raise NotSimulatedError(
            f"parallelism.context: the attention of '{model.name}' {trait}, which zsim does not simulate "
            f"with {name}'s context parallelism; expected context = 1"
        )
    if _has_window(work, training.sequence_length) and method not in _WINDOW_METHODS:
        accepted_methods = [name for name in _WINDOW_METHODS if name in parallelism.style.context_methods]
        raise InputError(
            f"parallelism.context_method: '{model.name}' attends to a window of {work.window:,} tokens, "
            f"which {name} refuses with '{method}'; expected {' or '.join(map(repr, accepted_methods))}"
        )
    _check_mask_blocks(training, parallelism)
    if method in ("all-to-all", "a2a+p2p"):
        _check_heads(work, model, parallelism)


def _check_mask_blocks(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """torch 2.13 tensor/experimental/_context_parallel/_attention.py `create_cp_block_mask`."""
    multiple = parallelism.context * _MASK_BLOCK
    if parallelism.context_masks and training.sequence_length % multiple:
        nearest = max(multiple, round(training.sequence_length / multiple) * multiple)
        raise InputError(
            f"training.sequence_length: found {training.sequence_length:,} with a window and "
            f"{parallelism.context} context ranks, which torch refuses unless each has whole blocks of "
            f"{_MASK_BLOCK} tokens of the mask; the nearest that it takes is {nearest:,}"
        )


def _unshared_trait(work: Attention, sequence_length: int) -> str:
    """The trait of an attention that zsim does not simulate across context ranks. Empty if there is none."""
    traits = {
        "sees all tokens": not work.is_causal,
        "is in chunks": work.chunk is not None and work.chunk < sequence_length,
        "has sinks": work.has_sinks,
        "has a bias": work.bias != "none",
    }
    return next((trait for trait, is_found in traits.items() if is_found), "")


def _check_heads(work: Attention, model: ModelSpec, parallelism: ParallelismConfig) -> None:
    """Ranks that exchange heads for tokens each take the same number of heads. DeepSpeed repeats heads of K
    and V.
    """
    is_inner = parallelism.context_method == "a2a+p2p"
    ranks, tensor = parallelism.context_inner if is_inner else parallelism.context, parallelism.tensor
    heads, groups = work.num_heads // tensor, max(1, work.num_kv_heads // tensor)
    repeats = parallelism.style.repeats_kv_heads_in_context and ranks % groups == 0
    for head_kind, count in (("heads", heads), ("key/value heads", groups)):
        if count % ranks and not (repeats and count == groups):
            rank_phrase = " on a tensor-parallel rank" if tensor > 1 else ""
            raise InputError(
                f"parallelism.context: found {ranks} ranks that exchange heads, which do not divide the "
                f"{count:,} {head_kind} of '{model.name}'{rank_phrase}; the nearest that do are "
                f"{_nearest_divisor(count, ranks)}"
            )


def _nearest_divisor(count: int, target: int) -> int:
    """The divisor of `count` that is nearest to `target`."""
    divisors = [number for number in range(1, min(count, 4 * target) + 1) if count % number == 0]
    return min(divisors, key=lambda number: abs(number - target))
