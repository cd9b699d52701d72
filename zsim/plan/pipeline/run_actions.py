"""The step of a pipeline rank: the framework's code that runs it, its steps in order, then the optimizer.

# [Note: a micro-batch as a repeat]
A forward of one micro-batch issues the ops of the forward before it if it starts from the same state. The
state is the builder's (which streams have work, which waits are open, and which of these are the same op, but
not how long ago they were issued) and what a framework's hooks declare (`Hooks.action_state`). An action that
leaves the hooks as it found them, or in a state that they can restore, is walked once. Later ones are repeats
of it: the same ops, whose waits are counted from the repeat, and the same memory changes, for another
micro-batch. An action that nothing declares, or that changes its hooks otherwise (the first that gathers, the
last that reduces), is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from zsim.plan.actions import Action, MessageCall, MessageWait, Overlap, Step, actions_of, no_pipeline
from zsim.plan.builder import ActionBody, PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.ops import ActionRepeat
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.stage import Stage
from zsim.plan.walk import Walk
from zsim.specs.strategy.parallelism import ParallelismConfig


@dataclass(frozen=True, slots=True)
class PipelineRuntime:
    """The pipeline of a job, as its framework runs it.

    The answers here are those of a framework without pipelines, which runs one micro-batch after the other.
    """

    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    @property
    def synchronizes(self) -> bool:
        """Whether the host waits for the device around every computation and every exchange of messages."""
        return False

    def check(self, micro_batches: int) -> None:
        """Raises InputError for counts that the framework's schedule refuses, where `micro_batches` are those
        of a pass.
        """

    def steps(self, micro_batches: int) -> list[list[Step]]:
        """The steps of a pass of `micro_batches`, per pipeline rank, in the order in which its host issues
        them.
        """
        raise NotImplementedError

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        """The steps of a rank that holds the whole model."""
        (steps,) = no_pipeline(micro_batches)
        return [*steps]

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        """The messages of the pipeline rank `rank`, which holds `stages`, where `ranks` has the rank of every
        stage.
        """
        empties_outputs = self.parallelism.style.empties_outputs
        return Messenger(builder, stages, ranks, rank, empties_outputs=empties_outputs)

    def run_pair(
        self,
        builder: PlanBuilder,
        pair: Overlap,
        walks: tuple[Walk, Walk],
        *,
        is_last: bool,
        schedule_manages_sharding: bool,
    ) -> None:
        """Issue a forward and a backward side by side, whose walks are `walks`. `is_last` and
        `schedule_manages_sharding` are those of `Hooks.begin_backward`.
        """
        raise NotImplementedError


_SHARDING_ACTIONS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def run_actions(
    builder: PlanBuilder,
    hooks_of_stage: Mapping[int, Hooks],
    steps: Sequence[Step],
    messenger: Messenger | None = None,
    runtime: PipelineRuntime | None = None,
) -> None:
    """Issue all steps of `steps`, and then the optimizer's, to `builder`.

    `hooks_of_stage` are the hooks around the computation of each stage. `messenger` issues the rank's
    messages and is None without a pipeline. `runtime` is the framework's, and left out it is that of one
    without pipelines.

    If `steps` hold an UNSHARD, RESHARD or REDUCE_GRAD of a stage, all its backwards run with
    `schedule_manages_sharding`, as torch's pipelines tell FSDP (`backward_maybe_with_nosync` of torch 2.13
    distributed/pipelining/stage.py).
    """
    runtime = runtime or PipelineRuntime()
    stage_hooks = tuple(hooks_of_stage.values())
    builder.phase = "forward"
    builder.host("begin step", overhead="step")
    for hooks in stage_hooks:
        hooks.stage_hooks = stage_hooks
        hooks.begin_step()
        if (logs := hooks.stage.workload.logs) is not None:
            logs.begin_step(builder)
    if messenger is not None:
        messenger.begin_step()
    actions = [action for step in steps if isinstance(step, Action | Overlap) for action in actions_of(step)]
    loops = ActionLoops(builder)
    scheduled_stages = {action.stage for action in actions if action.kind in _SHARDING_ACTIONS}
    last = {action.stage: action for action in actions if action.kind in ("B", "W")}
    for step in steps:
        is_timed = runtime.synchronizes and (isinstance(step, Overlap | MessageCall) or _is_computation(step))
        if is_timed:
            builder.synchronize()
        if isinstance(step, Action):
            is_last = last.get(step.stage) == step
            _run_action(
                hooks_of_stage[step.stage],
                step,
                messenger,
                loops,
                is_last=is_last,
                schedule_manages_sharding=step.stage in scheduled_stages,
            )
        elif isinstance(step, Overlap):
            stage = step.backward.stage
            is_last = last.get(stage) == step.backward
            walks = _walk_of(hooks_of_stage, step.forward), _walk_of(hooks_of_stage, step.backward)
            with _messages_around(messenger, step):
                runtime.run_pair(
                    builder,
                    step,
                    walks,
                    is_last=is_last,
                    schedule_manages_sharding=stage in scheduled_stages,
                )
        elif messenger is not None and isinstance(step, MessageCall):
            messenger.post(step)
        elif messenger is not None and isinstance(step, MessageWait):
            messenger.wait(step.messages)
        if is_timed:
            builder.synchronize()
    if messenger is not None:
        messenger.finish()
    if stage_hooks[0].stage.workload.training.forward_only:
        stage_hooks[0].end_passes()
        builder.free_all()
        return
    stage_hooks[0].finish_gradients()
    builder.phase, builder.micro_batch = "optimizer", -1
    stage_hooks[0].optimizer_step()
    if messenger is not None:
        messenger.end_step()
    for hooks in stage_hooks:
        if (logs := hooks.stage.workload.logs) is not None:
            logs.end_step(builder)


def _is_computation(step: Step) -> bool:
    return isinstance(step, Action) and step.kind not in _SHARDING_ACTIONS


def _walk_of(hooks_of_stage: Mapping[int, Hooks], action: Action) -> Walk:
    assert action.micro_batch is not None
    return Walk(hooks_of_stage[action.stage], action.micro_batch)


@contextmanager
def _messages_around(messenger: Messenger | None, pair: Overlap) -> Iterator[None]:
    """The messages around a pair: both inputs are waited for in front of it."""
    (_, forward_stage, forward_micro_batch), (_, backward_stage, backward_micro_batch) = pair
    if messenger is None or forward_micro_batch is None or backward_micro_batch is None:
        yield
        return
    messenger.pre_forward(forward_stage, forward_micro_batch)
    messenger.pre_backward(backward_stage, backward_micro_batch)
    messenger.begin_gradients(backward_stage, backward_micro_batch)
    yield
    messenger.post_forward(forward_stage, forward_micro_batch)
    messenger.end_gradients(backward_stage, backward_micro_batch)


def _run_action(
    hooks: Hooks,
    action: Action,
    messenger: Messenger | None,
    loops: ActionLoops,
    *,
    is_last: bool,
    schedule_manages_sharding: bool,
) -> None:
    hooks.builder.begin(action)
    kind, stage, micro_batch = action
    if kind == "UNSHARD":
        hooks.unshard()
    elif kind == "RESHARD":
        hooks.reshard()
    elif kind == "REDUCE_GRAD":
        hooks.reduce_gradients()
    elif micro_batch is not None:
        walk = Walk(hooks, micro_batch)
        if kind == "F":
            if messenger is not None:
                messenger.pre_forward(stage, micro_batch)
            num_others = hooks.stage.training.num_reference_forwards
            forward = partial(_run_forwards, walk, num_others) if num_others else walk.forward
            loops.issue((kind, stage), hooks, micro_batch, forward)
            if messenger is not None:
                messenger.post_forward(stage, micro_batch)
            return
        if messenger is not None and kind in ("B", "I"):
            messenger.pre_backward(stage, micro_batch)
        makes_input = kind == "B" or (kind == "W" if hooks.stage.is_first else kind == "I")
        if messenger is not None and makes_input:
            messenger.begin_gradients(stage, micro_batch)
        if kind == "B" and not is_last:
            backward = partial(
                walk.backward, is_last=False, schedule_manages_sharding=schedule_manages_sharding
            )
            loops.issue((kind, stage, schedule_manages_sharding), hooks, micro_batch, backward)
        elif kind == "B":
            walk.backward(is_last=True, schedule_manages_sharding=schedule_manages_sharding)
        elif kind == "I":
            walk.backward_inputs(schedule_manages_sharding=schedule_manages_sharding)
        else:
            walk.backward_weights(is_last=is_last, schedule_manages_sharding=schedule_manages_sharding)
        if messenger is not None and makes_input:
            messenger.end_gradients(stage, micro_batch)


def _run_forwards(walk: Walk, num_others: int) -> None:
    is_first = walk.hooks.runs_reference_first
    if not is_first:
        walk.forward()
    for _ in range(num_others):
        walk.reference_forward()
    if is_first:
        walk.forward()


def _state_of(hooks: Hooks, micro_batch: int) -> Hashable | None:
    """The state of hooks, with that of a reference's: see `Hooks.action_state`."""
    state, reference = hooks.action_state(micro_batch), hooks.reference
    if state is None or reference is None or reference is hooks:
        return state
    reference_state = reference.action_state(micro_batch)
    return None if reference_state is None else (state, reference_state)


