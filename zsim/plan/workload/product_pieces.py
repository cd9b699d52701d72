"""Products that overlap their own collectives piece by piece, as Transformer Engine's userbuffers do.

# [Note: rings and pipelines]
A gathered product of t ranks runs in t pieces: each multiplies the tokens that are there while the next
rank's tokens arrive, in t - 1 steps of a ring ("ring_exchange"), which the copy engines make (`use_ce`, on by
default). A scattered product runs in pieces, and the reduce-scatter of one runs beneath the next
("pipeline"), so that the last one's is exposed. Gathers again and reductions beneath the two products of
backward are those of the product's `overlapped_collectives` ("bulk"). Source: Transformer Engine 2.17
pytorch/module/base.py (`initialize_ub`, which GEMM uses which method).

# [Note: symmetric memory]
In torch's a rank first copies its rows into a buffer that all can read, and the copy engines do the rest. A
scattered product makes the other ranks' pieces first, each of which its rank copies during the next product,
and its own at last. A kernel then adds up t partial sums. Pieces have the rows of all sequences, so that of
several sequences a product for a weight's gradient, which reads what was gathered sequence by sequence, first
copies it, except where casts to fp8 read it (torch 2.13 distributed/_symmetric_memory/__init__.py
`_pipelined_multi_all_gather_and_consume`, `_pipelined_produce_and_all2all`, `_fused_all_gather_matmul_impl`).

# [Note: pieces share waves]
The pieces' products are launched in turn on three streams (`_stream_compute` of Transformer Engine's
common/comm_gemm_overlap/comm_gemm_overlap.cpp), so that the next one fills the SMs that the last wave of
tiles of the one before leaves idle. So a piece has its part of the arithmetic at the rate of the full
product's shape, and not that of its own. It still reads the weight once.

# [Note: own rows first]
In nanotron's a rank computes its own rows while the other ranks' arrive. With asynchronous communication a
column gathers its input beneath the product of the rank's own rows, waits, and multiplies the rows of the
ranks before and of those after it, a product each. A row does so in backward with its output's gradient,
whose product with the weight gives the input's gradient. The weight's gradient is one product of all rows
(`_ColumnLinearAsyncCommunication.forward`, `_RowLinearAsyncCommunication.backward`, nanotron 2411b022
parallel/tensor_parallel/functional.py). The first and the last rank have one product less. All have the same
rows. The plan is that of rank t // 2, as of the ranks that share a context.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels import fp8
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.cost.kernels.update import copy_kernels
from zsim.operations.operation import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Pass
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, Message, PointToPoint
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import ChunkedOverlap, Linear, Module

Parts = tuple[WorkPart, ...]


def gather(
    numel: int, ranks: int, group: str, options: WorkOptions, *, is_gradient: bool = False
) -> Collective:
    """The all-gather of an operand of `numel` elements, quantised where the recipe of fp8 training does
    so."""
    size = fp8.gathered_bytes(numel, ranks, options, is_gradient=is_gradient)
    dtype = "fp8" if fp8.is_gathered_quantized(options) else options.kernel_dtype
    return Collective("all_gather", size, dtype, group)


def scale_agreement(group: str, options: WorkOptions) -> Parts:
    """() or the all-reduce of an operand's maximum, 4 bytes, before it is gathered."""
    if not fp8.sums_maxima(options):
        return ()
    return (WorkPart(Collective("all_reduce", 4, "fp32", group), "maximum"),)


def gathered_input(product: Linear, shape: BatchShape, options: WorkOptions) -> WorkPart:
    """The full input of a product that gathers it, in line."""
    pieces = product.chunked_overlap
    assert pieces is not None
    return WorkPart(gather(shape.tokens * product.in_features, pieces.ranks, pieces.group, options))


def product_forward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: BatchShape, options: WorkOptions
) -> Parts:
    """The forward of a product that gathers its input, or scatters its output. See [Note: rings and
    pipelines].
    """
    if pieces.gathers == "forward":
        casts, kernels = _pieces(FORWARD, module, shape, pieces.ranks, options)
        collective = gather(shape.tokens * product.in_features, pieces.ranks, pieces.group, options)
        return (*scale_agreement(pieces.group, options), *casts, *_ring_parts(kernels, pieces, collective))
    casts, kernels = _pieces(FORWARD, module, shape, pieces.scatters, options)
    size = shape.tokens * product.out_features * options.activation_bytes // pieces.scatters
    if pieces.is_symmetric_memory:
        return (*casts, *_exchanged_sums(kernels, pieces, size, options.kernel_dtype))
    scatter = Collective("reduce_scatter", size, options.kernel_dtype, pieces.group)
    work_parts = [*casts]
    for _ in range(pieces.scatters):
        work_parts.append(WorkPart(Kernels(kernels), "piece"))
        work_parts.append(WorkPart(scatter, "scatter piece", pieces.group, COMPUTE))
    return (*work_parts, WorkPart(None, follows=pieces.group))


def product_backward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: BatchShape, options: WorkOptions
) -> Parts:
    """The backward of a product whose output was scattered. The output's gradient goes around the ring
    beneath the product for the input's gradient. The product for the weight's gradient reads all of it.
    """
    casts, input_gradient = _pieces(BACKWARD_INPUT, module, shape, pieces.ranks, options)
    weight_gradient = module.kernels(BACKWARD_WEIGHT, shape, options)
    numel = shape.tokens * product.out_features
    collective = gather(numel, pieces.ranks, pieces.group, options, is_gradient=True)
    ring = _ring_parts(input_gradient, pieces, collective)
    if weight_gradient:
        weight_gradient = (*sequence_copy(numel, pieces, shape, options), *weight_gradient)
    return (
        *scale_agreement(pieces.group, options),
        *casts,
        *ring,
        WorkPart(Kernels(weight_gradient), "weight"),
    )


