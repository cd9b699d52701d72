"""Names of `[training.lora]` that match nothing in the model.

# [Note: names that match nothing]
PEFT 0.21.2 stops where nothing at all is adapted, and warns where `exclude_modules` excludes nothing
(tuners/tuners_utils.py `inject_adapter`). It says nothing of a target among others, of `modules_to_save`
(utils/other.py `_set_trainable`), nor of `rank_pattern` and `alpha_pattern` (`get_pattern_key` there). zsim
stops at a target that matches nothing, which is a typo, unless it is a product's name in other models, which
lists that go from model to model have. It notes those, and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from zsim.errors import InputError, did_you_mean
from zsim.operations.operation import Role
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.model.adapters import ALL_LINEAR, Adapters, is_named_by, matches_pattern
from zsim.specs.model.expert_adapters import adaptable_products
from zsim.specs.model.freezing import is_saved
from zsim.specs.model.spec import ModelSpec, Module

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
