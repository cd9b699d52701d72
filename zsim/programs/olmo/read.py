"""OLMo's YAML -> settings of an experiment: FSDP1 with OLMo's wrapping, or DDP.

Read in OLMo 59a53e3f: `olmo/config.py`, `olmo/model.py` (`get_fsdp_wrap_policy`), `scripts/train.py`,
`olmo/train.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.olmo.keys import CHECKPOINTS, IDLE, KEYS
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"}
_WRAPPINGS = ("by_block", "by_block_and_size")
# ModelConfig's, where the file leaves a field out.
_MODEL: dict[str, Any] = {
    "d_model": 768, "n_heads": 12, "n_layers": 12, "mlp_ratio": 4, "activation_type": "swiglu",
    "block_type": "sequential", "rope": False, "alibi": False, "layer_norm_type": "default",
    "include_bias": True, "attention_layer_norm": False, "norm_after": False, "weight_tying": True,
    "embedding_size": 50304, "max_sequence_length": 1024, "clip_qkv": None,
}  # fmt: skip


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in an OLMo YAML.

    Raises InputError for values that OLMo refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="olmo")
    keys = FileValues.nested(file, data, KEYS, IDLE)
    keys.read("device_train_microbatch_size", "optimizer.name")
    file.global_batch_size = keys.get("global_train_batch_size", 512)
    word = keys.get("precision", "amp_bf16")
    file.settings |= {
        "training.precision": _PRECISIONS[word],
        "training.sequence_length": keys.get("model.max_sequence_length", 1024),
        "training.gradient_clipping": keys.get("max_grad_norm", 0.0),
        "training.attention": "flash2" if keys.get("model.flash_attention", False) else "flash",
        "training.cross_entropy": "fused" if keys.get("fused_loss", False) else "eager",
    }
    if keys.get("optimizer.name", "adamw") == "adamw":
        file.defaults["training.optimizer_implementation"] = "foreach"  # torch's own choice (optim.py)
    if keys.has("compile"):
        file.settings["training.compile"] = True
        keys.ignore("compile")
    _read_checkpointing(keys)
    _read_sharding(keys)
    _read_model(keys)
    keys.finish()
    return file


def _read_checkpointing(keys: FileValues) -> None:
    strategy = keys.get("activation_checkpointing")
    if strategy in (None, False):
        return
    strategy = "whole_layer" if strategy is True else strategy
    if strategy not in CHECKPOINTS:
        raise NotSimulatedError(
            f"{keys.file.name}: activation_checkpointing: zsim does not simulate '{strategy}' of OLMo's; "
            f"expected {', '.join(CHECKPOINTS)}"
        )
    keys.file.settings["training.activation_checkpointing"] = "full"
    if CHECKPOINTS[strategy] > 1:
        keys.file.settings["training.checkpoint_every"] = CHECKPOINTS[strategy]


def _read_sharding(keys: FileValues) -> None:
    """FSDP reduces after every micro-batch (`train_batch` has no `no_sync` of FSDP's)."""
    file, settings = keys.file, keys.file.settings
    strategy = keys.get("distributed_strategy", "fsdp")
    if strategy == "ddp":
        settings["strategy.kind"] = "ddp"
        file.defaults["strategy.no_sync"] = keys.get("ddp.grad_sync_mode", "batch") == "batch"
        keys.ignore("fsdp")
        return
    if strategy != "fsdp":
        raise NotSimulatedError(
            f"{file.name}: distributed_strategy: found '{strategy}', expected fsdp or ddp"
        )
    settings["strategy.kind"] = "fsdp1"
    keys.read("fsdp.sharding_strategy")
    wrapping = keys.get("fsdp.wrapping_strategy")
    if wrapping is None:
        settings["strategy.wrapping"] = "none"
    elif wrapping in _WRAPPINGS:
        settings["strategy.wrapping"] = "huggingface"
        if wrapping == "by_block_and_size":
            file.note(
                "fsdp.wrapping_strategy by_block_and_size: embedding and head are simulated in one unit"
            )
    else:
        raise NotSimulatedError(
            f"{file.name}: fsdp.wrapping_strategy: zsim does not simulate '{wrapping}'; expected "
            f"{', '.join(_WRAPPINGS)}"
        )
    precision, mode = settings["training.precision"], keys.get("fsdp.precision", "pure")
    if mode not in ("pure", "mixed"):
        raise InputError(f"{file.name}: fsdp.precision: found '{mode}', expected pure or mixed")
    settings |= {
        "strategy.param_dtype": precision,
        "strategy.reduce_dtype": precision if mode == "pure" else "fp32",
    }
    file.defaults["strategy.no_sync"] = False
    if replicas := keys.get("fsdp.hybrid_sharding_num_model_replicas"):
        settings["strategy.replicate"] = replicas


def _read_model(keys: FileValues) -> None:
    """OLMo's blocks, as transformers has them: Llama's, or OLMo 2's with norms behind and on queries and "
    "keys."""
    config = keys.table("model")
    values = {key: config.get(key, default) for key, default in _MODEL.items()}
    has_llama_parts = (
        values["activation_type"] == "swiglu"
        and values["block_type"] in ("sequential", "llama")
        and values["rope"]
    )
    is_olmo2 = values["norm_after"] and values["attention_layer_norm"] and values["layer_norm_type"] == "rms"
    is_olmo1 = not values["norm_after"] and not values["attention_layer_norm"]
    if not has_llama_parts or values["include_bias"] or values["alibi"] or not (is_olmo2 or is_olmo1):
        keys.file.note("model: such blocks of OLMo's are not read: give the model with --model")
        return
    hidden = values["d_model"]
    width = config.get("mlp_hidden_size") or values["mlp_ratio"] * hidden  # of gate and up together
    model = {
        "hidden_size": hidden,
        "num_hidden_layers": values["n_layers"],
        "num_attention_heads": values["n_heads"],
        "num_key_value_heads": config.get("n_kv_heads") or values["n_heads"],
        "intermediate_size": width // 2,
        "vocab_size": values["embedding_size"],
        "max_position_embeddings": values["max_sequence_length"],
        "tie_word_embeddings": values["weight_tying"],
        "attention_bias": False,
        "hidden_act": "silu",
        "_name_or_path": "olmo",
    }
    keys.file.defaults["model"] = {**model, "model_type": "olmo2" if is_olmo2 else "llama"}
    if is_olmo1 and values["layer_norm_type"] != "rms":
        keys.file.note(f"model.layer_norm_type {values['layer_norm_type']}: norms are simulated as RMS norms")
