"""The kernels of mixture-of-experts layers: router, rows rearranged by expert, grouped products.

See [Note: rows that move] of moved_rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels import fp8
from zsim.cost.kernels.kernel import Kernel, Layout
from zsim.cost.kernels.moved_rows import RowPasses, move_cost
from zsim.cost.kernels.quantised_rows import computed_rows, is_grouped_fp8, padding_copies
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.experts import GroupedLinear, Rearrange, Router
from zsim.specs.model.spec import Module

Kernels = tuple[Kernel, ...]
# The streams of a grouped product in Transformer Engine 2.17 (common/gemm/cublaslt_gemm.cu,
# `multi_stream_cublas_gemm`, `nvte_get_num_compute_streams`); the host launches a product per expert.
STREAMS = 4


# ---- Router ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ScoreCost:
    """Bytes per score (one per token and expert, fp32) and launches, forward and backward."""

    forward_bytes: int
    forward_launches: int
    backward_bytes: int
    backward_launches: int


# DeepSpeed 0.19.8 moe/sharded_moe.py, counted op by op: `top1gating`, `top2gating`, `topkgating`. Masks are
# int64 (bool in the last), as are running sums of them; one and two experts draw random numbers.
_DEEPSPEED_GATES = {1: _ScoreCost(180, 34, 22, 10), 2: _ScoreCost(410, 60, 40, 16)}
_DEEPSPEED_GATE = _ScoreCost(85, 30, 30, 12)


def _score_cost(spec: Router) -> _ScoreCost:
    """Cost of the scores. They are read, softmax or sigmoid is written, and topk reads it. Backward fills the
    gradient of the scores with zeros and passes through the function (reads gradient and output, writes). A
    bias for the choice is a sum more. Groups take the best two scores of each, a mask, and a masked copy.
    Megatron's map of tokens to experts is two tensors filled with zeros and scattered into
    (`topk_routing_with_score_function`, core 0.16.1 core/transformer/moe/moe_utils.py). The loss is a sum of
    scores and one of the map.
    """
    if spec.library == "deepspeed-moe":
        return _DEEPSPEED_GATES.get(spec.top_k, _DEEPSPEED_GATE)
    forward, launches, backward, back_launches = 12, 5, 18, 6
    if spec.library.startswith("megatron"):
        forward, launches, backward, back_launches = forward + 10, launches + 6, backward + 4, 7
    if spec.has_choice_bias:
        forward, launches = forward + 8, launches + 1
    if spec.num_groups > 1:
        forward, launches = forward + 12, launches + 7
    if spec.has_auxiliary_loss:
        forward, launches, backward, back_launches = (
            forward + 12,
            launches + 6,
            backward + 8,
            back_launches + 4,
        )
    return _ScoreCost(forward, launches, backward, back_launches)


def router_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Casts of a product in fp32, the gate's product, scores and choice."""
    work = _router(module)
    cost, scores = _score_cost(work), shape.tokens * work.num_experts
    score_kernel = _elementwise(scores * cost.forward_bytes, options, cost.forward_launches)
    return (*_router_casts(work, shape, options), _gate(work, shape, options, "nt"), score_kernel)


def router_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Scores, the gate's two products (one if it is frozen), casts of what was cast. The input's gradient is
    added to that of the experts.
    """
    work = _router(module)
    cost, scores = _score_cost(work), shape.tokens * work.num_experts
    score_kernel = _elementwise(scores * cost.backward_bytes, options, cost.backward_launches)
    weight_gradient = (_gate(work, shape, options, "tn"),) if module.trains_weight else ()
    width = shape.tokens * work.in_features
    accumulation = _elementwise(3 * width * options.activation_bytes, options)
    input_gradient = _gate(work, shape, options, "nn")
    return (
        score_kernel,
        input_gradient,
        *weight_gradient,
        *_router_casts(work, shape, options),
        accumulation,
    )


def _router_casts(spec: Router, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The input cast between the activations' type and fp32, in one direction."""
    if not spec.in_fp32 or options.activation_bytes == 4:
        return ()
    return (_elementwise(shape.tokens * spec.in_features * 6, options, 2),)


def _gate(spec: Router, shape: BatchShape, options: WorkOptions, layout: Layout) -> Kernel:
    tokens, experts, width = shape.tokens, spec.num_experts, spec.in_features
    shapes = {"nt": (tokens, experts, width), "nn": (tokens, width, experts), "tn": (experts, width, tokens)}
    dtype = "fp32" if spec.in_fp32 else options.kernel_dtype
    operand = 4 if spec.in_fp32 else options.activation_bytes
    score = 4 if spec.in_fp32 or spec.has_fp32_output else options.activation_bytes
    moved_bytes = (tokens * width + width * experts) * operand + tokens * experts * score
    flops = 2.0 * tokens * experts * width
    return Kernel("gemm", flops, float(moved_bytes), dtype, shapes[layout], layout=layout)


def _router(module: Module) -> Router:
    assert isinstance(module.op_spec, Router)
    return module.op_spec


# ---- Rows --------------------------------------------------------------------------------------------------