def _restore(hooks: Hooks, state: Any) -> None:
    reference = hooks.reference
    if reference is not None and reference is not hooks:
        state, reference_state = state
        reference.restore_action_state(reference_state)
    hooks.restore_action_state(state)


class ActionLoops:
    """The walked actions of a rank, by what they are and the state in which they begin."""

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder = builder
        self._bodies: dict[Hashable, tuple[ActionBody, Hashable]] = {}  # and the hooks' state after it

    def issue(self, action: Hashable, hooks: Hooks, micro_batch: int, walk: Callable[[], None]) -> None:
        """Issue an action, which `walk` issues, for a micro-batch. Actions that are equal walk alike from
        equal states. See [Note: a micro-batch as a repeat].
        """
        builder, hooks_state = self._builder, _state_of(hooks, micro_batch)
        has_logs = hooks.stage.workload.logs is not None
        if hooks_state is None or has_logs or not hooks.checkpoints.repeats:
            walk()
            return
        before = builder.relative_state()
        key = action, hooks_state, before.pattern
        if key in self._bodies:
            body, state_after = self._bodies[key]
            builder.repeat(body, before, micro_batch)
            if state_after != hooks_state:
                _restore(hooks, state_after)
            return
        first_op, first_change = len(builder.ops), len(builder.memory)
        walk()
        source = ActionRepeat(
            first_op, first_op, len(builder.ops) - first_op,
            first_change, first_change, len(builder.memory) - first_change,
            micro_batch, micro_batch,
        )  # fmt: skip
        state_after = _state_of(hooks, micro_batch)
        if state_after == hooks_state or (state_after is not None and hooks.restores_action_state):
            new_body = builder.body_since(source, before)
            if new_body is not None:
                self._bodies[key] = new_body, state_after
