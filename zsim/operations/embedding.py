"""Tables of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation, Role

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Embedding(Operation):
    """Row lookup, without a matrix product."""

    rows: int
    width: int

    @property
    def role(self) -> Role:
        return Role.EMBEDDING

    @property
    def weight_numel(self) -> int:
        return self.rows * self.width

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """Gather one row per token, which becomes the residual stream."""
        num_bytes = shape.tokens * (2 * self.width * options.stream_bytes + INDEX_BYTES)
        return (Kernel("embedding", 0.0, float(num_bytes), options.kernel_dtype),)

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """`embedding_dense_backward`: zero the full gradient of the table, sort the indices, add the rows."""
        e = options.stream_bytes
        table = self.weight_numel * e
        rows = shape.tokens * (3 * self.width * e + 4 * INDEX_BYTES)
        return (Kernel("embedding", 0.0, float(table + rows), options.kernel_dtype, (), 4),)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        """The token indices."""
        return shape.tokens * INDEX_BYTES

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.stream_bytes

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return shape.tokens * self.width * options.activation_bytes
