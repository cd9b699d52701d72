"""llm-foundry's YAML -> settings of an experiment: composer's FSDP1, or DDP without `fsdp_config`.

Read in llm-foundry 8c8dd48f (`utils/config_utils.py`, `models/mpt/`) and composer 0.32.1
(`utils/parallelism.py`, `distributed/mosaic_parallelism.py`: `get_mixed_precision`,
`distributed/dist_strategy.py`: `prepare_fsdp_module`, `core/state.py`: `_create_device_mesh`).

Micro-batches: `ddp_sync_context` leaves every model alone that is not DDP's, so FSDP reduces gradients after
each of them. DDP reduces at the last one (`DDPSyncStrategy.SINGLE_AUTO_SYNC`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.llm_foundry.keys import IDLE, KEYS
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

# `mixed_precision` -> the types that are gathered and reduced, None for that of the products.
_MIXED_PRECISIONS: dict[str, tuple[str | None, str | None]] = {
    "PURE": (None, None), "DEFAULT": (None, "fp32"), "FULL": ("fp32", "fp32"),
}  # fmt: skip
_PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32"}
# Words for a type in a table of `mixed_precision`, and in `master_weights_dtype`.
_DTYPES = {
    **dict.fromkeys(("float32", "torch.float32", "fp32"), "fp32"),
    **dict.fromkeys(("float16", "torch.float16", "half", "fp16", "amp", "amp_fp16"), "fp16"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "bfloat", "bf16", "amp_bf16"), "bf16"),
}
# A strategy without replicas <-> the one with them. composer takes that which the degrees need.
_HYBRIDS = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
_UPPER = ("sharding_strategy", "backward_prefetch")  # words that composer takes in small letters too
# MPTConfig's, where the file leaves a field out.
_MPT = {
    "d_model": 2048, "n_heads": 16, "n_layers": 24, "expansion_ratio": 4, "vocab_size": 50368,
    "no_bias": False, "learned_pos_emb": True, "tie_word_embeddings": True, "resid_pdrop": 0.0,
    "emb_pdrop": 0.0,
}  # fmt: skip
_MPT_ATTENTION = {"alibi": False, "attn_pdrop": 0.0}
# Blocks that zsim's MPT does not have.
_OTHER_MPT = (
    "ffn_config.ffn_type", "attn_config.attn_type", "attn_config.rope", "attn_config.qk_ln",
    "attn_config.qk_gn",
    "attn_config.kv_n_heads", "block_overrides", "fc_type", "norm_type", "head_dim",
)  # fmt: skip


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in an llm-foundry YAML.

    Raises InputError for values that llm-foundry refuses, NotSimulatedError for what zsim does not simulate.
    """
    file = TrainingFile(name, program="llm-foundry")
    keys = FileValues.nested(file, data, KEYS, IDLE)
    keys.read("max_seq_len", "optimizer.name")
    if keys.get("optimizer.name", "decoupled_adamw") == "decoupled_adamw":
        # Composer's updates one tensor at a time (optim/decoupled_weight_decay.py)
        file.defaults["training.optimizer_implementation"] = "for_loop"
    word = keys.get("precision", "amp_bf16")
    if word not in _PRECISIONS:
        raise NotSimulatedError(f"{file.name}: precision: zsim does not simulate '{word}' of composer's")
    file.settings["training.precision"] = _PRECISIONS[word]
    _read_batch(keys)
    _read_sharding(keys)
    _read_model(keys)
    clipping = keys.get("algorithms.gradient_clipping.clipping_threshold", 0.0)
    if keys.get("algorithms.gradient_clipping.clipping_type", "norm") != "norm":
        raise NotSimulatedError(f"{file.name}: algorithms.gradient_clipping: zsim clips by norm only")
    file.settings["training.gradient_clipping"] = clipping
    file.defaults["training.expandable_segments"] = keys.get("expandable_segments", True)
    if keys.has("compile_config"):
        file.settings["training.compile"] = True
        keys.ignore("compile_config")
    if keys.has("tp_config"):
        raise NotSimulatedError(
            f"{file.name}: tp_config: zsim does not simulate composer's tensor parallelism"
        )
    algorithms = [
        name for name in keys.values if name.startswith("algorithms.") and "gradient_clipping" not in name
    ]
    if algorithms:
        file.note(
            f"algorithms that are left out: {', '.join(sorted({name.split('.')[1] for name in algorithms}))}"
        )
        keys.ignore(*algorithms)
    keys.finish()
    return file


