"""Recipes of Megatron-Bridge and NeMo, and Megatron's own YAML -> Megatron's arguments.

Their keys are the fields of Megatron-Core's configurations, wherever they stand in the file. Most have the
name of a flag. Read in Megatron-Core 0.16.1 (`transformer_config.py`, `distributed_data_parallel_config.py`,
`optimizer_config.py`), Megatron-Bridge of August 2026 (`training/config.py`, `mixed_precision.py`,
`comm_overlap.py`) and NeMo 1's `megatron_gpt_config.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Role
from zsim.programs.megatron_lm.arguments import Arguments
from zsim.programs.megatron_lm.flags import FLAGS, LISTS, SWITCHES
from zsim.programs.megatron_lm.read import settings_of
from zsim.reading import read_user_text
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.model.fusion import FUSED_PRODUCTS, fuse_named_products
from zsim.specs.model.huggingface import load_model

_MARKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "MODEL_ARGS")
# Field -> flag, where the names differ.
_NAMES = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "num_moe_experts": "num-experts",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "fp4_param": "fp4-param-gather",
    "fp8_param": "fp8-param-gather",
    "fp8_params": "fp8-param-gather",
    "average_in_collective": "ddp-average-in-collective",
    "bucket_size": "ddp-bucket-size",
    "encoder_seq_length": "seq-length",
    "sequence_length": "seq-length",
    "activations_checkpoint_granularity": "recompute-granularity",
    "activations_checkpoint_method": "recompute-method",
    "activations_checkpoint_num_layers": "recompute-num-layers",
    "ub_tp_comm_overlap": "tp-comm-overlap",
    "gradient_clip_val": "clip-grad",
    "overlap_grad_sync": "overlap-grad-reduce",
    "overlap_param_sync": "overlap-param-gather",
    "qk_layernorm": "qk-layernorm",
}
# Field -> the flag that switches it off.
_NEGATED_FLAGS = {
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "add_bias_linear": "disable-bias-linear",
    "bias": "disable-bias-linear",
    "check_for_nan_in_grad": "no-check-for-nan-in-loss-and-grad",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "bias_activation_fusion": "no-bias-gelu-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
# Name of a mixed precision -> its flags (training/mixed_precision.py of Megatron-Bridge of August 2026).
_MIXED_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8_current_scaling": {
        "fp8-format": "hybrid", "fp8-recipe": "tensorwise", "fp8-param-gather": True,
        "first-last-layers-bf16": True,
    },
    "fp8_delayed_scaling": {"fp8-format": "hybrid", "fp8-recipe": "delayed", "fp8-param-gather": True},
    "fp8_subchannel_scaling": {"fp8-format": "hybrid", "fp8-recipe": "blockwise"},
    "mxfp8": {"fp8-format": "hybrid", "fp8-recipe": "mxfp8"},
    "nvfp4": {"fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}  # fmt: skip
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
_ACTIVATIONS = {
    "swiglu": "swiglu", "fast-swiglu": "swiglu", "silu": "swiglu", "squared-relu": "squared-relu",
    "squared_relu": "squared-relu", "quick_gelu": "quick-geglu", "openai-gelu": "openai-gelu",
}  # fmt: skip
_VALIDATION = ("validation_ds", "test_ds", "validation", "predict_ds")
_PRECISIONS = ("precision", "mixed_precision", "params_dtype", "bf16", "fp16", "--bf16", "--fp16")
_READ_LAST = ("mixed_precision", "comm_overlap")  # both are written over the other sections when a run starts
_READ = (
    "devices", "num_nodes", "precision", "mixed_precision", "activation", "activation_func",
    "gated_linear_unit", "num_query_groups", "params_dtype", "optim.name", "fp8_hybrid", "fp8_e4m3",
)  # fmt: skip
# Quantised queries, keys and values: a ring of Transformer Engine sends keys and values of a byte an element
# then, and the gradients of all steps in one all-to-all behind the last (`AttnFuncWithCPAndKVP2P` of 2.17.1).
_FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_dpa", "fp8_mha")
# Field of a recipe's LoRA -> (ours, its default); and those that change what is computed, with their
# defaults.
_LORA = {
    "dim": ("rank", 32),
    "alpha": ("alpha", 32),
    "dropout": ("dropout", 0.0),
    "target_modules": ("targets", [*FUSED_PRODUCTS]),
    "share_expert_adapters": ("share_expert_adapters", True),
}
_LORA_DEFAULTS: dict[str, Any] = {
    "dropout_position": "pre", "a2a_experimental": False, "sequence_parallel_input_regather": False,
    "normalize_moe_lora": False, "experts_shared_outer_loras": False,
}  # fmt: skip


def is_recipe(data: Any) -> bool:
    """Whether the content of a YAML has fields of Megatron-Core's configurations."""
    return isinstance(data, Mapping) and any(
        path.rpartition(".")[2] in _MARKS or "MODEL_ARGS" in path for path, _ in _leaves(data)
    )


