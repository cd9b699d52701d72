"""Activation bytes: the tensors that forward keeps for backward, module by module.

Follows Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), section 4.1: every tensor that a module's backward needs is counted once, at the module that
needs it, and masks take one byte. With b sequences of s tokens, hidden size h, a heads and 2-byte activations
its block with dropout and written-out attention keeps

    s b h (34 + 5 a s / h) bytes =
        2sbh norm + 2sbh qkv input + 6sbh q, k, v + 5as^2b softmax, its mask, its output
      + 2sbh projection input + sbh mask + 2sbh norm + 2sbh MLP input + 8sbh GELU + 8sbh its output + sbh mask

Adapted: grouped queries keep k and v of g < a heads. A gated MLP of width f keeps gate, up and their product,
6sbf bytes (8sbf in eager mode, which keeps act(gate) too). Fused attention keeps q, k, v and 4 bytes of
log-sum-exp per head and token in place of everything with s^2 (its output is the projection's input). Eager
Hugging Face code keeps more than the paper where it is written in Python: see `norm_cost` and
`activation_cost`. Norm statistics are neglected, as in the paper. The loss is in `zsim.cost.kernels.losses`.
"""

from __future__ import annotations

from typing import Any

from zsim.cost.kernels.adapters import product_type
from zsim.cost.kernels.attention import (
    LOGSUMEXP_BYTES,
    input_elements,
    output_elements,
    query_elements,
    unpads,
)
from zsim.cost.kernels.fp8 import is_quantized, kept_input_bytes, kept_weight_bytes
from zsim.cost.kernels.losses import temporary_bytes_per_logit
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.memory.adapters import adapter_temporary_bytes, cast_bytes, frozen_saved_bytes, is_dequantised
from zsim.cost.memory.context import backward_tensors, forward_tensors
from zsim.cost.memory.experts import (
    ExpertWork,
    expert_backward_tensors,
    expert_forward_tensors,
    expert_saved_tensors,
)
from zsim.cost.memory.saved import SAVED, keeps_fused_projection, score_bytes
from zsim.cost.memory.traced import traced_backward_tensors, traced_forward_tensors, traced_saved_tensors
from zsim.cost.rates.deterministic import SCORE_BYTES, num_buffers
from zsim.dtypes import DTYPE_BYTES
from zsim.specs.model.experts import GroupedLinear
from zsim.specs.model.spec import (
    Activation,
    AdapterInput,
    AdapterSum,
    Attention,
    Block,
    Embedding,
    Exchange,
    ExchangeKind,
    Linear,
    Loss,
    Module,
    Norm,
    Residual,
)
from zsim.specs.model.traced import TracedModule


