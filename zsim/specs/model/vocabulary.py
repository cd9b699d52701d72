"""A vocabulary that is padded, as Megatron pads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zsim.specs.model.spec import Embedding, Linear, Loss, ModelSpec, Module, Parameter


def with_padded_vocabulary(model: ModelSpec, multiple: int) -> ModelSpec:
    """The model with the rows of its embedding and LM head padded to a multiple of `multiple`."""
    old, new = model.vocab_size, -(-model.vocab_size // multiple) * multiple
    if new == old:
        return model

    def padded(modules: tuple[Module, ...]) -> tuple[Module, ...]:
        return tuple(_padded(module, old, new) for module in modules)

    return replace(model, vocab_size=new, before=padded(model.before), after=padded(model.after))


def _padded(module: Module, old: int, new: int) -> Module:
    work: Any = module.work
    if isinstance(work, Embedding) and work.rows == old:
        work = replace(work, rows=new)
    elif isinstance(work, Linear) and work.out_features == old:
        work = replace(work, out_features=new)
    elif isinstance(work, Loss):
        return replace(module, work=replace(work, vocab_size=new))
    else:
        return module
    parameters = tuple(
        Parameter(one.name, tuple(new if size == old else size for size in one.shape))
        for one in module.parameters
    )
    return replace(module, work=work, parameters=parameters)
