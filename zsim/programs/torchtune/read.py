"""torchtune's YAML -> an experiment.

Read in torchtune 0.7.0 (bd2a0fc7): recipes/full_finetune_distributed.py, full_finetune_single_device.py,
lora_finetune_*.py, training/_distributed.py (`shard_model`), models/*/_model_builders.py, modules/loss.

# [Note: torchtune has one type]
With `dtype: bf16` weights, gradients, optimizer states and activations are bf16, without autocast and without
fp32 copies (recipes/full_finetune_distributed.py, "Precision"). FSDP2 gathers and reduces in that type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.programs.huggingface.adapters import keep_adapters_in_bf16, write_quantisation
from zsim.programs.huggingface.job import note_full_length, read_epochs, read_preferences
from zsim.programs.huggingface.models import locate_model
from zsim.programs.torchtune.keys import KEYS, RELEASE, SILENT
from zsim.specs.formats.config_file import TrainingFile, flatten
from zsim.specs.formats.file_values import FileValues
from zsim.specs.model.hub_names import missing_model
from zsim.specs.presets import model_preset_names

_OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adam", "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "paged-adamw", "bitsandbytes.optim.PagedAdamW8bit": "paged-adamw-8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw-8bit", "torchao.optim.AdamW8bit": "adamw-8bit-torchao",
    "torchao.optim.AdamW4bit": "adamw-4bit-torchao",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw-8bit-torchao",
    "torchao.prototype.low_bit_optim.AdamW4bit": "adamw-4bit-torchao",
}  # fmt: skip
_TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
# Sections of other recipes, and what these train.
_OTHER_RECIPES = {
    "teacher_model": "distillation from a teacher (knowledge_distillation)",
    "kd_loss": "distillation from a teacher (knowledge_distillation)",
    "policy_model": "PPO and GRPO",
    "reward_and_value_model": "PPO and GRPO",
    "ref_policy_checkpointer": "PPO and GRPO",
    "grpo_samples": "PPO and GRPO",
}
_SINGLE = ("single_device", "low_memory")  # in names of files and outputs
_PREFERENCE = "rlhf.loss.DPOLoss"
# Builders whose shapes a later model has as well (models/qwen2/_model_builders.py).
_SAME_SHAPES = {"qwen205b": "qwen2.5-0.5b", "qwen215b": "qwen2.5-1.5b"}


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in torchtune's values by key, of a file called `name`."""
    file = TrainingFile(name, program="torchtune")
    values = FileValues(file, dict(flatten(data, ("compile",))), KEYS, SILENT, "torchtune")
    values.refuse_declared()
    _check_recipe(values, data)
    component = str(values.get("model._component_", ""))
    builder = component.rpartition(".")[2]
    _read_model(values, component)
    values.read("batch_size", "gradient_accumulation_steps")
    if not values.has("batch_size"):
        raise InputError(f"{name}: batch_size: missing, which torchtune's recipes need")
    read_epochs(values, "epochs", 1, "max_steps_per_epoch")
    _read_length(values)
    names = f"{name} {data.get('output_dir', '')}"
    _read_strategy(values, is_single=any(mark in names for mark in _SINGLE))
    has_adapters = builder.startswith(("lora_", "qlora_"))
    _read_types(values, has_adapters=has_adapters)
    _read_optimizer(values)
    _read_checkpointing(values)
    _read_kernels(values)
    if has_adapters:
        _read_adapters(values, is_quantised=builder.startswith("qlora_"))
    if str(values.get("loss._component_", "")).endswith(_PREFERENCE):
        read_preferences(values, "DPO", reference="base" if has_adapters else "copy")
    values.finish(RELEASE)
    return file


def _check_recipe(values: FileValues, data: Mapping[str, Any]) -> None:
    """Raises for files of recipes that train nothing, or otherwise than on documents."""
    for section, feature in _OTHER_RECIPES.items():
        if section in data:
            raise values.lack(section, feature)
    if (device := values.get("device", "cuda")) != "cuda":
        raise values.lack("device", f"devices besides GPUs (cuda), found {device}")
    loss = str(values.get("loss._component_", ""))
    if (".rlhf." in loss or ".dev." in loss) and not loss.endswith(_PREFERENCE):
        raise values.lack(
            "loss._component_", "preference training and reinforcement learning of torchtune yet"
        )
    if loss and not loss.startswith(("torch.", "torchtune.")):
        raise values.lack("loss._component_", "losses of one's own; expected one of torchtune's or torch's")
    if isinstance(data.get("quantizer"), Mapping):
        raise values.lack("quantizer._component_", "quantisation, also in training (qat)")
    if "optimizer" not in data:
        raise InputError(
            f"{values.file.name}: is torchtune's, but trains nothing; expected a recipe with an optimizer"
        )


