"""The step of a pipeline rank: its actions in order, then the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.errors import NotSimulatedError
from zsim.plan.builder import PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.pipeline.schedules import Action
from zsim.plan.walk import Walk

_VERBS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def run_actions(builder: PlanBuilder, owners: Mapping[int, Hooks], actions: Sequence[Action]) -> None:
    """Issue a whole step to `builder`; `owners`: by stage, the hooks around its computation.

    If `actions` hold an UNSHARD, RESHARD or REDUCE_GRAD of a stage, all its backwards run with `is_told`, as
    torch's pipelines tell FSDP (`backward_maybe_with_nosync` of torch 2.13 distributed/pipelining/stage.py).
    """
    builder.phase = "forward"
    builder.host("begin step", overhead="step")
    for owner in owners.values():
        owner.begin_step()
        if (logs := owner.stage.workload.logs) is not None:
            logs.begin_step(builder)
    told = {action.stage for action in actions if action.kind in _VERBS}
    last = {action.stage: action for action in actions if action.kind == "B"}
    for action in actions:
        is_last = last.get(action.stage) == action
        _run(owners[action.stage], action, is_last=is_last, is_told=action.stage in told)
    builder.phase, builder.micro_batch = "optimizer", -1
    for owner in owners.values():
        owner.optimizer_step()
        if (logs := owner.stage.workload.logs) is not None:
            logs.end_step(builder)


def _run(owner: Hooks, action: Action, *, is_last: bool, is_told: bool) -> None:
    if action.kind == "UNSHARD":
        owner.unshard()
    elif action.kind == "RESHARD":
        owner.reshard()
    elif action.kind == "REDUCE_GRAD":
        owner.reduce_gradients()
    elif action.kind in ("F", "B") and action.micro_batch is not None:
        walk = Walk(owner, action.micro_batch)
        if action.kind == "F":
            walk.forward()
        else:
            walk.backward(is_last=is_last, is_told=is_told)
    else:
        raise NotSimulatedError(f"pipeline: zsim does not simulate the action {action} yet")
