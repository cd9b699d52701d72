"""A model small enough to simulate every configuration of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import zsim

TINY = {
    "model_type": "gpt2",
    "n_embd": 512,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 512,
    "vocab_size": 4096,
}  # 11.8 million parameters
tune = partial(zsim.tune, jobs=1)
"""In this process alone: tests change what it simulates with."""


@pytest.fixture
def make_tiny() -> Callable[..., zsim.Experiment]:
    """`tiny`, as a fixture."""
    return tiny


def tiny(
    strategy: dict[str, Any], *, memory: str = "40 GB", nodes: int = 2, num_layers: int = 3, **training: Any
) -> zsim.Experiment:
    """Two DGX A100 nodes, two sequences per rank and step; `memory` shrinks the GPUs, `**` is [training]."""
    cluster = {
        "extends": "dgx-a100-40gb",
        "name": "small",
        "gpu": {
            "extends": "a100-sxm-40gb",
            "memory": {"capacity": memory, "source": "made up for a test", "evidence": "assumed"},
        },
    }
    return zsim.Experiment(
        model={**TINY, "n_layer": num_layers},
        cluster=cluster,
        nodes=nodes,
        training={"sequence_length": 512, "gradient_accumulation_steps": 2, **training},
        strategy=strategy,
    )