def _read_model(values: FileValues, component: str) -> None:
    """Read the model from the name of its builder, which torchtune builds whatever the checkpoint is.

    The folder of the checkpoint only says which model to give where no builder stands, or none that has a
    preset.
    """
    if "vision" in component or ".flamingo" in component:
        raise values.lack("model._component_", "multimodal models")
    folder = values.get("checkpointer.checkpoint_dir")
    stored = locate_model(str(folder), Path(values.file.name).parent) if folder else None
    built = _preset_of(component.rpartition(".")[2])
    if model := built or (None if component else stored):
        # its Phi has q, k and v, gate and up apart (torchtune 0.6 models/phi3/_component_builders.py)
        values.file.defaults["model"] = (
            {"extends": model, "model_type": "llama"} if model.startswith("phi") else model
        )
        if stored in model_preset_names() and stored != model:
            values.file.note(
                f"model._component_ builds {model}, which is simulated, while checkpointer.checkpoint_dir "
                f"names {stored}"
            )
        return
    sentence = missing_model("model._component_", component)
    if stored:
        sentence += f"; checkpointer.checkpoint_dir names {stored} (--model {stored})"
    values.file.missing["model"] = sentence


def _preset_of(builder: str) -> str | None:
    """`qlora_llama3_1_8b` -> `llama-3.1-8b`."""
    name = re.sub(r"^q?lora_|_(instruct|base|classifier)$", "", builder).replace("_", "")
    names = {re.sub(r"[-.]", "", preset): preset for preset in model_preset_names()}
    return names.get(name) or _SAME_SHAPES.get(name)


def _read_length(values: FileValues) -> None:
    key = "dataset.max_seq_len" if values.has("dataset.max_seq_len") else "tokenizer.max_seq_len"
    is_packed = values.flag("dataset.packed")
    if length := values.count(key):
        values.file.settings["training.sequence_length"] = length
        note_full_length(values, key, is_packed=is_packed)
    else:
        values.file.note(
            "tokenizer.max_seq_len: no limit, so documents are as long as they are; training.sequence_length "
            "says what is simulated"
        )


def _read_strategy(values: FileValues, *, is_single: bool) -> None:
    """Read FSDP2, or one GPU where the file's name or output is of a single device's recipe."""
    file, settings = values.file, values.file.settings
    if is_single:
        settings |= {"strategy.kind": "ddp", "gpus": 1}
        return
    settings["strategy.kind"] = "fsdp2"
    values.read("fsdp_cpu_offload", "fsdp_reshard_after_forward")
    has_layers = bool(values.words("custom_sharded_layers"))
    file.defaults["strategy.wrapping"] = "torchtitan" if has_layers else "huggingface"
    file.note("taken as a recipe of several GPUs (FSDP2), since the file does not say single_device")
    if "torchtune.utils." in str(values.get("checkpointer._component_")):
        file.note(
            "torchtune.utils: is of releases before 0.3, whose recipes mostly ran FSDP1; FSDP2 is taken"
        )
    shard = values.count("data_parallel_shard_dim", -1, minimum=-1)
    if shard is not None and shard >= 1:
        file.shard_degree = shard
    if replicate := values.count("data_parallel_replicate_dim"):
        settings["strategy.replicate"] = replicate
    if (tensor := values.count("tensor_parallel_dim") or 1) > 1:
        settings["parallelism.tensor"] = tensor
        file.defaults["strategy.wrapping"] = "torchtitan"
    if (context := values.count("context_parallel_dim") or 1) > 1:
        settings["parallelism.context"] = context


