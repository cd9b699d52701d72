"""Actions of a schedule that do what an earlier one did, for another micro-batch.

# [Note: a micro-batch as a repeat]
A forward of one micro-batch issues the ops of the forward before it if it starts from the same state. The
state is the builder's (which streams have work, which waits are open, and which of these are the same op, but
not how long ago they were issued) and what a framework's hooks declare (`Hooks.action_state`). An action that
leaves the hooks as it found them is walked once. Later ones are repeats of it: the same ops, whose waits are
counted from the repeat, and the same memory changes, for another micro-batch. An action that nothing
declares, or that changes its hooks (the first that gathers, the last that reduces), is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from zsim.plan.builder import ActionBody, PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.ops import ActionRepeat


class ActionLoops:
    """The walked actions of a rank, by what they are and the state in which they begin."""

    def __init__(self, builder: PlanBuilder) -> None:
        self._builder = builder
        self._bodies: dict[Hashable, ActionBody] = {}

    def issue(self, action: Hashable, hooks: Hooks, micro_batch: int, walk: Callable[[], None]) -> None:
        """Issue an action, which `walk` issues, for a micro-batch. Actions that are equal walk alike from
        equal states. See [Note: a micro-batch as a repeat].
        """
        builder, hooks_state = self._builder, hooks.action_state()
        if hooks_state is None or hooks.stage.workload.logs is not None:
            walk()
            return
        before = builder.relative_state()
        key = action, hooks_state, before.pattern
        body = self._bodies.get(key)
        if body is not None:
            builder.repeat(body, before, micro_batch)
            return
        first_op, first_change = len(builder.ops), len(builder.memory)
        walk()
        source = ActionRepeat(
            first_op, first_op, len(builder.ops) - first_op,
            first_change, first_change, len(builder.memory) - first_change,
            micro_batch, micro_batch,
        )  # fmt: skip
        if hooks.action_state() == hooks_state:
            body = builder.body_since(source, before)
            if body is not None:
                self._bodies[key] = body
