"""Parameters of which a rank has one of several parts."""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.model.spec import Linear, Parameter


def output_dimension(parameter: Parameter, work: Linear) -> int:
    """The dimension of a weight or bias that its product's outputs are in: the first, in GPT-2's Conv1D the
    last."""
    is_transposed = parameter.shape == (work.in_features, work.out_features)
    return 1 if is_transposed and work.in_features != work.out_features else 0


def shard_parameter(parameter: Parameter, dimension: int, ranks: int) -> Parameter:
    """The parameter cut along a dimension."""
    return resize_parameter(parameter, dimension, parameter.shape[dimension] // ranks)


def resize_parameter(parameter: Parameter, dimension: int, size: int) -> Parameter:
    """The parameter with `size` rows along a dimension."""
    shape = list(parameter.shape)
    shape[dimension] = size
    return replace(parameter, shape=tuple(shape))
