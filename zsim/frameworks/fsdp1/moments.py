"""FSDP1's moments outside the steady step."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.frameworks.torch.moments import sharded_moments
from zsim.plan.moments import BetweenSteps, JobMoment


def fsdp1_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """A full state dict unshards one FSDP unit at a time, a block or everything outside of the blocks."""
    model = state.job.model
    largest = max([model.numel_outside_blocks, *(block.numel for block in model.unique_blocks)])
    yield from sharded_moments(
        state, largest, "a FULL_STATE_DICT", "torch 2.13 distributed/fsdp/_state_dict_utils.py"
    )
