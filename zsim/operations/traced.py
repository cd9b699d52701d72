"""Kernels that a captured module was seen to run, with FLOPs and bytes, and the tensors that autograd keeps
of them.

All amounts are of the example that was captured, of `samples` samples. A micro-batch of b samples does b /
samples times as much of what grows with it.

FLOPs and bytes grow with the samples where they did not come from weights alone. Bytes of the type that the
module computed in follow the training's precision, and casts to fp32 fall away in fp32. A compiler
(`compile`) makes one kernel in each direction of all that is no product: it reads what comes from outside and
writes what is used outside, an assumption about what torch.compile fuses within a module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation
from zsim.operations.tensors import ModuleTensors, Sizes


@dataclass(frozen=True, slots=True)
class Extent:
    """An amount of memory."""

    elements: int = 0
    """Elements of the type that the training computes in."""
    num_bytes: int = 0
    """Bytes of types that stay as they are (fp32 statistics, indices, masks)."""
    fixed_elements: int = 0
    """Elements of memory that does not grow with the micro-batch (weights, tables of positions)."""
    fixed_bytes: int = 0
    """Bytes of memory that does not grow with the micro-batch."""

    def total_bytes(self, fraction: float, element_bytes: int) -> int:
        """Bytes for `fraction` times the example's samples, at `element_bytes` an element."""
        growing = round((self.elements * element_bytes + self.num_bytes) * fraction)
        return growing + self.fixed_elements * element_bytes + self.fixed_bytes

    def combine(self, extent: Extent) -> Extent:
        """The sum of both amounts."""
        return Extent(
            self.elements + extent.elements,
            self.num_bytes + extent.num_bytes,
            self.fixed_elements + extent.fixed_elements,
            self.fixed_bytes + extent.fixed_bytes,
        )


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One kernel of a captured module."""

    operator: str
    kind: Literal["gemm", "attention_forward", "attention_backward", "elementwise", "embedding"]
    """The kind of kernel. "gemm", "attention_forward" and "attention_backward" have a shape as
    `zsim.cost.kernels.kernel` says. "elementwise" is all that memory bandwidth bounds.
    """
    memory: Extent
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    scaled: int | None = None
    """The index of the number in `shape` that grows with the micro-batch."""
    layout: Literal["nt", "nn", "tn"] = "nt"
    is_causal: bool = False
    grows: bool = True
    """Whether the FLOPs grow with the micro-batch."""
    in_fp32: bool = False
    """The kernel multiplies fp32, whatever the training's precision."""
    casts: bool = False
    """The kernel casts between the training's type and fp32, which an fp32 training does not have."""


@dataclass(frozen=True, slots=True)
class TracedModule(Operation):
    """The kernels and the memory of a captured module, forward and backward."""

    samples: int
    forward: tuple[TracedKernel, ...] = ()
    backward: tuple[TracedKernel, ...] = ()
    saved: tuple[Extent, ...] = ()
    """The tensors that the module keeps for backward."""
    transient_forward: tuple[Extent, ...] = ()
    """The tensors that live at the worst moment of forward only."""
    transient_backward: tuple[Extent, ...] = ()
    """The tensors that live at the worst moment of backward only."""
    forward_fused: Extent | None = None
    """Bytes of all kernels of forward without products if a compiler makes one of them: what they read from
    and write to the outside.
    """
    backward_fused: Extent | None = None
    """The same for backward."""

    @property
    def flops(self) -> float:
        """FLOPs of the products of the example, attention over all pairs, forward and backward."""
        return sum(product_flops(kernel) for kernel in (*self.forward, *self.backward))

    @property
    def counts_products(self) -> bool:
        return self.flops > 0

    @property
    def saves_nothing(self) -> bool:
        return not self.saved

    def forward_flops(self, module: Module, sequence_length: int) -> float:
        flops = sum(product_flops(kernel) for kernel in self.forward)
        return flops / self.samples / sequence_length

    def training_flops(self, module: Module, sequence_length: int) -> float:
        return self.flops / self.samples / sequence_length

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        return _kernels(self.forward, self.forward_fused, self._ratio(shape), options)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """The kernels of gradients that the module was seen to compute."""
        return _kernels(self.backward, self.backward_fused, self._ratio(shape), options)

    def saved_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._sizes(self.saved, shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self.tensors(module, shape, options).forward)

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self.tensors(module, shape, options).backward)

    def tensors(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        """The tensors that autograd was seen to keep, and those that lived in one direction only. Compiled,
        these are the largest alone of forward, and the two largest of backward.
        """
        return ModuleTensors(
            self._sizes(self.saved, shape, options),
            _largest_if_compiled(self._sizes(self.transient_forward, shape, options), options),
            _largest_if_compiled(
                self._sizes(self.transient_backward, shape, options), options, max_tensors=2
            ),
        )

    def _ratio(self, shape: BatchShape) -> float:
        """Samples of the micro-batch by samples of the example."""
        return shape.sequences / shape.shards / self.samples

    def _sizes(self, extents: Iterable[Extent], shape: BatchShape, options: WorkOptions) -> Sizes:
        part = self._ratio(shape)
        sizes = (extent.total_bytes(part, options.activation_bytes) for extent in extents)
        return tuple(size for size in sizes if size)


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


def _largest_if_compiled(sizes: Sizes, options: WorkOptions, max_tensors: int = 1) -> Sizes:
    return tuple(sorted(sizes, reverse=True)[:max_tensors]) if options.compile else sizes


def product_flops(kernel: TracedKernel) -> float:
    """FLOPs of a kernel's products, by the convention of model FLOPs (PaLM, appendix B), in which nothing
    recomputed counts.

    Of attention all pairs count, causal or not, and twice as many backward as forward.
    """
    if kernel.kind not in ("attention_forward", "attention_backward"):
        return kernel.flops
    _, queries, keys, _ = kernel.shape
    pairs = queries * keys - (queries * queries / 2 if kernel.is_causal else 0.0)
    full_flops = kernel.flops * queries * keys / pairs
    return full_flops * (2.0 / 2.5 if kernel.kind == "attention_backward" else 1.0)


@dataclass(frozen=True, slots=True)
class CaptureInfo:
    """Facts of a model that was captured."""

    samples: int
    """Samples of the example."""
    sequence_length: int
    """Tokens of a sequence of the example."""
    unpriced: tuple[str, ...] = ()
    """Operators without a price, taken at memory bandwidth."""
    is_assumed: bool = False
    """The model has unpriced operators or convolutions, for which no efficiency was measured."""
    notes: tuple[str, ...] = ()
    """Sentences for the report."""
    function: str = ""
    """The function that makes the module, as `package.module:function`. Empty for a module that was given
    itself.
    """
