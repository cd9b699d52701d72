"""The interface of a framework: hooks that the walk calls where PyTorch calls its hooks, and the actions with
which a pipeline's schedule may unshard, reshard and reduce instead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

from zsim.plan.ops import CollectiveKind, Memory
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import ModuleCall, Segment


class BlockPosition(NamedTuple):
    """The position of the hooks in front of a block: all that their work in the block depends on, counted
    from the next op and from the numbers here.
    """

    state: object
    """The state of the hooks of the block, counted from the next op and from the numbers below."""
    parameter: int
    """The number of the block's first parameter."""
    step: int
    """The number of the next step of a recorded order of modules."""
    entry: int
    """The number of the next entry of the queue of fetches."""


class CheckpointStore:
    """Base class of what is done with checkpoints. It is called around the segments of each micro-batch, and
    does nothing.
    """

    repeats: bool = True
    """Whether it does the same for every micro-batch, without remembering which."""

    def enter(self, segment: Segment) -> None:
        """Before the forward of a segment, whose checkpoint is allocated."""

    def save(self, segment: Segment) -> None:
        """After the forward of a segment."""

    def restore(self, segment: Segment) -> None:
        """Before the backward of a segment, which begins with its recomputation."""

    def drop(self, segment: Segment) -> None:
        """After the backward of a segment, whose checkpoint is freed."""


class Hooks:
    """Base class of the managers of a stage's parameters, gradients and optimizer states. Its hooks are
    empty.

    Every method may issue ops to `builder`. Several micro-batches may run their forward before the first
    backward. Backwards run one after the other, in the order of the micro-batches. `stage_hooks` are the
    hooks of all stages of the rank, these included. `checkpoints` is what becomes of the inputs of
    checkpointed blocks.
    """

    asynchronous: ClassVar[frozenset[CollectiveKind]] = frozenset()
    """Collectives issued with `async_op=True`: without streams (CPUs) only these overlap computation."""

    runs_reference_first: ClassVar[bool] = False
    """Whether the forward of a reference comes before the trained model's."""

    is_eager: ClassVar[bool] = True
    """Whether the host takes its time for every operator of a module; else for every block."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.builder = stage.builder
        self.stage_hooks: Sequence[Any] = (self,)
        self.checkpoints = CheckpointStore()
        self.reference: Hooks | None = None
        """The hooks of the forward of a reference that is gathered, these again where the model is its own.
        """

    def resident(self) -> list[Memory]:
        """The memory that a rank holds between steps."""
        return []

    @property
    def startup_bytes(self) -> int:
        """GPU bytes held before the first step, where they may exceed the peak of the step. Otherwise 0."""
        return 0

    # -- a step -----------------------------------------------------------------------------------------

    def begin_step(self) -> None: ...

    def finish_gradients(self) -> None:
        """After all backwards, finish their reductions, and sum up the gradients that stages or
        tensor-parallel ranks share. It is called on the first of `stage_hooks`, for all of them.
        """

    def optimizer_step(self) -> None:
        """Update the parameters: one optimizer for all stages of the rank. It is called on the first of
        `stage_hooks`.
        """

    def end_passes(self) -> None:
        """End a step that has no backward, which is called as `optimizer_step` is."""

    # -- forward of one micro-batch -----------------------------------------------------------------------

    def begin_forward(self, micro_batch: int) -> None: ...
    def pre_forward(self, segment: Segment) -> None: ...
    def post_forward(self, segment: Segment) -> None: ...
    def end_forward(self) -> None: ...

    def forget_forward(self) -> None:
        """Forget the order of a forward, as no backward follows it."""

    def keep_gathered(self) -> list[Memory]:
        """Start with what forwards without a backward leave for the next: gathered parameters, and shards
        over fewer ranks. Returns their memory.
        """
        return []

    # -- backward of one micro-batch ----------------------------------------------------------------------

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        """Begin the backward of a micro-batch.

        `is_last` says that it is the stage's last backward in this step. With `schedule_manages_sharding` the
        schedule unshards, reshards and reduces by the methods below, so backward itself does not.
        """

    def pre_backward(self, segment: Segment) -> None: ...
    def post_backward(self, segment: Segment) -> None: ...
    def gradient_ready(self, call: ModuleCall) -> None: ...
    def end_backward(self) -> None: ...

    # -- modules, in forward, recomputation and backward --------------------------------------------------

    def pre_module(self, call: ModuleCall) -> None: ...
    def post_module(self, call: ModuleCall) -> None: ...

    # -- blocks as copies, see zsim.plan.walk --------------------------------------------------------

    def block_position(self, segment: Segment) -> BlockPosition | None:
        """The position of the hooks in front of a block. None where blocks are not to be copied."""

    def repeat_count(self, start: BlockPosition, end: BlockPosition) -> int:
        """How many times what the hooks did from `start` until `end` will be the right thing again, one block
        further each time.
        """
        raise NotImplementedError

    def skip(self, start: BlockPosition, end: BlockPosition, count: int, num_ops: int) -> None:
        """Advance by `count` times the way from `start` to `end`, which is `num_ops` ops in all."""
        raise NotImplementedError

    # -- micro-batches as repeats, see zsim.plan.pipeline.run_actions ----------------------------------

    def action_state(self, micro_batch: int) -> Hashable | None:
        """All that the forward or backward (but the last) of a micro-batch depends on and may change, except
        for its number. None where it is not to be repeated.
        """

    restores_action_state: ClassVar[bool] = False
    """Whether `restore_action_state` is there, so that actions that change the state can be repeated too."""

    def restore_action_state(self, state: Any) -> None:
        """Go on as from a state that `action_state` gave."""
        raise NotImplementedError

    # -- actions of a pipeline's schedule -----------------------------------------------------------------

    def unshard(self) -> None:
        """Issue the all-gathers of all parameters of the stage."""

    def reshard(self) -> None:
        """Free all gathered parameters of the stage."""

    def reduce_gradients(self) -> None:
        """Reduce the gradients accumulated by all backwards, where the last backward has not reduced them."""


class BlockTimedHooks(Hooks):
    """Hooks of a framework for which the host time of layers was fitted per block (Megatron's), not per
    operator.
    """

    is_eager = False
