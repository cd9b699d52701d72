"""The GPU kernels of modules: FLOPs, HBM bytes and launches, no seconds.

Products count 2 m n k FLOPs. HBM bytes are every operand read once and every result written once, as in eager
PyTorch. Fused kernels (`compile`) save the traffic between operators. Elementwise kernels have no FLOPs: they
are bound by HBM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zsim.cost.kernels import fp8
from zsim.cost.kernels.adapters import (
    casts_around,
    dequantise_kernels,
    input_forward,
    merged_backward,
    merged_forward,
    product_type,
    sum_backward,
    sum_forward,
)
from zsim.cost.kernels.attention import attention_backward, attention_forward
from zsim.cost.kernels.elementwise import activation_cost_of, freeze_norm_weight, norm_cost_of
from zsim.cost.kernels.experts import (
    grouped_backward,
    grouped_forward,
    grouped_gradients,
    rearrange_backward,
    rearrange_forward,
    router_backward,
    router_forward,
)
from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.kernels.losses import loss_kernels
from zsim.cost.kernels.rotary import rotary_forward
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.traced import traced_backward, traced_forward
from zsim.cost.kernels.update import (
    accumulate_kernels,
    cast_kernels,
    copy_kernels,
    fill_kernels,
    norm_kernels,
    optimizer_kernels,
    optimizer_state_bytes,
    scale_kernels,
)
from zsim.specs.model.experts import GroupedLinear, MergedWeights, Rearrange, Router
from zsim.specs.model.spec import (
    Activation,
    AdapterInput,
    AdapterSum,
    Attention,
    Embedding,
    Exchange,
    Linear,
    Loss,
    Module,
    Norm,
    Residual,
)
from zsim.specs.model.traced import TracedModule

__all__ = [
    "BatchShape",
    "WorkOptions",
    "accumulate_kernels",
    "backward_kernels",
    "cast_kernels",
    "copy_kernels",
    "fill_kernels",
    "forward_kernels",
    "norm_kernels",
    "optimizer_kernels",
    "optimizer_state_bytes",
    "scale_kernels",
    "total_flops",
]

Kernels = tuple[Kernel, ...]
INDEX_BYTES = 8


def forward_kernels(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of one module's forward pass, in order."""
    return _FORWARD[type(module.op_spec)](module, shape, options)


