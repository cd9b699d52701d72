"""The head and the loss as one: logits a piece at a time, never whole.

Liger's `fused_linear_cross_entropy_forward` (linkedin/Liger-Kernel 0.8, `ops/fused_linear_cross_entropy.py`)
does both directions in the forward pass. The tokens are cut into ceil(V / H) pieces, rounded so that a piece
is a power of two of them; each is multiplied with the head, turned into its own gradient in place, multiplied
back (the input's gradient) and multiplied with its input (the weight's gradient, added up). So no more logits
exist at once than the hidden states are large. Backward only hands the gradients on; it would scale them by a
loss scale, which bf16 has none of and fp16's is applied to (one pass over both).

Neglected: the host reads the number of labels that count (`.item()`), once per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.modules import gemm
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import accumulate_kernels, scale_kernels
from zsim.cost.memory.tensors import ModuleTensors
from zsim.specs.model.spec import Linear, Loss, Module


@dataclass(frozen=True, slots=True)
class FusedHead:
    """What the head does in place of itself and of what follows it; it keeps both gradients."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    tensors: ModuleTensors


def piece_tokens(tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Tokens of one piece: tokens / ceil(V / H), up to a power of two, at most all."""
    least = -(-tokens // -(-vocab_size // hidden_size))
    return min(tokens, 1 << (least - 1).bit_length())


def head_place(modules: tuple[Module, ...]) -> int | None:
    """Where in `modules` the head stands: the last product before the loss; None without a loss."""
    if not any(isinstance(module.work, Loss) for module in modules):
        return None
    products = [place for place, module in enumerate(modules) if isinstance(module.work, Linear)]
    return products[-1] if products else None


def fused_head(head: Module, shape: BatchShape, options: WorkOptions) -> FusedHead:
    """Kernels and bytes of the head with its loss, piece by piece.

    Per piece of t tokens: three products of 2 t V H FLOPs, the loss over t V logits (read twice, written
    once), and t_last like the others. Keeps the gradients of its input (T H) and of its weight (V H).
    """
    work = head.work
    assert isinstance(work, Linear)
    tokens, hidden, vocab, e = shape.tokens, work.in_features, work.out_features, options.activation_bytes
    dtype, weight = options.kernel_dtype, work.in_features * work.out_features
    piece = piece_tokens(tokens, hidden, vocab)
    kernels: list[Kernel] = []
    for begin in range(0, tokens, piece):
        size = min(piece, tokens - begin)
        kernels += [
            gemm(size, vocab, hidden, e, dtype),
            Kernel("loss", 0.0, float(3 * size * vocab * e), dtype),
            gemm(size, hidden, vocab, e, dtype, "nn"),
            gemm(vocab, hidden, size, e, dtype, "tn"),
            *accumulate_kernels(weight, dtype, dtype),
        ]
    is_scaled = options.dtype == "fp16"
    backward = scale_kernels(tokens * hidden + weight, dtype) if is_scaled else ()
    return FusedHead(
        forward=tuple(kernels),
        backward=backward,
        tensors=ModuleTensors(
            saved=(tokens * hidden * e, weight * e), forward=(piece * vocab * e, weight * e)
        ),
    )