def read_recipe(path: str) -> TrainingFile:
    """The settings in a recipe.

    Raises InputError for text that is no YAML and for what Megatron refuses, NotSimulatedError for what zsim
    does not simulate.
    """
    data = load_yaml(read_user_text(Path(path), "a recipe of Megatron-Bridge or NeMo"), path)
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: expected the keys of a recipe at the top")
    peft = data.get("peft")
    file = settings_of(_arguments(path, {key: value for key, value in data.items() if key != "peft"}))
    if isinstance(peft, Mapping):
        file.settings |= recipe_adapters(file, peft)
    return file


def read_fields(file: TrainingFile, fields: Mapping[str, Any]) -> None:
    """Write what fields of Megatron-Core's configurations say into `file`, for programs that set it up.

    The program's own batch, machines and model stay. Raises what `read_recipe` raises.
    """
    megatron = settings_of(_arguments(file.name, fields))
    kept = dict(file.settings)
    file.settings |= megatron.settings | kept
    file.defaults = megatron.defaults | file.defaults
    file.notes += [note for note in megatron.notes if note not in file.notes]
    file.resolve_stages = megatron.resolve_stages


def recipe_adapters(file: TrainingFile, peft: Mapping[str, Any]) -> dict[str, Any]:
    """`[training.lora]` of a recipe's `peft` (Megatron-Bridge 0.6.0 peft/lora.py `LoRA`). Without targets it
    is on every linear layer, also the head, and not on routed experts (`ModuleMatcher`).

    Raises NotSimulatedError for other adapters, and for fields that change what is computed, InputError for
    excluded modules beside targets, which it asserts are none.
    """
    where, kind = file.name, str(peft.get("_target_", "LoRA")).rpartition(".")[2]
    if kind != "LoRA":
        raise NotSimulatedError(f"{where}: peft: zsim does not simulate {kind}, only LoRA")
    for field, neutral in _LORA_DEFAULTS.items():
        if field == "dropout_position" and not peft.get("dropout", 0.0):
            continue
        if peft.get(field, neutral) not in (neutral, None):
            raise NotSimulatedError(
                f"{where}: peft.{field}: zsim does not simulate {peft[field]!r}; expected {neutral!r}"
            )
    lora_values = {lora_key: peft.get(field, default) for field, (lora_key, default) in _LORA.items()}
    excluded = peft.get("exclude_modules") or ()
    if lora_values["targets"] and excluded:
        raise InputError(
            f"{where}: peft.exclude_modules: found {excluded!r} beside target_modules "
            f"{lora_values['targets']!r}; expected target_modules: [] beside it"
        )
    if not lora_values["targets"]:
        file.note("peft: without target_modules the head has an adapter too, which is left out")
        lora_values["targets"] = linear_layers(file)
        lora_values["exclude"] = pattern_of_modules([*excluded, "*.experts.*"])
    return {f"training.lora.{key}": value for key, value in lora_values.items()}


def linear_layers(file: TrainingFile) -> list[str]:
    """The last names of the layers of Transformer Engine, which a router and a gate of experts are not."""
    name = file.defaults.get("model")
    model = fuse_named_products(load_model(name)) if isinstance(name, str) else None
    modules = [module for block in model.unique_blocks for module in block.modules] if model else []
    names = [module.name.rpartition(".")[2] for module in modules if module.role is Role.PRODUCT]
    return [*dict.fromkeys((*FUSED_PRODUCTS, *(name for name in names if not name.endswith("_gate"))))]