def sequence_copy(
    numel: int, pieces: ChunkedOverlap, shape: BatchShape, options: WorkOptions
) -> tuple[Kernel, ...]:
    """() or the copy of a gathered operand of `numel` elements in the order of its sequences."""
    if not pieces.is_symmetric_memory or shape.sequences == 1 or fp8.is_gathered_quantized(options):
        return ()
    return copy_kernels(numel * options.activation_bytes)


def _exchanged_sums(kernels: tuple[Kernel, ...], pieces: ChunkedOverlap, size: int, dtype: str) -> Parts:
    """`kernels` for each rank's tokens in turn, its own last, while the one before is copied, and the sum of
    a piece of `size` bytes from each rank.
    """
    work_parts: list[WorkPart] = []
    for shift in range(1, pieces.ranks):
        exchange = PointToPoint(
            (Message("send", size, shift), Message("recv", size, -shift)),
            dtype,
            pieces.group,
            by_copy_engine=True,
        )
        work_parts.append(WorkPart(Kernels(kernels), "piece"))
        work_parts.append(WorkPart(exchange, "scatter piece", pieces.group, COMPUTE))
    total = copy_kernels(size, read_factor=pieces.ranks)
    return (
        *work_parts,
        WorkPart(Kernels(kernels), "piece"),
        WorkPart(None, follows=pieces.group),
        WorkPart(Kernels(total), "sum"),
    )


def _pieces(
    in_pass: Pass,
    module: Module,
    shape: BatchShape,
    count: int,
    options: WorkOptions,
) -> tuple[Parts, tuple[Kernel, ...]]:
    """The casts of the operands, once, and the products of one of `count` pieces of the tokens. See [Note:
    pieces share waves].
    """
    full_kernels = module.kernels(in_pass, shape, options)
    casts = tuple(kernel for kernel in full_kernels if kernel.kind != "gemm")
    shapes = [kernel.shape for kernel in full_kernels if kernel.kind == "gemm"]
    kernels = module.kernels(in_pass, shape.split(count), options)
    piece_products = [kernel for kernel in kernels if kernel.kind == "gemm"]
    products = tuple(
        replace(piece, shape=full_shape) for piece, full_shape in zip(piece_products, shapes, strict=True)
    )
    return ((WorkPart(Kernels(casts), "casts"),) if casts else ()), products


def _ring_parts(kernels: tuple[Kernel, ...], pieces: ChunkedOverlap, collective: Collective) -> Parts:
    """`kernels` for each rank's tokens in turn, while the tensor that `collective` would gather arrives
    beneath them.
    """
    piece_bytes = collective.bytes // pieces.ranks
    messages = (Message("send", piece_bytes, 1), Message("recv", piece_bytes, -1))
    step = PointToPoint(messages, collective.dtype, pieces.group, by_copy_engine=True)
    work_parts: list[WorkPart] = []
    if pieces.is_symmetric_memory:
        work_parts.append(WorkPart(Kernels(copy_kernels(piece_bytes)), "copy to the buffer"))
    for number in range(pieces.ranks):
        if number:
            work_parts.append(WorkPart(None, follows=pieces.group))
        if number < pieces.ranks - 1:
            work_parts.append(WorkPart(step, "ring step", pieces.group, COMPUTE if number == 0 else ""))
        work_parts.append(WorkPart(Kernels(kernels), "piece"))
    return tuple(work_parts)


def column_forward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: BatchShape, options: WorkOptions
) -> Parts:
    """The forward of a column, its input gathered."""
    return _gather_by_rows(FORWARD, module, product.in_features, pieces, shape, options)


def row_backward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: BatchShape, options: WorkOptions
) -> Parts:
    """The backward of a row, its output's gradient gathered."""
    weight_gradient = module.kernels(BACKWARD_WEIGHT, shape, options)
    rows = _gather_by_rows(BACKWARD_INPUT, module, product.out_features, pieces, shape, options)
    return (*rows, WorkPart(Kernels(weight_gradient), "weight")) if weight_gradient else rows


def _gather_by_rows(
    in_pass: Pass,
    module: Module,
    width: int,
    pieces: ChunkedOverlap,
    shape: BatchShape,
    options: WorkOptions,
) -> Parts:
    size = shape.tokens * width * options.activation_bytes
    gather = Collective("all_gather", size, options.kernel_dtype, pieces.group)
    ranks_before = pieces.ranks // 2
    ranks_after = pieces.ranks - 1 - ranks_before

    def rows(ranks: int) -> Kernels:
        part = replace(
            shape, sequence_length=shape.sequence_length * ranks, shards=shape.shards * pieces.ranks
        )
        return Kernels(module.kernels(in_pass, part, options))

    return (
        WorkPart(gather, "gather", pieces.group, COMPUTE),
        WorkPart(rows(1), "own rows"),
        WorkPart(None, follows=pieces.group),
        WorkPart(rows(ranks_before), "rows before"),
        *((WorkPart(rows(ranks_after), "rows behind"),) if ranks_after else ()),
    )
