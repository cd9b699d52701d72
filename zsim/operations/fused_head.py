"""The LM head fused with the loss: logits are computed piece by piece and never exist as one tensor.

Liger's `fused_linear_cross_entropy_forward` (linkedin/Liger-Kernel 0.8, `ops/fused_linear_cross_entropy.py`)
does both directions in the forward pass. The tokens are cut into ceil(V / H) pieces, rounded so that a piece
has a power of two of tokens. Each piece is multiplied with the head, the logits are turned into their
gradient in place, and this is multiplied with the head (gradient of the input) and with the input (gradient
of the weight, accumulated, and left out of a frozen one by `if weight.requires_grad`). So at most about as
many logits exist at once as there are hidden states. Backward only hands the gradients on. With fp16 it
multiplies them by the loss scale (one pass).

# [Note: tiles of tokens]
"tiled" is DeepSpeed's `TiledFusedLogitsLoss` (0.19.8 runtime/sequence_parallel/ulysses_sp.py) as
ArcticTraining calls it: tiles of at most 1 GiB of fp32 logits (b28638e6 trainer/sft_trainer.py). Each runs
the head and transformers' eager loss forward and backward, adds the weight's gradient to that of the tiles
before it, and the input's to its part of a tensor of zeros, which backward scales.

torchtitan's `ChunkedCELoss` (786e26f8 of April 2026, components/loss.py, since 9530a874 of June
`ChunkedLossWrapper`) does the same with a number of tiles. The zeros are fp32 and cast at the end. FSDP2
reduces the weight's gradient once, behind the last tile, and adds the tiles' in the type of its reduction,
which is fp32 by torchtitan's default. So that two gradients of the weight exist, the sum and a tile's, and
behind the last tile the sum and the input of its reduction, without logits (torch 2.13 fsdp/_fully_shard,
`accumulate_unsharded_grad_if_needed`, `foreach_reduce`). Backward hands the input's gradient on. The weight's
is held here until the head's backward, which follows at once. Until then it stands for the tile's, or for a
part of the reduction's input.

# [Note: checkpoints of head and loss]
A loss with `checkpointed_tokens` runs the head and itself in chunks of so many tokens, each a checkpoint
whose forward runs again in backward (the loss's `backward` has its own part of that). The head's product is
of operands that are cast to fp32, and by autocast back to the type of the products: the weight goes through
both casts in every chunk, twice, and its gradient back, if it has one. Weights that autocast keeps in fp32
take the second alone. Without autocast, as under DeepSpeed's engine, the product would be in fp32, which is
not simulated. Backward needs the hidden states alone.

# [Note: chunks of tokens and words]
With `chunked_words` a chunk is of some words as well (prime-rl's `_SequenceChunkedLogProbEntropyFn`): its
product is of a part of the weight, backward makes the logits again, and adds the gradients of hidden states
and weight to their parts of two tensors of zeros. It keeps the hidden states, and a number per token.

Neglected: the host reads the number of labels that count (`.item()`), once per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel, elementwise, gemm
from zsim.cost.kernels.losses import LossKernelSet
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import accumulate_kernels, cast_kernels, fill_kernels, scale_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.linear import Linear
from zsim.operations.operation import Module, Role
from zsim.operations.tensors import ModuleTensors


@dataclass(frozen=True, slots=True)
class FusedHead:
    """Kernels and tensors of the LM head with its loss. The saved tensors are the gradients of its input and
    weight.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    tensors: ModuleTensors


