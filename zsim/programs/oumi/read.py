"""oumi's YAML -> an experiment, by the arguments of TRL's trainers that it makes of its keys.

Read in oumi d8ed0777: core/configs/params/training_params.py (`to_hf`), model_params.py, peft_params.py,
fsdp_params.py, core/configs/training_config.py (`__post_init__`), builders/models.py (`build_peft_model`) and
core/distributed.py (`get_accelerate_env_vars`). oumi hands all arguments over, so that its defaults count.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.trl.read import read_values as read_trl_values
from zsim.specs.formats.config_file import TrainingFile, flatten, read_renamed
from zsim.specs.formats.file_values import silent_keys

_TRAINERS = {"TRL_SFT": "sft", "TRL_DPO": "dpo"}
# oumi's keys -> (TRL's, oumi's default).
_ARGUMENTS: Mapping[str, tuple[str, Any]] = {
    "model.model_name": ("model_name_or_path", None), "model.model_max_length": ("max_length", None),
    "model.torch_dtype_str": ("dtype", "auto"), "model.attn_implementation": ("attn_implementation", None),
    "model.enable_liger_kernel": ("use_liger_kernel", False),
    "training.per_device_train_batch_size": ("per_device_train_batch_size", 8),
    "training.gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "training.enable_gradient_checkpointing": ("gradient_checkpointing", False),
    "training.gradient_checkpointing_kwargs": ("gradient_checkpointing_kwargs", None),
    "training.optimizer": ("optim", "adamw_torch"), "training.max_grad_norm": ("max_grad_norm", 1.0),
    "training.compile": ("torch_compile", False), "training.use_peft": ("use_peft", False),
    "training.num_train_epochs": ("num_train_epochs", 3), "training.max_steps": ("max_steps", -1),
    "training.empty_device_cache_steps": ("torch_empty_cache_steps", None),
    "training.ddp_find_unused_parameters": ("ddp_find_unused_parameters", None),
    "peft.lora_r": ("lora_r", 8), "peft.lora_alpha": ("lora_alpha", 8),
    "peft.lora_dropout": ("lora_dropout", 0.0), "peft.lora_target_modules": ("lora_target_modules", None),
    "peft.lora_modules_to_save": ("lora_modules_to_save", None),
    "peft.lora_target_parameters": ("lora_target_parameters", None),
    "peft.use_bnb_nested_quant": ("use_bnb_nested_quant", False),
}  # fmt: skip
_REFUSED = {
    "deepspeed.enable_deepspeed": "DeepSpeed of oumi's", "model.freeze_layers": "layers that are frozen",
    "model.adapter_model": "adapters whose rank a checkpoint says",
    "peft.lora_exclude_modules": "modules without adapters; expected training.lora.exclude",
}  # fmt: skip
_FSDP = {
    "sharding_strategy": "FULL_SHARD", "auto_wrap_policy": "NO_WRAP", "min_num_params": 100_000,
    "backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False,
}  # fmt: skip
# Beginnings of keys that no step depends on, or that have been read.
_IDLE = silent_keys(
    """
    data.* fsdp.enable_fsdp fsdp.sharding_strategy fsdp.auto_wrap_policy fsdp.min_num_params
    fsdp.backward_prefetch fsdp.forward_prefetch fsdp.cpu_offload fsdp.mixed_precision
    fsdp.use_orig_params fsdp.state_dict_type fsdp.transformer_layer_cls fsdp.sync_module_states
    model.tokenizer* model.chat_template* model.trust_remote_code model.load_pretrained_weights
    model.device_map model.model_revision peft.* training.log* training.save_* training.output_dir
    training.eval_* training.enable_* training.include_* training.warmup_* training.lr_* training.adam_*
    training.learning_rate training.weight_decay training.dataloader_* training.run_name training.seed
    training.data_seed training.dep_log_level training.try_resume* training.resume_* training.profiler*
    training.telemetry*
    """
)


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in oumi's values by key.

    Raises InputError for values that it refuses, NotSimulatedError for trainers and engines that zsim does
    not read of it.
    """
    values = dict(flatten(data, ("training.trainer_kwargs", "training.gradient_checkpointing_kwargs")))
    trainer = str(values.pop("training.trainer_type", "HF"))
    if trainer not in _TRAINERS:
        raise NotSimulatedError(
            f"{name}: training.trainer_type: found {trainer!r}, which zsim does not read of oumi; expected "
            f"{' or '.join(_TRAINERS)}"
        )
    for key, feature in _REFUSED.items():
        if values.pop(key, None):
            raise NotSimulatedError(f"{name}: {key}: zsim does not read {feature}")
    arguments = {target: values.pop(key, default) for key, (target, default) in _ARGUMENTS.items()}
    mixed = str(values.pop("training.mixed_precision_dtype", "none")).lower()
    if mixed == "none" and values.get("fsdp.enable_fsdp"):  # ACCELERATE_MIXED_PRECISION, which then counts
        mixed = str(values.get("fsdp.mixed_precision")).lower()
    is_quantised = arguments["use_peft"] and values.pop("peft.q_lora", False)
    bits = values.pop("peft.q_lora_bits", 4)
    arguments |= {
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        "load_in_4bit": bool(is_quantised) and bits == 4,
        "load_in_8bit": bool(is_quantised) and bits == 8,
    }
    if values.get("fsdp.enable_fsdp"):
        arguments |= _sharding(values, arguments["gradient_checkpointing"])
    if not arguments["use_peft"]:
        arguments = {key: value for key, value in arguments.items() if not key.startswith("lora_")}
    further = values.pop("training.trainer_kwargs", None) or {}
    if not isinstance(further, Mapping):
        raise InputError(f"{name}: training.trainer_kwargs: found {further!r}, expected keys and values")
    arguments |= further
    others = {key: value for key, value in values.items() if key not in _IDLE}
    file = read_renamed(
        partial(read_trl_values, name, {**arguments, **others}, trainer=_TRAINERS[trainer]),
        {target: key for key, (target, _) in _ARGUMENTS.items()},
    )
    if is_quantised:
        file.note("peft.q_lora: PEFT's preparation, other weights than those in 4 bits in fp32, is left out")
    return file


def _sharding(values: Mapping[str, Any], checkpoints: Any) -> dict[str, Any]:
    """The Trainer's arguments of FSDP, which makes the checkpoints of blocks itself."""
    config = {key: values.get(f"fsdp.{key}", default) for key, default in _FSDP.items()} | {
        "version": 1,
        "offload_params": values.get("fsdp.cpu_offload", False),
        "activation_checkpointing": checkpoints,
    }
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config, "gradient_checkpointing": False}
