"""Sums of gradients that ranks of one model share: partial sums of tensor-parallel ranks, tied weights."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.update import accumulate_kernels, cat_launches
from zsim.dtypes import DTYPE_BYTES
from zsim.operations.operation import Role
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.hooks import Hooks
from zsim.plan.stage import EMBEDDING, Stage
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.parallelism import TENSOR


def partial_numels(stage: Stage) -> list[int]:
    """Elements of each parameter of which a tensor-parallel rank has a part of the gradient."""
    named = stage.workload.model.named_parameters()
    return [parameter.numel for _, parameter in named if parameter.summed_over == TENSOR]


def sum_partial_gradients(builder: PlanBuilder, chunks: Sequence[Hooks], dtype: str, shards: int = 1) -> None:
    """All-reduce the partial gradients of all stages of a rank as one tensor (`_flatten_dense_tensors`, then
    copies back). The rank holds one of `shards` shards of each gradient.
    """
    numels = [-(-numel // shards) for chunk in chunks for numel in partial_numels(chunk.stage)]
    size = sum(numels) * DTYPE_BYTES[dtype]
    if not size:
        return
    builder.allocate("buffers", size)
    builder.kernels("join partial gradients", move_kernels(size, size, launches=cat_launches(len(numels))))
    builder.collective("all_reduce", size, dtype, TENSOR, stream=COMPUTE, name="all_reduce partial gradients")
    builder.kernels("copy partial gradients", move_kernels(size, size, launches=len(numels)))
    builder.free("buffers", size)


def sum_tied_gradient(stage: Stage, dtype: str, shards: int = 1) -> None:
    """All-reduce the gradient of an embedding that the first and the last stage share, between their ranks. A
    rank that has both stages adds them. The rank holds one of `shards` shards of it.
    """
    if not stage.tied_numel:
        return
    builder, size = stage.builder, -(-stage.tied_numel // shards) * DTYPE_BYTES[dtype]
    name = "all_reduce tied embedding"
    if stage.parallelism.pipeline > 1 and not stage.parallelism.is_v_schedule:
        builder.collective("all_reduce", size, dtype, EMBEDDING, stream=COMPUTE, name=name)
    elif stage.is_last:
        builder.kernels("add tied embedding", move_kernels(2 * size, size))


class TiedGradient:
    """The gradients of weights that several modules use: of a tied head's, or of each module that lends its
    weight to later layers.

    autograd holds the first gradient in the weight's `dtype`, adds each later one to it, and frees the later
    one. The weight's own module adds its gradient last, or holds it first (`hold`, `release`).
    """

    def __init__(self, builder: PlanBuilder, dtype: str, owner: str = "") -> None:
        self._builder, self._dtype, self._owner = builder, dtype, owner
        self._held: dict[str, int] = {}

    @property
    def held_numel(self) -> int:
        return sum(self._held.values())

    def add(self, call: ModuleCall, numel: int) -> None:
        """Hold the gradient of `numel` elements that `call` makes for the weight it borrows."""
        self._builder.allocate("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)
        if call.module.lender in self._held:
            self._add_and_free(call, numel)
        self._held[call.module.lender] = numel

    def hold(self, lender: str, numel: int) -> None:
        """Hold the gradient of the weight's own module, where backward comes to that module first."""
        self._builder.allocate("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)
        self._held[lender] = numel

    def release(self, lender: str) -> None:
        """Free what is held for a weight, the sum of all."""
        if numel := self._held.pop(lender, 0):
            self._builder.free("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)

    def finish(self, call: ModuleCall, numel: int) -> None:
        """Add the held gradient to that of a parameter of `numel` elements, if it is of this parameter."""
        lender = call.name if call.name in self._held or call.module.role is not Role.EMBEDDING else ""
        if numel == self._held.get(lender):
            self._add_and_free(call, numel)
            del self._held[lender]

    def _add_and_free(self, call: ModuleCall, numel: int) -> None:
        kernels = accumulate_kernels(numel, self._dtype, self._dtype)
        self._builder.kernels(f"add tied gradient {call.name}", kernels, module=call.name)
        self._builder.free("activations", numel * DTYPE_BYTES[self._dtype], owner=self._owner)
