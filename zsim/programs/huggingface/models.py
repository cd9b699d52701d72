"""The model that a file names, and the types that a Trainer's job keeps and computes in.

# [Note: what casts under the Trainer]
With `bf16` the forward runs under torch.autocast (transformers 5.23 trainer.py
`autocast_smart_context_manager`, Accelerate's `mixed_precision`), and the weights stay in the type that they
were loaded in. AdamW keeps gradients and states in that type too. Under FSDP Accelerate 1.15 casts what is
trained to fp32 first (accelerator.py `prepare_model`, utils/fsdp_utils.py `fsdp2_prepare_model`), and under
DeepSpeed the engine has fp32 masters. Without `bf16` and `fp16` nothing casts, and a model in bf16 computes
in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues
from zsim.specs.model import hub_names
from zsim.specs.model.hub_names import hub_id_of_path, missing_model
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Module

_QUANTISED = re.compile(
    r"gptq|awq|aqlm|hqq|eetq|exl2|int4|int8|w4a16|fp8|nvfp4|mxfp4|[-_](bnb|nf4)", re.IGNORECASE
)
_LOW = ("bf16", "fp16")
_TYPES = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "half": "fp16", "float16": "fp16",
    "fp16": "fp16", "torch.float16": "fp16", "float32": "fp32", "fp32": "fp32", "torch.float32": "fp32",
}  # fmt: skip


def locate_model(name: str, folder: Path) -> str | None:
    """A preset's name, or the path of a config.json, for a model that a file in `folder` names.

    The name is a path from there or from the working folder, a preset's, or ends in an id of the Hub. None
    if there is neither.
    """
    return hub_names.locate_model(name, (folder, Path()), hub_id_of_path(name))


def is_quantised_name(name: str) -> bool:
    """Whether a model's name says that its weights are stored quantised."""
    return _QUANTISED.search(name.rpartition("/")[2]) is not None


def read_model(values: FileValues, key: str, *, is_quantised: bool) -> None:
    """Write the model that a file names, as a preset or a config.json. An experiment may name another.

    `is_quantised` says that the file asks for weights in 4 bits. Raises NotSimulatedError for a model whose
    weights are stored quantised and that the file trains otherwise.
    """
    name = values.get(key)
    if name is None:
        return
    if not isinstance(name, str):
        raise values.error(key, "a model's name")
    if is_quantised_name(name) and not (is_quantised and ("bnb" in name.lower() or "nf4" in name.lower())):
        raise values.lack(key, "weights that are stored quantised, as this model's name says")
    write_model(values, key, name)


def write_model(values: FileValues, key: str, name: str) -> None:
    """Write the model of a `name` that stands at `key`, or that the experiment must give one."""
    model = locate_model(name, Path(values.file.name).parent)
    if model is not None:
        values.file.defaults["model"] = model
    else:
        values.file.missing["model"] = missing_model(key, name)


def freeze_tower(
    values: FileValues,
    *,
    tower: bool,
    projector: bool,
    is_full: bool,
    aligners: tuple[str, ...] = ("merger", "deepstack_merger", "proj"),
) -> None:
    """Write that the towers of the model that the file names, and their projectors, are not trained. Where
    adapters are, those parts get none. A model without a tower stays as it is. What stands behind a tower's
    blocks and below its root is frozen with the tower, but for modules whose names there begin with one of
    `aligners`.
    """
    name = values.file.defaults.get("model")
    model = load_model(name) if isinstance(name, str) else None
    if model is None:
        return
    names = []
    for part in model.towers:
        first, last = _names_of_weights(part.before), _names_of_weights(part.after)
        root = "".join(f"{name}." for name in part.block_prefix.split(".")[:2])  # "model.visual."
        inner = {name: name.removeprefix(root) for name in last if name.startswith(root)}
        of_tower = [name for name, below in inner.items() if not below.startswith(aligners)]
        of_projector = [
            name for name in last if name not in inner or inner[name].startswith((*aligners, "proj"))
        ]
        names += [*first, *part.block_lists, *of_tower] if tower else []
        names += [name for name in of_projector if name not in names] if projector else []
    settings = values.file.settings
    if names and is_full:
        settings["training.frozen"] = [*settings.get("training.frozen", ()), *names]
    elif names:
        settings["training.lora.exclude"] = "|".join(f"{re.escape(name)}(\\..*)?" for name in names)


def present_names(values: FileValues, key: str) -> list[str]:
    """The beginnings at `key` that names of parameters have. ms-swift compares by `startswith` alone."""
    model_name = values.file.defaults.get("model")
    model = load_model(model_name) if isinstance(model_name, str) else None
    names = [] if model is None else [name for name, _ in model.named_parameters()]
    absent = [text for text in values.words(key) if names and not any(n.startswith(text) for n in names)]
    if absent:
        values.file.note(f"{key}: no parameter begins with {', '.join(absent)}")
    return [text for text in values.words(key) if text not in absent]


def _names_of_weights(modules: Iterable[Module]) -> list[str]:
    """The modules that have parameters, or those of their parameters that a module around them registers."""
    paths = [(module.name, module.path_of(weight)) for module in modules for weight in module.parameters]
    return [*dict.fromkeys(name if path.startswith(f"{name}.") else path for name, path in paths)]


def weights_type(values: FileValues, *keys: str) -> str:
    """The type at the first of `keys` that the file has, "" for one that the checkpoint decides."""
    for key in keys:
        word: Any = values.get(key)
        if word is None:
            continue
        if str(word) in ("auto", "null", ""):
            return ""
        if str(word) not in _TYPES:
            raise values.error(key, "one of auto, bfloat16, float16, float32")
        return _TYPES[str(word)]
    return ""


def write_types(file: TrainingFile, precision: str, weights: str, *, has_adapters: bool) -> None:
    """Write the types of products and of weights. `weights` is the type that is loaded, "" for the product's.

    The strategy stands in the file's settings already. Raises NotSimulatedError for weights in fp16 that are
    trained, which torch's GradScaler refuses ("Attempting to unscale FP16 gradients").
    """
    settings, kind = file.settings, file.settings["strategy.kind"]
    file.weight_types = (precision, weights, has_adapters)
    is_cast = precision in _LOW
    if not is_cast and weights in _LOW:
        precision = weights
        if kind in ("fsdp1", "fsdp2"):
            settings |= {"strategy.param_dtype": weights, "strategy.reduce_dtype": weights}
    settings["training.precision"] = precision
    if kind == "deepspeed":
        return
    if has_adapters:
        if kind == "ddp" and weights and weights != precision:
            settings["training.frozen_dtype"] = weights
        return
    if weights == "fp16" and (kind == "ddp" or not is_cast):
        raise NotSimulatedError(
            f"{file.name}: asks to train weights that are kept in fp16, whose gradients torch refuses to "
            "scale; zsim does not simulate it; expected weights in bf16 or fp32"
        )
    if weights == "bf16" and (kind == "ddp" or not is_cast):
        settings["training.stored_dtype"] = "bf16"
        if precision == "fp16":
            raise NotSimulatedError(
                f"{file.name}: fp16: zsim does not simulate products in fp16 of weights in bf16"
            )
