"""The gradients that Transformer Engine returns to autograd where the real ones are summed up in place.

With gradients accumulated in the products (`--gradient-accumulation-fusion`, the default) a backward has
nothing to return for a weight, and returns an uninitialised tensor of its shape, for Megatron's hooks to run.
From 2.3 on one such tensor of each shape and type is made, and kept to the end (pytorch/module/base.py
`get_dummy_wgrad`, v2.3 to d0067d0d, and linear.py, layernorm_linear.py, grouped_linear.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.ops import Memory
from zsim.specs.model.experts import GroupedLinear
from zsim.specs.model.spec import Linear, ModelSpec, Module


def placeholders(models: Iterable[ModelSpec], dtype: str) -> list[Memory]:
    """One tensor for each shape that a weight of the layers of a rank's stages has. Experts have one weight
    for each expert, all of one shape.
    """
    modules = (module for model in models for block in model.blocks for module in block.modules)
    shapes = {shape for module in modules for shape in _shapes(module)}
    return [Memory("buffers", prod(shape) * DTYPE_BYTES[dtype]) for shape in sorted(shapes)]


def _shapes(module: Module) -> Iterable[tuple[int, ...]]:
    if not isinstance(module.op_spec, Linear | GroupedLinear) or not module.trains_weight:
        return ()
    weights = (parameter.shape for parameter in module.parameters if len(parameter.shape) > 1)
    return [shape[-2:] for shape in weights]
