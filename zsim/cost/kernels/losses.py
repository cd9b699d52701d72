"""Cross-entropy as kernels and bytes per logit: a `LossKernelSet` for each implementation used in training.

The sets of torch and of what runs in its loops are below. A framework's are in the module `kernels` of its
folder, by the names of `training.cross_entropy`.

# [Note: how often log-softmax reads a row]
torch's kernel (`cunn_SoftMaxForward`, ATen/native/cuda/SoftMax.cu) goes over a row for its maximum, for the
sum, and to write. Backward goes over it for the sum of the gradient, and to write. Where rows are long, those
that all SMs work on at once overflow the caches: 3 x 4 bytes read and 4 written forward, 4 + 8 read and 4
written backward in fp32.

Measured: torch's fp32 cross-entropy of 16,384 tokens on A100-SXM4-80GB takes 5.32, 10.62, 20.73 ms forward
for vocabularies of 32,768, 65,536, 131,072 and 15.49, 30.78, 60.44 ms with backward and the addition to
`.grad` (12 bytes): 16.1 and 31.2 bytes a logit at BabelStream's 1.71 TB/s. Up to 16,384 (1.19 and 1.95 ms for
8,192 and 16,384) a row is read once. Between 64 and 128 KiB the fraction that is read again is assumed to
grow linearly. Source: linkedin/Liger-Kernel@0400d313 benchmark/data/ all_benchmark_data.csv, cross_entropy,
huggingface.

# [Note: one warp picks the labels]
`nll_loss_forward_reduce_cuda_kernel_2d` (ATen/native/cuda/Loss.cu) is one block of 32 threads. Each reads a
label, then the logit of that label, and so on: two dependent loads per 32 tokens, 34 ns a token whatever the
vocabulary. Backward stores without waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from zsim.cost.kernels.kernel import Kernel

# The longest row that stays in a cache; of a row of twice as many bytes nothing does: see [Note: how often
# log-softmax reads a row].
_CACHED_ROW_BYTES = 65536

# NLL_LOSS_THREADS of torch 1.12 to 2.6: see [Note: one warp picks the labels].
_LABEL_THREADS = 32


@dataclass(frozen=True, slots=True)
class LossTensors:
    """Bytes per logit of each of some tensors."""

    of_16_bits: tuple[int, ...] = ()
    """Where the logits are bf16 or fp16."""
    of_fp32: tuple[int, ...] = ()
    """Where the logits are fp32."""

    def sizes(self, logits: int, element_bytes: int) -> tuple[int, ...]:
        """Bytes of each tensor, of `logits` logits of `element_bytes` bytes."""
        return tuple(logits * size for size in (self.of_16_bits if element_bytes < 4 else self.of_fp32))


@dataclass(frozen=True, slots=True)
class LossPasses:
    """The kernels and temporaries of one direction of a loss."""

    launches: int
    """Kernels, without those of `casts`."""
    logits: int = 0
    """Tensors in the type of the logits that are read or written."""
    fp32: int = 0
    """Tensors in fp32 that are read or written."""
    casts: int = 0
    """Kernels that cast between the type of the logits and fp32. None where the logits are fp32."""
    log_softmax: Literal["none", "fp32", "logits"] = "none"
    """torch's log-softmax, in fp32 or in the type of the logits. See [Note: how often log-softmax reads a
    row].
    """
    picks_labels: bool = False
    """A kernel picks the labels. See [Note: one warp picks the labels]."""
    temporaries: LossTensors = LossTensors()
    """Tensors that are allocated during this direction only."""


@dataclass(frozen=True, slots=True)
class LossKernelSet:
    """An implementation of cross-entropy, by what its kernels do and what autograd keeps for them."""

    name: str
    """The value of `training.cross_entropy`."""
    forward: LossPasses
    backward: LossPasses
    kept: LossTensors = LossTensors()
    """Tensors kept from forward to backward, without the logits."""
    keeps_logits: bool = False
    """The logits are kept too, where the trainer does not hold them anyway."""
    includes_head: bool = False
    """The LM head's product is a part of it, as `zsim.operations.fused_head` has it."""
    checkpointed_tokens: int = 0
    """Tokens of a chunk of the head and the loss, each of which is a checkpoint that runs again in backward.
    0 where chunks are cut in another way.
    """
    chunked_words: int = 0
    """Words of the vocabulary of such a chunk, with a part of the head's weight as it is. 0 for all of them,
    with the weight cast.
    """
    trains_frozen_head: bool = False
    """Backward has the gradient of the head's weight even where that is not trained."""
    tile_bytes: int = 0
    """The largest fp32 logits of a tile of tokens, of which each runs the head and the loss forward and
    backward in the forward pass. 0 where there are none, or a number of them.
    """
    num_tiles: int = 0
    """The number of such tiles. 0 where their bytes are limited, or there are none."""
    sums_in_fp32: bool = False
    """The tiles' gradients of the hidden states and of the weight are added up in fp32."""
    num_chunks: int = 1
    """Parts of the logits that the kernels take one after the other, and whose temporaries one part has."""

    def kernels(
        self, tokens: int, vocab_size: int, element_bytes: int, dtype: str, *, is_backward: bool
    ) -> tuple[Kernel, ...]:
        """The kernels of one direction over `tokens` rows of `vocab_size` logits of `element_bytes` bytes."""
        passes = self.backward if is_backward else self.forward
        casts = passes.casts if element_bytes < 4 else 0
        size: float = passes.logits * element_bytes + passes.fp32 * 4 + casts * (element_bytes + 4)
        if passes.log_softmax != "none":
            element = 4 if passes.log_softmax == "fp32" else element_bytes
            size += _log_softmax(vocab_size, element, is_backward=is_backward)
        loads = 2 * ceil(tokens / _LABEL_THREADS) if passes.picks_labels else 0
        num_bytes = float(tokens * vocab_size * size)
        return (Kernel("loss", 0.0, num_bytes, dtype, (), passes.launches + casts, loads),)

    def kept_sizes(self, logits: int, element_bytes: int, *, holds_logits: bool = False) -> tuple[int, ...]:
        """Bytes of each tensor that the loss of `logits` logits keeps from forward to backward. With
        `holds_logits` the trainer holds the logits, so they are not counted here.
        """
        sizes = self.kept.sizes(logits, element_bytes)
        return (*sizes, logits * element_bytes) if self.keeps_logits and not holds_logits else sizes

    def temporary_sizes(self, logits: int, element_bytes: int, *, is_backward: bool) -> tuple[int, ...]:
        """Bytes of each tensor that is allocated during one direction only."""
        passes = self.backward if is_backward else self.forward
        return passes.temporaries.sizes(ceil(logits / self.num_chunks), element_bytes)


def _log_softmax(vocab_size: int, element_bytes: int, *, is_backward: bool) -> float:
    """Bytes per logit: one read and one write forward, two reads and one write backward, plus the repeated
    reads that miss the caches."""
    repeated_fraction = min(max(vocab_size * element_bytes / _CACHED_ROW_BYTES - 1, 0), 1)
    return element_bytes * (3 + repeated_fraction if is_backward else 2 + 2 * repeated_fraction)


# transformers' `ForCausalLMLoss`. Forward: `logits.float()`, log-softmax, pick the labels. Backward: fill
# zeros, set labels, log-softmax backward, cast. Keeps fp32 log-probabilities. Temporaries: fp32 logits and
# their shifted copy forward, two fp32 gradients backward. Measured: 11.1 bytes per logit, PowerLM-3B in
# transformers (training_runs fms-acceleration-0025 and -0027 less their checkpoints).
EAGER = LossKernelSet(
    "eager",
    forward=LossPasses(
        2, casts=1, log_softmax="fp32", picks_labels=True, temporaries=LossTensors((4, 4), (4,))
    ),
    backward=LossPasses(3, fp32=1, casts=1, log_softmax="fp32", temporaries=LossTensors((4, 4), (4, 4))),
    kept=LossTensors((4,), (4,)),
)

# The same from transformers 4.49 on, which shifts the labels: no copy of the fp32 logits
# (loss/loss_utils.py of 4.49.0 to 5.0.0; 4.48.3 still copies). The logits themselves are an output of the
# model, which holds them until its loss is computed.
EAGER_SHIFTED_LABELS = replace(
    EAGER,
    name="eager-shifted-labels",
    forward=replace(EAGER.forward, temporaries=LossTensors((2, 4), (4,))),
)

# `F.cross_entropy` of 16-bit logits, log-softmax and its gradient in 16 bits (NeMo AutoModel 0.2.0
# components/loss/masked_ce.py with `fp32_upcast: false`).
EAGER_16_BIT = LossKernelSet(
    "eager-16-bit",
    forward=LossPasses(2, log_softmax="logits", picks_labels=True),
    backward=LossPasses(3, logits=1, log_softmax="logits", temporaries=LossTensors((2, 2), (4, 4))),
    kept=LossTensors((2,), (4,)),
)