def pattern_of_modules(names: Sequence[object]) -> str:
    """The expression of modules as `ModuleMatcher` has them: a name is a module's last one, and stars stand
    for any part of the whole.
    """
    expressions = {str(name): re.escape(str(name)).replace(r"\*", ".*") for name in names}
    return "|".join(text if "*" in name else rf"(.*\.)?{text}" for name, text in expressions.items())


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every value, without what is only of validation.

    Values behind others win where names repeat: those of a section over those of sections in it, and the
    sections for mixed precision and overlap over all.
    """

    def rank(name: str) -> int:
        return _READ_LAST.index(name) + 2 if name in _READ_LAST else int(not isinstance(data[name], Mapping))

    for name in sorted(data, key=rank):
        value = data[name]
        if str(name) in _VALIDATION:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif not str(name).startswith("_") and value is not None and value != "None":  # OmegaConf's null
            yield f"{prefix}{name}", value


def _arguments(where: str, data: Mapping[str, Any]) -> Arguments:
    arguments, fields = Arguments(where), dict(_leaves(data))
    last_values: dict[str, Any] = {}
    unknown: list[str] = []
    for path, value in fields.items():
        name = path.rpartition(".")[2]
        last_values[name] = value
        if path.startswith("ENV_VARS."):
            continue
        if name in _READ or path in _READ:
            continue
        if name in _FP8_ATTENTION and value is True:
            raise NotSimulatedError(
                f"{where}: {path}: zsim does not simulate attention in fp8, whose kernels no GPU file has a "
                "rate of; expected false"
            )
        flag = name.removeprefix("--") if name.startswith("--") else _flag(name)
        if name in _NEGATED_FLAGS:
            _set_flag(arguments, _NEGATED_FLAGS[name], value is False)
        elif flag in FLAGS:
            _set_flag(arguments, flag, value)
        elif f"no-{flag}" in SWITCHES:
            _set_flag(arguments, f"no-{flag}", value is False)
        else:
            unknown.append(path)
    _set_shape(arguments, last_values)
    if isinstance(data.get("train"), Mapping) and not set(_PRECISIONS) & set(last_values):
        last_values["mixed_precision"] = "bf16_mixed"
        arguments.notes.append("no precision in it: bf16, as Megatron-Bridge's own recipes have it")
    _set_precision(arguments, last_values)
    _set_network(arguments, last_values)
    if str(fields.get("model.optim.name", fields.get("optim.name", ""))).startswith("distributed_"):
        _set_flag(arguments, "use-distributed-optimizer", True)
    environment = data.get("ENV_VARS")
    if isinstance(environment, Mapping):
        arguments.environment = {str(name): str(value) for name, value in environment.items()}
    has_flags = any(name.startswith("--") for name in last_values)
    if "tokenizer-type" not in arguments.values and not has_flags:  # a recipe names its tokenizer by a model
        arguments.values["tokenizer-type"] = "HuggingFaceTokenizer"
        arguments.read_flags.add("tokenizer-type")
    if unknown:
        arguments.notes.append(f"not read: {', '.join(unknown)}")
    return arguments


def _flag(name: str) -> str:
    return _NAMES.get(name, name.replace("_", "-"))


def _set_flag(arguments: Arguments, flag: str, value: Any) -> None:
    """Set a flag: a switch if the value is true, a list or a text otherwise."""
    if flag in SWITCHES:
        if value is True:
            arguments.values[flag] = True
        elif value is False:
            arguments.values.pop(flag, None)
        else:
            raise InputError(
                f"{arguments.where}: {flag.replace('-', '_')}: found {value!r}, expected true or false"
            )
    elif flag in LISTS:
        values = value if isinstance(value, list) else str(value).split()
        arguments.values[flag] = [str(entry) for entry in values]
    elif not isinstance(value, bool):
        arguments.values[flag] = _word(flag, value)
    elif flag == "fp8-format" and value:
        arguments.values[flag] = "hybrid"


def _word(flag: str, value: Any) -> str:
    text = str(value)
    word = text.rpartition(".")[2] if text.startswith(("torch.", "AttnBackend.")) else text
    if flag.endswith("-dtype"):
        return _DTYPES.get(word, word)
    return _NORMS.get(word.lower(), word) if flag == "normalization" else word


def _set_shape(arguments: Arguments, fields: Mapping[str, Any]) -> None:
    devices, nodes = fields.get("devices"), fields.get("num_nodes", 1)
    if isinstance(devices, int) and isinstance(nodes, int) and devices > 0 and nodes > 0:
        arguments.nodes, arguments.gpus = nodes, nodes * devices


def _set_precision(arguments: Arguments, fields: Mapping[str, Any]) -> None:
    """Set the flags of precision.

    `precision` is bf16-mixed, bf16 or 16. `mixed_precision` names a function, as in
    bf16_with_fp8_current_scaling_mixed.
    """
    precisions = [
        str(fields[key]) for key in ("precision", "mixed_precision", "params_dtype") if key in fields
    ]
    if not {"bf16", "fp16"} & set(arguments.values):
        for text in precisions:
            if "bf" in text:
                arguments.values["bf16"] = True
            elif "16" in text:
                arguments.values["fp16"] = True
    matches = [
        (word, flags) for word, flags in _MIXED_PRECISIONS.items() if any(word in text for text in precisions)
    ]
    if matches:
        _, flags = matches[0]
        for flag, value in flags.items():
            arguments.values.setdefault(flag, value)
    elif any("fp8" in text for text in precisions):
        arguments.values.setdefault("fp8-format", "hybrid")
    if "bf16" not in arguments.values:
        arguments.values.pop("grad-reduce-in-bf16", None)
        if fields.get("grad_reduce_in_fp32") is True:
            arguments.values["accumulate-allreduce-grads-in-fp32"] = True


def _set_network(arguments: Arguments, fields: Mapping[str, Any]) -> None:
    groups = fields.get("num_query_groups")
    if groups is not None:
        arguments.values |= {"group-query-attention": True, "num-query-groups": str(groups)}
    text = str(fields.get("activation", fields.get("activation_func", "gelu")))
    name = text.rpartition(".")[2].lower()
    flag = _ACTIVATIONS.get(name)
    is_gated = fields.get("gated_linear_unit", name in ("swiglu", "fast-swiglu"))
    if flag == "swiglu" and not is_gated:
        raise InputError(f"{arguments.where}: activation_func: Megatron's flags have silu with a gate only")
    if flag is not None:
        arguments.values[flag] = True
    if "seq-length" in arguments.values:
        arguments.values.setdefault("max-position-embeddings", arguments.values["seq-length"])
