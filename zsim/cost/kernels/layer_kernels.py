"""The kernels that a library has for norms, activations and rotary positions, and their passes over memory.

A *pass* is one tensor of a module's width read or written once.

# [Note: kernels that walk strides]
torch's elementwise kernels load full vectors only where all operands are contiguous and of one shape. A slice
of the last dimension or a broadcast operand makes each thread work out the address of each element
(ATen/native/cuda/CUDALoops.cuh `launch_legacy_kernel`). Those are priced by their elements where that takes
longer than moving the bytes: by `seconds_per_strided_element` of the GPU over two dimensions, by
`seconds_per_indexed_element` over more. They are counted for what Megatron leaves to eager kernels. In
transformers' eager code the bytes alone are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.cost.kernels.kernel import Kernel, elementwise


@dataclass(frozen=True, slots=True)
class StridedPasses:
    """The part of passes that walks strides. See [Note: kernels that walk strides]."""

    tensors: float
    """Tensors read plus written."""
    launches: int
    elements: float
    """Tensors of which each element's address is computed separately."""
    has_many_dimensions: bool = False
    """The operands have more than two dimensions."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Tensors read plus written, and kernel launches, in one direction."""

    tensors: float
    launches: int
    strided: StridedPasses | None = None
    """The part that walks strides."""

    def kernels(self, elements: float, element_bytes: int, dtype: str) -> tuple[Kernel, ...]:
        """The kernels over tensors of so many elements of a type. () without launches."""
        e, strided = element_bytes, self.strided
        if not self.launches:
            return ()
        if strided is None:
            return (elementwise(self.tensors * elements * e, dtype, self.launches),)
        contiguous_bytes = (self.tensors - strided.tensors) * elements * e
        kernel = elementwise(strided.tensors * elements * e, dtype, strided.launches)
        addresses = round(strided.elements * elements)
        indexed, walked = (addresses, 0) if strided.has_many_dimensions else (0, addresses)
        return (
            elementwise(contiguous_bytes, dtype, self.launches - strided.launches),
            replace(kernel, indexed_elements=indexed, strided_elements=walked),
        )


@dataclass(frozen=True, slots=True)
class LayerKernelSet:
    """The library whose fused kernels `compile`, or `liger`, stands for, by what its kernels do."""

    name: str = "torch"
    """The value of `training.layer_kernels`."""
    joins_norms: bool = True
    """Compiled, the residual add and its dropout are in the next norm's kernel, and the scores' dropout in
    that of softmax.
    """
    has_two_pass_layer_norm: bool = False
    """Compiled, LayerNorm is a kernel that goes over a row as torch's own does."""
    multiplies_by_mask: bool = False
    """Written-out scores are multiplied by the mask, and what is masked is subtracted: a kernel more."""
    adds_biases: bool = False
    """A bias is added to its product by a kernel of its own."""
    has_native_norms: bool = False
    """Without `compile`, RMSNorm is torch's own kernel. See [Note: torch's RMSNorm]."""
    casts_norms: bool = False
    """Beside Liger's kernels, norms cast the stream to fp32 and run again before backward."""
    splits_gates: bool = False
    """A gated activation splits the output of one product, in eager kernels."""
    copies_heads: bool = False
    """Queries, keys and values are copied around attention."""
    replaces_fused_projection: bool = False
    """Compiled, rotated queries and keys take the place of a fused projection, of which v is a slice."""
    scaled_rotary: tuple[Passes, Passes] | None = None
    """Rotary positions that are multiplied by a factor are eager kernels, of these passes per tensor forward
    and backward. None where they are fused as all others.
    """
    has_eager_rotary: bool = False
    """Rotary positions without a factor are those kernels as well."""
    rotates_by_document: bool = False
    """Those kernels run for one packed document after the other. See [Note: rotation by document]."""
    repeats_normalised_heads: bool = False
    """Gated DeltaNet normalises queries and keys before it repeats their heads, and keeps both."""
    norms_after_scans: bool = False
    """The norm behind Mamba-2's scan is a kernel of its own, which keeps its input."""
    gates_in_kernel: bool = False
    """The kernel of Kimi delta attention makes its decays."""
    has_sparse_attention: bool = False
    """Attention over chosen keys has kernels that compute no others."""