# `F.cross_entropy` of 16-bit logits under torch.autocast. It requests log-softmax in the type of the logits,
# which autocast respects (`set_opt_dtype`, ATen/autocast_mode.h). Only nll_loss is on autocast's fp32 list.
# Forward: log-softmax in 16 bits, its output cast, pick the labels. Backward: fp32 zeros, set labels, cast,
# log-softmax backward in 16 bits. Keeps log-probabilities in both types. An fp32 gradient is a temporary of
# backward. Its cast takes the place of the fp32 log-probabilities, which autograd frees after nll_loss's
# backward. composer's pull request 2987 counts 6 bytes per logit for it, 2 + 4. Source: torch 1.12 to 2.13,
# ATen/native/LossNLL.cpp `cross_entropy_loss`.
AUTOCAST = LossKernelSet(
    "autocast",
    forward=LossPasses(2, casts=1, log_softmax="logits", picks_labels=True),
    backward=LossPasses(3, fp32=1, casts=1, log_softmax="logits", temporaries=LossTensors((4,), (4, 4))),
    kept=LossTensors((2, 4), (4,)),
)

# unsloth's kernel in transformers (fms-acceleration, fms_acceleration_foak/kernels/unsloth/
# cross_entropy_loss.py; transformers before 4.46 casts the logits in the model, which frees the 16-bit
# logits). Forward: `float()`, a shifted copy, one reading. Backward: the gradient in place of the copy, zeros
# into which the copy is written, cast. Keeps the fp32 copy. Temporaries: fp32 logits forward, the shifted
# gradient backward. Measured: 8.1 bytes per logit (training_runs fms-acceleration-0050 and -0049 less their
# checkpoints).
UNSLOTH = LossKernelSet(
    "unsloth",
    forward=LossPasses(2, fp32=3, casts=1, temporaries=LossTensors((4,), (4,))),
    backward=LossPasses(3, fp32=5, casts=1, temporaries=LossTensors((4,), (4,))),
    kept=LossTensors((4,), (4,)),
)

# Liger's kernel inside transformers, which casts the logits to fp32 before any loss (`ForCausalLMLoss` of
# transformers 4.46 to 5.13, loss/loss_utils.py; the labels are shifted, not the logits). Forward reads the
# fp32 logits twice and writes their gradient over them. Backward scales it in place (`element_mul_kernel`, as
# Trainer divides the sum by the tokens of all micro-batches) and casts it. The 16-bit logits pass forward,
# their gradient backward. Source: linkedin/Liger-Kernel
# 0.5 to 0.8, ops/cross_entropy.py, and `apply_liger_kernel_to_...(cross_entropy=True,
# fused_linear_cross_entropy=False)` of transformers/monkey_patch.py.
LIGER = LossKernelSet(
    "liger",
    forward=LossPasses(1, fp32=3, casts=1, temporaries=LossTensors((2,), ())),
    backward=LossPasses(1, fp32=2, casts=1, temporaries=LossTensors((2,), ())),
    kept=LossTensors((4,), (4,)),
)

# The kernels of torch.compile, flash-attn and Apex, and Liger's called on 16-bit logits. Forward reads the
# logits twice (maximum and sum, then the label). Backward reads once and writes the gradient. Keeps the
# logits.
FUSED = LossKernelSet(
    "fused",
    forward=LossPasses(2, logits=2),
    backward=LossPasses(1, logits=2, temporaries=LossTensors((2,), (4,))),
    keeps_logits=True,
)

# Liger's, in the chunks of its product with the LM head. The loss is `FUSED` where there is no head.
FUSED_LINEAR = LossKernelSet(
    "fused_linear", FUSED.forward, FUSED.backward, keeps_logits=True, includes_head=True
)

# The same in tiles of about 1 GiB of fp32 logits, each of `EAGER`'s kernels.
TILED = LossKernelSet(
    "tiled", EAGER.forward, EAGER.backward, kept=EAGER.kept, includes_head=True, tile_bytes=2**30
)

# unsloth's own with the head, compiled, in tiles of at most 4 GiB of fp32 logits, whose gradients are made in
# the forward pass (unsloth 015bdef0 models/llama.py `unsloth_fused_ce_loss`, from 0528b4ce of 2025-10 on;
# unsloth_zoo ce232d6c fused_losses/cross_entropy_loss.py). Half of the free memory, where that is less, and
# the rounding of the number of tiles to a multiple of four are not simulated.
UNSLOTH_FUSED = LossKernelSet(
    "unsloth-fused", FUSED.forward, FUSED.backward, keeps_logits=True, includes_head=True, tile_bytes=2**32
)

_ALL = (
    EAGER, EAGER_SHIFTED_LABELS, EAGER_16_BIT, AUTOCAST, UNSLOTH, LIGER, FUSED, FUSED_LINEAR, TILED,
    UNSLOTH_FUSED,
)  # fmt: skip
LOSSES = {loss.name: loss for loss in _ALL}
