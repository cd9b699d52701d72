"""What a framework does around the computation: the hooks that the walk calls where PyTorch calls them, and
the verbs that a pipeline's schedule may use instead."""

from __future__ import annotations

from typing import ClassVar

from zsim.plan.ops import CollectiveKind, Memory
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment


class Hooks:
    """The owner of a stage's parameters, gradients and optimizer states; this one does nothing with them.

    Every method may issue ops to `builder`. Forwards of several micro-batches may come before their
    backwards; backwards come one after the other, in the order of the micro-batches.
    """

    asynchronous: ClassVar[frozenset[CollectiveKind]] = frozenset()
    """Collectives that are asked for with `async_op=True`: where there are no streams, only these overlap."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.builder = stage.builder

    def resident(self) -> list[Memory]:
        """What a rank holds between steps."""
        return []

    @property
    def startup_bytes(self) -> int:
        """GPU bytes before the first step, where that may be more than the step itself needs."""
        return 0

    # -- a step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None: ...
    def optimizer_step(self) -> None: ...

    # -- forward of one micro-batch -----------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None: ...
    def before_forward(self, segment: Segment) -> None: ...
    def after_forward(self, segment: Segment) -> None: ...
    def end_forward(self) -> None: ...

    # -- backward of one micro-batch ----------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, is_told: bool) -> None:
        """`is_last`: no backward of the stage comes after it in this step; `is_told`: the schedule says by
        the verbs below when to unshard, reshard and reduce, so that backward itself does not."""

    def before_backward(self, segment: Segment) -> None: ...
    def after_backward(self, segment: Segment) -> None: ...
    def gradient_ready(self, call: ModuleCall) -> None: ...
    def end_backward(self) -> None: ...

    # -- modules, in forward, recomputation and backward --------------------------------------------------

    def before_module(self, call: ModuleCall) -> None: ...
    def after_module(self, call: ModuleCall) -> None: ...

    # -- verbs of a pipeline's schedule -------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to gather all parameters of the stage."""

    def reshard(self) -> None:
        """Let go of all gathered parameters."""

    def reduce_gradients(self) -> None:
        """Reduce the gradients of all backwards, where the last one has not done so by itself."""