def _read_types(values: FileValues, *, has_adapters: bool) -> None:
    """See [Note: torchtune has one type]."""
    settings = values.file.settings
    dtype = values.choose("dtype", "fp32", ("bf16", "fp32", "fp16"))
    if dtype == "fp16":
        raise values.error("dtype", "bf16 or fp32, which torchtune's recipes take")
    settings["training.precision"] = dtype
    if settings["strategy.kind"] == "fsdp2":
        settings |= {"strategy.param_dtype": dtype, "strategy.reduce_dtype": dtype}
    if dtype == "bf16" and not has_adapters:
        settings["training.stored_dtype"] = "bf16"


def _read_optimizer(values: FileValues) -> None:
    name = str(values.get("optimizer._component_", ""))
    if name not in _OPTIMIZERS:
        raise values.lack(
            "optimizer._component_", f"that optimizer; expected one of {', '.join(_OPTIMIZERS)}"
        )
    optimizer = _OPTIMIZERS[name]
    values.file.settings["training.optimizer"] = optimizer
    if name.startswith("torch.") and not values.flag("optimizer.fused"):
        values.put("training.optimizer_implementation", "foreach", "optimizer._component_")
    if values.flag("optimizer_in_bwd"):
        if values.file.settings["strategy.kind"] != "ddp":
            raise values.lack("optimizer_in_bwd", "updates within backward on several GPUs")
        values.file.settings["strategy.optimizer_in_backward"] = True
    norm = values.get("clip_grad_norm")
    is_clipped = norm is not None and str(norm) != "inf"
    values.file.settings["training.gradient_clipping"] = (
        values.number("clip_grad_norm") if is_clipped else 0.0
    )


def _read_checkpointing(values: FileValues) -> None:
    values.read("enable_activation_checkpointing")
    if values.flag("enable_activation_offloading"):  # of outputs of the embedding and blocks, which is all
        if not values.flag("enable_activation_checkpointing"):
            raise values.error(
                "enable_activation_offloading", "enable_activation_checkpointing: True beside it"
            )
        has_stream = values.flag("activation_offloading_use_streams", True)
        values.file.settings["training.checkpoint_offload"] = "stream" if has_stream else "pinned"
    mode = values.get("ac_mode")
    if mode is None or not values.flag("enable_activation_checkpointing"):
        return
    values.choose("ac_mode", "full", ("full", "selective"))
    if mode == "selective":
        if values.get("ac_option") == "op":
            values.file.settings["training.activation_checkpointing"] = "selective-op"
        else:
            values.file.settings["training.checkpoint_every"] = values.count("ac_option", 1) or 1


def _read_kernels(values: FileValues) -> None:
    config = values.get("compile", False)
    is_model, is_loss = (
        (bool(config.get("model", True)), bool(config.get("loss", True)))
        if isinstance(config, Mapping)
        else (values.flag("compile"), values.flag("compile"))
    )
    if is_model:
        values.file.settings["training.compile"] = True
    loss = str(values.get("loss._component_", "")).rpartition(".")[2]
    if loss == "LinearCrossEntropyLoss":
        values.file.settings["training.cross_entropy"] = "fused_linear"
        values.file.note(
            "LinearCrossEntropyLoss: simulated as Liger's loss in chunks, which keeps no logits either"
        )
    elif loss == "CEWithChunkedOutputLoss":
        values.file.settings["training.cross_entropy"] = (
            "torchtune-chunked-fused" if is_loss else "torchtune-chunked"
        )
    elif is_model and not is_loss:
        values.file.settings["training.cross_entropy"] = "eager"


def _read_adapters(values: FileValues, *, is_quantised: bool) -> None:
    """Read LoRA, whose adapters have the type of the weights. NF4Tensor quantises its scales as well."""
    settings = values.file.settings
    targets = [_TARGETS.get(word, word) for word in values.words("model.lora_attn_modules")]
    targets += _MLP if values.flag("model.apply_lora_to_mlp") else ()
    targets += ["lm_head"] if values.flag("model.apply_lora_to_output") else []
    settings |= {
        "training.lora.rank": values.count("model.lora_rank") or values.assume("model.lora_rank", 8),
        "training.lora.alpha": values.number("model.lora_alpha", 16.0),
        "training.lora.dropout": values.number("model.lora_dropout", 0.0),
        "training.lora.targets": targets,
    }
    if settings["training.precision"] == "bf16":
        keep_adapters_in_bf16(settings)
    if is_quantised:
        write_quantisation(values, double=True)
        values.file.note("torchao's NF4Tensor is simulated as bitsandbytes' 4 bits with quantised scales")