def rearrange_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """See [Note: rows that move]. The output of shared experts is added, after its gate."""
    assert isinstance(module.op_spec, Rearrange)
    work, e = module.op_spec, options.activation_bytes
    kernels = _move_kernels(work, move_cost(work, options).forward, shape, options)
    token = shape.tokens * work.width * e
    if work.shared == "gated":
        kernels = (*kernels, _elementwise(2 * token, options, 2))
    return kernels if work.shared == "none" else (*kernels, _elementwise(3 * token, options))


def rearrange_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """See [Note: rows that move]. A sum passes its gradient on as it is."""
    assert isinstance(module.op_spec, Rearrange)
    work, e = module.op_spec, options.activation_bytes
    kernels = _move_kernels(work, move_cost(work, options).backward, shape, options)
    if work.shared != "gated":
        return kernels
    return (_elementwise(5 * shape.tokens * work.width * e, options, 4), *kernels)


def _move_kernels(work: Rearrange, passes: RowPasses, shape: BatchShape, options: WorkOptions) -> Kernels:
    tokens, rows = shape.tokens, routed_rows(work, shape)
    if not passes.launches:
        return ()
    e = options.activation_bytes
    num_bytes = (tokens * passes.tokens + rows * passes.rows) * work.width * e
    if not passes.added:
        return (_elementwise(num_bytes, options, passes.launches),)
    elements = rows * work.width
    accumulation = replace(
        _elementwise(3 * elements * e, options), added_elements=round(elements * passes.added)
    )  # each row read, the one it is added to read and written
    return (_elementwise(num_bytes, options, passes.launches - 1), accumulation)


def routed_rows(work: Rearrange, shape: BatchShape) -> int:
    """Rows of all experts of a rank."""
    return round(shape.tokens * work.rows)


# ---- Grouped products --------------------------------------------------------------------------------------


