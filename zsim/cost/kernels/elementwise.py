"""Bytes read, written and kept, and launches, of memory-bound modules, in eager PyTorch and fused.

The eager figures are counts of the operators that transformers 5.23's modelling code dispatches under torch
2.13, forward and backward (the same operators on every device): a *pass* is one tensor of the module's width
read or written once. They depend on the code alone, not on sizes.

    RMSNorm forward   to fp32, pow, mean, add, rsqrt, mul, to bf16, mul            8 launches
    RMSNorm backward  2 mul, sum, to fp32, 2 mul, sum, pow, 2 mul, div, pow, 2 mul, add, to bf16    16
    rotary forward    per tensor: mul, neg, cat, mul, add                          10 passes, 5 launches
    rotary backward   per tensor: mul, neg, 2 x (fill, copy), add, mul, add        15 passes, 9 launches

Where only some of a head's features are rotated, the full head is put together again: forward concatenates (2
passes), backward fills and copies each slice and adds (6; GLM 4). Latent attention takes 2 passes forward.
Its backward moves 3,238 elements per head of 2 x 192, 8.4 passes (split, expand and transposed copies;
DeepSeek V2 and V3). Counted with a dispatch mode around `apply_rotary_pos_emb` and the attention's forward.

# [Note: LayerNorm reads twice]
torch's `vectorized_layer_norm_kernel` and `layer_norm_grad_input_kernel` (ATen/native/cuda/
layer_norm_kernel.cu) loop over a row twice, and caches do not save the second reading: nn.LayerNorm in fp32
on 4,096 rows of 1,024, 2,048, 4,096, 8,192 and 16,384 takes 34, 56, 122, 258 and 508 us forward on an A100 80
GB PCIe, 118, 198, 435, 834 and 1636 us with backward. A Triton kernel that holds its row in registers takes
323 us forward for the longest: 1.66 TB/s. At that rate and 4 us a launch, torch's kernels move 2.9, 2.6, 2.9,
3.1 and 3.1 times the tensor forward, 7.5, 6.6, 7.6, 7.0 and 6.9 times backward. Source:
linkedin/Liger-Kernel@bdbfeadf benchmark/data/a100_all_benchmark_data.csv, layer_norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import Kernel, elementwise
from zsim.cost.kernels.layer_kernels import Passes, StridedPasses
from zsim.cost.kernels.shapes import WorkOptions


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Cost of one non-linearity."""

    forward: Passes
    backward: Passes
    saved: float
    """The number of tensors that it keeps for backward."""


# One kernel: silu, gelu, gelu_pytorch_tanh and all others that torch has natively. Backward reads the input
# and the incoming gradient and writes a gradient.
NATIVE = ActivationCost(Passes(2, 1), Passes(3, 1), saved=1)

