"""Context parallelism: the model that one of c ranks computes, each on a part of every sequence."""

from __future__ import annotations

from zsim.errors import NotSimulatedError
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import Parallelism


def context_parallel(model: ModelSpec, parallelism: Parallelism) -> ModelSpec:
    """The model of one of `parallelism.context` ranks; the model itself with one rank."""
    if parallelism.context == 1:
        return model
    raise NotSimulatedError("parallelism.context: zsim does not simulate it yet")
