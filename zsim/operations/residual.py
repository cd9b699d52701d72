"""Adds to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.elementwise import autocast_cast
from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role


@dataclass(frozen=True, slots=True)
class Residual(Operation):
    """The add to the residual stream, after dropout if the model has it."""

    width: int
    dropout: float = 0.0
    scales: bool = False
    """The branch is multiplied by a number first."""

    @property
    def is_function(self) -> bool:
        return True

    @property
    def role(self) -> Role:
        return Role.RESIDUAL

    @property
    def saves_nothing(self) -> bool:
        return not self.dropout

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Dropout (reads, writes, writes a byte of mask), the product with a number (reads, writes) and the
        add. Compiled, all are part of the next norm. Megatron's kernel (`bias_dropout_add_fused_train`) reads
        the branch and the stream, and writes their sum and the mask.
        """
        elements, e, dtype = shape.tokens * self.width, options.activation_bytes, options.kernel_dtype
        if options.compile and not options.joins_norms:
            return (elementwise(elements * (3 * e + bool(self.dropout)), dtype),)
        if options.compile:
            return (elementwise(elements, dtype),) if self.dropout else ()
        add = elementwise(elements * (2 * options.stream_bytes + e), dtype)
        kernels = (elementwise(elements * (2 * e + 1), dtype),) if self.dropout else ()
        if self.scales:
            kernels = (*kernels, elementwise(elements * 2 * e, dtype))
        return (*kernels, add)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Add the gradients of the stream and of the branch. Dropout reads its mask. Under autocast the
        gradient of the branch comes from a norm that runs in fp32 (torch's list of autocast operators), like
        the stream's, and the gradient that goes into the branch is cast. Megatron's kernel reads the gradient
        and the mask and writes the branch's, and autograd adds the stream's.
        """
        elements, kernels = shape.tokens * self.width, self.forward_kernels(module, shape, options)
        dtype = options.kernel_dtype
        if options.compile and not options.joins_norms:
            e = options.activation_bytes
            dropped = (elementwise(elements * (2 * e + 1), dtype),) if self.dropout else ()
            return (*dropped, elementwise(elements * 3 * e, dtype))
        if not options.autocast or options.compile:
            return (*kernels, *autocast_cast(elements, options))
        add = elementwise(3 * elements * options.stream_bytes, dtype)
        return (*kernels[:-1], add, *autocast_cast(elements, options))

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The dropout mask. An add keeps nothing."""
        return shape.tokens * self.width if self.dropout else 0

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.stream_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes
