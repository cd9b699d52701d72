"""Which of a model's routed experts get adapters, by the code that trains them.

See [Note: adapters on experts] of `zsim.specs.model.expert_adapters`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Role
from zsim.specs.experiment.training.framework_training import FrameworkTraining, phrases_of, training_of
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.model.adapters import ALL_LINEAR, Adapters
from zsim.specs.model.expert_adapters import split_stacked_targets, transformers_4_names
from zsim.specs.model.expert_layer import has_experts, stacked_experts
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.table import StrategyConfig, StrategyTable

_WHERE = "training.lora.target_parameters"


def check_has_experts(lora: LoraTable, model: ModelSpec) -> None:
    """Raises InputError for keys of adapters on routed experts with a model that has none."""
    keys = {
        "target_parameters": bool(lora.target_parameters),
        "share_expert_adapters": not lora.share_expert_adapters,
    }
    for key, is_given in keys.items():
        if is_given and stacked_experts(model) is None:
            expert_kind = "stacked" if has_experts(model) else "routed"
            raise InputError(
                f"training.lora.{key}: '{model.name}' has no {expert_kind} experts; expected it left out"
            )


def adapt_experts(
    adapters: Adapters,
    lora: LoraTable,
    model: ModelSpec,
    framework: FrameworkTraining[Any, Any],
    split: ExpertSplit,
    config: StrategyConfig | None,
) -> Adapters:
    """The adapters with those on a model's routed experts.

    They are the framework's own where it has some. Else they are PEFT's, on the stacked weights that are
    named.

    Raises InputError and NotSimulatedError for adapters that the strategy cannot have.
    """
    adapted = framework.adapt_experts(adapters, lora, split)
    if adapted is not None:
        return adapted
    if not lora.share_expert_adapters:
        owners = " or ".join(phrases_of(lambda candidate: candidate.expert_adapters))
        raise InputError(
            f"training.lora.share_expert_adapters: found false, which {owners} have; expected it left "
            "out, or these among training.lora.targets"
        )
    if adapters.targets == (ALL_LINEAR,) and split.library != TRANSFORMERS and not lora.target_parameters:
        return adapters  # its experts are no products that PEFT finds
    adapters = _move_targets_to_parameters(adapters, lora, model)
    if adapters.parameters:
        _check_merged_adapters(adapters, lora, framework, split, config)
    return adapters


def _move_targets_to_parameters(adapters: Adapters, lora: LoraTable, model: ModelSpec) -> Adapters:
    """The adapters, whose targets that were products of experts in transformers 4 become the stacked weights
    of today.
    """
    targets, names = adapters.targets, transformers_4_names(model.family)
    if adapters.is_pattern:
        experts = "model.layers.0.mlp.experts"
        if any(re.fullmatch(targets[0], f"{experts}.{name}") for name in names):
            raise NotSimulatedError(
                f"training.lora.targets: the pattern {targets[0]!r} matches experts of transformers 4, which "
                f"PEFT takes for stacked weights and zsim does not; expected a list of names, or {_WHERE}"
            )
        kept_targets, parameter_counts = list(targets), dict[str, int]()
    elif targets == (ALL_LINEAR,) and names:
        products = [
            module.name.rpartition(".")[2]
            for block in model.unique_blocks
            for module in block.modules
            if module.role is Role.PRODUCT and module.parameters
        ]
        kept_targets, parameter_counts = split_stacked_targets(
            model.family, [*dict.fromkeys(products), *names]
        )
        kept_targets = list(dict.fromkeys(target for target in kept_targets if target not in names))
    else:
        kept_targets, parameter_counts = split_stacked_targets(model.family, targets)
    parameters = tuple(dict.fromkeys((*lora.target_parameters, *parameter_counts)))
    ranks = dict(lora.rank_pattern)
    for name, count in parameter_counts.items():
        if count > 1:
            ranks.setdefault(re.escape(name), count * lora.rank)
    return replace(
        adapters,
        targets=tuple(kept_targets),
        parameters=parameters,
        rank_patterns=ranks,
        experts="merged" if parameters else None,
    )


def _check_merged_adapters(
    adapters: Adapters,
    lora: LoraTable,
    framework: FrameworkTraining[Any, Any],
    split: ExpertSplit,
    config: StrategyConfig | None,
) -> None:
    """Raises for adapters merged into stacked weights that are read by code other than transformers'."""
    where = f"training.lora: {adapters.parameters[0]!r} is a weight of routed experts"
    if adapters.dropout and lora.stacked_dropout is None:
        raise InputError(
            f"training.lora.dropout: found {adapters.dropout:g} with adapters on {adapters.parameters[0]!r}, "
            "a stacked weight, which PEFT merges and so has no input to drop out; expected 0"
        )
    if split.library != TRANSFORMERS:
        strategies = ", or ".join(phrases_of(lambda candidate: candidate.merging_strategy))
        raise NotSimulatedError(
            f"{where}, into which PEFT merges adapters under transformers' own layers; these are of "
            f"'{split.library.name}'; expected targets of attention, or strategy {strategies}"
        )
    framework.check_merged_adapters(where, config)


def check_adapted_experts(model: ModelSpec, table: StrategyTable, split: ExpertSplit) -> None:
    """Raises for the framework's own adapters on experts combined with settings that zsim does not simulate
    with them.
    """
    experts = stacked_experts(model)
    if experts is not None and experts.adapters is not None:
        training_of(table.kind).check_adapted_experts(table, split)
