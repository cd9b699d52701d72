"""A whole step of hooks that a test has made, in the order without a pipeline."""

from __future__ import annotations

from zsim.plan.actions import no_pipeline
from zsim.plan.hooks import Hooks
from zsim.plan.pipeline.run_actions import run_actions


def walk_step(hooks: Hooks, num_micro_batches: int) -> None:
    """Issue the step to the hooks' builder."""
    (actions,) = no_pipeline(num_micro_batches)
    run_actions(hooks.builder, {0: hooks}, actions)
