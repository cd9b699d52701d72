"""Megatron's changes to a model: layers of multi-token prediction, and a padded vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import is_core
from zsim.frameworks.megatron.settings.table import MegatronTable
from zsim.specs.model.prediction import add_prediction_layers
from zsim.specs.model.spec import Embedding, Linear, Loss, ModelSpec, Module, Parameter
from zsim.specs.strategy.parallelism import ParallelismConfig

_PREDICTIONS = "strategy.mtp_layers"


def apply_multi_token_prediction(
    model: ModelSpec, table: MegatronTable, parallelism: ParallelismConfig
) -> tuple[ModelSpec, ParallelismConfig]:
    """The model with its layers of multi-token prediction, and the stages with those layers on the last.

    Raises InputError where Megatron has none, NotSimulatedError for what zsim lacks.
    """
    count = table.mtp_layers
    if table.engine != "megatron" or not is_core(table.version):
        raise InputError(
            f"{_PREDICTIONS}: found {count}; only Megatron-Core has multi-token prediction, expected 0"
        )
    if model.learned_positions:  # core 0.16.1 training/arguments.py, `position_embedding_type`
        raise InputError(
            f"{_PREDICTIONS}: found {count} with '{model.name}', whose positions are learned; Megatron has "
            "multi-token prediction with rotary positions or none, expected 0"
        )
    unsupported = {
        "Megatron-FSDP": table.fsdp_sharding is not None,
        "overlap_expert_parallel": table.overlap_expert_parallel,
        f"schedule '{parallelism.schedule}'": parallelism.pipeline > 1 and parallelism.is_v_schedule,
        "a captured module": model.captured is not None,
        "an encoder": model.has_encoder,
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise NotSimulatedError(
                f"{_PREDICTIONS}: found {count} with {name}, beside which zsim does not simulate it yet"
            )
    stages = parallelism.layers_per_stage
    if stages:
        parallelism = replace(parallelism, layers_per_stage=(*stages[:-1], stages[-1] + count))
    return add_prediction_layers(model, count), parallelism


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
