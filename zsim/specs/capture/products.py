"""FLOPs and shapes of the operators that multiply matrices, and names of the operators that memory bandwidth
bounds.

Products count 2 m n k, as torch's `FlopCounterMode` does (torch 2.13 utils/flop_counter.py), grouped products
2 k n per row. A convolution is priced as a product, without its own kernel (implicit GEMM): m output
positions, n output channels, k inputs to each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from zsim.specs.capture.recording import Product

if TYPE_CHECKING:
    from torch import Tensor

Grows = Callable[[Any], bool]

# Convolutions with fewer inputs to each output channel than this (depthwise ones) are bound by memory.
_MIN_CHANNELS = 4

# Not of torch's tag "pointwise", but each element is read and written once or a few times.
MEMORY_BOUND = frozenset(
    """
    sum mean var var_mean std amax amin max min argmax argmin prod any all _is_all_true norm
    linalg_vector_norm logsumexp _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss
    mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _fused_rms_norm _fused_rms_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward
    _batch_norm_with_update _batch_norm_with_update_functional native_dropout
    native_dropout_backward bernoulli bernoulli_ rand randn rand_like randn_like randint uniform_
    normal_ random_ exponential_ embedding embedding_dense_backward gather index_select
    select_backward slice_backward index take cat stack split_with_sizes_copy _to_copy clone copy
    copy_ contiguous fill fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros
    new_ones new_full scalar_tensor arange linspace eye tril triu tril_indices constant_pad_nd
    reflection_pad1d reflection_pad2d replication_pad2d roll flip repeat pixel_shuffle
    pixel_unshuffle expand_copy avg_pool2d avg_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool1d max_pool3d_with_indices _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward avg_pool3d adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward upsample_nearest1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa glu glu_backward glu_jvp bucketize one_hot mv dot
    masked_fill masked_fill_ where where_self cumsum cumsum_ pow fill_diagonal_ gelu_backward
    silu_backward threshold_backward sigmoid_backward tanh_backward hardswish_backward
    hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward mish_backward
    hardtanh_backward _prelu_kernel _prelu_kernel_backward floor_divide remainder fmod lerp addcmul
    addcdiv slice_scatter select_scatter masked_scatter
    """.split()  # noqa: SIM905 - words, not a hundred lines
)

# Operators that only make room, or look at memory in another way.
ALLOCATIONS = frozenset(
    """
    empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ set_
    as_strided_
    """.split()  # noqa: SIM905 - words, not a hundred lines
)


def _layout(a: Tensor, b: Tensor) -> str:
    """The order of the operands in memory: "nt" if the second operand is transposed, "tn" if the first is."""
    if _is_transposed(a):
        return "tn"
    return "nt" if _is_transposed(b) else "nn"


def _is_transposed(matrix: Tensor) -> bool:
    return matrix.dim() >= 2 and matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _scaled_dimension(a: Tensor, b: Tensor, grows: Grows, *, batched: bool = False) -> int | None:
    """Index in (m, n, k) of the dimension that grows with the samples, or None.

    If both operands grow, it is the tokens that are summed over (k), or the batch of a batched product
    (None).
    """
    if grows(a) and grows(b):
        return None if batched else 2
    return 0 if grows(a) else (1 if grows(b) else None)


def _matmul(a: Tensor, b: Tensor, grows: Grows) -> tuple[Product, ...]:
    (m, k), n = a.shape, b.shape[1]
    return (Product("gemm", 2.0 * m * n * k, (m, n, k), _scaled_dimension(a, b, grows), _layout(a, b)),)


def _batched_matmul(a: Tensor, b: Tensor, grows: Grows) -> tuple[Product, ...]:
    (batch, m, k), n = a.shape, b.shape[2]
    scaled = _scaled_dimension(a, b, grows, batched=True)
    return (Product("gemm", 2.0 * batch * m * n * k, (m, n, k), scaled, _layout(a, b)),)


def _grouped_matmul(args: Sequence[Any], grows: Grows) -> tuple[Product, ...]:
    """Products of groups of rows, each with its own weight (2D x 3D), and the gradients of such weights (2D x
    2D).

    Every group gets the same number of rows.
    """
    a, b, offsets = args[0], args[1], args[2]
    if a.dim() == 2 and b.dim() == 3:
        (rows, k), (groups, _, n) = a.shape, b.shape
        rows_per_group = max(1, rows // groups)
        return (Product("gemm", 2.0 * rows * n * k, (rows_per_group, n, k), 0, _layout(a, b)),)
    if a.dim() == 2 and b.dim() == 2:
        (m, rows), n = a.shape, b.shape[1]
        rows_per_group = max(1, rows // max(1, offsets.shape[0]))
        return (Product("gemm", 2.0 * rows * m * n, (m, n, rows_per_group), 2, "tn"),)
    return _batched_matmul(a, b, grows) if a.dim() == 3 and b.dim() == 3 else ()


def _convolution_shape(
    x: Tensor, weight: Tensor, y: Sequence[int], *, transposed: bool, groups: int
) -> tuple[int, int, int, int]:
    """(groups, m, n, k) of a convolution's product."""
    kernel = prod(weight.shape[2:])
    if transposed:
        return groups, x.shape[0] * prod(x.shape[2:]), weight.shape[1] * kernel, weight.shape[0] // groups
    return groups, y[0] * prod(y[2:]), weight.shape[0] // groups, weight.shape[1] * kernel


def _kind(n: int, k: int, weight: Tensor) -> str:
    """The kind of a convolution. Memory bounds convolutions of few channels."""
    return "gemm" if min(n, k // max(1, prod(weight.shape[2:]))) >= _MIN_CHANNELS or k >= 64 else "memory"


def _convolution(args: Sequence[Any], out: Any) -> tuple[Product, ...]:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    num_groups, m, n, k = _convolution_shape(x, weight, out.shape, transposed=transposed, groups=groups)
    return (Product(_kind(n, k, weight), 2.0 * num_groups * m * n * k, (m, n, k), 0),)


def _convolution_backward(args: Sequence[Any]) -> tuple[Product, ...]:
    """Gradients of the input and of the weight, as far as the operator's output mask requests them."""
    y, x, weight, transposed, groups, output_mask = args[0], args[1], args[2], args[7], args[9], args[10]
    num_groups, m, n, k = _convolution_shape(x, weight, y.shape, transposed=transposed, groups=groups)
    flops, kind = 2.0 * num_groups * m * n * k, _kind(n, k, weight)
    input_gradient = (Product(kind, flops, (m, k, n), 0, "nn"),) if output_mask[0] else ()
    weight_gradient = (Product(kind, flops, (n, k, m), 2, "tn"),) if output_mask[1] else ()
    return (*input_gradient, *weight_gradient)


def products_of(name: str, args: Sequence[Any], out: Any, grows: Grows) -> tuple[Product, ...]:
    """The products of an operator, or () for an operator that multiplies no matrices.

    `grows` tells whether a tensor grows with the samples.
    """
    if name == "mm":
        return _matmul(args[0], args[1], grows)
    if name == "addmm":
        return _matmul(args[1], args[2], grows)
    if name == "bmm":
        return _batched_matmul(args[0], args[1], grows)
    if name in ("baddbmm", "baddbmm_"):
        return _batched_matmul(args[1], args[2], grows)
    if name == "_grouped_mm":
        return _grouped_matmul(args, grows)
    if name in ("convolution", "_convolution", "convolution_overrideable"):
        return _convolution(args, out)
    return _convolution_backward(args) if name == "convolution_backward" else ()
