"""The keys of litgpt's files (0.5.13, 26857050: finetune/*.py, pretrain.py, args.py), behind "
"their section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

RELEASE = "litgpt 0.5.13"
TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": ("lm_head",),
}

_READ = (
    *declare(
        ("checkpoint_dir", str, "the model that is fine-tuned", "model"),
        ("model_name", str, "the model that is pre-trained", "model"),
        ("precision", str, "the type of products, and of weights (-true)", "training.precision"),
        ("quantize", str, "bnb.nf4 and bnb.nf4-dq: frozen products in 4 bits", "training.lora.quantized"),
        ("devices", (int, str), "GPUs of a node", "gpus"),
        ("num_nodes", int, "nodes", "nodes"),
        ("lora_r", int, "rank of the adapters", "training.lora.rank"),
        ("lora_alpha", float, "scale of the adapters, over the rank", "training.lora.alpha"),
        ("lora_dropout", float, "dropout before an adapter", "training.lora.dropout"),
    ),
    *(
        ProgramKey(key, bool, f"whether {' and '.join(names)} are adapted", "training.lora.targets")
        for key, names in TARGETS.items()
    ),
    ProgramKey(
        "train.micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size",
        is_plain=True, tuned=(), source=RELEASE + ", args.py",
    ),
    *declare(
        ("train.global_batch_size", int, "sequences of a step of all ranks", "training.global_batch_size"),
        ("train.max_seq_length", int, "tokens of a sequence", "training.sequence_length"),
        ("train.max_norm", float, "norm that gradients are clipped to", "training.gradient_clipping"),
        ("optimizer", (str, dict), "the optimizer", "training.optimizer"),
        ("optimizer.class_path", str, "the optimizer", "training.optimizer"),
        ("train.epochs", float, "passes over a data set whose size is said", "cost.epochs"),
    ),
    ProgramKey("model_config", dict, "another model's shapes", treatment="refused"),
    ProgramKey("train.tie_embeddings", bool, "an embedding that is the head as well", treatment="noted"),
    ProgramKey("adapter_prompt_length", int, "LLaMA-Adapter", treatment="refused"),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _READ}
SILENT = silent_keys(
    """
    out_dir resume logger_name seed access_token tokenizer_dir initial_checkpoint_dir data
    train.save_interval train.log_interval train.lr_warmup_steps train.lr_warmup_fraction train.max_tokens
    train.max_steps train.max_time train.min_lr data.* eval.* log.* optimizer.init_args.*
    """
)
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
