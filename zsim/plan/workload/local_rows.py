"""Products of which a rank computes its own rows while the other ranks' arrive: nanotron's.

With asynchronous communication a column gathers its input beneath the product of the rank's own rows, waits,
and multiplies the rows of the ranks before and of those after it, a product each. A row does so in backward
with its output's gradient, whose product with the weight gives the input's gradient. The weight's gradient is
one product of all rows (`_ColumnLinearAsyncCommunication.forward`, `_RowLinearAsyncCommunication.backward`,
nanotron 2411b022 parallel/tensor_parallel/functional.py). The first and the last rank have one product less.
All have the same rows. The plan is that of rank t // 2, as of the ranks that share a context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zsim.cost.kernels import modules as work
from zsim.cost.kernels.kernel import Kernel
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import ChunkedOverlap, Linear, Module

Parts = tuple[WorkPart, ...]
_KernelsOf = Callable[[Module, work.BatchShape, work.WorkOptions], tuple[Kernel, ...]]


def column_forward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: work.BatchShape, options: work.WorkOptions
) -> Parts:
    """The forward of a column, its input gathered."""
    return _gather_by_rows(work.forward_kernels, module, product.in_features, pieces, shape, options)


def row_backward(
    module: Module, product: Linear, pieces: ChunkedOverlap, shape: work.BatchShape, options: work.WorkOptions
) -> Parts:
    """The backward of a row, its output's gradient gathered."""
    _, weight_gradient = work.split_backward(module, shape, options)
    rows = _gather_by_rows(_input_gradient_kernels, module, product.out_features, pieces, shape, options)
    return (*rows, WorkPart(Kernels(weight_gradient), "weight")) if weight_gradient else rows


def _input_gradient_kernels(
    module: Module, shape: work.BatchShape, options: work.WorkOptions
) -> tuple[Kernel, ...]:
    return work.split_backward(module, shape, options)[0]


def _gather_by_rows(
    kernels_of: _KernelsOf,
    module: Module,
    width: int,
    pieces: ChunkedOverlap,
    shape: work.BatchShape,
    options: work.WorkOptions,
) -> Parts:
    size = shape.tokens * width * options.activation_bytes
    gather = Collective("all_gather", size, options.kernel_dtype, pieces.group)
    ranks_before = pieces.ranks // 2
    ranks_after = pieces.ranks - 1 - ranks_before

    def rows(ranks: int) -> Kernels:
        part = replace(
            shape, sequence_length=shape.sequence_length * ranks, shards=shape.shards * pieces.ranks
        )
        return Kernels(kernels_of(module, part, options))

    return (
        WorkPart(gather, "gather", pieces.group, COMPUTE),
        WorkPart(rows(1), "own rows"),
        WorkPart(None, follows=pieces.group),
        WorkPart(rows(ranks_before), "rows before"),
        *((WorkPart(rows(ranks_after), "rows behind"),) if ranks_after else ()),
    )
