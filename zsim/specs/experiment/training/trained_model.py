"""The model as `[training]` trains it: adapters on its products, frozen weights, and the types of both.

# [Note: the types of adapters and of frozen weights]
A checkpoint is loaded in the low type, and stays so where it is frozen. PEFT keeps adapters in fp32. torch's
FSDP casts what it gathers. DDP trains under autocast, which casts at every product. Where a whole model is
kept in 16 bits (`stored_dtype`) nothing casts, so adapters compute in fp32. DeepSpeed's engine and Megatron
cast every weight, and keep fp32 masters of those that are trained. With a product in 4 bits PEFT leaves the
adapter's casts to autocast, which has none to do in 16 bits (0.21.2 tuners/lora/bnb.py).

# [Note: heads of labels]
transformers' `GenericForSequenceClassification` (5.24 modeling_layers.py) multiplies the hidden states of
all tokens by `score`, a Linear without bias, and takes one token's row of each sequence. Neither a tied
embedding's weight nor what squeezes logits has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.linear import Linear
from zsim.operations.loss import Loss
from zsim.operations.operation import HEAD, Module, Parameter, Role
from zsim.specs.experiment.training.adapted_experts import adapt_experts, check_has_experts
from zsim.specs.experiment.training.framework_training import FrameworkTraining, training_of
from zsim.specs.experiment.training.lora_table import LoraTable, merge_adapter_config
from zsim.specs.experiment.training.quantisation import (
    check_quantised,
    is_prepared,
    product_type,
    quantisation_notes,
)
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.experiment.training.unmatched_names import check_targets, unmatched_notes
from zsim.specs.model.adapters import ALL_LINEAR, Adapters, add_adapters
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.expert_loop import has_linear_routers
from zsim.specs.model.freezing import FrozenParameters, freeze_parameters
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import Precision

# Projections that PEFT 0.21.2 adapts where nothing is named (utils/constants.py,
# TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING): of these the first that the model has.
_SCORE = "score"
_DEFAULT_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("c_attn",), ("qkv_proj",), ("Wqkv",))


def apply_training(
    model: ModelSpec,
    table: TrainingTable,
    strategy: StrategyTable,
    precision: Precision,
    parallelism: ParallelismConfig,
    experts: ExpertSplit,
    config: StrategyConfig | None = None,
) -> tuple[ModelSpec, Sequence[str]]:
    """The model with adapters and frozen parameters, and notes on names that match nothing. It is unchanged
    without them.

    `experts` says whose code runs routed experts, and `config` is that of `FrameworkTraining`. Raises
    InputError for impossible adapters, NotSimulatedError for what zsim lacks.
    """
    notes: list[str] = []
    lora, framework = table.lora, training_of(strategy.kind)
    if table.labels is not None:
        if not parallelism.is_trivial:
            raise NotSimulatedError(
                "training.labels: not simulated with model parallelism; expected data parallelism alone"
            )
        model = _replace_head(model, table.labels)
        notes.append(
            "training.labels: the head reads every token, and the loss of each sequence is taken as nothing"
        )
    if lora is None:
        if not table.frozen:
            return model, notes
        framework.check_partial_training("training.frozen", strategy, config, parallelism)
        frozen = FrozenParameters(table.frozen, stored_dtype=table.frozen_dtype or "")
        return freeze_parameters(model, frozen), notes
    framework.check_partial_training("training.lora", strategy, config, parallelism)
    lora = merge_adapter_config(lora)
    low = {"fp8": "bf16"}.get(precision, precision)
    check_quantised(lora, framework, low)
    _check_layers(lora, model)
    model, lora = framework.adopt_adapters(lora, model, parallelism)
    check_has_experts(lora, model)
    has_preparation = is_prepared(table, strategy.kind, model)
    adapters = _adapters(lora, table, framework, low, model, has_preparation=has_preparation)
    if stacked_experts(model) is not None:
        adapters = adapt_experts(adapters, lora, model, framework, experts, config)
        if table.recompute_modules and "moe_act" in table.recompute_modules and adapters.experts:
            raise NotSimulatedError(
                "training.recompute_modules: found 'moe_act' with adapters on routed experts, which zsim "
                "does not simulate; expected 'moe', or targets without linear_fc1 and linear_fc2"
            )
    base_model = model
    model, adapted = add_adapters(base_model, adapters)
    check_targets(base_model, adapters, adapted)
    notes += unmatched_notes(lora, base_model, adapters, adapted)
    notes += quantisation_notes(lora, base_model, framework, has_preparation=has_preparation)
    starts = table.activation_checkpointing != "none" or bool(table.block_checkpointing)
    frozen = FrozenParameters(
        table.frozen,
        all_but_adapters=True,
        modules_to_save=lora.modules_to_save,
        keeps_originals=framework.keeps_originals,
        stored_dtype="fp32" if has_preparation else _base_type(table, framework, low),
        product_dtype=product_type(lora),
        quantises_routers=has_linear_routers(base_model),
        has_fp32_stream=has_preparation,
        inputs_require_gradients=starts,
        patches_require_gradients=starts and framework.keeps_originals,
    )
    return freeze_parameters(model, frozen), notes


def _replace_head(model: ModelSpec, labels: int) -> ModelSpec:
    """The model with a head of `labels` outputs, see [Note: heads of labels].

    Raises InputError for a model without a language model's head, and for as many labels as it has words.
    """
    where = "training.labels"
    number = next((number for number, module in enumerate(model.after) if module.name == HEAD), None)
    if number is None or model.after[-1].role is not Role.LOSS:
        raise InputError(f"{where}: '{model.name}' has no head of a language model; expected it left out")
    if labels >= model.vocab_size:
        raise InputError(
            f"{where}: found {labels:,}, but '{model.name}' has {model.vocab_size:,} words; expected fewer"
        )
    features = model.after[number].op_spec.product_features[0]
    score = Module(_SCORE, Linear(features, labels), (Parameter("weight", (labels, features)),))
    after = (*model.after[:number], score, replace(model.after[-1], op_spec=Loss(labels)))
    names = model.registered_after_blocks
    if names is not None:
        names = tuple(_SCORE if name == HEAD else name for name in names)
    return replace(model, after=after, vocab_size=labels, is_tied=False, registered_after_blocks=names)


def _adapters(
    lora: LoraTable,
    table: TrainingTable,
    framework: FrameworkTraining[Any, Any],
    low: str,
    model: ModelSpec,
    *,
    has_preparation: bool,
) -> Adapters:
    """See [Note: the types of adapters and of frozen weights]."""
    is_plain = lora.quantized is None or has_preparation
    stored_dtype = "" if framework.casts_weights else lora.dtype or "fp32"
    is_low = table.stored_dtype != "fp32"
    targets, is_pattern = _targets(lora, model)
    return Adapters(
        lora.rank,
        targets,
        is_pattern,
        lora.dropout,
        lora.rank_pattern,
        lora.layers,
        (lora.exclude,) if isinstance(lora.exclude, str) else lora.exclude,
        isinstance(lora.exclude, str),
        lora.modules_to_save,
        stored_dtype=stored_dtype,
        products_keep_input=lora.quantized == "int8",
        compute_dtype="fp32" if stored_dtype == "fp32" and is_low else "",
        routers_are_linear=has_linear_routers(model),
        recasts=stored_dtype == "fp32"
        and framework.is_under_autocast
        and low != "fp32"
        and not is_low
        and is_plain,
    )


def _base_type(table: TrainingTable, framework: FrameworkTraining[Any, Any], low: str) -> str:
    if framework.casts_weights or table.stored_dtype != "fp32" or low == "fp32":
        return table.frozen_dtype or ""
    return table.frozen_dtype or low


def _targets(lora: LoraTable, model: ModelSpec) -> tuple[tuple[str, ...], bool]:
    """The targets, and whether they are a pattern."""
    if lora.targets == ALL_LINEAR:
        return (ALL_LINEAR,), False
    if isinstance(lora.targets, tuple):
        return lora.targets, False
    if lora.targets is not None:
        return (lora.targets,), True
    block = model.blocks[0].modules if model.blocks else ()
    names = {module.name.rpartition(".")[2] for module in block if module.role is Role.PRODUCT}
    for targets in _DEFAULT_TARGETS:
        if names.issuperset(targets):
            return targets, False
    raise InputError(
        f"training.lora.targets: missing; PEFT has no default for '{model.name}', expected some of "
        f'{", ".join(sorted(names))}, or "all-linear"'
    )


def _check_layers(lora: LoraTable, model: ModelSpec) -> None:
    invalid_numbers = [number for number in lora.layers if not 0 <= number < len(model.blocks)]
    if invalid_numbers:
        raise InputError(
            f"training.lora.layers: found {invalid_numbers[0]}, but '{model.name}' has the blocks 0 to "
            f"{len(model.blocks) - 1}"
        )
