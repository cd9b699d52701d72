"""The model as `[training]` trains it: adapters on its products, frozen weights, and the types of both.

# [Note: the types of adapters and of frozen weights]
A checkpoint is loaded in the low type, and stays so where it is frozen. PEFT keeps adapters in fp32. torch's
FSDP casts what it gathers. DDP trains under autocast, which casts at every product. Where a whole model is
kept in 16 bits (`stored_dtype`) nothing casts, so adapters that `lora.dtype` puts in fp32 compute in fp32.
What PEFT's `modules_to_save` copies is not among the adapters that it puts in fp32 (0.21.2 utils/other.py
`cast_adapter_dtype`): it is trained in the type that the base has, or in that of `lora.dtype`.
Beside adapters whose type is left out, `stored_dtype` is the type that the base was loaded in, and the run is
transformers' Trainer with `bf16=True`, which computes under autocast (5.24 trainer.py
`compute_loss_context_manager`). DeepSpeed's engine and Megatron
cast every weight, and keep fp32 masters of those that are trained. With a product in 4 bits PEFT leaves the
adapter's casts to autocast, which has none to do in 16 bits (0.21.2 tuners/lora/bnb.py).

# [Note: heads of labels]
transformers' `GenericForSequenceClassification` (5.24 modeling_layers.py) multiplies the hidden states of
all tokens by `score`, a Linear without bias, and takes one token's row of each sequence. Neither a tied
embedding's weight nor what squeezes logits has a part in it.

# [Note: a reference's forward]
DPO, KTO and the like score each sequence by the trained model and by a frozen one (TRL 1.10
trainer/dpo_trainer.py `_compute_loss`, LLaMA-Factory 0.9.6 train/dpo/trainer.py). The reference runs after
the trained model's forward and before its backward, without autograd, while all that the forward keeps is
there. KTO asks both models for mismatched pairs as well (TRL's kto_trainer.py, LLaMA-Factory's
train/kto/trainer.py), which are three forwards without gradients in place of one. A copy is loaded like the
model and held by every rank (TRL's `prepare_deepspeed` before stage 3, `accelerator.prepare_model`). With
adapters the model itself runs without them. The work of the adapters is counted in that pass too, which is
little. Under FSDP and ZeRO-3 a copy is sharded and gathered as the model is, by hooks of its own that see no
backward: what a forward does not reshard stays gathered. Megatron-SWIFT runs the reference first, in the same
step of each stage, and sends the activations of both models in one tensor.

# [Note: names that match nothing]
PEFT 0.21.2 stops where nothing at all is adapted, and warns where `exclude_modules` excludes nothing
(tuners/tuners_utils.py `inject_adapter`). It says nothing of a target among others, of `modules_to_save`
(utils/other.py `_set_trainable`), nor of `rank_pattern` and `alpha_pattern` (`get_pattern_key` there). zsim
stops at a target that matches nothing, which is a typo, unless it is a product's name in other models, which
lists that go from model to model have. It notes those, and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.operations.linear import Linear
from zsim.operations.loss import Loss
from zsim.operations.operation import HEAD, Module, Parameter, Role
from zsim.specs.experiment.training.adapted_experts import adapt_experts, check_has_experts
from zsim.specs.experiment.training.framework_training import FrameworkTraining, training_of
from zsim.specs.experiment.training.lora_table import LoraTable, merge_adapter_config
from zsim.specs.experiment.training.quantisation import (
    check_quantised,
    check_quantised_experts,
    is_prepared,
    product_type,
    quantisation_notes,
)
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.adapters import ALL_LINEAR, Adapters, add_adapters, is_named_by, matches_pattern
from zsim.specs.model.expert_adapters import adaptable_products
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.expert_loop import has_linear_routers
from zsim.specs.model.freezing import FrozenParameters, freeze_parameters, is_saved
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
    check_quantised_experts(lora, model, framework, experts, config)
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
    notes += _check_tied_heads(base_model, lora.modules_to_save)
    notes += unmatched_notes(lora, base_model, adapters, adapted)
    notes += quantisation_notes(lora, base_model, framework, has_preparation=has_preparation)
    starts = table.activation_checkpointing != "none" or bool(table.block_checkpointing)
    frozen = FrozenParameters(
        table.frozen,
        all_but_adapters=True,
        modules_to_save=lora.modules_to_save,
        saved_dtype="" if has_preparation else _saved_type(lora, table, framework, low),
        keeps_originals=framework.keeps_originals,
        stored_dtype="fp32" if has_preparation else _base_type(table, framework, low),
        product_dtype=product_type(lora),
        quantises_routers=has_linear_routers(base_model),
        quantises_experts=lora.quantize_experts,
        has_fp32_stream=has_preparation,
        inputs_require_gradients=starts,
        patches_require_gradients=starts and framework.keeps_originals,
    )
    return freeze_parameters(model, frozen), notes


def table_under_autocast(table: TrainingTable, kind: str) -> tuple[TrainingTable, Sequence[str]]:
    """The table with `stored_dtype` as the type of the base alone, where DDP's adapters leave theirs out, and
    a note on it. See [Note: the types of adapters and of frozen weights].
    """
    lora, is_cast = table.lora, table.precision in (None, "bf16") and training_of(kind).is_under_autocast
    if lora is None or lora.dtype is not None or lora.quantized is not None or not is_cast:
        return table, ()
    if table.stored_dtype == "fp32":
        return table, ()
    note = (
        f"training.stored_dtype '{table.stored_dtype}' is taken as the type of the frozen weights, beside "
        "adapters in fp32 under torch.autocast: training.lora.dtype says another type, or fp32 without it"
    )
    if table.frozen_dtype is not None:
        note = (
            f"training.stored_dtype '{table.stored_dtype}' has no effect: frozen weights are in the "
            f"'{table.frozen_dtype}' of training.frozen_dtype, adapters in fp32 without training.lora.dtype"
        )
    return table.model_copy(update={"stored_dtype": "fp32"}), (note,)


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
    is_plain = lora.kernels == "peft" and (lora.quantized is None or has_preparation)
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
        adds_in_product=lora.kernels == "unsloth",
        products_keep_input=lora.quantized == "int8",
        compute_dtype="fp32" if stored_dtype == "fp32" and is_low and lora.kernels == "peft" else "",
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


def _saved_type(
    lora: LoraTable, table: TrainingTable, framework: FrameworkTraining[Any, Any], low: str
) -> str:
    """The type of `modules_to_save` under torch.autocast: that of the base, which PEFT copies as it is."""
    if not framework.is_under_autocast or table.stored_dtype != "fp32" or low == "fp16":
        return ""
    return lora.dtype or _base_type(table, framework, low)


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


KEY = "training.reference"


def check_reference(
    table: TrainingTable,
    strategy: StrategyTable,
    config: StrategyConfig | None,
    parallelism: ParallelismConfig,
) -> None:
    """Raises InputError for a base without adapters, NotSimulatedError for a forward that zsim does not know,
    see [Note: a reference's forward].
    """
    if table.reference is None:
        if table.reference_forwards != 1:
            raise InputError(
                f"{KEY}_forwards: found {table.reference_forwards} without {KEY}; expected {KEY} with it"
            )
        return
    if table.reference == "base" and table.lora is None:
        raise InputError(f"{KEY}: found 'base' without training.lora, whose base it is; expected 'copy'")
    training_of(strategy.kind).check_reference(KEY, table.reference, strategy, config, parallelism)


def reference_notes(table: TrainingTable) -> list[str]:
    """The sentence on how often the loss runs forward."""
    if table.reference is None:
        return []
    model = "a frozen copy of the model" if table.reference == "copy" else "the model without its adapters"
    times = "" if table.reference_forwards == 1 else f", {table.reference_forwards} times in all"
    return [
        f"{model} runs forward on every micro-batch as well{times}; MFU counts the trained model's work alone"
    ]


_WHERE = "training.lora"
# Names of products in transformers' models (PEFT 0.21.2 utils/constants.py, and others of attention and MLP).
_PRODUCT_NAMES = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "c_attn", "c_proj",
        "c_fc", "Wqkv", "Wo", "dense", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2",
        "dense_h_to_4h", "dense_4h_to_h", "w1", "w2", "w3", "in_proj", "x_proj", "dt_proj", "lm_head",
        "embed_tokens", "gate", "router", "shared_expert_gate", "q_a_proj", "q_b_proj",
        "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b",
        "in_proj_qkvz", "in_proj_ba",
    }
)  # fmt: skip


def check_targets(model: ModelSpec, adapters: Adapters, adapted_names: Collection[str]) -> None:
    """Raises InputError for targets that match nothing, and where nothing is adapted. The message names the
    model's products.

    `adapted_names` holds the full names of the modules with an adapter. `model` is the model without
    adapters.
    """
    products = list(dict.fromkeys(name.rpartition(".")[2] for name in _product_names(model)))
    targets = () if adapters.is_pattern or adapters.targets == (ALL_LINEAR,) else adapters.targets
    _check_parameters(model, adapters, adapted_names)
    excluded_names = [name for name in _product_names(model) if adapters.is_excluded(name)]
    missing_targets = [
        target
        for target in targets
        if not any(is_named_by(name, (target,)) for name in (*adapted_names, *excluded_names))
    ]
    if adapted_names and all(target.rpartition(".")[2] in _PRODUCT_NAMES for target in missing_targets):
        return
    if not missing_targets and adapters.parameters:
        return
    if not adapters.targets:
        raise InputError(
            f"{_WHERE}.targets: found none, expected products of '{model.name}': {', '.join(products)}, "
            f'or "{ALL_LINEAR}"'
        )
    if not missing_targets and excluded_names:
        key = "exclude" if adapters.excludes else "modules_to_save"
        raise InputError(f"{_WHERE}.{key}: leaves no product that gets an adapter; expected fewer names")
    name = missing_targets[0] if missing_targets else adapters.targets[0]
    hint = did_you_mean(name.rpartition(".")[2], products).removesuffix("?")
    raise InputError(
        f"{_WHERE}.targets: '{name}' matches no product of '{model.name}'{hint}; its products are "
        f'{", ".join(products)}, and "all-linear" means all of them but the head'
    )


def _check_parameters(model: ModelSpec, adapters: Adapters, adapted_names: Collection[str]) -> None:
    """Raises InputError for `target_parameters` that match nothing. The message names the model's stacked
    weights.
    """
    weight_names = [
        weight.name
        for module in (model.blocks[-1].modules if model.blocks else ())
        for weight in adaptable_products(module, module.name, "merged")
        if module.role is Role.EXPERTS
    ]
    for target in adapters.parameters:
        if any(is_named_by(name, (target,)) for name in adapted_names):
            continue
        hint = did_you_mean(target.rpartition(".")[2], [name.rpartition(".")[2] for name in weight_names])
        weights_phrase = (
            f"; its stacked weights are {', '.join(weight_names)}"
            if weight_names
            else ", which has no experts"
        )
        raise InputError(
            f"{_WHERE}.target_parameters: '{target}' matches no stacked weight of experts of "
            f"'{model.name}'{hint.removesuffix('?')}{weights_phrase}"
        )


def _check_tied_heads(model: ModelSpec, saved_names: Collection[str]) -> list[str]:
    """A note on a tied head in `modules_to_save` together with the embedding, whose weight it has.

    Raises NotSimulatedError for such a head alone, of which PEFT trains a copy (huggingface/peft #2777, of
    0.17, and 0.18 on without `ensure_weight_tying`).
    """
    heads = [module.name for module in model.after if module.op_spec.weight_numel and not module.has_weight]
    head = next((name for name in heads for saved in saved_names if is_saved(f"{name}.weight", saved)), None)
    if not model.is_tied or head is None:
        return []
    embedding = next(module.name for module in model.before if module.role is Role.EMBEDDING)
    if any(is_saved(f"{embedding}.weight", saved) for saved in saved_names):
        return [
            f"{_WHERE}.modules_to_save: '{head}' and '{embedding}' are one weight in '{model.name}', which "
            "is trained once; PEFT trains a copy for each without ensure_weight_tying"
        ]
    raise NotSimulatedError(
        f"{_WHERE}.modules_to_save: '{head}' has the weight of '{embedding}' in '{model.name}', and zsim "
        f"does not simulate the copy that PEFT trains of it; expected '{embedding.rpartition('.')[2]}'"
    )


def unmatched_notes(
    lora: LoraTable, model: ModelSpec, adapters: Adapters, adapted_names: Collection[str]
) -> list[str]:
    """One sentence per name of `lora` that matches nothing. See [Note: names that match nothing].

    `adapted_names` holds the full names of the modules with an adapter. `model` is the model without
    adapters.
    """
    module_names = list(_module_names(model))
    notes = []
    for key, patterns in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        notes += [
            f"{_WHERE}.{key}: '{pattern}' matches nothing that has an adapter, and changes nothing"
            f"{_nearest_hint(pattern, adapted_names)}"
            for pattern in patterns
            if not any(matches_pattern(name, pattern) for name in adapted_names)
        ]
    for name in adapters.excludes:
        is_end = any(is_named_by(module, (name,)) for module in module_names)
        is_there = is_end
        if adapters.is_exclude_pattern:
            is_there = any(re.fullmatch(name, module) for module in module_names)
        if not is_there:
            hint = (
                f"; a pattern is of whole names, such as '.*{name}'"
                if is_end
                else _nearest_hint(name, module_names)
            )
            notes.append(f"{_WHERE}.exclude: '{name}' excludes nothing of '{model.name}'{hint}")
    if not adapters.is_pattern and adapters.targets != (ALL_LINEAR,):
        named = (*adapted_names, *(name for name in _product_names(model) if adapters.is_excluded(name)))
        notes += [
            f"{_WHERE}.targets: '{target}' is no product of '{model.name}', and gets no adapter"
            for target in adapters.targets
            if not any(is_named_by(name, (target,)) for name in named)
        ]
    notes += [
        f"{_WHERE}.modules_to_save: '{target}' is no module of '{model.name}', and nothing is trained for it"
        f"{_nearest_hint(target, module_names)}"
        for target in lora.modules_to_save
        if not any(is_saved(f"{name}.weight", target) for name in module_names)
    ]
    return notes


def _nearest_hint(name: str, options: Iterable[str]) -> str:
    """A hint that names the nearest of the last parts of `options`."""
    last = dict.fromkeys(option.rpartition(".")[2] for option in options)
    return did_you_mean(name.rpartition(".")[2], last)


def _module_names(model: ModelSpec) -> Iterator[str]:
    """Full names of modules, and of the weights of routed experts."""
    for prefix, module in _prefixed_modules(model):
        yield prefix + module.name
        if module.role is Role.EXPERTS:
            yield from (weight.name for weight in adaptable_products(module, prefix + module.name, "merged"))


def _product_names(model: ModelSpec) -> Iterator[str]:
    """Full names of the products of the blocks, and of the head."""
    for prefix, module in _prefixed_modules(model):
        if module.role is Role.PRODUCT:
            yield prefix + module.name


def _prefixed_modules(model: ModelSpec) -> Iterator[tuple[str, Module]]:
    yield from (("", module) for module in model.before)
    for number, block in enumerate(model.blocks, model.first_block):
        yield from ((f"{model.block_prefix}.{number}.", module) for module in block.modules)
    yield from (("", module) for module in model.after)
