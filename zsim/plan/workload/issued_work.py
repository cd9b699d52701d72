"""The work that a module issues in one direction: kernels alone, or parts, some of them collectives.

# [Note: beneath the products]
Megatron's column-parallel layer gathers its input again beneath the product for the input's gradient, and
reduces that gradient beneath the product for the weight's: both are launched on the group's stream before the
product, and the compute stream waits for the first before the second product and for the second behind it
(`LinearWithGradAccumulationAndAsyncCommunication.backward`, Megatron-Core 0.16.1
core/tensor_parallel/layers.py). All other exchanges are in line with the computation, also nanotron's without
asynchronous communication, which gathers again before both products
(`_ColumnLinearNoAsyncCommunicationReduceScatterMode`, nanotron 2411b022
parallel/tensor_parallel/functional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import copy_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.attention.context import SharedAttention
from zsim.operations.operation import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, SplitSizes
from zsim.plan.workload.context import heads, torch_attention, transformer_engine
from zsim.plan.workload.product_pieces import (
    column_forward,
    gather,
    product_backward,
    product_forward,
    row_backward,
    scale_agreement,
    sequence_copy,
)
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import (
    Attention,
    ChunkedOverlap,
    ContextSharding,
    Exchange,
    ExchangeKind,
    Linear,
    Module,
    OverlappedCollectives,
)

# Attention over split sequences, by method and library.
_AttentionParts = Callable[[SharedAttention], tuple[WorkPart, ...]]
_TE: Mapping[str, tuple[_AttentionParts, _AttentionParts]] = {
    "p2p": (transformer_engine.ring_forward, transformer_engine.ring_backward),
    "all-gather": (transformer_engine.gather_forward, transformer_engine.gather_backward),
}
_TORCH = torch_attention.ring_forward, torch_attention.ring_backward
_FLEX = torch_attention.flex_forward, torch_attention.flex_backward
_HEADS = heads.forward, heads.backward

IssuedWork = Kernels | tuple[WorkPart, ...]


def launches_of(issued: IssuedWork) -> int:
    """Kernels that the host launches, without collectives."""
    if isinstance(issued, Kernels):
        return num_launches(issued.kernels)
    return sum(num_launches(part.work.kernels) for part in issued if isinstance(part.work, Kernels))


def kernels_of(issued: IssuedWork) -> Kernels:
    """The kernels without the collectives."""
    if isinstance(issued, Kernels):
        return issued
    kernels_per_part = [part.work.kernels for part in issued if isinstance(part.work, Kernels)]
    return Kernels(tuple(kernel for kernels in kernels_per_part for kernel in kernels))


def num_launches(kernels: tuple[Kernel, ...]) -> int:
    """Launches of some kernels."""
    return sum([kernel.launches for kernel in kernels])


def forward_of(module: Module, shape: BatchShape, options: WorkOptions) -> IssuedWork:
    """The work of a module's forward."""
    match module.op_spec:
        case Exchange() as exchange:
            return _exchange_parts(exchange, exchange.forward, shape, options, is_forward=True)
        case Attention(context=ContextSharding()) as attention:
            return shared_forward(attention, shape, options)
        case Linear(chunked_overlap=ChunkedOverlap() as pieces) as product:
            if not pieces.starts_with_local_rows:
                return product_forward(module, product, pieces, shape, options)
            if pieces.gathers == "forward":
                return column_forward(module, product, pieces, shape, options)
    return Kernels(module.kernels(FORWARD, shape, options))


def backward_of(module: Module, shape: BatchShape, options: WorkOptions) -> IssuedWork:
    """The work of a module's backward. See [Note: beneath the products]."""
    match module.op_spec:
        case Exchange() as exchange:
            return _exchange_parts(exchange, exchange.backward, shape, options, is_forward=False)
        case Attention(context=ContextSharding()) as attention:
            return shared_backward(attention, shape, options)
        case Linear(chunked_overlap=ChunkedOverlap(gathers="backward") as pieces) as product:
            backward = row_backward if pieces.starts_with_local_rows else product_backward
            return backward(module, product, pieces, shape, options)
        case Linear(chunked_overlap=ChunkedOverlap(is_symmetric_memory=True) as pieces) as product:
            numel = shape.tokens * product.in_features
            copy = sequence_copy(numel, pieces, shape, options) if module.trains_weight else ()
            return Kernels((*copy, *module.kernels(BACKWARD, shape, options)))
        case Linear(overlapped_collectives=OverlappedCollectives() as beneath) as product:
            return _around_products(module, product, beneath, shape, options)
    return Kernels(module.kernels(BACKWARD, shape, options))


