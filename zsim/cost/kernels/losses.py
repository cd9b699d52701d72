"""Cross-entropy as kernels and bytes per logit, in the implementations that are used in training.

eager: transformers' `ForCausalLMLoss`. Forward: `logits.float()`, log-softmax, pick the labels. Backward:
fill zeros, set labels, log-softmax backward, cast. Keeps fp32 log-probabilities (4). Temporaries: fp32 logits
and their shifted copy forward (8), two fp32 gradients backward (8). Measured: 11.1 bytes per logit,
PowerLM-3B in transformers (training_runs fms-acceleration-0025 and -0027 less their checkpoints).

autocast: `F.cross_entropy` of 16-bit logits under torch.autocast. It requests log-softmax in the type of the
logits, which autocast respects (`set_opt_dtype`, ATen/autocast_mode.h). Only nll_loss is on autocast's fp32
list. Forward: log-softmax in 16 bits, its output cast, pick the labels. Backward: fp32 zeros, set labels,
cast, log-softmax backward in 16 bits. Keeps log-probabilities in both types. An fp32 gradient is a temporary
of backward. Its cast takes the place of the fp32 log-probabilities, which autograd frees after nll_loss's
backward. composer's pull request 2987 counts 6 bytes per logit for it, 2 + 4. Source: torch 1.12 to 2.13,
ATen/native/LossNLL.cpp `cross_entropy_loss`.

megatron: Megatron-LM's `vocab_parallel_cross_entropy` (`mpu/cross_entropy.py`, unfused). Forward: `float()`,
maximum, subtract in place, exp, sum, divide in place. Backward: scale in place, cast. Keeps the fp32 softmax
(4), which becomes the gradient. Temporaries: the 16-bit logits forward, the cast backward. Before
Megatron-Core 0.8 the subtraction was not in place: an fp32 copy more forward. Measured: a GPT of 12 layers of
512 with 50,304 entries, 4 x 1,024 tokens, has its peak there (training_runs megatron-ci).

megatron-fused: `--cross-entropy-loss-fusion` as it is implemented by default (`native`, core/fusions/
fused_cross_entropy.py: functions under torch.compile, between which the sums go over the group). Forward:
cast and maximum in one kernel, subtract (written back, as the function's argument is changed) and exp, divide
in place. Backward: one kernel reads the softmax, changes it and writes the 16-bit gradient. Keeps the fp32
softmax (4). The fp32 logits are another temporary. Measured: 4.4 bytes per logit more than unfused
(training_runs megatron-ci-0073 less its workspaces, role calibrate). Transformer Engine's (`te`) is "fused".

unsloth: its kernel in transformers (fms-acceleration, fms_acceleration_foak/kernels/unsloth/
cross_entropy_loss.py; transformers before 4.46 casts the logits in the model, which frees the 16-bit logits).
Forward: `float()`, a shifted copy, one reading. Backward: the gradient in place of the copy, zeros into which
the copy is written, cast. Keeps the fp32 copy (4). Temporaries: fp32 logits forward (4), the shifted gradient
backward (4). Measured: 8.1 bytes per logit (training_runs fms-acceleration-0050 and -0049 less their
checkpoints).

fused: the kernels of torch.compile, flash-attn, Apex and Liger. Forward reads the logits twice (maximum and
sum, then the label). Backward reads once and writes the gradient. Keeps the logits.

Liger's "fused_linear" includes the LM head: `zsim.operations.fused_head`.

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

from dataclasses import replace
from math import ceil

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import WorkOptions

# The longest row that stays in a cache; of a row of twice as many bytes nothing does: see [Note: how often
# log-softmax reads a row].
_CACHED_ROW_BYTES = 65536

# NLL_LOSS_THREADS of torch 1.12 to 2.6: see [Note: one warp picks the labels].
_LABEL_THREADS = 32

MEGATRON = ("megatron", "megatron-before-0.8", "megatron-fused")
_COPIES = ("megatron-before-0.8", "megatron-fused")  # fp32 logits beside their softmax


def loss_kernels(
    tokens: int, vocab_size: int, options: WorkOptions, *, is_backward: bool
) -> tuple[Kernel, ...]:
    """The kernels of one direction over `tokens` rows of `vocab_size` logits."""
    e = options.activation_bytes
    cast, launches = (e + 4, 1) if e < 4 else (0, 0)
    passes: float
    if options.cross_entropy == "megatron-fused":
        passes, kernels = (8 + e, 1) if is_backward else (24 + e, 3)
    elif options.cross_entropy in MEGATRON:
        passes, kernels = (8 + cast, 2 + launches) if is_backward else (32 + cast, 5 + launches)
    elif options.cross_entropy == "unsloth":
        passes, kernels = (20 + cast, 3 + launches) if is_backward else (12 + cast, 2 + launches)
    elif options.cross_entropy in ("eager", "autocast"):
        element = e if options.cross_entropy == "autocast" else 4
        zeros = 4 if is_backward else 0
        passes = zeros + cast + _log_softmax(vocab_size, element, is_backward=is_backward)
        kernels = (3 if is_backward else 2) + launches
    else:
        passes, kernels = 2 * e, 1 if is_backward else 2
    num_bytes = float(tokens * vocab_size * passes)
    picks_labels = options.cross_entropy in ("eager", "autocast") and not is_backward
    loads = 2 * ceil(tokens / _LABEL_THREADS) if picks_labels else 0
    return (Kernel("loss", 0.0, num_bytes, options.kernel_dtype, (), kernels, loads),)


def _log_softmax(vocab_size: int, element_bytes: int, *, is_backward: bool) -> float:
    """Bytes per logit: one read and one write forward, two reads and one write backward, plus the repeated
    reads that miss the caches."""
    repeated_fraction = min(max(vocab_size * element_bytes / _CACHED_ROW_BYTES - 1, 0), 1)
    return element_bytes * (3 + repeated_fraction if is_backward else 2 + 2 * repeated_fraction)


def metric_kernels(tokens: int, vocab_size: int, options: WorkOptions) -> tuple[Kernel, ...]:
    """composer's LanguageCrossEntropy or Perplexity: torch's loss under autocast, forward only."""
    return loss_kernels(tokens, vocab_size, replace(options, cross_entropy="autocast"), is_backward=False)


def log_probabilities(logits: int, options: WorkOptions) -> tuple[int, ...]:
    """Bytes of each tensor of log-probabilities that the loss under autocast makes of `logits` logits: in
    their type and, if that is not fp32, in fp32."""
    e = options.activation_bytes
    return (logits * e, logits * 4) if e < 4 else (logits * 4,)


def saved_bytes_per_logit(options: WorkOptions, *, holds_logits: bool = False) -> int:
    """Bytes per logit that the loss keeps from forward to backward. With `holds_logits` the trainer holds the
    logits, so they are not counted here.
    """
    if options.cross_entropy == "autocast":
        return sum(log_probabilities(1, options))
    if options.cross_entropy in ("eager", "unsloth", *MEGATRON):
        return 4
    return 0 if holds_logits else options.activation_bytes


def temporary_bytes_per_logit(options: WorkOptions, *, is_backward: bool) -> int:
    """Bytes per logit of temporaries, allocated during one direction only."""
    e = options.activation_bytes
    if options.cross_entropy == "eager":
        return 8 if is_backward or e < 4 else 4
    if options.cross_entropy == "autocast":
        return (4 if e < 4 else 8) if is_backward else 0
    if options.cross_entropy in MEGATRON:
        copies = options.cross_entropy in _COPIES and not is_backward
        return e + 4 if copies else e
    if options.cross_entropy == "unsloth":
        return 4
    return e if is_backward else 0