def saved_bytes(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes that the module keeps from forward to backward."""
    if isinstance(module.op_spec, ExpertWork):
        return sum(expert_saved_tensors(module, shape, options))
    if isinstance(module.op_spec, TracedModule):
        return sum(traced_saved_tensors(module.op_spec, shape, options))
    weight = 0
    if isinstance(module.op_spec, Linear) and module.has_backward and is_quantized(module, options):
        weight = kept_weight_bytes(module.op_spec, options)
        if not module.shares_input:
            input_shards = (
                module.op_spec.overlapped_collectives.input_shards
                if module.op_spec.overlapped_collectives
                else 1
            )
            numel = shape.tokens // input_shards * module.op_spec.in_features
            copy = module.op_spec.in_features * module.op_spec.out_features if options.autocast else 0
            copy *= 0 if options.fp8.is_transformer_engine else options.activation_bytes
            return kept_input_bytes(module.op_spec, numel, options) + weight + copy
    if module.shares_input and _saves_only_its_input(module, options):
        return weight
    if (frozen_bytes := frozen_saved_bytes(module, shape, options)) is not None:
        return frozen_bytes
    return SAVED[type(module.op_spec)](module.op_spec, shape, options)


def saved_bytes_selective(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """`saved_bytes` under selective recomputation (Korthikanti et al. 2022, section 5). The core of attention
    keeps q, k and v and is run again in backward. Everything else is kept.
    """
    if not isinstance(module.op_spec, Attention):
        return saved_bytes(module, shape, options)
    return shape.tokens * input_elements(module.op_spec) * options.activation_bytes


def selective_op_modules(block: Block, options: WorkOptions) -> tuple[Module, ...]:
    """Modules whose outputs "selective-op" keeps: fused attention, reduce-scatters, all-to-alls, and the
    first, third, fifth ... product of a block (experts' and their gate's are not among them). Backward reads
    the last product's output, or what its reduce-scatter makes of it, only if a norm follows (Gemma 2).
    Otherwise torch.compile does not keep it. A product in fp8 is `aten._scaled_mm`, which is neither counted
    nor kept: all of them run again whose outputs backward reads.

    Source: torchtitan v0.1.0 to v0.2.2 `_op_sac_save_list` (models/llama3/infra/parallelize.py) and
    `_apply_op_sac` (distributed/activation_checkpoint.py), which runs every second `aten.mm` again (its main
    branch since February 2026, pull request 2357, keeps every `_scaled_mm`). torch 2.13's `solve_min_cut`
    (_functorch/partitioners.py) cuts only paths to backward: compiled with that list, a block of four
    products runs one again in bf16 and three in fp8.
    """
    modules = block.modules
    products = [module for module in modules if isinstance(module.op_spec, Linear)]
    scatters = [module for module in modules if _is_scatter(module)]
    if options.compile and not _feeds_norm(modules, products[-1]):
        products = products[:-1]
        scatters = [
            scatter for scatter in scatters if scatter is not scatters[-1] or _feeds_norm(modules, scatter)
        ]
    products = [module for module in products if not is_quantized(module, options)]
    cores = [module for module in modules if isinstance(module.op_spec, Attention)]
    exchanges = [
        exchange
        for exchange in modules
        if isinstance(exchange.op_spec, Exchange) and exchange.op_spec.forward == "all_to_all"
    ]
    saved_modules = (*products[::2], *cores, *scatters, *exchanges)
    return tuple(dict.fromkeys(saved_modules))


def kept_quantised_input(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes of the input of a product in fp8 that "selective-op" keeps although it is set to make it again:
    one byte an element, once for the products that share it, of the rank's own part where it is gathered.

    Source: pytorch issue 128730 (2024): the partitioner keeps the inputs of `_scaled_mm`, as in the releases
    that these lists were written for. torch 2.13 does so no more.
    """
    spec = module.op_spec
    if not isinstance(spec, Linear) or not is_quantized(module, options) or module.shares_input:
        return 0
    return options.fp8.operand_bytes(shape.tokens * spec.in_features // spec.input_cast_ranks)


def _is_scatter(module: Module) -> bool:
    """Whether it reduce-scatters, be it a product that scatters its own output in pieces."""
    spec = module.op_spec
    if isinstance(spec, Linear):
        return spec.chunked_overlap is not None and spec.chunked_overlap.scatters > 0
    return isinstance(spec, Exchange) and spec.forward == "reduce_scatter"


def _feeds_norm(modules: tuple[Module, ...], module: Module) -> bool:
    """Whether a norm reads the module's output, and no exchange before it."""
    reader = _reader(modules, modules.index(module), Norm | Exchange)
    return reader is not None and isinstance(reader.op_spec, Norm)


def kept_outputs(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[int, ...]:
    """Bytes of each tensor that "selective-op" keeps of a module: the output of a product or an exchange, or
    fused attention's output and log-sum-exp."""
    work, e = module.op_spec, options.activation_bytes
    if isinstance(work, Exchange):
        return (exchanged_bytes(work, work.forward, shape.tokens, e),)
    if isinstance(work, Attention):
        return shape.tokens * output_elements(work) * e, shape.tokens * work.num_heads * LOGSUMEXP_BYTES
    assert isinstance(work, Linear)
    num_parts = (
        work.chunked_overlap.ranks
        if work.chunked_overlap is not None and work.chunked_overlap.scatters
        else 1
    )
    return (shape.tokens * work.out_features * e // num_parts,)


def shared_saved_bytes(block: Block, shape: BatchShape, options: WorkOptions) -> dict[str, int]:
    """Bytes by module of the saved tensors that are among the outputs "selective-op" keeps, so that
    recomputation does not allocate them again: inputs of fused attention, of the product after it, of
    activations and of a norm after the last product, and attention's log-sum-exp. With rotary embeddings
    attention keeps new q and k, so of its inputs only v counts (or the full fused projection of which v is a
    slice).
    """
    modules, shared = block.modules, dict.fromkeys((module.name for module in block.modules), 0)
    index_of_module = {module.name: index for index, module in enumerate(modules)}
    core = next(index for index, module in enumerate(modules) if isinstance(module.op_spec, Attention))
    last = max(index for index in range(core) if isinstance(modules[index].op_spec, Linear))
    for module in selective_op_modules(block, options):
        local_shape = shape.seen_by(module)
        index, (size, *statistics) = index_of_module[module.name], kept_outputs(module, local_shape, options)
        if isinstance(module.op_spec, Attention):
            shared[module.name] += sum(statistics)
            reader = _reader(modules, index, Linear)
        elif index < core and isinstance(module.op_spec, Linear):
            reader, attention = modules[core], modules[core].op_spec
            assert isinstance(attention, Attention)
            if attention.rotary and not keeps_fused_projection(attention, options):
                values = attention.num_kv_heads * attention.v_head_dim * options.activation_bytes
                size = local_shape.tokens * values if index == last else 0
        else:
            reader = _reader(modules, index, Activation) if isinstance(module.op_spec, Linear) else None
            if reader is None and options.fuses_kernels:  # or keeps a copy in fp32
                reader = _reader(modules, index, Norm) if _feeds_norm(modules, module) else None
        if reader is not None:
            shared[reader.name] += size
    return {name: size for name, size in shared.items() if size}


def _reader(modules: tuple[Module, ...], index: int, kind: Any) -> Module | None:
    """The next module after `index` whose work is of type `kind`."""
    return next((module for module in modules[index + 1 :] if isinstance(module.op_spec, kind)), None)


def checkpoint_bytes(hidden_size: int, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes that a block keeps under full recomputation: its input, 2sbh bytes in bf16."""
    return shape.tokens * hidden_size * options.stream_bytes


def recomputed_modules(block: Block, *, stops_early: bool = True) -> tuple[Module, ...]:
    """The modules that run a second time before the block's backward under full recomputation.

    `stops_early`: torch's non-reentrant checkpoint (the default of transformers 5 and torchtitan) stops once
    the last tensor that backward needs exists again. A Linear keeps its input, not its output, so a block
    that ends in a Linear does not repeat that product, nor the add after it.
    """
    modules = list(block.modules)
    if stops_early:
        while modules and _saves_nothing(modules[-1]):
            modules.pop()
        if modules and isinstance(modules[-1].op_spec, Linear | GroupedLinear):
            modules.pop()
    return tuple(modules)


def forward_extra_bytes(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes that a module allocates during forward beyond `saved_bytes`: its output and its largest
    temporaries.

    Where attention unpads, the kernel is FlashAttention's first, which sums its output in fp32 (`o_tmp` of
    `mha_fwd`, fmha_api.cpp).
    """
    work, tokens, e = module.op_spec, shape.tokens, options.activation_bytes
    if isinstance(work, Linear):
        weight = work.in_features * work.out_features * e if is_dequantised(module) else 0
        gathered = work.in_features if work.holds_gathered_input else 0
        output_bytes = tokens * (work.out_features + gathered) * product_type(work, options)[0]
        return output_bytes + weight + cast_bytes(module, shape, is_backward=False)
    if isinstance(work, AdapterInput | AdapterSum):
        return adapter_temporary_bytes(work, shape, options)
    if isinstance(work, Norm):
        is_upcast = work.kind != "layer" and not options.fuses_kernels
        return tokens * work.width * (options.stream_bytes + (4 if is_upcast else 0))
    if isinstance(work, Attention) and work.context is not None:
        return sum(forward_tensors(work, shape, options))
    if isinstance(work, Attention):
        rotary = 2 * query_elements(work) * e if work.rotary and not options.fuses_kernels else 0
        temporaries = 2 * score_bytes(work, shape, e) if options.attention == "math" else 0
        output = output_elements(work) * e
        if unpads(work, options):  # q, k and v before the gather; the sum in fp32 is gone before the scatter
            output = input_elements(work) * e + output_elements(work) * max(e, 4)
        return tokens * (output + rotary) + temporaries
    if isinstance(work, Loss):
        return tokens * work.vocab_size * temporary_bytes_per_logit(options, is_backward=False)
    if isinstance(work, Residual | Embedding):
        return tokens * work.width * options.stream_bytes
    if isinstance(work, Exchange):
        return exchanged_bytes(work, work.forward, tokens, e)
    if isinstance(work, ExpertWork):
        return sum(expert_forward_tensors(work, shape, options))
    if isinstance(work, TracedModule):
        return sum(traced_forward_tensors(work, shape, options))
    return tokens * work.width * e if isinstance(work, Activation) else 0


def exchanged_bytes(spec: Exchange, kind: ExchangeKind | None, tokens: int, element_bytes: int) -> int:
    """Bytes of the tensor that a collective of an exchange makes: all tokens' or a rank's part. An all-reduce
    works in place.
    """
    element = DTYPE_BYTES[spec.dtype] if spec.dtype else 4 if spec.in_fp32 else element_bytes
    full = (spec.numel or tokens * spec.width) * element
    return {"all_gather": full, "reduce_scatter": full // spec.ranks, "all_to_all": full}.get(kind or "", 0)


def backward_extra_bytes(module: Module, shape: BatchShape, options: WorkOptions) -> int:
    """Bytes that a module allocates during backward: gradients of its output and its input, and temporaries.

    The gradient of the residual stream and the gradients of parameters are not included. FlashAttention-2
    sums the gradient of queries up in fp32, in deterministic mode in several buffers
    (`zsim.cost.rates.deterministic`, also of the scores that cuDNN's writes on Hopper). For gradients of
    grouped keys and values see `expands_groups`. Liger's kernels write gradients in place: a norm the
    gradient of its input over that of its output, a gated activation the gradients of gate and up over gate
    and up (linkedin/Liger-Kernel 0.8, `ops/rms_norm.py` with `in_place`, `ops/swiglu.py`).
    """
    work, tokens, e = module.op_spec, shape.tokens, options.activation_bytes
    if not module.has_backward:
        return 0
    if isinstance(work, AdapterInput | AdapterSum):
        return adapter_temporary_bytes(work, shape, options)
    if isinstance(work, Linear):  # under autocast the weight's gradient is made in the low type, then cast
        makes_weight = options.autocast or is_dequantised(module)
        weight = work.in_features * work.out_features if makes_weight else 0
        gathered = (
            tokens * work.in_features
            if work.overlapped_collectives and work.overlapped_collectives.input_shards > 1
            else 0
        )
        e = product_type(work, options)[0]
        gradient_bytes = (tokens * (work.in_features + work.out_features) + gathered + weight) * e
        return gradient_bytes + cast_bytes(module, shape, is_backward=True)
    if isinstance(work, Norm):
        is_upcast = work.kind != "layer" and not options.fuses_kernels
        stream = options.stream_bytes
        return tokens * work.width * ((stream if options.liger else 2 * stream) + (8 if is_upcast else 0))
    if isinstance(work, Attention) and work.context is not None:
        return sum(backward_tensors(work, shape, options))
    if isinstance(work, Attention):
        elements = input_elements(work) + output_elements(work)
        if options.attention == "flash":
            score_gradient_bytes = score_bytes(work, shape, e) if work.bias in ("made", "read") else 0
            heads = shape.sequences * work.num_heads
            sums = num_buffers(heads, options.deterministic_sms) if options.deterministic_sms else 1
            expanded = 2 * query_elements(work) * e if expands_groups(work, options) else 0
            if options.writes_scores:
                score_gradient_bytes += score_bytes(work, shape, SCORE_BYTES)
            return tokens * (elements * e + sums * query_elements(work) * 4 + expanded) + score_gradient_bytes
        upcast = 4 if work.upcasts_softmax and not options.compile else e
        return tokens * elements * e + 2 * score_bytes(work, shape, upcast)
    if isinstance(work, Activation):
        if options.layers == "nanotron" and work.gated:  # both halves' gradients, and the two joined
            return tokens * work.width * e * 4
        in_place = options.liger and work.gated
        return tokens * work.width * e * (1 if in_place else 3 if work.gated else 2)
    if isinstance(work, Loss):
        return tokens * work.vocab_size * temporary_bytes_per_logit(options, is_backward=True)
    if isinstance(work, Exchange):
        return exchanged_bytes(work, work.backward, tokens, e)
    if isinstance(work, ExpertWork):
        return sum(expert_backward_tensors(work, shape, options))
    if isinstance(work, TracedModule):
        return sum(traced_backward_tensors(work, shape, options))
    return tokens * work.width * e if isinstance(work, Residual | Embedding) else 0


def expands_groups(spec: Attention, options: WorkOptions) -> bool:
    """Whether backward makes dk and dv for every query head, in the activations' type, and sums them up over
    the groups: FlashAttention-2 2.3 to 2.8.3 (csrc/flash_attn/flash_api.cpp `mha_bwd`, `mha_varlen_bwd`,
    `dk_expanded`), as does torch's copy of it (ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    return options.expands_groups and spec.num_kv_heads < spec.num_heads


def _saves_only_its_input(module: Module, options: WorkOptions) -> bool:
    spec = module.op_spec
    if isinstance(spec, Norm):
        return spec.kind == "layer" or options.fuses_kernels
    return isinstance(spec, Linear)


def saves_only_block_input(module: Module, options: WorkOptions) -> bool:
    """Whether the module, as the first of a block, keeps only the block's input. (Under autocast a product
    keeps a cast copy.)"""
    is_kept_as_it_is = isinstance(module.op_spec, Norm) or not options.autocast
    return is_kept_as_it_is and _saves_only_its_input(module, options)


def runs_before_recomputation(block: Block) -> int:
    """The number of modules at the block's end whose backward needs nothing that forward keeps, up to an
    exchange: torch's non-reentrant checkpoint recomputes when the first kept tensor is asked for, so the
    backward of these, and its collective, comes before (`_checkpoint_hook` of torch 2.13
    utils/checkpoint.py). 0 without an exchange there."""
    count = 0
    for number, module in enumerate(reversed(block.modules), 1):
        if not _saves_nothing(module):
            break
        if isinstance(module.op_spec, Exchange):
            count = number
    return count


def _saves_nothing(module: Module) -> bool:
    spec = module.op_spec
    if isinstance(spec, TracedModule):
        return not spec.saved
    return isinstance(spec, Exchange | AdapterSum) or (isinstance(spec, Residual) and not spec.dropout)
