"""Megatron-SWIFT (`megatron sft` and the like), whose arguments are fields of Megatron-Core's configurations.

Read in ms-swift 4.6.0.dev0 (3602360a): megatron/arguments/, megatron/utils/utils.py (`prepare_adapter`),
megatron/trainers/, and in mcore-bridge f020e47, tuners/lora.py.

# [Note: Megatron-SWIFT's adapters]
Adapters are on every product of Transformer Engine, of which each expert has its own
(`LoraParallelLinear` with `TEGroupedLinear`). PEFT casts them to fp32, and `Float16Module` back to the type
of the model (`wrap_model`), so that their masters are the distributed optimizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.programs.huggingface.adapters import load_mixture, write_adapters
from zsim.programs.huggingface.job import note_full_length, read_epochs, read_preferences, read_rewards
from zsim.programs.huggingface.models import freeze_tower, weights_type, write_model
from zsim.programs.megatron_lm.recipe import linear_layers, read_fields
from zsim.programs.ms_swift.keys import ADAPTERS, MEGATRON_KEYS, MEGATRON_SILENT, TUNER_KEYS
from zsim.programs.rollout import skip_rollout
from zsim.programs.trl.rollout import read_lengths
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

RELEASE = "Megatron-SWIFT 4.6"
# Fields whose default is another than that of Megatron-Core's own flags.
_DEFAULTS = {
    "sequence_parallel": False, "use_distributed_optimizer": True, "recompute_granularity": "selective",
    "attention_backend": "flash", "cross_entropy_loss_fusion": True, "apply_rope_fusion": False,
}  # fmt: skip
_EXPERT_DEFAULTS = {
    "expert_tensor_parallel_size": 1, "moe_grouped_gemm": True, "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
_NAMES = {"word_embeddings": "embed_tokens", "output_layer": "lm_head"}
_SEQUENCES, _LABELS = 16, 2


def read_megatron(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in Megatron-SWIFT's values by key, of a file or a command line called `name`.

    Raises NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="megatron")
    values = FileValues(file, data, MEGATRON_KEYS, MEGATRON_SILENT, "Megatron-SWIFT")
    values.refuse_declared()
    loss = values.get("rlhf_type")
    if loss not in (None, "dpo", "rm", "grpo"):
        raise values.lack("rlhf_type", "it with Megatron-SWIFT yet; expected dpo, rm, grpo, or none")
    task = values.get("task_type", "causal_lm")
    if task not in ("causal_lm", "seq_cls"):
        raise values.lack("task_type", "embeddings and rerankers; expected causal_lm or seq_cls")
    has_adapters = _has_adapters(values)
    name = values.get("model", values.get("load"))
    if isinstance(name, str):
        write_model(values, "model", name)
    file.settings["training.micro_batch_size"] = values.count("micro_batch_size", 1)
    size = values.count("global_batch_size", _SEQUENCES)
    file.global_batch_size = size
    if values.has("num_train_epochs"):
        read_epochs(values, "num_train_epochs", 1, "train_iters")
    _read_fields(values, has_adapters=has_adapters)
    if has_adapters:
        _read_adapters(values)
    freeze_tower(
        values,
        tower=values.flag("freeze_vit", True),
        projector=values.flag("freeze_aligner", True),
        is_full=not has_adapters,
    )
    if loss == "grpo":
        read_lengths(FileValues(file, _lengths_of_grpo(values), values.keys, values.silent, values.title))
        skip_rollout(file, "rollouts of Megatron-SWIFT are not simulated", "of completions at their longest")
    else:
        _read_length(values)
    if loss == "dpo":
        read_preferences(values, "DPO", reference="base" if has_adapters else "copy")
    elif loss == "rm":
        read_rewards(values, has_adapters=has_adapters)
    elif task == "seq_cls":
        file.settings["training.labels"] = values.count("num_labels") or values.assume("num_labels", _LABELS)
    if loss in ("dpo", "rm"):  # both count rows, of which each is two sequences
        file.global_batch_size = 2 * (size or _SEQUENCES)
    values.finish(RELEASE)
    return file


def _has_adapters(values: FileValues) -> bool:
    key = next((key for key in TUNER_KEYS if values.has(key)), TUNER_KEYS[0])
    kind = values.get(key, "full")
    if kind not in ("full", "lora"):
        raise values.lack(key, f"{key} {kind}; expected lora or full")
    return str(kind) == "lora"


def _read_fields(values: FileValues, *, has_adapters: bool) -> None:
    """Read what Megatron-Core's configurations say, with those of experts for a model with some."""
    stated_fields = {
        key: value
        for key, value in values.values.items()
        if key not in values.keys and key not in values.silent and value is not None
    }
    fields = {**_DEFAULTS, **(_EXPERT_DEFAULTS if load_mixture(values) else {}), **stated_fields}
    fields = {key: value for key, value in fields.items() if value != "none"}
    if has_adapters and fields.pop("moe_shared_expert_overlap", False) and _has_shared_experts(values):
        values.file.note(
            "moe_shared_expert_overlap: simulated without it, since shared experts may have adapters"
        )
    precision = weights_type(values, "torch_dtype")
    fields.setdefault("fp16" if precision == "fp16" else "bf16", True)
    read_fields(values.file, fields)
    for key in stated_fields:  # named by `read_fields` where it reads none
        values.values.pop(key)


def _lengths_of_grpo(values: FileValues) -> Mapping[str, Any]:
    """The lengths by the keys of TRL's trainer."""
    names = {"max_length": "max_prompt_length", "max_completion_length": "max_completion_length"}
    return {name: values.get(key) for key, name in names.items() if values.has(key)}


def _read_length(values: FileValues) -> None:
    is_packed = values.flag("packing")
    key = "packing_length" if is_packed and values.has("packing_length") else "max_length"
    if length := values.count(key):
        values.file.settings["training.sequence_length"] = length
        note_full_length(values, key, is_packed=is_packed)


def _read_adapters(values: FileValues) -> None:
    """Read adapters, see [Note: Megatron-SWIFT's adapters]."""
    write_adapters(values, ADAPTERS, "all-linear")
    settings = values.file.settings
    if pattern := values.get("target_regex"):
        settings["training.lora.targets"] = str(pattern)
    elif settings["training.lora.targets"] == "all-linear":
        settings["training.lora.targets"] = linear_layers(values.file)
    else:
        layers = linear_layers(values.file)
        if any(str(name).rpartition(".")[2] not in layers for name in settings["training.lora.targets"]):
            raise values.error("target_modules", f"Megatron's layers: all-linear, {', '.join(layers)}")
    if saved := settings.get("training.lora.modules_to_save"):
        settings["training.lora.modules_to_save"] = [_NAMES.get(name, name) for name in saved]
    if load_mixture(values) and {"linear_fc1", "linear_fc2"} & {*settings["training.lora.targets"]}:
        settings["training.lora.share_expert_adapters"] = False


def _has_shared_experts(values: FileValues) -> bool:
    model = load_mixture(values)
    blocks = () if model is None else model.unique_blocks
    return any("shared_expert" in module.name for block in blocks for module in block.modules)