def _exchange_parts(
    exchange: Exchange,
    kind: ExchangeKind | None,
    shape: BatchShape,
    options: WorkOptions,
    *,
    is_forward: bool,
) -> tuple[WorkPart, ...]:
    if (
        kind is None
        or exchange.shares_forwarded_bytes
        or (exchange.repeats and is_forward and options.compile)
    ):
        return ()
    if kind == "all_gather" and exchange.follows_precision:
        numel, is_gradient = shape.tokens * exchange.width, exchange.forward != "all_gather"
        collective = gather(numel, exchange.ranks, exchange.group, options, is_gradient=is_gradient)
        return (*scale_agreement(exchange.group, options), *_add_copy(collective, exchange, shape))
    element, dtype = options.activation_bytes, options.kernel_dtype
    if exchange.dtype:
        element, dtype = DTYPE_BYTES[exchange.dtype], exchange.dtype
    elif exchange.in_fp32:
        element, dtype = 4, "fp32"
    size = (exchange.numel or shape.tokens * exchange.width) * element
    if kind == "all_to_all" and exchange.loads:
        sends_unevenly = exchange.returns == is_forward
        return (
            WorkPart(
                Collective.all_to_all(
                    _split_sizes(size, exchange.loads, sends_unevenly), dtype, exchange.group
                )
            ),
        )
    collective = Collective(kind, size, dtype, exchange.group, library=exchange.library)
    return _add_copy(collective, exchange, shape)


def _add_copy(collective: Collective, exchange: Exchange, shape: BatchShape) -> tuple[WorkPart, ...]:
    """The collective, in line, after or before the copy that `exchange` makes of its full tensor."""
    if not exchange.copies or shape.sequences == 1 or collective.kind not in ("all_gather", "reduce_scatter"):
        return (WorkPart(collective),)
    copy = WorkPart(Kernels(copy_kernels(collective.bytes)))
    return (WorkPart(collective), copy) if collective.kind == "all_gather" else (copy, WorkPart(collective))


def _split_sizes(size: int, loads: tuple[float, ...], sends_unevenly: bool) -> SplitSizes:
    """Bytes from each rank to each of an all-to-all whose ranks receive, or send, `loads` times the mean
    `size`."""
    ranks = len(loads)
    row = tuple(round(size * load / ranks) for load in loads)
    return tuple((part,) * ranks for part in row) if sends_unevenly else (row,) * ranks


def _around_products(
    module: Module,
    product: Linear,
    beneath: OverlappedCollectives,
    shape: BatchShape,
    options: WorkOptions,
) -> tuple[WorkPart, ...]:
    numel = shape.tokens * product.in_features
    size, dtype = numel * options.activation_bytes, options.kernel_dtype
    input_gradient_kernels = module.kernels(BACKWARD_INPUT, shape, options)
    weight_gradient_kernels = module.kernels(BACKWARD_WEIGHT, shape, options)
    group = beneath.group
    is_frozen = (
        not weight_gradient_kernels
    )  # nothing reads the input again, and nothing runs beside the reduction
    is_low = options.dtype == "fp8" and not module.is_quantized(options)
    gather_options = replace(options, dtype="bf16") if is_low else options
    if beneath.is_sequential:
        gathers = beneath.input_shards > 1 and not is_frozen
        return (
            *(
                (WorkPart(gather(numel, beneath.input_shards, group, gather_options), "gather input"),)
                if gathers
                else ()
            ),
            WorkPart(Kernels((*weight_gradient_kernels, *input_gradient_kernels))),
            WorkPart(Collective(beneath.reduces, size, dtype, group), "reduce input's gradient"),
        )
    input_gradient_parts = (
        WorkPart(gather(numel, beneath.input_shards, group, gather_options), "gather input", group, COMPUTE),
        WorkPart(Kernels(input_gradient_kernels)),
        WorkPart(None, follows=group),
    )
    return (
        *(
            input_gradient_parts
            if beneath.input_shards > 1 and not is_frozen
            else (WorkPart(Kernels(input_gradient_kernels)),)
        ),
        WorkPart(Collective(beneath.reduces, size, dtype, group), "reduce input's gradient", group, COMPUTE),
        *(() if is_frozen else (WorkPart(Kernels(weight_gradient_kernels), "weight"),)),
        WorkPart(None, follows=group),
    )


def shared_forward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[WorkPart, ...]:
    """The parts of attention's forward on one of the ranks that share its sequences. `shape` is the
    rank's.
    """
    shared = SharedAttention.of(work, shape, options)
    return _context_parts(shared.share)[0](shared)


def shared_backward(work: Attention, shape: BatchShape, options: WorkOptions) -> tuple[WorkPart, ...]:
    """The parts of attention's backward on one of the ranks that share its sequences. `shape` is the
    rank's.
    """
    shared = SharedAttention.of(work, shape, options)
    return _context_parts(shared.share)[1](shared)


def _context_parts(share: ContextSharding) -> tuple[_AttentionParts, _AttentionParts]:
    if share.library == "torch":
        return _FLEX if share.has_masks else _TORCH
    return _TE.get(share.method, _HEADS)
