"""FSDP2's moments outside the steady step."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.frameworks.torch.moments import sharded_moments
from zsim.plan.moments import BetweenSteps, JobMoment


def fsdp2_moments(state: BetweenSteps) -> Iterator[JobMoment]:
    """A full state dict all-gathers one DTensor at a time."""
    largest = max(parameter.numel for _, parameter in state.job.model.named_parameters())
    yield from sharded_moments(
        state, largest, "full_state_dict=True", "torch 2.13 distributed/checkpoint/state_dict.py"
    )