def backward_kernels(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of one module's backward pass: gradients of its input and of its parameters. () if neither
    needs one.
    """
    if not module.has_backward:
        return ()
    return _BACKWARD[type(module.op_spec)](module, shape, options)


def split_backward(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Kernels, Kernels]:
    """The kernels of `backward_kernels` that the gradient of the module's input needs, and those of its
    weight's gradient alone, which a schedule may run later. The second are () for modules without a product.
    """
    if isinstance(module.op_spec, GroupedLinear):
        return grouped_gradients(module, shape, options)
    if not isinstance(module.op_spec, Linear):
        return backward_kernels(module, shape, options), ()
    marked = _linear_gradients(module, shape, options)
    input_gradient = tuple(kernel for kernel, is_weight in marked if not is_weight)
    return input_gradient, tuple(kernel for kernel, is_weight in marked if is_weight)


def recomputed_kernels(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Kernels of a module's forward that recomputation repeats although the module's output was kept:
    attention's rotary embedding."""
    if not isinstance(module.op_spec, Attention):
        return ()
    return rotary_forward(module.op_spec, shape, options)


def total_flops(kernels: Iterable[Kernel]) -> float:
    """FLOPs of all kernels."""
    return sum(kernel.flops for kernel in kernels)


def gemm(
    m: int,
    n: int,
    k: int,
    element_bytes: int,
    dtype: str,
    layout: Layout = "nt",
    *,
    extra_bytes: int = 0,
    is_transformer_engine: bool = False,
) -> Kernel:
    """One product of m x k by k x n: 2 m n k FLOPs, (m k + k n + m n) elements."""
    moved_bytes = float((m * k + k * n + m * n) * element_bytes + extra_bytes)
    return Kernel(
        "gemm",
        2.0 * m * n * k,
        moved_bytes,
        dtype,
        (m, n, k),
        layout=layout,
        is_transformer_engine=is_transformer_engine,
    )


def _elementwise(hbm_bytes: float, dtype: str, launches: int = 1) -> Kernel:
    return Kernel("elementwise", 0.0, float(hbm_bytes), dtype, (), launches)


# ---- Linear ------------------------------------------------------------------------------------------------


def _linear_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """One product, with the bias in its epilogue."""
    work = _linear(module)
    m, n, k = shape.tokens, work.out_features, work.in_features
    e, dtype = product_type(work, options)
    bias_bytes = n * e if _has_bias(module) else 0
    if not fp8.is_quantized(module, options):
        is_transformer_engine = fp8.runs_in_transformer_engine(module, options)
        product = gemm(m, n, k, e, dtype, extra_bytes=bias_bytes, is_transformer_engine=is_transformer_engine)
        casts_before, casts_after = casts_around(module, shape, is_backward=False)
        return (
            *casts_before,
            *dequantise_kernels(module, options),
            *_autocast_cast(n * k, options),
            product,
            *casts_after,
        )
    casts = fp8.forward_casts(module, m, options)
    return (*casts, fp8.product(m, n, k, m * n * e + bias_bytes, options.fp8))


def _linear_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Gradient of the input, gradient of the weight, sum over tokens for the bias.

    The gradient of a shared input is accumulated by a separate add, and so is that of a tied weight. A frozen
    weight has no gradient, and an input before all that is trained has none.
    """
    return tuple(kernel for kernel, _ in _linear_gradients(module, shape, options))


def _linear_gradients(module: Module, shape: BatchShape, options: WorkOptions) -> list[tuple[Kernel, bool]]:
    """The kernels of a product's backward in order, each with whether it is for the weight's gradient."""
    is_needed = {True: module.trains_weight, False: module.input_gradient}
    return [marked for marked in _unfiltered_gradients(module, shape, options) if is_needed[marked[1]]]


def _unfiltered_gradients(
    module: Module, shape: BatchShape, options: WorkOptions
) -> list[tuple[Kernel, bool]]:
    work = _linear(module)
    m, n, k = shape.tokens, work.out_features, work.in_features
    e, dtype = product_type(work, options)
    casts_before, casts_after = casts_around(module, shape, is_backward=True)
    kernels: list[tuple[Kernel, bool]] = []
    kernels += [(kernel, False) for kernel in (*casts_before, *dequantise_kernels(module, options))]
    if fp8.is_quantized(module, options):
        kernels += fp8.backward_casts(module, m, options)
        kernels.append((fp8.product(m, k, n, m * k * e, options.fp8), False))
        kernels.append((fp8.product(n, k, m, k * n * e, options.fp8), True))
    else:
        is_transformer_engine = fp8.runs_in_transformer_engine(module, options)
        kernels += [
            (gemm(m, k, n, e, dtype, "nn", is_transformer_engine=is_transformer_engine), False),
            (gemm(n, k, m, e, dtype, "tn", is_transformer_engine=is_transformer_engine), True),
            *((kernel, False) for kernel in casts_after),
        ]
        kernels += [(kernel, True) for kernel in _autocast_cast(n * k, options)]
    if _has_bias(module):
        kernels.append((_elementwise((m * n + n) * e, options.kernel_dtype), True))
    if (module.shares_input or work.is_adapter) and not options.compile:
        kernels.append((_elementwise(3 * m * k * e, options.kernel_dtype), False))
    if not any(parameter.name == "weight" for parameter in module.parameters):
        kernels.append((_elementwise(3 * n * k * options.stream_bytes, options.kernel_dtype), True))
    return kernels


def _has_bias(module: Module) -> bool:
    return any(parameter.name == "bias" for parameter in module.parameters)


def _linear(module: Module) -> Linear:
    assert isinstance(module.op_spec, Linear)
    return module.op_spec


# ---- Norms, activations, residuals -------------------------------------------------------------------------


def _norm_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    assert isinstance(module.op_spec, Norm)
    cost = norm_cost_of(module.op_spec.kind, options)
    elements = shape.tokens * module.op_spec.width
    moved_bytes = cost.forward_bytes * elements
    if module.op_spec.writes_fp8:
        moved_bytes -= fp8.norm_saving(elements, options)
    kernel = _elementwise(moved_bytes, options.kernel_dtype, cost.forward_launches)
    return (kernel, *_autocast_cast(elements, options))


def _norm_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    assert isinstance(module.op_spec, Norm)
    cost = norm_cost_of(module.op_spec.kind, options)
    elements = shape.tokens * module.op_spec.width
    if not module.trains_weight:
        cost = freeze_norm_weight(cost, module.op_spec.kind, options)
    kernel = _elementwise(cost.backward_bytes * elements, options.kernel_dtype, cost.backward_launches)
    return (*_autocast_cast(elements, options), kernel)


def _autocast_cast(num_elements: int, options: WorkOptions) -> Kernels:
    """Cast between fp32 and the type of the products, in one direction. None without autocast."""
    if not options.autocast:
        return ()
    return (_elementwise(num_elements * (4 + options.activation_bytes), options.kernel_dtype),)


def _activation_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    spec = module.op_spec
    assert isinstance(spec, Activation)
    passes = activation_cost_of(spec.name, is_gated=spec.gated, options=options).forward
    return passes.kernels(shape.tokens * spec.width, options)


def _activation_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    spec = module.op_spec
    assert isinstance(spec, Activation)
    passes = activation_cost_of(spec.name, is_gated=spec.gated, options=options).backward
    return passes.kernels(shape.tokens * spec.width, options)


def _residual_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Dropout (reads, writes, writes a byte of mask), the product with a number (reads, writes) and the add.
    Compiled, all are part of the next norm. Megatron's kernel (`bias_dropout_add_fused_train`) reads the
    branch and the stream, and writes their sum and the mask.
    """
    assert isinstance(module.op_spec, Residual)
    elements, e = shape.tokens * module.op_spec.width, options.activation_bytes
    if options.compile and not options.joins_norms:
        return (_elementwise(elements * (3 * e + bool(module.op_spec.dropout)), options.kernel_dtype),)
    if options.compile:
        return (_elementwise(elements, options.kernel_dtype),) if module.op_spec.dropout else ()
    add = _elementwise(elements * (2 * options.stream_bytes + e), options.kernel_dtype)
    kernels = (_elementwise(elements * (2 * e + 1), options.kernel_dtype),) if module.op_spec.dropout else ()
    if module.op_spec.scales:
        kernels = (*kernels, _elementwise(elements * 2 * e, options.kernel_dtype))
    return (*kernels, add)


def _residual_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Add the gradients of the stream and of the branch. Dropout reads its mask. Under autocast the gradient
    of the branch comes from a norm that runs in fp32 (torch's list of autocast operators), like the stream's,
    and the gradient that goes into the branch is cast. Megatron's kernel reads the gradient and the mask and
    writes the branch's, and autograd adds the stream's.
    """
    assert isinstance(module.op_spec, Residual)
    elements, kernels = shape.tokens * module.op_spec.width, _residual_forward(module, shape, options)
    if options.compile and not options.joins_norms:
        e = options.activation_bytes
        dropped = (
            (_elementwise(elements * (2 * e + 1), options.kernel_dtype),) if module.op_spec.dropout else ()
        )
        return (*dropped, _elementwise(elements * 3 * e, options.kernel_dtype))
    if not options.autocast or options.compile:
        return (*kernels, *_autocast_cast(elements, options))
    add = _elementwise(3 * elements * options.stream_bytes, options.kernel_dtype)
    return (*kernels[:-1], add, *_autocast_cast(elements, options))


# ---- Embedding and loss ------------------------------------------------------------------------------------


def _embedding_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Gather one row per token, which becomes the residual stream."""
    assert isinstance(module.op_spec, Embedding)
    num_bytes = shape.tokens * (2 * module.op_spec.width * options.stream_bytes + INDEX_BYTES)
    return (Kernel("embedding", 0.0, float(num_bytes), options.kernel_dtype),)


def _embedding_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """`embedding_dense_backward`: zero the full gradient of the table, sort the indices, add the rows."""
    assert isinstance(module.op_spec, Embedding)
    e = options.stream_bytes
    table = module.op_spec.rows * module.op_spec.width * e
    rows = shape.tokens * (3 * module.op_spec.width * e + 4 * INDEX_BYTES)
    return (Kernel("embedding", 0.0, float(table + rows), options.kernel_dtype, (), 4),)


def _loss_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    assert isinstance(module.op_spec, Loss)
    return loss_kernels(shape.tokens, module.op_spec.vocab_size, options, is_backward=False)


def _loss_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    assert isinstance(module.op_spec, Loss)
    return loss_kernels(shape.tokens, module.op_spec.vocab_size, options, is_backward=True)


def _exchange(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    return ()  # NCCL's kernels are the collective's


_FORWARD: dict[type[Any], Callable[[Module, BatchShape, WorkOptions], Kernels]] = {
    Linear: _linear_forward,
    Norm: _norm_forward,
    Attention: attention_forward,
    Activation: _activation_forward,
    Residual: _residual_forward,
    Embedding: _embedding_forward,
    Loss: _loss_forward,
    Exchange: _exchange,
    AdapterInput: input_forward,
    AdapterSum: sum_forward,
    Router: router_forward,
    GroupedLinear: grouped_forward,
    MergedWeights: merged_forward,
    Rearrange: rearrange_forward,
    TracedModule: traced_forward,
}
_BACKWARD: dict[type[Any], Callable[[Module, BatchShape, WorkOptions], Kernels]] = {
    Linear: _linear_backward,
    Norm: _norm_backward,
    Attention: attention_backward,
    Activation: _activation_backward,
    Residual: _residual_backward,
    Embedding: _embedding_backward,
    Loss: _loss_backward,
    Exchange: _exchange,
    AdapterInput: input_forward,
    AdapterSum: sum_backward,
    Router: router_backward,
    GroupedLinear: grouped_backward,
    MergedWeights: merged_backward,
    Rearrange: rearrange_backward,
    TracedModule: traced_backward,
}
