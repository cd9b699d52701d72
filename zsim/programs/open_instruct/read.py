"""Open Instruct's SFT and DPO -> an experiment, by the arguments of TRL's trainers that say the same.

Read in Open Instruct of August 2026 (e6c3044a): open_instruct/finetune.py and dpo_tune_cache.py, which has
the reference's log-probabilities before it trains. The launcher says the type of products and the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.programs.trl.read import read_values as read_trl_values
from zsim.specs.formats.config_file import TrainingFile, read_renamed
from zsim.specs.formats.file_values import silent_keys

_PREFERENCE = ("loss_type", "dpo_loss_type", "beta", "dpo_beta")
_ROLLOUTS = ("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "vllm_num_engines")
# Open Instruct's keys -> (TRL's, Open Instruct's default).
_ARGUMENTS: Mapping[str, tuple[str, Any]] = {
    "per_device_train_batch_size": ("per_device_train_batch_size", 8), "max_seq_length": ("max_length", None),
    "gradient_checkpointing": ("gradient_checkpointing", False), "max_train_steps": ("max_steps", -1),
    "use_liger_kernel": ("use_liger_kernel", False), "use_lora": ("use_peft", False), "bf16": ("bf16", False),
    "lora_rank": ("lora_r", 64), "lora_alpha": ("lora_alpha", 16), "lora_dropout": ("lora_dropout", 0.1),
    "packing": ("padding_free", False), "load_balancing_loss": ("router_aux_loss_coef", False),
}  # fmt: skip
_TARGETS = ["q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]
_AUTO = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
_ZERO_3 = {
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
}  # fmt: skip
_IDLE = silent_keys(
    """
    beta dpo_beta label_smoothing dpo_label_smoothing exp_name do_not_randomize_output_dir use_slow_tokenizer
    with_tracking checkpointing_steps keep_last_n_checkpoints timeout overwrite_cache final_lr_ratio add_bos
    clean_checkpoints_at_end verbose load_balancing_weight train_file chat_template_name max_train_samples
    clip_grad_norm mixer_list* tokenizer_* cache_* try_* hf_* gs_* oe_* offload_optimizer offload_param
    zero_hpz_partition_size
    """
)


def trainer_in_name(path: Path) -> str:
    """TRL's trainer that does what a script does."""
    return {"finetune": "hf", "dpo_tune_cache": "dpo"}.get(path.stem, "")


def read_values(name: str, data: Mapping[str, Any], trainer: str = "") -> TrainingFile:
    """The settings in Open Instruct's values by key. `trainer` is the script's. Without it, the keys tell.

    Raises InputError for values that it refuses, NotSimulatedError for its reinforcement learning.
    """
    if key := next((key for key in _ROLLOUTS if key in data), None):
        raise NotSimulatedError(
            f"{name}: {key}: is of Open Instruct's reinforcement learning, which zsim does not read; "
            "expected a file of finetune.py or dpo_tune_cache.py"
        )
    values = {key: value for key, value in data.items() if value is not None}
    trainer = trainer or ("dpo" if any(key in values for key in _PREFERENCE) else "hf")
    trainer = "simpo" if "simpo" in [values.pop(key, "") for key in _PREFERENCE[:2]] else trainer
    arguments = {target: values.pop(key, default) for key, (target, default) in _ARGUMENTS.items()}
    epochs, norm_key, stage = 2, "clip_grad_norm", None
    if trainer != "hf":
        epochs, norm_key, stage = 1, "max_grad_norm", values.pop("zero_stage", None)
        arguments["max_length"] = arguments["max_length"] or 4096
        budget = values.pop("activation_memory_budget", 1)
        is_without = arguments["use_peft"] and not values.get("use_qlora")  # adapters of plain weights
        if isinstance(budget, int | float) and budget < 1 and not is_without:
            arguments["gradient_checkpointing"] = True
    norm = values.pop(norm_key, 0)
    if stage is None:
        arguments["max_grad_norm"] = norm if not isinstance(norm, int | float) or norm > 0 else 0
    else:
        arguments["deepspeed"] = _zero_json(stage, values)
    is_quantised = bool(values.pop("use_qlora", False))
    optimizer = "adamw_torch_fused" if values.pop("fused_optimizer", True) else "adamw_torch"
    paged = f"paged_adamw_{8 if values.pop('use_8bit_optimizer', False) else 32}bit"
    synchronisation = {"sync_each_batch": values.pop("sync_each_batch", False)}
    arguments |= {
        "dtype": "auto" if arguments["use_liger_kernel"] and not is_quantised else "bfloat16",
        "attn_implementation": "flash_attention_2" if values.pop("use_flash_attn", True) else "eager",
        "optim": paged if values.pop("dpo_use_paged_optimizer", False) or is_quantised else optimizer,
        "accelerator_config": {"gradient_accumulation_kwargs": synchronisation},
        "num_train_epochs": values.pop("num_train_epochs", values.pop("num_epochs", epochs)),
        "precompute_ref_log_probs": trainer == "dpo" or None,
        **dict.fromkeys(("load_in_4bit", "use_bnb_nested_quant"), is_quantised or None),
        "lora_target_modules": _TARGETS,
    }
    if not arguments["use_peft"]:
        arguments = {key: value for key, value in arguments.items() if not key.startswith("lora_")}
    arguments |= {key: value for key, value in values.items() if key not in _IDLE}
    file = read_renamed(
        partial(read_trl_values, name, arguments, trainer=trainer),
        {target: key for key, (target, _) in _ARGUMENTS.items()}
        | {"max_grad_norm": norm_key, "TRL": "Open Instruct"},
    )
    file.program, file.clips_in_loop = "open-instruct", True
    file.settings.pop("training.lora.dtype", None)  # TRL's cast
    if is_quantised:  # prepare_model_for_kbit_training, which a launcher with another engine takes back
        file.settings["training.lora.preparation"] = "peft"
    return file


def _zero_json(stage: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON that dpo_tune_cache.py makes of its flags (`build_deepspeed_config`)."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= _ZERO_3 | {"zero_hpz_partition_size": values.get("zero_hpz_partition_size", 8)}
    offloads = [key for key in ("offload_optimizer", "offload_param") if values.get(key)]
    zero |= {key: {"device": "cpu", "pin_memory": True} for key in offloads}
    return {**dict.fromkeys(_AUTO, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": zero}