def _read_batch(keys: FileValues) -> None:
    file = keys.file
    file.global_batch_size = keys.get("global_train_batch_size")
    per_rank, micro = keys.get("device_train_batch_size"), keys.get("device_train_microbatch_size", "auto")
    if micro == "auto":
        raise NotSimulatedError(
            f"{file.name}: device_train_microbatch_size: 'auto' tries batches on the GPU until one fits; "
            "give a number, or --set training.micro_batch_size"
        )
    if not isinstance(micro, int) or micro < 1:
        raise InputError(
            f"{file.name}: device_train_microbatch_size: found {micro!r}, expected a whole number of at "
            f"least 1"
        )
    file.settings["training.micro_batch_size"] = micro
    if file.global_batch_size is None and per_rank is not None:
        if per_rank % micro:
            raise InputError(f"{file.name}: device_train_batch_size: expected a multiple of {micro}")
        file.settings["training.gradient_accumulation_steps"] = per_rank // micro


def _read_sharding(keys: FileValues) -> None:
    file, settings = keys.file, keys.file.settings
    if not keys.has("fsdp_config"):
        settings["strategy.kind"] = "ddp"
        return
    settings["strategy.kind"] = "fsdp1"
    for key in (f"fsdp_config.{name}" for name in _UPPER):
        if isinstance(word := keys.values.get(key), str):
            keys.values[key] = word.upper()
    keys.read(
        "fsdp_config.sharding_strategy", "fsdp_config.backward_prefetch", "fsdp_config.forward_prefetch",
        "fsdp_config.limit_all_gathers", "fsdp_config.activation_checkpointing",
    )  # fmt: skip
    _read_types(keys)
    file.defaults["strategy.no_sync"] = False
    if settings.get("training.activation_checkpointing") == "full":
        settings["training.checkpoint_is_reentrant"] = keys.get(
            "fsdp_config.activation_checkpointing_reentrant", True
        )
    keys.ignore("fsdp_config.activation_checkpointing_reentrant")
    keys.refuse("fsdp_config.activation_cpu_offload", "checkpoints on the host of composer's")
    keys.refuse("fsdp_config.cpu_offload", "composer's offloading, which composer itself refuses")
    _read_degrees(keys)


def _read_types(keys: FileValues) -> None:
    """The types that are gathered and reduced.

    A type that is left out of a table is the parameters' own, and torch's FSDP reduces in the type that it
    gathers where it is told no other.
    """
    file, settings, key = keys.file, keys.file.settings, "fsdp_config.mixed_precision"
    precision = settings["training.precision"]
    stored = _dtype(keys, "model.master_weights_dtype")
    if stored in ("bf16", "fp16"):  # llm-foundry puts a table without a `param_dtype` in place of the word
        settings["training.stored_dtype"] = stored
        keys.ignore(key)
        reduced = _dtype(keys, f"{key}.reduce_dtype")
        settings |= {"strategy.param_dtype": stored, "strategy.reduce_dtype": reduced or stored}
        return
    if keys.has(f"{key}.param_dtype", f"{key}.reduce_dtype", f"{key}.buffer_dtype"):
        gathered = _dtype(keys, f"{key}.param_dtype") or "fp32"
        reduced = _dtype(keys, f"{key}.reduce_dtype") or gathered
        settings |= {"strategy.param_dtype": gathered, "strategy.reduce_dtype": reduced}
        return
    mode = keys.get(key, "DEFAULT").upper()
    if mode not in _MIXED_PRECISIONS:
        raise InputError(f"{file.name}: {key}: found '{mode}', expected {', '.join(_MIXED_PRECISIONS)}")
    low, high = _MIXED_PRECISIONS[mode]
    settings |= {"strategy.param_dtype": low or precision, "strategy.reduce_dtype": high or precision}


def _dtype(keys: FileValues, key: str) -> str | None:
    word = keys.get(key)
    if word is not None and word not in _DTYPES:
        raise InputError(f"{keys.file.name}: {key}: found '{word}', expected float32, float16 or bfloat16")
    return None if word is None else _DTYPES[word]