def piece_tokens(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Tokens of one piece: tokens / ceil(V / H), up to a power of two, at most all."""
    min_tokens = -(-tokens // -(-vocab_size // hidden_size))
    return min(tokens, 1 << (min_tokens - 1).bit_length())


def head_index(modules: tuple[Module, ...]) -> int | None:
    """Index of the LM head in `modules`: the last product before the loss. None without a loss."""
    if not any(module.role is Role.LOSS for module in modules):
        return None
    products = [index for index, module in enumerate(modules) if module.role is Role.PRODUCT]
    return products[-1] if products else None


def fused_head(head: Module, shape: BatchShape, options: WorkOptions) -> FusedHead:
    """Kernels and bytes of the LM head with its loss, piece by piece.

    Per piece of t tokens (the last may be smaller): three products of 2 t V H FLOPs, the loss over t V logits
    (read twice, written once), and the accumulation of the weight's gradient. The gradients of the input
    (T H) and of the weight (V H) are saved for backward. A frozen weight has no gradient: two products.
    """
    spec = head.op_spec
    assert isinstance(spec, Linear)
    tokens, hidden, vocab, e = shape.tokens, spec.in_features, spec.out_features, options.activation_bytes
    dtype, is_trained = options.kernel_dtype, head.trains_weight
    weight = spec.in_features * spec.out_features if is_trained else 0
    if options.loss.tile_bytes or options.loss.num_tiles:
        return _tiled_head(tokens, hidden, vocab, options, is_trained=is_trained)
    if options.loss.chunked_words:
        return _chunked_head(head, tokens, options)
    if options.loss.checkpointed_tokens:
        return _checkpointed_head(tokens, hidden, vocab, options, is_trained=is_trained)
    piece = piece_tokens(tokens, hidden, vocab)
    kernels: list[Kernel] = []
    for begin in range(0, tokens, piece):
        size = min(piece, tokens - begin)
        kernels += [
            gemm(size, vocab, hidden, e, dtype),
            Kernel("loss", 0.0, float(3 * size * vocab * e), dtype),
            gemm(size, hidden, vocab, e, dtype, "nn"),
        ]
        if is_trained:
            kernels += [
                gemm(vocab, hidden, size, e, dtype, "tn"),
                *accumulate_kernels(weight, dtype, dtype),
            ]
    is_scaled = options.dtype == "fp16"
    backward = scale_kernels(tokens * hidden + weight, dtype) if is_scaled else ()
    return FusedHead(
        forward=tuple(kernels),
        backward=backward,
        tensors=ModuleTensors(
            saved=_sizes(tokens * hidden * e, weight * e), forward=_sizes(piece * vocab * e, weight * e)
        ),
    )


def _sizes(*sizes: int) -> tuple[int, ...]:
    """The sizes of tensors that exist."""
    return tuple(size for size in sizes if size)


def _tiled_head(tokens: int, hidden: int, vocab: int, options: WorkOptions, *, is_trained: bool) -> FusedHead:
    """The head with its loss in tiles. See [Note: tiles of tokens]."""
    e, dtype, loss = options.activation_bytes, options.kernel_dtype, options.loss
    weight, sums = hidden * vocab if is_trained else 0, "fp32" if loss.sums_in_fp32 else dtype
    num_tiles = loss.num_tiles or -(-tokens * vocab * DTYPE_BYTES["fp32"] // loss.tile_bytes)
    tile = -(-tokens // num_tiles)
    zeros = tokens * hidden * DTYPE_BYTES[sums]
    kernels = list(fill_kernels(zeros))
    for begin in range(0, tokens, tile):
        size = min(tile, tokens - begin)
        kernels += [
            gemm(size, vocab, hidden, e, dtype),
            *loss.kernels(size, vocab, e, dtype, is_backward=False),
            *loss.kernels(size, vocab, e, dtype, is_backward=True),
            gemm(size, hidden, vocab, e, dtype, "nn"),
            *((gemm(vocab, hidden, size, e, dtype, "tn"),) if is_trained else ()),
            elementwise(size * hidden * (e + 2 * DTYPE_BYTES[sums]), dtype),
            *(accumulate_kernels(weight, sums, dtype) if begin and is_trained else ()),
        ]
    is_cast = sums != dtype
    if is_cast:
        kernels += cast_kernels(tokens * hidden, sums, dtype)
    logits = tile * vocab
    temporaries = max(
        (loss.temporary_sizes(logits, e, is_backward=is_backward) for is_backward in (False, True)), key=sum
    )
    of_a_tile: tuple[int, ...] = (logits * e, *loss.kept.sizes(logits, e), *temporaries)
    if is_cast:
        of_sum = weight * DTYPE_BYTES[sums]
        of_a_tile = of_a_tile if sum(of_a_tile) > of_sum - weight * e else (of_sum - weight * e,)
    return FusedHead(
        forward=tuple(kernels),
        backward=() if is_cast else scale_kernels(tokens * hidden, dtype),
        tensors=ModuleTensors(
            saved=_sizes(tokens * hidden * e, weight * e),
            forward=_sizes(*of_a_tile, *((zeros, of_sum) if is_cast else (weight * e,))),
        ),
    )


def _checkpointed_head(
    tokens: int, hidden: int, vocab: int, options: WorkOptions, *, is_trained: bool
) -> FusedHead:
    """The head with its loss in checkpoints. See [Note: checkpoints of head and loss]."""
    e, dtype, weight, loss = options.activation_bytes, options.kernel_dtype, hidden * vocab, options.loss
    stored = "fp32" if options.autocast or e == 4 else dtype
    casts, casts_back = _weight_casts(weight, stored, dtype), _weight_casts(weight, dtype, dtype)
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    chunk = min(tokens, loss.checkpointed_tokens)
    for begin in range(0, tokens, chunk):
        size = min(chunk, tokens - begin)
        forward += _chunk_kernels(size, vocab, hidden, options, casts, is_backward=False)
        backward += _chunk_kernels(size, vocab, hidden, options, casts, is_backward=True)
        if is_trained:
            backward += [
                gemm(vocab, hidden, size, e, dtype, "tn"),
                *(casts_back if stored == dtype else casts_back[:1]),
                *(accumulate_kernels(weight, stored, stored) if begin else ()),
            ]
    logits, copies = chunk * vocab, (4, 2) if stored != "fp32" else (2,)
    copied = tuple(weight * size for size in copies) if e < 4 else ()
    temporaries = (logits * e, *loss.kept_sizes(logits, e), *copied)
    gradient = (weight * e,) if is_trained else ()
    tensors = _chunk_tensors(loss, tokens * hidden * e, logits, e, temporaries, gradient)
    return FusedHead(forward=tuple(forward), backward=tuple(backward), tensors=tensors)


def _chunked_head(head: Module, tokens: int, options: WorkOptions) -> FusedHead:
    """The head with its loss by tokens and words. See [Note: chunks of tokens and words]."""
    spec = head.op_spec
    assert isinstance(spec, Linear)
    hidden, vocab, loss = spec.in_features, spec.out_features, options.loss
    e, dtype = options.activation_bytes, options.kernel_dtype
    is_trained = loss.trains_frozen_head or head.trains_weight
    chunk, words = min(tokens, loss.checkpointed_tokens), min(vocab, loss.chunked_words)
    forward: list[Kernel] = []
    weight_gradient = (hidden * vocab * e,) if is_trained else ()
    backward = [kernel for size in (tokens * hidden * e, *weight_gradient) for kernel in fill_kernels(size)]
    for begin in range(0, tokens, chunk):
        size = min(chunk, tokens - begin)
        for first in range(0, vocab, words):
            width = min(words, vocab - first)
            forward += _chunk_kernels(size, width, hidden, options, is_backward=False)
            backward += _chunk_kernels(size, width, hidden, options, is_backward=True)
            backward += accumulate_kernels(size * hidden, dtype, dtype)
            if is_trained:
                backward += [
                    gemm(width, hidden, size, e, dtype, "tn"),
                    *accumulate_kernels(width * hidden, dtype, dtype),
                ]
    logits = chunk * words
    temporaries = (logits * e, *loss.kept_sizes(logits, e))
    gradients = tokens * hidden * e, *weight_gradient
    tensors = _chunk_tensors(loss, tokens * hidden * e, logits, e, temporaries, gradients)
    return FusedHead(forward=tuple(forward), backward=tuple(backward), tensors=tensors)


def _chunk_kernels(
    tokens: int,
    words: int,
    hidden: int,
    options: WorkOptions,
    casts: tuple[Kernel, ...] = (),
    *,
    is_backward: bool,
) -> list[Kernel]:
    """Kernels of a chunk that makes its logits in both directions, after `casts` of the weight. Backward
    gives the gradient of the hidden states.
    """
    e, dtype = options.activation_bytes, options.kernel_dtype
    logits = gemm(tokens, words, hidden, e, dtype)
    loss = options.loss.kernels(tokens, words, e, dtype, is_backward=is_backward)
    gradient = (gemm(tokens, hidden, words, e, dtype, "nn"),) if is_backward else ()
    return [*casts, logits, *loss, *gradient]


def _chunk_tensors(
    loss: LossKernelSet,
    input_bytes: int,
    logits: int,
    element_bytes: int,
    temporaries: tuple[int, ...],
    gradients: tuple[int, ...],
) -> ModuleTensors:
    """The tensors of a head that keeps its input alone and makes the `logits` elements of a chunk in both
    directions. `temporaries` are those of both, `gradients` those of backward, in bytes.
    """
    return ModuleTensors(
        saved=(input_bytes,),
        forward=(*temporaries, *loss.temporary_sizes(logits, element_bytes, is_backward=False)),
        backward=(*temporaries, *loss.temporary_sizes(logits, element_bytes, is_backward=True), *gradients),
    )


def _weight_casts(weight: int, stored: str, dtype: str) -> tuple[Kernel, ...]:
    """A weight in `stored` cast to fp32 and on to `dtype`, or a gradient the same way back. None in fp32."""
    if dtype == "fp32":
        return ()
    up = cast_kernels(weight, stored, "fp32") if stored != "fp32" else ()
    return (*up, *cast_kernels(weight, "fp32", dtype))