EAGER_ACTIVATIONS: dict[str, ActivationCost] = {
    # Written out in Python as products, powers and tanh, each keeping its operands.
    "gelu_new": ActivationCost(Passes(18, 8), Passes(28, 11), saved=4),
    "gelu_fast": ActivationCost(Passes(21, 9), Passes(36, 13), saved=7),
    "gelu_python": ActivationCost(Passes(11, 5), Passes(24, 10), saved=3),
    "quick_gelu": ActivationCost(Passes(7, 3), Passes(14, 5), saved=2),
    # BLOOM's custom autograd function keeps only its input and recomputes.
    "gelu_bloom": ActivationCost(Passes(21, 9), Passes(44, 18), saved=1),
    # Gemma 2's logits: divide, tanh, multiply.
    "softcap": ActivationCost(Passes(6, 3), Passes(7, 3), saved=1),
    # Keeps its output, which the next Linear keeps anyway as its input.
    "relu": ActivationCost(Passes(2, 1), Passes(3, 1), saved=0),
    # A gate: keeps its output, a factor of the product.
    "sigmoid": ActivationCost(Passes(2, 1), Passes(3, 1), saved=0),
    # Nemotron's: relu, and a square, whose gradient takes pow(1), a product with two and one with dy
    # (torch's pow_backward). Both keep the relu's output.
    "relu2": ActivationCost(Passes(4, 2), Passes(10, 4), saved=1),
    # gpt-oss: two clamps, a product, a sigmoid, a product, an add; with the last product 16 tensors in 7
    # launches forward, 43 in 18 backward (slices of a fused projection filled up), 6 kept (`_apply_gate`).
    "swiglu_oai": ActivationCost(Passes(13, 6), Passes(37, 16), saved=4),
    # A dropout or a norm behind it keeps its output, not a Linear.
    "relu_kept": ActivationCost(Passes(2, 1), Passes(3, 1), saved=1),
    # Logits multiplied by a number (Granite, Cohere 2).
    "scale": ActivationCost(Passes(2, 1), Passes(2, 1), saved=0),
    # Multiplied by a learned vector, whose gradient is a product (3 tensors) and its sum over rows.
    "learned_scale": ActivationCost(Passes(2, 1), Passes(6, 3), saved=1),
    # Apertus's, written out in Python with two learned numbers: 12 kernels forward, 26 backward, which keep
    # its input, three results and a mask of one byte (counted with a dispatch mode, activations.py
    # `_xielu_python` of transformers 5.24).
    "xielu": ActivationCost(Passes(29, 12), Passes(63, 26), saved=4.5),
    # Gemma 3n's gates above a cutoff, with the gelu behind it (`_gaussian_topk` of modeling_gemma3n.py):
    # mean, deviation, difference and relu, whose gradients are a threshold, a sum over features, and the
    # deviation's and mean's, added up. The deviation keeps its input, relu and gelu their own.
    "gaussian_topk_gelu": ActivationCost(Passes(8, 5), Passes(15, 8), saved=2),
    # Between bounds that are tensors; backward: a comparison with each and both joined (masks of one byte),
    # and the gradient where the mask is.
    "clamp": ActivationCost(Passes(2, 1), Passes(7, 4), saved=1),
    # Reads and writes the tensor and a mask of one byte, half a 16-bit tensor.
    "dropout": ActivationCost(Passes(2.5, 1), Passes(2.5, 1), saved=0.5),
}
# Fused into a neighbour's kernel; dropout still writes or reads its mask.
_FUSED_AWAY = {
    "scale": ActivationCost(Passes(0, 0), Passes(0, 0), saved=0),
    "dropout": ActivationCost(Passes(0.5, 1), Passes(0.5, 1), saved=0.5),
}

# Fused but for the clamps before it: Megatron's gpt-oss (`weighted_bias_quick_geglu_impl`, core 0.16.1
# core/fusions/fused_bias_geglu.py) clamps each half (reads and writes it) and concatenates both (2 and 2), in
# eager kernels; backward, counted with a dispatch mode: a comparison with each bound (reads a half, writes a
# mask of one byte: 4.5 with three of them), the two masks of one half joined (1.5), each half's gradient
# where its mask is (5, and a zero to put elsewhere), and the halves' gradients concatenated (4). All but the
# joined masks and the concatenation read a slice. What was clamped is kept beside what goes into the fused
# kernel.
_CLAMPED_GATED = {
    "clamped_quick_gelu": ActivationCost(
        Passes(8, 3, StridedPasses(4, 2, 2)), Passes(15, 9, StridedPasses(9.5, 5, 5)), saved=2
    )
}

# `act(gate) * up`: eager multiplies in a separate kernel and keeps both factors; fused keeps gate and up.
GATED_PRODUCT = ActivationCost(Passes(3, 1), Passes(6, 2), saved=2)
FUSED_GATED = ActivationCost(Passes(3, 1), Passes(5, 1), saved=2)

ROTARY_EAGER = (Passes(10, 5), Passes(15, 9))
ROTARY_FUSED = (Passes(2, 1), Passes(2, 1))

# Putting heads together of which a part is rotated, over whole heads, and latent attention's (all tensors).
PARTLY_ROTATED = (Passes(2, 1), Passes(6, 3))
LATENT_HEADS = (Passes(2, 3), Passes(8.4, 12))


def activation_cost(name: str, *, is_gated: bool, is_fused: bool) -> ActivationCost:
    """Cost of the activation `name`. A fused activation is a single kernel in each direction."""
    if is_fused and name in _FUSED_AWAY:
        return _FUSED_AWAY[name]
    if is_fused and is_gated and name in _CLAMPED_GATED:
        base_cost = _CLAMPED_GATED[name]
        return ActivationCost(
            _add_passes(base_cost.forward, FUSED_GATED.forward),
            _add_passes(base_cost.backward, FUSED_GATED.backward),
            base_cost.saved + FUSED_GATED.saved,
        )
    if is_fused:
        saved = 0 if name == "relu" and not is_gated else NATIVE.saved
        return FUSED_GATED if is_gated else ActivationCost(NATIVE.forward, NATIVE.backward, saved)
    base_cost = EAGER_ACTIVATIONS.get(name, NATIVE)
    if not is_gated:
        return base_cost
    return ActivationCost(
        Passes(base_cost.forward.tensors + GATED_PRODUCT.forward.tensors, base_cost.forward.launches + 1),
        Passes(base_cost.backward.tensors + GATED_PRODUCT.backward.tensors, base_cost.backward.launches + 2),
        # The output of a gated relu is kept, as a factor of the product.
        base_cost.saved + GATED_PRODUCT.saved,
    )


