"""Products that overlap their own collectives piece by piece, as Transformer Engine's userbuffers do.

# [Note: rings and pipelines]
A gathered product of t ranks runs in t pieces: each multiplies the tokens that are there while the next
rank's tokens arrive, in t - 1 steps of a ring ("ring_exchange"). A scattered product runs in pieces, and the
reduce-scatter of one runs beneath the next ("pipeline"), so that the last one's is exposed. Gathers again and
reductions beneath the two products of backward are those of `Beneath` ("bulk"). Source: Transformer Engine
2.17 pytorch/module/base.py (`initialize_ub`, which GEMM uses which method).
"""

from __future__ import annotations

from zsim.cost.kernels import modules as work
from zsim.cost.kernels.kernel import Kernel
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Collective, Kernels, Message, PointToPoint
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import InPieces, Linear, Module

Parts = tuple[WorkPart, ...]


def gathered_type(options: work.WorkOptions) -> tuple[int, str]:
    """Bytes and type of an element that is gathered for a product: fp8 in fp8 training (Transformer Engine
    2.17 pytorch/module/layernorm_linear.py gathers what it has quantised)."""
    return (1, "fp8") if options.dtype == "fp8" else (options.activation_bytes, options.kernel_dtype)


def gathered_input(product: Linear, shape: work.BatchShape, options: work.WorkOptions) -> WorkPart:
    """The input of a product that gathers it, gathered whole and in line."""
    assert product.in_pieces is not None
    element, dtype = gathered_type(options)
    size = shape.tokens * product.in_features * element
    return WorkPart(Collective("all_gather", size, dtype, product.in_pieces.group))


def product_forward(
    module: Module, product: Linear, pieces: InPieces, shape: work.BatchShape, options: work.WorkOptions
) -> Parts:
    """The forward of a product that gathers its input, or scatters its output; see [Note: rings and
    pipelines]."""
    if pieces.gathers == "forward":
        kernels = work.forward_kernels(module, shape.split(pieces.ranks), options)
        return _in_ring(kernels, pieces, shape.tokens * product.in_features, options)
    kernels = work.forward_kernels(module, shape.split(pieces.scatters), options)
    size = shape.tokens * product.out_features * options.activation_bytes // pieces.scatters
    scatter = Collective("reduce_scatter", size, options.kernel_dtype, pieces.group)
    found: list[WorkPart] = []
    for _ in range(pieces.scatters):
        found.append(WorkPart(Kernels(kernels), "piece"))
        found.append(WorkPart(scatter, "scatter piece", pieces.group, COMPUTE))
    return (*found, WorkPart(None, follows=pieces.group))


def product_backward(
    module: Module, product: Linear, pieces: InPieces, shape: work.BatchShape, options: work.WorkOptions
) -> Parts:
    """The backward of a product whose output was scattered: the output's gradient goes around beneath the
    product for the input's; the weight's reads the whole."""
    of_input, _ = work.split_backward(module, shape.split(pieces.ranks), options)
    _, of_weight = work.split_backward(module, shape, options)
    ring = _in_ring(of_input, pieces, shape.tokens * product.out_features, options)
    return (*ring, WorkPart(Kernels(of_weight), "weight"))


def _in_ring(kernels: tuple[Kernel, ...], pieces: InPieces, numel: int, options: work.WorkOptions) -> Parts:
    """`kernels` for each rank's tokens in turn, the tensor of `numel` elements arriving beneath them."""
    element, dtype = gathered_type(options)
    part = numel * element // pieces.ranks
    step = PointToPoint((Message("send", part, 1), Message("recv", part, -1)), dtype, pieces.group)
    found: list[WorkPart] = []
    for number in range(pieces.ranks):
        if number:
            found.append(WorkPart(None, follows=pieces.group))
        if number < pieces.ranks - 1:
            found.append(WorkPart(step, "ring step", pieces.group, COMPUTE if number == 0 else ""))
        found.append(WorkPart(Kernels(kernels), "piece"))
    return tuple(found)
