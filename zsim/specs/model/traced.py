"""Work that a captured module was seen to do: kernels with FLOPs and bytes, and what autograd keeps of them.

All amounts are of the example that was captured, of `samples` samples; a micro-batch of b samples does
b / samples times as much of what grows with it.
"""

from __future__ import annotations

from typing import Literal

from zsim.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """An amount of memory: `elements` of the type that the training computes in, `num_bytes` of types that
    stay as they are (fp32 statistics, indices, masks); `fixed_elements` and `fixed_bytes`: the same for
    memory that does not grow with the micro-batch (weights, tables of positions)."""

    elements: int = 0
    num_bytes: int = 0
    fixed_elements: int = 0
    fixed_bytes: int = 0

    def of(self, fraction: float, element_bytes: int) -> int:
        """Bytes for `fraction` times the example's samples, at `element_bytes` an element."""
        growing = round((self.elements * element_bytes + self.num_bytes) * fraction)
        return growing + self.fixed_elements * element_bytes + self.fixed_bytes

    def plus(self, other: Extent) -> Extent:
        """Both together."""
        return Extent(
            self.elements + other.elements,
            self.num_bytes + other.num_bytes,
            self.fixed_elements + other.fixed_elements,
            self.fixed_bytes + other.fixed_bytes,
        )


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One kernel. `kind`: "gemm", "attention_forward" and "attention_backward" have a shape as
    `zsim.cost.kernels.kernel` says, of which number `scaled` grows with the micro-batch; "elementwise" is all
    that memory bandwidth bounds. `grows`: whether its FLOPs grow. `in_fp32`: it multiplies fp32, whatever the
    training's precision; `casts`: between the training's type and fp32, which an fp32 training has not."""

    operator: str
    kind: Literal["gemm", "attention_forward", "attention_backward", "elementwise", "embedding"]
    memory: Extent
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    scaled: int | None = None
    layout: Literal["nt", "nn", "tn"] = "nt"
    is_causal: bool = False
    grows: bool = True
    in_fp32: bool = False
    casts: bool = False


@dataclass(frozen=True, slots=True)
class Traced:
    """The work of a module forward and backward. `saved`: the tensors that it keeps for backward;
    `passing_forward`, `passing_backward`: those that live at the worst moment of one direction only.
    `forward_fused`, `backward_fused`: bytes of all kernels without products in one direction if a compiler
    makes one of them: what they read from and write to the outside."""

    samples: int
    forward: tuple[TracedKernel, ...] = ()
    backward: tuple[TracedKernel, ...] = ()
    saved: tuple[Extent, ...] = ()
    passing_forward: tuple[Extent, ...] = ()
    passing_backward: tuple[Extent, ...] = ()
    forward_fused: Extent | None = None
    backward_fused: Extent | None = None

    @property
    def flops(self) -> float:
        """FLOPs of the products of the example, attention over all pairs, forward and backward."""
        return sum(product_flops(kernel) for kernel in (*self.forward, *self.backward))

    @property
    def forward_flops(self) -> float:
        """FLOPs of the products of the example's forward, attention over all pairs."""
        return sum(product_flops(kernel) for kernel in self.forward)


def product_flops(kernel: TracedKernel) -> float:
    """FLOPs of a kernel's products; of attention all pairs, causal or not, twice as many backward as forward:
    the convention of model FLOPs (PaLM, appendix B), in which nothing recomputed counts."""
    if kernel.kind not in ("attention_forward", "attention_backward"):
        return kernel.flops
    _, queries, keys, _ = kernel.shape
    pairs = queries * keys - (queries * queries / 2 if kernel.is_causal else 0.0)
    whole = kernel.flops * queries * keys / pairs
    return whole * (2.0 / 2.5 if kernel.kind == "attention_backward" else 1.0)


@dataclass(frozen=True, slots=True)
class Captured:
    """Facts of a model that was captured. `samples` and `sequence_length`: of the example;
    `unpriced`: operators without a price, taken at memory bandwidth; `is_assumed`: that and convolutions, for
    which no efficiency was measured; `notes`: sentences for the report; `function`: whose module it is, as
    `package.module:function`, "" for a module that was given itself."""

    samples: int
    sequence_length: int
    unpriced: tuple[str, ...] = ()
    is_assumed: bool = False
    notes: tuple[str, ...] = ()
    function: str = ""