def grouped_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The product of every expert. Its bias, one row per expert, is added to its rows."""
    work, rows = _grouped(module), computed_rows(_grouped(module), shape, options)
    n, k = work.out_features, work.in_features
    casts: Kernels = ()
    if is_grouped_fp8(work, options):
        input_casts = () if module.shares_input else _casts(work, rows * k, options)
        casts = (*input_casts, *fp8.weight_casts(work.num_experts * k * n, options, is_backward=False))
    copies_before, copies_after = padding_copies(work, shape, options, is_backward=False)
    if _concatenates_rows(work):
        casts = (*casts, _elementwise(2 * rows * k * options.activation_bytes, options))
    products = (_product(module, rows, (n, k), options, "nt"),)
    has_bias = any(parameter.name == "bias" for parameter in module.parameters)
    bias: Kernels = ()
    if work.scored_bias_bytes:
        bias = _scored_bias(work, rows, options).forward
    elif has_bias:
        bias = (_elementwise(3 * rows * n * options.activation_bytes, options, 2),)
    return (*copies_before, *casts, *products, *bias, *copies_after)


def grouped_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """Gradients of the rows, then of the weights."""
    of_input, of_weight = grouped_gradients(module, shape, options)
    return (*of_input, *of_weight)


def grouped_gradients(module: Module, shape: BatchShape, options: WorkOptions) -> tuple[Kernels, Kernels]:
    """The kernels for the gradient of the rows, and for that of the weights, which frozen ones have not."""
    work, rows = _grouped(module), computed_rows(_grouped(module), shape, options)
    n, k = work.out_features, work.in_features
    input_gradient: Kernels = (_product(module, rows, (k, n), options, "nn"),)
    if is_grouped_fp8(work, options):
        weights = fp8.weight_casts(work.num_experts * k * n, options, is_backward=True)
        input_gradient = (*_casts(work, rows * n, options), *weights, *input_gradient)
    if (module.shares_input or work.is_adapter) and not options.compile:
        input_gradient = (*input_gradient, _elementwise(3 * rows * k * options.activation_bytes, options))
    if _concatenates_rows(work):
        passes = work.num_experts + 2 + 3 * (work.num_experts - 1)
        concatenation = _elementwise(
            passes * rows * k * options.activation_bytes, options, 3 * work.num_experts - 1
        )
        input_gradient = (*input_gradient, concatenation)
    weight_gradient: Kernels = (_product(module, rows, (n, k), options, "tn"),)
    if work.scored_bias_bytes:
        input_gradient = (*_scored_bias(work, rows, options).backward, *input_gradient)
    elif any(parameter.name == "bias" for parameter in module.parameters):
        weight_gradient = (
            *weight_gradient,
            _elementwise(2 * rows * n * options.activation_bytes, options, 2),
        )
    copies_before, copies_after = padding_copies(work, shape, options, is_backward=True)
    return (*copies_after, *input_gradient, *copies_before), weight_gradient if module.trains_weight else ()


def _concatenates_rows(spec: GroupedLinear) -> bool:
    """Whether an adapter copies the rows of every expert into one tensor before its products:
    Megatron-Bridge's (0.6.0 peft/utils.py `GroupedExpertLinearAdapter.forward`). Backward of each slice
    writes zeros for all rows and the slice into them. The slices' gradients are added up.
    """
    return spec.is_adapter and spec.kernel == "grouped" and spec.num_experts > 1


@dataclass(frozen=True, slots=True)
class _ForwardAndBackward:
    """Kernels of forward and of backward."""

    forward: Kernels
    backward: Kernels


def _scored_bias(spec: GroupedLinear, rows: int, options: WorkOptions) -> _ForwardAndBackward:
    """The bias of Transformer Engine's second product, which Megatron adds itself (core 0.16.1
    core/transformer/moe/experts.py `TEGroupedMLP._apply_bias`), eager.

    With e bytes per element of the output, p per score and w = max(e, p): for each expert the bias times the
    scores (writes p) and its sum with the rows (reads e and p, writes w). The experts' rows are concatenated
    (reads and writes w) and cast back where w > e (reads w, writes e). Backward: the cast. The sum passes w
    on, in e to the rows (a cast where w > e), whose parts are concatenated (2 e). The product's two gradients
    are each a product (reads w, writes p) summed up (reads p). Every product has a broadcast factor.
    """
    e, p = options.activation_bytes, spec.scored_bias_bytes
    w, count = max(e, p), spec.num_experts
    cast, casts = (w + e, 1) if w > e else (0, 0)
    numel = rows * spec.out_features
    forward = (e + p + w) + 2 * w + cast
    backward = 2 * cast + 2 * e + 2 * p
    return _ForwardAndBackward(
        (
            _broadcast_products(numel, p, count, options),
            _elementwise(numel * forward, options, count + 1 + casts),
        ),
        (
            _broadcast_products(2 * numel, w + p, 2 * count, options),
            _elementwise(numel * backward, options, (2 + casts) * count + 1 + casts),
        ),
    )


def _broadcast_products(elements: int, each_bytes: int, launches: int, options: WorkOptions) -> Kernel:
    """Products with a broadcast factor: [Note: kernels that walk strides] of elementwise."""
    moved_bytes = float(elements * each_bytes)
    return Kernel(
        "elementwise", 0.0, moved_bytes, options.kernel_dtype, (), launches, strided_elements=elements
    )


def _casts(spec: GroupedLinear, numel: int, options: WorkOptions) -> Kernels:
    """Casts of the experts' rows. With delayed scales in both directions, and in nvfp4, they are one kernel
    for all. Otherwise they are those of each expert (Transformer Engine d0067d0d
    pytorch/csrc/extensions/cast.cpp `split_quantize`, `multi_tensor_quantize_impl`).
    """
    casts, recipe = fp8.cast(numel, options), options.fp8
    if recipe.recipe == "nvfp4" or (recipe.recipe == "delayed" and recipe.transposes):
        return tuple(casts)
    return tuple(replace(kernel, launches=kernel.launches * spec.num_experts) for kernel in casts)


def _product(
    module: Module, rows: int, features: tuple[int, int], options: WorkOptions, layout: Layout
) -> Kernel:
    """The experts' products: 2 R n k FLOPs, with R rows of all experts. They are priced at the rows of one
    expert in the mean, in fp8 at a multiple of 16, as every expert's are padded. Transformer Engine's
    GroupedLinear calls its own product for each expert (`multi_stream_cublas_gemm`). Products in one kernel
    were timed as they are.
    """
    work, (n, k) = _grouped(module), features
    rows_per_expert = max(1, round(rows / work.num_experts))
    is_fp8 = is_grouped_fp8(work, options)
    is_transformer_engine = is_fp8 or fp8.runs_in_transformer_engine(module, options)
    rows_per_expert = -(-rows_per_expert // 16) * 16 if is_fp8 else rows_per_expert
    shape = (n, k, rows_per_expert) if layout == "tn" else (rows_per_expert, n, k)
    e, operand = options.activation_bytes, 1 if is_fp8 else options.activation_bytes
    weights, outputs = work.num_experts * n * k, rows * n
    if layout == "tn":
        moved_bytes = (rows * n + rows * k) * operand + weights * e
    else:
        moved_bytes = (rows * k + weights) * operand + outputs * e
    launches = 1 if work.kernel == "grouped" else work.num_experts
    streams = STREAMS if work.kernel == "streams" else 1
    dtype = options.fp8.dtype if is_fp8 else options.kernel_dtype
    flops = 2.0 * rows * n * k
    return Kernel(
        "gemm",
        flops,
        float(moved_bytes),
        dtype,
        shape,
        launches,
        layout="nt" if is_fp8 else layout,
        is_grouped=work.kernel == "grouped",
        is_transformer_engine=is_transformer_engine and work.kernel != "grouped",
        concurrent_launches=streams,
    )


def _grouped(module: Module) -> GroupedLinear:
    assert isinstance(module.op_spec, GroupedLinear)
    return module.op_spec


def _elementwise(num_bytes: float, options: WorkOptions, launches: int = 1) -> Kernel:
    return Kernel("elementwise", 0.0, float(num_bytes), options.kernel_dtype, (), launches)
