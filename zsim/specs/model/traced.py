"""Kernels that a captured module was seen to run, with FLOPs and bytes, and the tensors that autograd keeps
of them.

All amounts are of the example that was captured, of `samples` samples. A micro-batch of b samples does b /
samples times as much of what grows with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
class TracedModule:
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
    def forward_flops(self) -> float:
        """FLOPs of the products of the example's forward, attention over all pairs."""
        return sum(product_flops(kernel) for kernel in self.forward)


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
