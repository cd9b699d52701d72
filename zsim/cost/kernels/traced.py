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
from zsim.specs.model.traced import Extent, TracedKernel, TracedModule

Kernels = tuple[Kernel, ...]


def traced_forward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of forward."""
    work = _traced(module)
    return _kernels(work.forward, work.forward_fused, sample_ratio(work, shape), options)


def traced_backward(module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
    """The kernels of backward, of gradients that the module was seen to compute."""
    work = _traced(module)
    return _kernels(work.backward, work.backward_fused, sample_ratio(work, shape), options)


def sample_ratio(work: TracedModule, shape: BatchShape) -> float:
    """Samples of the micro-batch by samples of the example."""
    return shape.sequences / shape.shards / work.samples


def _traced(module: Module) -> TracedModule:
    assert isinstance(module.op_spec, TracedModule)
    return module.op_spec


def _kernels(
    traced_kernels: tuple[TracedKernel, ...], fused: Extent | None, ratio: float, options: WorkOptions
) -> Kernels:
    if options.compile and fused is not None:
        products = tuple(kernel for kernel in traced_kernels if kernel.flops)
        size = fused.total_bytes(ratio, options.activation_bytes)
        fused_kernel = Kernel("elementwise", 0.0, float(size), options.kernel_dtype)
        return (*(_kernel(kernel, ratio, options) for kernel in products), fused_kernel)
    runs = (kernel for kernel in traced_kernels if not (kernel.casts and options.activation_bytes == 4))
    return tuple(_kernel(kernel, ratio, options) for kernel in runs)


def _kernel(traced: TracedKernel, ratio: float, options: WorkOptions) -> Kernel:
    numbers = list(traced.shape)
    if traced.scaled is not None and traced.kind != "elementwise":
        numbers[traced.scaled] = max(1, round(numbers[traced.scaled] * ratio))
    is_elementwise = traced.kind == "elementwise"
    return Kernel(
        traced.kind,
        traced.flops * (ratio if traced.grows else 1.0),
        float(traced.memory.total_bytes(ratio, options.activation_bytes)),
        "fp32" if traced.in_fp32 and traced.flops else options.kernel_dtype,
        () if is_elementwise else tuple(numbers),
        3 if traced.kind == "attention_backward" else 1,
        layout=traced.layout,
        is_causal=traced.is_causal,
        is_batched=traced.operator in ("bmm", "baddbmm"),
    )