# A product with the score of each row, forward; backward the gradient of the row, and that of the score, a
# product and its sum over the row. It keeps the row as it was.
_SCORE_PRODUCT = ActivationCost(Passes(2, 1), Passes(6, 3), saved=1)


def activation_cost_of(
    name: str, *, is_gated: bool, options: WorkOptions, is_scored: bool = False
) -> ActivationCost:
    """The cost of the activation `name` under `options`. nanotron's gated one is eager (9055c664
    models/llama.py `GLUActivation`): it splits the merged projection, so that backward concatenates the
    gradients of both halves, four tensors more. One that `is_scored` is eager, too, with a product behind it.
    """
    if is_scored:
        eager, score = activation_cost(name, is_gated=is_gated, is_fused=False), _SCORE_PRODUCT
        return ActivationCost(
            _add_passes(eager.forward, score.forward),
            _add_passes(eager.backward, score.backward),
            eager.saved + score.saved,
        )
    if options.layers.splits_gates and is_gated:
        eager = activation_cost(name, is_gated=True, is_fused=False)
        backward = Passes(eager.backward.tensors + 4, eager.backward.launches + 1)
        return ActivationCost(eager.forward, backward, eager.saved)
    return activation_cost(name, is_gated=is_gated, is_fused=options.fuses_kernels)


def _add_passes(passes: Passes, others: Passes) -> Passes:
    return replace(
        passes, tensors=passes.tensors + others.tensors, launches=passes.launches + others.launches
    )


@dataclass(frozen=True, slots=True)
class NormCost:
    """Bytes moved per normalised element, launches, and bytes kept per element."""

    forward_bytes: int
    forward_launches: int
    backward_bytes: int
    backward_launches: int
    saved_bytes: int


# Bytes and launches per element forward and backward, without casts to fp32 and back, and bytes kept: counted
# with a dispatch mode over Cohere2LayerNorm, Llama4TextL2Norm and T5LayerNorm in bf16 and fp32.
_EAGER_NORMS = {
    "cohere_layer": (48, 10, 132, 22, 12),
    "l2": (20, 5, 68, 11, 4),
    "t5_rms": (28, 6, 92, 14, 8),
}


def freeze_norm_weight(cost: NormCost, kind: str, options: WorkOptions) -> NormCost:
    """The cost of a norm whose weight is frozen: without its gradient's reading of dy and x, and in eager
    RMSNorm without what it keeps for it (torch saves a factor only for the other's gradient). Compiled and
    Liger's kernels compute it all the same, or in the same pass.
    """
    if options.fuses_kernels:
        return cost
    e = options.stream_bytes
    if native_kind(kind, options) == "layer":
        return replace(cost, backward_bytes=cost.backward_bytes - 2 * e, backward_launches=1)
    element = 4 if kind == "gemma_rms" else e
    return replace(
        cost,
        backward_bytes=cost.backward_bytes - 4 * element,
        backward_launches=cost.backward_launches - 2,
        saved_bytes=4,
    )


