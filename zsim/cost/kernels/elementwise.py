"""Bytes read, written and kept, and launches, of memory-bound modules, in eager PyTorch and fused.

The eager figures are counts of the operators that transformers 5.23's modelling code dispatches under torch
2.13, forward and backward (the same operators on every device): a *pass* is one tensor of the module's width
read or written once. They depend on the code alone, not on sizes.

    RMSNorm forward   to fp32, pow, mean, add, rsqrt, mul, to bf16, mul            8 launches
    RMSNorm backward  2 mul, sum, to fp32, 2 mul, sum, pow, 2 mul, div, pow, 2 mul, add, to bf16    16
    rotary forward    per tensor: mul, neg, cat, mul, add                          10 passes, 5 launches
    rotary backward   per tensor: mul, neg, 2 x (fill, copy), add, mul, add        15 passes, 9 launches

# [Note: LayerNorm reads twice]
torch's `vectorized_layer_norm_kernel` and `layer_norm_grad_input_kernel` (ATen/native/cuda/
layer_norm_kernel.cu) loop over a row twice, and caches do not save the second reading:
nn.LayerNorm in fp32 on 4,096 rows of 1,024, 2,048, 4,096, 8,192 and 16,384 takes 34, 56, 122, 258 and 508 us
forward on an A100 80 GB PCIe, 118, 198, 435, 834 and 1636 us with backward. A Triton kernel that holds its
row in registers takes 323 us forward for the longest: 1.66 TB/s. At that rate and 4 us a launch, torch's
kernels move 2.9, 2.6, 2.9, 3.1 and 3.1 times the tensor forward, 7.5, 6.6, 7.6, 7.0 and 6.9 times backward.
Source: linkedin/Liger-Kernel@bdbfeadf benchmark/data/a100_all_benchmark_data.csv, layer_norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.shapes import WorkOptions


@dataclass(frozen=True, slots=True)
class Passes:
    """Tensors read plus written, and kernel launches, in one direction."""

    tensors: float
    launches: int


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Cost of one non-linearity; `saved` is the number of tensors that it keeps for backward."""

    forward: Passes
    backward: Passes
    saved: int


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
    # Nemotron's: relu, and a square, whose gradient takes pow(1), a product with two and one with dy
    # (torch's pow_backward). Both keep the relu's output.
    "relu2": ActivationCost(Passes(4, 2), Passes(10, 4), saved=1),
}

# `act(gate) * up`: eager multiplies in a separate kernel and keeps both factors; fused keeps gate and up.
GATED_PRODUCT = ActivationCost(Passes(3, 1), Passes(6, 2), saved=2)
FUSED_GATED = ActivationCost(Passes(3, 1), Passes(5, 1), saved=2)

ROTARY_EAGER = (Passes(10, 5), Passes(15, 9))
ROTARY_FUSED = (Passes(2, 1), Passes(2, 1))


def activation_cost(name: str, *, is_gated: bool, is_fused: bool) -> ActivationCost:
    """Cost of the activation `name`; a fused activation is a single kernel in each direction."""
    if is_fused:
        saved = 0 if name == "relu" and not is_gated else NATIVE.saved
        return FUSED_GATED if is_gated else ActivationCost(NATIVE.forward, NATIVE.backward, saved)
    own = EAGER_ACTIVATIONS.get(name, NATIVE)
    if not is_gated:
        return own
    return ActivationCost(
        Passes(own.forward.tensors + GATED_PRODUCT.forward.tensors, own.forward.launches + 1),
        Passes(own.backward.tensors + GATED_PRODUCT.backward.tensors, own.backward.launches + 2),
        # The output of a gated relu is kept, as a factor of the product.
        own.saved + GATED_PRODUCT.saved,
    )


@dataclass(frozen=True, slots=True)
class NormCost:
    """Bytes moved per normalised element, launches, and bytes kept per element."""

    forward_bytes: int
    forward_launches: int
    backward_bytes: int
    backward_launches: int
    saved_bytes: int


def without_weight_gradient(cost: NormCost, kind: str, options: WorkOptions) -> NormCost:
    """The cost of a norm whose weight is frozen: without its gradient's reading of dy and x, and in eager
    RMSNorm without what it keeps for it (torch saves a factor only for the other's gradient). Compiled and
    Liger's kernels compute it all the same, or in the same pass."""
    if options.fuses_kernels:
        return cost
    e = options.stream_bytes
    if kind == "layer":
        return replace(cost, backward_bytes=cost.backward_bytes - 2 * e, backward_launches=1)
    element = 4 if kind == "gemma_rms" else e
    return replace(
        cost,
        backward_bytes=cost.backward_bytes - 4 * element,
        backward_launches=cost.backward_launches - 2,
        saved_bytes=4,
    )


def norm_cost(kind: str, element_bytes: int, *, is_fused: bool, adds: bool = True) -> NormCost:
    """Cost of a norm. LayerNorm is one native kernel; RMSNorm is Python code in fp32 unless fused.

    With e bytes per element: torch's native norm goes over a row twice, for the moments and to normalise, 3e
    forward. Backward has one kernel for the gradient of the input (dy and x twice, writes dx) and one for the
    gradient of the weight (reads both): 7e. See [Note: LayerNorm reads twice]. A compiled norm includes the
    residual add (`adds`): 4e (reads the stream and the branch, writes the sum and the normalised tensor) and
    6e. Liger's norm does not: 2e, and 3e (reads dy and x once for both gradients, writes dx over dy; then
    sums the gradient of the weight). All of these keep their input.

    Eager RMSNorm: casts 2(e + 4), fp32 passes 20, weight 2e forward; weight 6e, casts 2(e + 4), fp32 passes
    68 backward. It keeps the fp32 copy of its input and the normalised tensor: 4 + e. In fp32 the casts are
    no-ops. Gemma multiplies by its weight in fp32 too, and keeps both fp32 tensors.
    Statistics (4 or 8 bytes per token) are neglected.
    """
    e = element_bytes
    if is_fused:
        return NormCost(4 * e, 1, 6 * e, 2, e) if adds else NormCost(2 * e, 1, 3 * e, 2, e)
    if kind == "layer":
        return NormCost(3 * e, 1, 7 * e, 2, e)
    casts, cast_launches = (2 * (e + 4), 2) if e < 4 else (0, 0)
    if kind == "gemma_rms":
        return NormCost(casts + 28, 8 + cast_launches, casts + 92, 15 + cast_launches, 8)
    return NormCost(
        forward_bytes=casts + 20 + 2 * e,
        forward_launches=6 + cast_launches,
        backward_bytes=6 * e + casts + 68,
        backward_launches=14 + cast_launches,
        saved_bytes=4 + e,
    )
