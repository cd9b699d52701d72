"""PEFT's LoRA, on weights in 16 bits or in bitsandbytes' 4, as the programs on top of it configure it.

# [Note: linear layers of a mixture]
For all linear layers some programs give PEFT the last names of the modules that are linear: axolotl 067b021c
(loaders/adapter.py `find_all_linear_names`), ms-swift 4.6 (utils/transformers_utils.py `find_all_linears`),
LLaMA-Factory ff6d4d12 (model/model_utils/misc.py `find_all_linear_modules`). PEFT's own "all-linear" adds
the names that experts and routers had in transformers 4. By a list of names, experts get adapters only where
another layer, such as a shared expert, has theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from zsim.operations.operation import Role
from zsim.specs.formats.file_values import FileValues
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import ModelSpec

ALL_LINEAR = ("all-linear", "all_linear", "all", "all_linears")


@dataclass(frozen=True, slots=True)
class AdapterKeys:
    """The keys of a program's file that say its adapters, with the program's own defaults.

    An empty name means that the program has no such key.
    """

    rank: str
    default_rank: int
    alpha: str
    default_alpha: float
    dropout: str
    default_dropout: float
    targets: str
    saved: str
    parameters: str = ""


def write_adapters(values: FileValues, keys: AdapterKeys, default_targets: str | None = None) -> None:
    """Write `[training.lora]`. `default_targets` are the program's, None for PEFT's of the model's family.

    Under FSDP1 the Trainer puts PEFT's wrapping in place of the file's (transformers 5.24 trainer.py
    `_fsdp_qlora_plugin_updates`), whose adapters, which PEFT casts to fp32, are units of their own.
    """
    settings = values.file.settings
    if settings.get("strategy.kind") == "fsdp1":
        settings["strategy.wrapping"] = "peft"
    rank, alpha = values.count(keys.rank), values.number(keys.alpha)
    settings["training.lora.rank"] = rank or values.assume(keys.rank, keys.default_rank)
    settings["training.lora.alpha"] = alpha if alpha is not None else keys.default_alpha
    dropout = values.number(keys.dropout)
    settings["training.lora.dropout"] = dropout if dropout is not None else keys.default_dropout
    targets = target_modules(values, keys.targets) or default_targets
    if targets is not None:
        settings["training.lora.targets"] = targets
    if keys.saved and (saved := values.words(keys.saved)):
        settings["training.lora.modules_to_save"] = list(saved)
    if keys.parameters and (parameters := values.words(keys.parameters)):
        settings["training.lora.target_parameters"] = list(parameters)


def adapter_settings(rank: int, alpha: float, targets: Any) -> dict[str, Any]:
    """`[training.lora]` of programs whose targets are a list, one module's name, or "all-linear"."""
    is_whole = targets == "all-linear" or isinstance(targets, list)
    return {
        "training.lora.rank": rank,
        "training.lora.alpha": alpha,
        "training.lora.targets": targets if is_whole else [targets],
    }


def load_mixture(values: FileValues) -> ModelSpec | None:
    """The model that a file names, if it has routed experts."""
    name = values.file.defaults.get("model")
    model = load_model(name) if isinstance(name, str) else None
    return None if model is None or stacked_experts(model) is None else model


def name_linear_layers(values: FileValues) -> None:
    """Write the names that "all-linear" stands for, see [Note: linear layers of a mixture].

    For models without experts both mean the same.
    """
    settings = values.file.settings
    model = load_mixture(values) if settings.get("training.lora.targets") == "all-linear" else None
    if model is not None and not model.towers:
        modules = [module for block in model.unique_blocks for module in block.modules]
        products = [module for module in modules if module.role is Role.PRODUCT and module.parameters]
        names = dict.fromkeys(module.name.rpartition(".")[2] for module in products)
        settings["training.lora.targets"] = list(names)


def target_modules(values: FileValues, key: str) -> Any:
    """Names of modules, a pattern, or "all-linear". None where the file has none."""
    value = values.get(key)
    if isinstance(value, str) and value in ALL_LINEAR:
        return "all-linear"
    if isinstance(value, str) and "," not in value:
        is_pattern = any(letter in value for letter in "()[]|*\\^$")
        return value if is_pattern else [value]
    names = values.words(key)
    if any(name in ALL_LINEAR for name in names):
        return "all-linear"
    return list(names) or None


def write_quantisation(values: FileValues, *, double: bool, bits: int = 4) -> None:
    """Write frozen products in bitsandbytes' 4 or 8 bits. `double` quantises the scales of 4 bits as well."""
    if bits == 8:
        values.file.settings["training.lora.quantized"] = "int8"
        return
    values.file.settings |= {
        "training.lora.quantized": "nf4",
        "training.lora.double_quantization": double,
        "training.lora.preparation": "none",
    }


def refuse_parts_of_phi(
    values: FileValues, key: str, model: str, targets: Iterable[str], unsplit: str
) -> None:
    """Raises NotSimulatedError for adapters on q, k, v, gate or up of a Phi.

    Programs with models of their own have them apart, while its presets have transformers' fused products.
    `model` is the name that the file has under `key` or elsewhere, dotted or not, and `unsplit` a target
    without parts.
    """
    is_phi = any(part.startswith("phi") for part in model.lower().split("."))
    if is_phi and {*targets} - {"o_proj", "down_proj", "lm_head"}:
        raise values.lack(
            key, f"adapters on Phi's q, k and v, or gate and up, one by one; expected {unsplit} alone"
        )


def keep_adapters_in_bf16(settings: dict[str, Any]) -> None:
    """Write adapters, their gradients and states in bf16, of a job whose strategy and types are written."""
    settings["training.lora.dtype"] = "bf16"
    if settings["strategy.kind"] == "ddp" and settings["training.precision"] == "bf16":
        settings["training.stored_dtype"] = "bf16"
