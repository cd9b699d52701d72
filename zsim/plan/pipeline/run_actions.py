"""The step of a pipeline rank: its steps in order, then the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.plan.builder import PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.schedules import Action, MessageCall, MessageWait, Step
from zsim.plan.walk import Walk

_VERBS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def run_actions(
    builder: PlanBuilder,
    owners: Mapping[int, Hooks],
    steps: Sequence[Step],
    messenger: Messenger | None = None,
) -> None:
    """Issue a whole step to `builder`; `owners`: by stage, the hooks around its computation; `messenger`: the
    rank's messages, None without a pipeline.

    If `steps` hold an UNSHARD, RESHARD or REDUCE_GRAD of a stage, all its backwards run with `is_told`, as
    torch's pipelines tell FSDP (`backward_maybe_with_nosync` of torch 2.13 distributed/pipelining/stage.py).
    """
    chunks = tuple(owners.values())
    builder.phase = "forward"
    builder.host("begin step", overhead="step")
    for owner in chunks:
        owner.chunks = chunks
        owner.begin_step()
        if (logs := owner.stage.workload.logs) is not None:
            logs.begin_step(builder)
    if messenger is not None:
        messenger.begin_step()
    actions = [step for step in steps if isinstance(step, Action)]
    told = {action.stage for action in actions if action.kind in _VERBS}
    last = {action.stage: action for action in actions if action.kind in ("B", "W")}
    for step in steps:
        if isinstance(step, Action):
            is_last = last.get(step.stage) == step
            _run(owners[step.stage], step, messenger, is_last=is_last, is_told=step.stage in told)
        elif messenger is not None and isinstance(step, MessageCall):
            messenger.post(step)
        elif messenger is not None and isinstance(step, MessageWait):
            messenger.wait(step.messages)
    if messenger is not None:
        messenger.finish()
    chunks[0].finish_gradients()
    builder.phase, builder.micro_batch = "optimizer", -1
    chunks[0].optimizer_step()
    if messenger is not None:
        messenger.end_step()
    for owner in chunks:
        if (logs := owner.stage.workload.logs) is not None:
            logs.end_step(builder)


def _run(owner: Hooks, action: Action, messenger: Messenger | None, *, is_last: bool, is_told: bool) -> None:
    owner.builder.begin(action)
    kind, stage, micro_batch = action
    if kind == "UNSHARD":
        owner.unshard()
    elif kind == "RESHARD":
        owner.reshard()
    elif kind == "REDUCE_GRAD":
        owner.reduce_gradients()
    elif micro_batch is not None:
        walk = Walk(owner, micro_batch)
        if kind == "F":
            if messenger is not None:
                messenger.before_forward(stage, micro_batch)
            walk.forward()
            if messenger is not None:
                messenger.after_forward(stage, micro_batch)
            return
        if messenger is not None and kind in ("B", "I"):
            messenger.before_backward(stage, micro_batch)
        makes_input = kind == "B" or (kind == "W" if owner.stage.is_first else kind == "I")
        if messenger is not None and makes_input:
            messenger.begin_gradients(stage, micro_batch)
        if kind == "B":
            walk.backward(is_last=is_last, is_told=is_told)
        elif kind == "I":
            walk.backward_inputs(is_told=is_told)
        else:
            walk.backward_weights(is_last=is_last, is_told=is_told)
        if messenger is not None and makes_input:
            messenger.end_gradients(stage, micro_batch)
