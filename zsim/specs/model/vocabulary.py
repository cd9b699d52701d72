"""A vocabulary that is padded, as Megatron pads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zsim.specs.model.spec import Embedding, Linear, Loss, ModelSpec, Module, Parameter


def pad_vocabulary(model: ModelSpec, multiple: int) -> ModelSpec:
    """The model with the rows of its embedding and LM head padded to a multiple of `multiple`."""
    old, new = model.vocab_size, -(-model.vocab_size // multiple) * multiple
    if new == old:
        return model

    def pad_modules(modules: tuple[Module, ...]) -> tuple[Module, ...]:
        return tuple(_pad_module(module, old, new) for module in modules)

    return replace(model, vocab_size=new, before=pad_modules(model.before), after=pad_modules(model.after))


def _pad_module(module: Module, old: int, new: int) -> Module:
    op_spec: Any = module.op_spec
    if isinstance(op_spec, Embedding) and op_spec.rows == old:
        op_spec = replace(op_spec, rows=new)
    elif isinstance(op_spec, Linear) and op_spec.out_features == old:
        op_spec = replace(op_spec, out_features=new)
    elif isinstance(op_spec, Loss):
        return replace(module, op_spec=replace(op_spec, vocab_size=new))
    else:
        return module
    parameters = tuple(
        Parameter(parameter.name, tuple(new if size == old else size for size in parameter.shape))
        for parameter in module.parameters
    )
    return replace(module, op_spec=op_spec, parameters=parameters)
