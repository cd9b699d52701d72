"""The keys of TRL's files beside TrainingArguments: ModelConfig's, and those of its trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.programs.huggingface.adapters import AdapterKeys
from zsim.programs.huggingface.arguments import ARGUMENT_KEYS, SILENT_ARGUMENTS
from zsim.programs.trainer.keys import CONFIG_MAPPINGS as TRAINER_MAPPINGS
from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program_key import ProgramKey, declare

RELEASE = "TRL 1.10"
ADAPTERS = AdapterKeys(
    "lora_r", 16, "lora_alpha", 32, "lora_dropout", 0.05, "lora_target_modules", "lora_modules_to_save",
    "lora_target_parameters",
)  # fmt: skip
# Keys of trainers by which a file without the name of its script is told to be one's.
PPO_MARKS = ("num_ppo_epochs", "reward_model_path", "reward_model_name_or_path")
GRPO_MARKS = ("num_generations", "max_completion_length", "reward_funcs", "num_iterations")
KTO_MARKS = ("desirable_weight", "undesirable_weight")
CPO_MARKS = ("simpo_gamma", "cpo_alpha")
SIMPO_MARKS = ("gamma_beta_ratio",)  # princeton-nlp/SimPO, scripts/simpo_config.py
REWARD_MARKS = ("center_rewards_coefficient",)
PREFERENCE_MARKS = (
    "beta", "max_prompt_length", "precompute_ref_log_probs", "reference_free", "rpo_alpha", "ld_alpha",
    "sync_ref_model", "ref_model_mixup_alpha", "f_divergence_type",
)  # fmt: skip
PREFERENCE_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair",
    "aot_unpaired", "discopop", "apo_zero", "apo_down", "sigmoid_norm", "sft", "simpo", "kto",
    "apo_zero_unpaired",
)  # fmt: skip

_OWN = (
    ProgramKey("accelerate_config", str, "Accelerate's file, or its name, of the command `trl`"),
    *declare(
        ("model_name_or_path", str, "the model, as an id of the Hub or a folder", "model"),
        ("dtype", str, "the type in which weights are loaded", "training.stored_dtype"),
        ("torch_dtype", str, "the same, in older releases", "training.stored_dtype"),
        ("attn_implementation", str, "the kernels of attention", "training.attention"),
        ("use_peft", bool, "whether adapters are trained"),
        ("lora_r", int, "rank of the adapters", "training.lora.rank"),
        ("lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
        ("lora_target_modules", (str, list), "modules that are adapted", "training.lora.targets"),
        ("lora_target_parameters", (str, list), "stacked weights that are adapted",
         "training.lora.target_parameters"),
        ("lora_modules_to_save", list, "modules that are trained whole", "training.lora.modules_to_save"),
        ("load_in_4bit", bool, "whether frozen products are in 4 bits", "training.lora.quantized"),
        ("use_bnb_nested_quant", bool, "whether their scales are quantised too",
         "training.lora.double_quantization"),
        ("max_length", int, "tokens of a sequence", "training.sequence_length"),
        ("max_seq_length", int, "the same, in older releases", "training.sequence_length"),
        ("max_seq_len", int, "the same, of scripts that pass it on", "training.sequence_length"),
        ("model_max_length", int, "the same, of scripts that pass it on", "training.sequence_length"),
        ("block_size", int, "the same, of scripts that cut texts to it", "training.sequence_length"),
        ("use_liger", bool, "Liger's kernels, until 0.16", "training.liger"),
        ("packing", bool, "whether documents fill sequences", "training.lengths"),
        ("num_processes", int, "GPUs, of `accelerate launch`, to which `trl` passes it on", "gpus"),
        ("num_machines", int, "nodes, likewise", "nodes"),
        ("mixed_precision", str, "products without bf16 and fp16, likewise", "training.precision"),
        ("dynamo_backend", str, "torch.compile, likewise", "training.compile"),
        ("loss_type", (str, list), "the loss, which tells the trainer as well"),
        ("beta", float, "weight of a preference loss, which tells the trainer"),
        ("precompute_ref_log_probs", bool, "whether DPO's reference has run before", "training.reference"),
        ("max_prompt_length", int, "tokens of a prompt, of GRPO", "training.sequence_length"),
        ("max_completion_length", int, "tokens of a completion", "training.sequence_length"),
        ("num_generations", int, "completions of a prompt, which tell GRPO", "rl.samples_per_prompt"),
        ("generation_batch_size", int, "completions of a rollout", "rl.prompts_per_step"),
        ("steps_per_generation", int, "micro-batches of a rollout", "rl.prompts_per_step"),
        ("num_iterations", int, "passes over a rollout", "rl.epochs"),
        ("use_vllm", bool, "whether vLLM makes completions, without which the update is simulated"),
        ("vllm_mode", str, "where it runs", "rl.placement"),
        ("vllm_gpu_memory_utilization", float, "part of the memory that it takes",
         "rl.rollout.gpu_memory_utilization"),
        ("vllm_tensor_parallel_size", int, "ranks of a replica", "rl.rollout.tensor"),
        ("vllm_enable_sleep_mode", bool, "whether it sleeps while training", "rl.offload.sleep_level"),
        ("vllm_importance_sampling_correction", bool, "a correction that needs old log-probabilities",
         "rl.old_logprobs"),
    ),
    ProgramKey("sync_ref_model", bool, "a reference that follows the model", treatment="noted"),
    ProgramKey("bnb_4bit_quant_type", str, "the type of the 4 bits, of which all have the same bytes"),
    ProgramKey("load_in_8bit", bool, "whether frozen products are in 8 bits", "training.lora.quantized"),
    ProgramKey("use_dora", bool, "DoRA, which norms every adapted weight", treatment="refused"),
    ProgramKey(
        "activation_offloading", bool, "whether checkpoints are on the host until backward",
        "training.checkpoint_offload",
    ),
    ProgramKey("use_unsloth", bool, "unsloth's kernels outside SFT", treatment="refused"),
    ProgramKey("router_aux_loss_coef", float, "the loss of balanced experts", treatment="noted",
               neutral=(0.0, 0, 0.001)),
    ProgramKey("padding_free", bool, "batches without padding", treatment="noted"),
    ProgramKey("bnb_4bit_quant_storage", str, "the type that 4-bit weights are stored in", treatment="noted",
               neutral=("uint8",)),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {**ARGUMENT_KEYS, **{key.key: key for key in _OWN}}
SILENT = SILENT_ARGUMENTS | silent_keys(
    """
    temperature top_p top_k min_p repetition_penalty epsilon epsilon_high scale_rewards reference_free
    reward_funcs reward_weights mask_truncated_completions log_completions importance_sampling_level
    num_completions_to_print use_rslora lora_task_type dataset_mixture dataset_mixer datasets dataset
    columns chat_template_path pad_token eos_token truncation_mode shuffle_dataset packing_strategy
    pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss model_init_kwargs
    label_smoothing gamma_beta_ratio sft_weight disable_dropout rpo_alpha ld_alpha discopop_tau
    use_weighting f_divergence_type
    f_alpha_divergence_coef loss_weights desirable_weight undesirable_weight cpo_alpha simpo_gamma
    label_pad_token_id padding_value is_encoder_decoder bos_token ignore_bias_buffers
    preprocessing_num_workers data_files text_column streaming system_prompt benchmarks callbacks config
    test_split_size eos tool_* overwrite_hub_* vllm_* ref_model_*
    """
)
CONFIG_MAPPINGS = TRAINER_MAPPINGS

_ON_EIGHT = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 8}
_WRAPPED = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
# Accelerate's files that `--accelerate_config` has by name (trl/accelerate_configs/).
ACCELERATE_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", **_ON_EIGHT},
    "zero1": {
        "distributed_type": "DEEPSPEED", **_ON_EIGHT,
        "deepspeed_config": {"zero_stage": 1, "gradient_accumulation_steps": 1},
    },
    **{
        f"zero{stage}": {
            "distributed_type": "DEEPSPEED", **_ON_EIGHT, "deepspeed_config": {"zero_stage": stage},
        }
        for stage in (2, 3)
    },
    "fsdp1": {
        "distributed_type": "FSDP", **_ON_EIGHT,
        "fsdp_config": {
            "fsdp_version": 1, **_WRAPPED, "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": True, "fsdp_reshard_after_forward": "FULL_SHARD",
            "fsdp_use_orig_params": True,
        },
    },
    "fsdp2": {
        "distributed_type": "FSDP", **_ON_EIGHT,
        "fsdp_config": {"fsdp_version": 2, **_WRAPPED, "fsdp_reshard_after_forward": True},
    },
}  # fmt: skip
