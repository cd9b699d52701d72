"""The kernels of captured modules: what was seen, for another micro-batch and another precision.

FLOPs and bytes grow with the samples where they did not come from weights alone. Bytes of the type that the
module computed in follow the training's precision, and casts to fp32 fall away in fp32. A compiler
(`compile`) makes one kernel in each direction of all that is no product: it reads what comes from outside and
writes what is used outside, an assumption about what torch.compile fuses within a module.
"""

from __future__ import annotations

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.specs.model.spec import Module
from zsim.specs.model.traced import Extent, Traced, TracedKernel

Kernels = tuple[Kernel, ...]


def traced_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of forward."""
    work = _traced(module)
    return _kernels(work.forward, work.forward_fused, part_of(work, shape), options)


def traced_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of backward, of gradients that the module was seen to compute."""
    work = _traced(module)
    return _kernels(work.backward, work.backward_fused, part_of(work, shape), options)


def part_of(work: Traced, shape: BatchShape) -> float:
    """Samples of the micro-batch by samples of the example."""
    return shape.sequences / shape.shards / work.samples


def _traced(module: Module) -> Traced:
    assert isinstance(module.work, Traced)
    return module.work


def _kernels(
    seen: tuple[TracedKernel, ...], fused: Extent | None, part: float, options: WorkOptions
) -> Kernels:
    if options.compile and fused is not None:
        products = tuple(one for one in seen if one.flops)
        size = fused.of(part, options.activation_bytes)
        whole = Kernel("elementwise", 0.0, float(size), options.kernel_dtype)
        return (*(_kernel(one, part, options) for one in products), whole)
    runs = (one for one in seen if not (one.casts and options.activation_bytes == 4))
    return tuple(_kernel(one, part, options) for one in runs)


def _kernel(seen: TracedKernel, part: float, options: WorkOptions) -> Kernel:
    numbers = list(seen.shape)
    if seen.scaled is not None and seen.kind != "elementwise":
        numbers[seen.scaled] = max(1, round(numbers[seen.scaled] * part))
    is_elementwise = seen.kind == "elementwise"
    return Kernel(
        seen.kind,
        seen.flops * (part if seen.grows else 1.0),
        float(seen.memory.of(part, options.activation_bytes)),
        "fp32" if seen.in_fp32 and seen.flops else options.kernel_dtype,
        () if is_elementwise else tuple(numbers),
        3 if seen.kind == "attention_backward" else 1,
        layout=seen.layout,
        is_causal=seen.is_causal,
        is_batched=seen.operator in ("bmm", "baddbmm"),
    )