def norm_cost(kind: str, element_bytes: int, *, is_fused: bool, adds: bool = True) -> NormCost:
    """Cost of a norm. LayerNorm is one native kernel. RMSNorm is Python code in fp32 unless fused.

    With e bytes per element: torch's native norm goes over a row twice, for the moments and to normalise, 3e
    forward. Backward has one kernel for the gradient of the input (dy and x twice, writes dx) and one for the
    gradient of the weight (reads both): 7e. See [Note: LayerNorm reads twice]. A compiled norm includes the
    residual add (`adds`): 4e (reads the stream and the branch, writes the sum and the normalised tensor) and
    6e. Liger's norm does not: 2e, and 3e (reads dy and x once for both gradients, writes dx over dy, then
    sums the gradient of the weight). All of these keep their input.

    Eager RMSNorm: casts 2(e + 4), fp32 passes 20, weight 2e forward. Backward: weight 6e, casts 2(e + 4),
    fp32 passes 68. It keeps the fp32 copy of its input and the normalised tensor: 4 + e. In fp32 the casts
    are no-ops. Gemma (and OLMo 2) multiplies by its weight in fp32 too, and keeps both fp32 tensors. T5's
    normalises its 16-bit input by an fp32 variance, `l2` (Llama 4's queries and keys) has no weight, and
    Cohere's is a LayerNorm written out in fp32: see `_EAGER_NORMS`. Statistics (4 or 8 bytes per token) are
    neglected.
    """
    e = element_bytes
    if is_fused:
        return NormCost(4 * e, 1, 6 * e, 2, e) if adds else NormCost(2 * e, 1, 3 * e, 2, e)
    if kind == "layer":
        return NormCost(3 * e, 1, 7 * e, 2, e)
    casts, cast_launches = (2 * (e + 4), 2) if e < 4 else (0, 0)
    if kind in _EAGER_NORMS:
        forward, launches, backward, backward_launches, saved = _EAGER_NORMS[kind]
        if kind == "t5_rms" and e < 4:  # its input, the fp32 copy that is squared, the normalised tensor
            return NormCost(forward + 6, launches + 2, backward - 2, backward_launches + 3, 8)
        return NormCost(
            forward + casts,
            launches + cast_launches,
            backward + casts,
            backward_launches + cast_launches,
            saved,
        )
    if kind == "gemma_rms":
        return NormCost(casts + 28, 8 + cast_launches, casts + 92, 15 + cast_launches, 8)
    return NormCost(
        forward_bytes=casts + 20 + 2 * e,
        forward_launches=6 + cast_launches,
        backward_bytes=6 * e + casts + 68,
        backward_launches=14 + cast_launches,
        saved_bytes=4 + e,
    )


def native_kind(kind: str, options: WorkOptions) -> str:
    """The kind of norm whose kernels a norm of this kind has under `options`.

    # [Note: torch's RMSNorm]
    From 2.9 on torch has one kernel for nn.RMSNorm where its input and weight are of one type
    (`_fused_rms_norm`, ATen/native/cuda/layer_norm_kernel.cu, pull request 153666), as under FSDP2's mixed
    precision. It is LayerNorm's without the mean, in both directions: see [Note: LayerNorm reads twice].
    Before, nn.RMSNorm was the operators that transformers writes out.
    """
    is_native = options.layers.has_native_norms and not options.fuses_kernels
    return "layer" if is_native and kind == "rms" else kind


def norm_cost_of(kind: str, options: WorkOptions) -> NormCost:
    """The cost of a norm under `options`.

    Megatron's are fused and without the residual add. Before its persistent kernel LayerNorm was Apex's,
    whose passes over a row are torch's (Megatron-LM 8aa4619f
    megatron/fused_kernels/layer_norm_cuda_kernel.cu: the moments, then the result; backward two kernels).

    # [Note: InternEvo's norms]
    InternEvo casts the stream to fp32 for Apex's norm and runs both again before backward (v0.2.1dev20231121
    model/modeling_internlm.py: `norm1(_residual.float())` in a checkpoint of its own, as
    `dropout_selective_checkpoint` is true by default). With e = 2: the cast e + 4, the norm 2 x 4 + e, so 16
    forward. Backward these again, the gradient of the input 2 (4 + e) + 4, of the weight 4 + e, and the cast
    back 4 + e, 44. It keeps the stream.
    """
    kind = native_kind(kind, options)
    if options.layers.casts_norms and options.liger:
        e = options.stream_bytes
        forward = (e + 4) + (8 + e)
        return NormCost(forward, 2, forward + (2 * (4 + e) + 4) + 2 * (4 + e), 6, e)
    if options.compile and options.layers.has_two_pass_layer_norm and kind == "layer":
        return norm_cost(kind, options.stream_bytes, is_fused=False)
    return norm_cost(kind, options.stream_bytes, is_fused=options.fuses_kernels, adds=options.joins_norms)


def autocast_cast(num_elements: int, options: WorkOptions) -> tuple[Kernel, ...]:
    """Cast between fp32 and the type of the products, in one direction. None without autocast."""
    if not options.autocast:
        return ()
    return (elementwise(num_elements * (4 + options.activation_bytes), options.kernel_dtype),)
