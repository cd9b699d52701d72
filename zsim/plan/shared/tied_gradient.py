"""The gradient of a tied weight, from the modules that borrow the weight to the one that has it."""

from __future__ import annotations

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import PlanBuilder
from zsim.plan.workload.workload import ModuleCall


class TiedGradient:
    """The gradient of a weight that several modules use.

    autograd holds the first gradient in the weight's `dtype`, adds each later one to it, and frees the later
    one. The weight's own module adds its gradient last.
    """

    def __init__(self, builder: PlanBuilder, dtype: str, owner: str = "") -> None:
        self._builder, self._dtype, self._owner = builder, dtype, owner
        self._held_numel = 0

    def add(self, call: ModuleCall) -> None:
        """Hold the gradient that `call` makes for the weight it borrows."""
        numel = call.borrowed_gradient_numel
        self._builder.allocate("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)
        if self._held_numel:
            self._add_and_free(call, numel)
        self._held_numel = numel

    def finish(self, call: ModuleCall, numel: int) -> None:
        """Add the held gradient to that of a parameter of `numel` elements, if it is of this parameter."""
        if self._held_numel and numel == self._held_numel:
            self._add_and_free(call, numel)
            self._held_numel = 0

    def _add_and_free(self, call: ModuleCall, numel: int) -> None:
        kernels = accumulate_kernels(numel, self._dtype, self._dtype)
        self._builder.kernels(f"add tied gradient {call.name}", kernels, module=call.name)
        self._builder.free("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)
