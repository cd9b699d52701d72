"""Passes over memory: a *pass* is one tensor of a module's width read or written once.

# [Note: kernels that walk strides]
torch's elementwise kernels load full vectors only where all operands are contiguous and of one shape. A slice
of the last dimension or a broadcast operand makes each thread work out the address of each element
(ATen/native/cuda/CUDALoops.cuh `launch_legacy_kernel`). Those are priced by their elements where that takes
longer than moving the bytes: by `seconds_per_strided_element` of the GPU over two dimensions, by
`seconds_per_indexed_element` over more. They are counted for what Megatron leaves to eager kernels. In
transformers' eager code the bytes alone are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel


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
        e = element_bytes
        if not self.launches:
            return ()
        if self.strided is None:
            return (Kernel("elementwise", 0.0, float(self.tensors * elements * e), dtype, (), self.launches),)
        strided_passes = self.strided
        contiguous_bytes = float((self.tensors - strided_passes.tensors) * elements * e)
        strided_bytes, address_count = (
            float(strided_passes.tensors * elements * e),
            round(strided_passes.elements * elements),
        )
        indexed_elements, strided_elements = (
            (address_count, 0) if strided_passes.has_many_dimensions else (0, address_count)
        )
        return (
            Kernel("elementwise", 0.0, contiguous_bytes, dtype, (), self.launches - strided_passes.launches),
            Kernel(
                "elementwise",
                0.0,
                strided_bytes,
                dtype,
                (),
                strided_passes.launches,
                indexed_elements=indexed_elements,
                strided_elements=strided_elements,
            ),
        )
