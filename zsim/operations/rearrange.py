"""Rows of routed experts brought into another order. See [Note: rows that move] of moved_rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zsim.cost.kernels.kernel import elementwise
from zsim.cost.kernels.moved_rows import TRANSFORMERS_KERNELS, ExpertKernelSet, MoveCost, MoveKind, RowPasses
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations.operation import Kernels, Module, Operation
from zsim.operations.tensors import ModuleTensors, Sizes

SharedOutput = Literal["none", "added", "gated"]
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Rearrange(Operation):
    """Rows of `width` elements brought into another order, `rows` per token that the module sees."""

    kind: MoveKind
    """The rearrangement. "permute" copies every token once for each of its experts, in the order of experts.
    "sort" and "unsort" bring rows of several senders into the order of experts, and back. "unpermute" sums up
    the rows of every token. "add" moves none. "map" moves none, but makes the map of rows to experts. Of
    experts that run one by one, "loop" makes the output that they add to and their masks, "select" gathers
    the rows of one, and "put" multiplies its rows by their scores and adds them to the output.
    """
    width: int
    rows: float
    library: ExpertKernelSet = TRANSFORMERS_KERNELS
    """The kernels of the library that rearranges."""
    shared: SharedOutput = "none"
    """The output of shared experts is added, gated by a number per token, or as it is."""
    num_experts: int = 1
    padding: float = 1.0
    """Rows of `num_experts` experts that are all padded to the fullest, over those that are routed."""

    @property
    def is_function(self) -> bool:
        return True

    def forward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """See [Note: rows that move]. The output of shared experts is added, after its gate."""
        e = options.activation_bytes
        kernels = self._move_kernels(self.move_cost(options).forward, shape, options)
        token = shape.tokens * self.width * e
        if self.shared == "gated":
            kernels = (*kernels, elementwise(2 * token, options.kernel_dtype, 2))
        return kernels if self.shared == "none" else (*kernels, elementwise(3 * token, options.kernel_dtype))

    def backward_kernels(self, module: Module, shape: BatchShape, options: WorkOptions) -> Kernels:
        """See [Note: rows that move]. A sum passes its gradient on as it is."""
        e = options.activation_bytes
        kernels = self._move_kernels(self.move_cost(options).backward, shape, options)
        if self.shared != "gated":
            return kernels
        return (elementwise(5 * shape.tokens * self.width * e, options.kernel_dtype, 4), *kernels)

    def move_cost(self, options: WorkOptions) -> MoveCost:
        """The passes over memory in each direction."""
        return self.library.move(self.kind, is_compiled=options.compile)

    def routed_rows(self, shape: BatchShape) -> int:
        """Rows of all experts of a rank."""
        return round(shape.tokens * self.rows)

    def kept_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._saved(shape, options))

    def forward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._outputs(shape, options))

    def backward_extra_bytes(self, module: Module, shape: BatchShape, options: WorkOptions) -> int:
        return sum(self._gradients(shape, options))

    def tensor_sizes(self, module: Module, shape: BatchShape, options: WorkOptions) -> ModuleTensors:
        saved = self._saved(shape, options)
        return ModuleTensors(saved, self._outputs(shape, options), self._gradients(shape, options))

    def _saved(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        """The rows of `MoveCost.kept_rows`, and indices."""
        rows = self.routed_rows(shape)
        kept_bytes = int(rows * self.width * self.move_cost(options).kept_rows) * options.activation_bytes
        indices = {"permute": 1, "select": 2}.get(self.kind, 0)
        return kept_bytes, rows * _INDEX_BYTES * indices

    def _outputs(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        rows, e = self.routed_rows(shape), options.activation_bytes
        if self.kind in ("add", "loop"):
            return (shape.tokens * self.width * e,)
        if self.kind == "unpermute":
            return shape.tokens * self.width * e, self._unordered_row_bytes(rows, options)
        return (rows * self.width * e,)

    def _gradients(self, shape: BatchShape, options: WorkOptions) -> Sizes:
        rows, e = self.routed_rows(shape), options.activation_bytes
        if self.kind == "unpermute":
            return rows * self.width * e, self._unordered_row_bytes(rows, options)
        if self.kind in ("permute", "select"):
            return rows * self.width * e, shape.tokens * self.width * e
        return (rows * self.width * e,) * 2

    def _unordered_row_bytes(self, rows: int, options: WorkOptions) -> int:
        """Bytes of the rows in their first order, where they are written before they are summed up."""
        if self.library.unordered_rows == "none" or (options.compile and self.library.is_compiled):
            return 0
        has_fp32_rows = self.library.unordered_rows == "fp32"
        return rows * self.width * (4 if has_fp32_rows else options.activation_bytes)

    def _move_kernels(self, passes: RowPasses, shape: BatchShape, options: WorkOptions) -> Kernels:
        tokens, rows = shape.tokens, self.routed_rows(shape)
        if not passes.launches:
            return ()
        passes = passes.sum_experts(self.num_experts, self.padding)
        e = options.activation_bytes
        num_bytes = (tokens * passes.tokens + rows * passes.rows) * self.width * e
        if not passes.added:
            return (elementwise(num_bytes, options.kernel_dtype, passes.launches),)
        elements = rows * self.width
        accumulation = replace(
            elementwise(3 * elements * e, options.kernel_dtype), added_elements=round(elements * passes.added)
        )  # each row read, the one it is added to read and written
        return (elementwise(num_bytes, options.kernel_dtype, passes.launches - 1), accumulation)
