"""Cross-entropy as kernels and bytes per logit, in the implementations that people train with.

eager: transformers' `ForCausalLMLoss`. Forward: `logits.float()`, log-softmax (two passes of fp32), pick the
labels; backward: fill zeros, set labels, log-softmax backward (two read, one written), cast. Keeps fp32
log-probabilities (4); fp32 logits and their shifted copy pass forward (8), two fp32 gradients backward (8).
Measured: 11.1 bytes per logit, PowerLM-3B in transformers (training_runs fms-acceleration-0025 and -0027 less
their checkpoints).

megatron: Megatron-LM's `vocab_parallel_cross_entropy` (`mpu/cross_entropy.py`, unfused). Forward: `float()`,
maximum, subtract in place, exp, sum, divide in place; backward: scale in place, cast. Keeps the fp32 softmax
(4), which becomes the gradient; the 16-bit logits and their fp32 copy pass forward, the cast backward.

unsloth: its kernel in transformers (fms-acceleration, fms_acceleration_foak/kernels/unsloth/
cross_entropy_loss.py; transformers before 4.46 casts the logits in the model, which lets go of the 16-bit
ones). Forward: `float()`, a shifted copy, one reading; backward: the gradient in place of the copy, zeros and
the copy's place in them, cast. Keeps the fp32 copy (4); the fp32 logits pass forward (4), the shifted
gradient backward (4). Measured: 8.1 bytes per logit (training_runs fms-acceleration-0050 and
-0049 less their checkpoints).

fused: torch.compile's, flash-attn's, Apex's, Liger's. Forward reads the logits twice (maximum and sum, then
the label); backward reads once and writes the gradient. Keeps the logits.

Liger's "fused_linear" takes the head along: `zsim.cost.fused_head`.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels import Kernel
from zsim.cost.shapes import WorkOptions


def loss_kernels(logits: int, options: WorkOptions, *, is_backward: bool) -> tuple[Kernel, ...]:
    """The kernels of one direction over so many logits."""
    e = options.activation_bytes
    cast, launches = (e + 4, 1) if e < 4 else (0, 0)
    if options.cross_entropy == "megatron":
        passes, kernels = (8 + cast, 2 + launches) if is_backward else (32 + cast, 5 + launches)
    elif options.cross_entropy == "unsloth":
        passes, kernels = (20 + cast, 3 + launches) if is_backward else (12 + cast, 2 + launches)
    elif options.cross_entropy == "eager":
        passes, kernels = (16 + cast, 3 + launches) if is_backward else (8 + cast, 2 + launches)
    else:
        passes, kernels = 2 * e, 1 if is_backward else 2
    return (Kernel("loss", 0.0, float(logits * passes), options.kernel_dtype, (), kernels),)


def eager_forward(logits: int, options: WorkOptions) -> tuple[Kernel, ...]:
    """The eager forward over so many logits, whatever the training's own loss is."""
    return loss_kernels(logits, replace(options, cross_entropy="eager"), is_backward=False)


def kept_per_logit(options: WorkOptions) -> int:
    """Bytes per logit from forward to backward."""
    return 4 if options.cross_entropy in ("eager", "megatron", "unsloth") else options.activation_bytes


def passing_per_logit(options: WorkOptions, *, is_backward: bool) -> int:
    """Bytes per logit that live only during one direction."""
    e = options.activation_bytes
    if options.cross_entropy == "eager":
        return 8 if is_backward or e < 4 else 4
    if options.cross_entropy == "megatron":
        return e if is_backward else e + 4
    if options.cross_entropy == "unsloth":
        return 4
    return e if is_backward else 0
