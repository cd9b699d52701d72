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

from dataclasses import replace

from zsim.cost.kernels import fp8
from zsim.cost.kernels import modules as work
from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.update import copy_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, Parts
from zsim.plan.workload.context.methods import shared_backward, shared_forward
from zsim.plan.workload.own_rows import column_forward, row_backward
from zsim.plan.workload.product_pieces import agreement, gather, product_backward, product_forward
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import Attention, Beneath, Exchange, ExchangeKind, Linear, Module

Issued = Kernels | tuple[WorkPart, ...]


def launches_of(issued: Issued) -> int:
    """Kernels that the host launches, without collectives."""
    if isinstance(issued, Kernels):
        return count(issued.kernels)
    return sum(count(part.work.kernels) for part in issued if isinstance(part.work, Kernels))


def kernels_of(issued: Issued) -> Kernels:
    """The kernels without the collectives."""
    if isinstance(issued, Kernels):
        return issued
    parts = [part.work.kernels for part in issued if isinstance(part.work, Kernels)]
    return Kernels(tuple(kernel for kernels in parts for kernel in kernels))


def count(kernels: tuple[Kernel, ...]) -> int:
    """Launches of some kernels."""
    return sum([kernel.launches for kernel in kernels])


def forward_of(module: Module, shape: work.BatchShape, options: work.WorkOptions) -> Issued:
    """The work of a module's forward."""
    if isinstance(module.work, Exchange):
        return _exchanged(module.work, module.work.forward, shape, options, is_forward=True)
    if isinstance(module.work, Attention) and module.work.context is not None:
        return shared_forward(module.work, shape, options)
    pieces = module.work.in_pieces if isinstance(module.work, Linear) else None
    if isinstance(module.work, Linear) and pieces is not None:
        if not pieces.own_rows:
            return product_forward(module, module.work, pieces, shape, options)
        if pieces.gathers == "forward":
            return column_forward(module, module.work, pieces, shape, options)
    return Kernels(work.forward_kernels(module, shape, options))


def backward_of(module: Module, shape: work.BatchShape, options: work.WorkOptions) -> Issued:
    """The work of a module's backward. See [Note: beneath the products]."""
    if isinstance(module.work, Exchange):
        return _exchanged(module.work, module.work.backward, shape, options, is_forward=False)
    if isinstance(module.work, Attention) and module.work.context is not None:
        return shared_backward(module.work, shape, options)
    pieces = module.work.in_pieces if isinstance(module.work, Linear) else None
    if isinstance(module.work, Linear) and pieces is not None and pieces.gathers == "backward":
        backward = row_backward if pieces.own_rows else product_backward
        return backward(module, module.work, pieces, shape, options)
    if isinstance(module.work, Linear) and module.work.beneath is not None:
        return _around_products(module, module.work, module.work.beneath, shape, options)
    return Kernels(work.backward_kernels(module, shape, options))


def _exchanged(
    exchange: Exchange,
    kind: ExchangeKind | None,
    shape: work.BatchShape,
    options: work.WorkOptions,
    *,
    is_forward: bool,
) -> tuple[WorkPart, ...]:
    if kind is None or exchange.is_beneath or (exchange.repeats and is_forward and options.compile):
        return ()
    if kind == "all_gather" and exchange.follows_precision:
        numel, is_gradient = shape.tokens * exchange.width, exchange.forward != "all_gather"
        whole = gather(numel, exchange.ranks, exchange.group, options, is_gradient=is_gradient)
        return (*agreement(exchange.group, options), *_with_copy(whole, exchange, shape))
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
                Collective.all_to_all(_parts(size, exchange.loads, sends_unevenly), dtype, exchange.group)
            ),
        )
    whole = Collective(kind, size, dtype, exchange.group, library=exchange.library)
    return _with_copy(whole, exchange, shape)


def _with_copy(whole: Collective, exchange: Exchange, shape: work.BatchShape) -> tuple[WorkPart, ...]:
    """The collective, in line, after or before the copy that `exchange` makes of its full tensor."""
    if not exchange.copies or shape.sequences == 1 or whole.kind not in ("all_gather", "reduce_scatter"):
        return (WorkPart(whole),)
    copy = WorkPart(Kernels(copy_kernels(whole.bytes)))
    return (WorkPart(whole), copy) if whole.kind == "all_gather" else (copy, WorkPart(whole))


def _parts(size: int, loads: tuple[float, ...], sends_unevenly: bool) -> Parts:
    """Bytes from each rank to each of an all-to-all whose ranks receive, or send, `loads` times the mean
    `size`."""
    ranks = len(loads)
    given = tuple(round(size * load / ranks) for load in loads)
    return tuple((part,) * ranks for part in given) if sends_unevenly else (given,) * ranks


def _around_products(
    module: Module, product: Linear, beneath: Beneath, shape: work.BatchShape, options: work.WorkOptions
) -> tuple[WorkPart, ...]:
    numel = shape.tokens * product.in_features
    size, dtype = numel * options.activation_bytes, options.kernel_dtype
    of_input, of_weight = work.split_backward(module, shape, options)
    group = beneath.group
    is_frozen = not of_weight  # nothing reads the input again, and nothing runs beside the reduction
    is_low = options.dtype == "fp8" and not fp8.is_quantized(module, options)
    read = replace(options, dtype="bf16") if is_low else options
    if beneath.in_line:
        gathers = beneath.input_shards > 1 and not is_frozen
        return (
            *(
                (WorkPart(gather(numel, beneath.input_shards, group, read), "gather input"),)
                if gathers
                else ()
            ),
            WorkPart(Kernels((*of_weight, *of_input))),
            WorkPart(Collective(beneath.reduces, size, dtype, group), "reduce input's gradient"),
        )
    again = (
        WorkPart(gather(numel, beneath.input_shards, group, read), "gather input", group, COMPUTE),
        WorkPart(Kernels(of_input)),
        WorkPart(None, follows=group),
    )
    return (
        *(again if beneath.input_shards > 1 and not is_frozen else (WorkPart(Kernels(of_input)),)),
        WorkPart(Collective(beneath.reduces, size, dtype, group), "reduce input's gradient", group, COMPUTE),
        *(() if is_frozen else (WorkPart(Kernels(of_weight), "weight"),)),
        WorkPart(None, follows=group),
    )