def _read_degrees(keys: FileValues) -> None:
    """Replicas. composer's mesh has a dimension of them only where the file has their degree."""
    file, settings, key = keys.file, keys.file.settings, "fsdp_config.data_parallel_replicate_degree"
    replicas = keys.get(key)
    keys.ignore("fsdp_config.data_parallel_shard_degree")  # the GPUs over the replicas
    sharding = settings.get("strategy.sharding_strategy", "FULL_SHARD")
    if replicas is None:
        plain = {hybrid: plain for plain, hybrid in _HYBRIDS.items()}.get(sharding, sharding)
        if plain != sharding:
            file.note(f"fsdp_config.sharding_strategy: {sharding} without {key} is {plain} to composer")
            settings["strategy.sharding_strategy"] = plain
    elif replicas < 1:
        raise NotSimulatedError(
            f"{file.name}: {key}: found {replicas}, which composer counts from the GPUs; give the number of "
            "replicas"
        )
    else:
        settings["strategy.sharding_strategy"] = _HYBRIDS.get(sharding, sharding)
        settings["strategy.replicate"] = replicas


def _read_model(keys: FileValues) -> None:
    file = keys.file
    name = keys.get("model.name", "mpt_causal_lm")
    if name == "hf_causal_lm":
        keys.read_model("model.pretrained_model_name_or_path")
        _read_adapters(keys)
        if keys.get("model.use_flash_attention_2", False):
            file.settings["training.attention"] = "flash2"
        return
    if name != "mpt_causal_lm":
        raise NotSimulatedError(
            f"{file.name}: model.name: zsim does not read the models of '{name}'; expected mpt_causal_lm or "
            f"hf_causal_lm"
        )
    if file.settings["strategy.kind"] == "fsdp1":  # `_fsdp_wrap` of the children in modeling_mpt.py
        file.note(
            "MPT's embeddings, last norm and head, each its own unit there, are simulated in the root's"
        )
    implementation = keys.get("model.attn_config.attn_impl", "flash")
    file.settings["training.attention"] = "math" if implementation == "torch" else "flash2"
    if (loss := keys.get("model.loss_fn", "fused_crossentropy")) == "fused_crossentropy":
        file.defaults["training.cross_entropy"] = "fused"
    elif loss != "torch_crossentropy":
        raise NotSimulatedError(f"{file.name}: model.loss_fn: zsim does not simulate '{loss}'")
    config = keys.table("model")
    paths = [f"{path}." for path, value in config.items() if value is not None]
    mark = next((key for key in _OTHER_MPT if any(path.startswith(f"{key}.") for path in paths)), None)
    if mark is not None:
        file.note(f"model.{mark}: such a model is not read: give it with --model")
        return
    model: dict[str, Any] = {key: config.get(key, default) for key, default in _MPT.items()}
    ratio, hidden = model["expansion_ratio"], model["d_model"]
    inner = config.get("ffn_config.ffn_hidden_size")
    if isinstance(ratio, int | float) and isinstance(hidden, int):  # layers/ffn.py, resolve_ffn_hidden_size
        product = hidden * model.pop("expansion_ratio")
        width = int(product) if float(product).is_integer() else product
        model["ffn_hidden_size"] = width if inner is None else inner
    model["max_seq_len"] = config.get("max_seq_len", keys.get("max_seq_len", 2048))
    model["attn_config"] = {
        key: config.get(f"attn_config.{key}", default) for key, default in _MPT_ATTENTION.items()
    }
    if not model["no_bias"]:
        model["no_bias"] = True
        file.note("model.no_bias false: the model is simulated without its biases")
    file.defaults["model"] = {**model, "model_type": "mpt", "_name_or_path": "mpt"}


def _read_adapters(keys: FileValues) -> None:
    rank, alpha = keys.get("model.peft_config.r"), keys.get("model.peft_config.lora_alpha", 8)
    kind = keys.get("model.peft_config.peft_type", "LORA")
    targets = keys.get("model.peft_config.target_modules")
    if rank is None:
        return
    if str(kind).upper() != "LORA":
        raise NotSimulatedError(
            f"{keys.file.name}: model.peft_config.peft_type: zsim does not simulate '{kind}'"
        )
    keys.file.settings |= {"training.lora.rank": rank, "training.lora.alpha": alpha}
    if targets is not None:
        keys.file.settings["training.lora.targets"] = targets
