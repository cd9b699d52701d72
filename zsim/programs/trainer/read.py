"""Hugging Face's TrainingArguments as a YAML or JSON (transformers 5.23: training_args.py) -> an experiment.

Files of programs on top of the Trainer (TRL, LLaMA-Factory) have the same keys besides their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, unreadable_reason
from zsim.programs.accelerate.fsdp_keys import read_fsdp
from zsim.programs.accelerate.keys import SHARDING
from zsim.reading import parse_json, read_text
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.formats.training_file import TrainingFile

_LENGTHS = ("max_length", "max_seq_length", "cutoff_len")  # of TRL, older TRL, LLaMA-Factory
_OPTIMIZERS = {"adamw_torch_fused": "fused", "adamw_torch": "foreach"}
_READ = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "optim",
    "gradient_checkpointing", "activation_checkpointing", "torch_compile", "use_liger_kernel", "deepspeed",
    "fsdp", "fsdp_config", "ddp_bucket_cap_mb", *_LENGTHS,
)  # fmt: skip


def _load(path: Path) -> Any:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    if path.suffix.lower() != ".json":
        return load_yaml(text, str(path))
    try:
        return parse_json(text, path)
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None


def read_training_arguments(path: str) -> TrainingFile:
    """The settings in a file of TrainingArguments.

    Raises InputError for impossible values, NotSimulatedError for other optimizers.
    """
    data = _load(Path(path))
    file = TrainingFile(path, program="transformers")
    _read_batch(file, data)
    precision = "bf16" if data.get("bf16") else "fp16" if data.get("fp16") else "fp32"
    file.settings["training.precision"] = precision
    if data.get("gradient_checkpointing") or data.get("activation_checkpointing"):
        file.settings["training.activation_checkpointing"] = "full"
    if data.get("torch_compile"):
        file.settings["training.compile"] = True
    if data.get("use_liger_kernel"):
        file.settings["training.liger"] = True
    folder = Path(path).parent
    if data.get("deepspeed"):
        _read_deepspeed(file, data["deepspeed"], folder)
    else:
        _read_optimizer(file, data)
        _read_sharding(file, data, folder)
    unread_keys = [str(key) for key in data if key not in _READ]
    if unread_keys:
        file.note(f"not read: {', '.join(unread_keys)}")
    return file


def _read_batch(file: TrainingFile, data: Mapping[str, Any]) -> None:
    for key, target, default in (
        ("per_device_train_batch_size", "training.micro_batch_size", 8),
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps", 1),
    ):
        value = data.get(key, default)
        if value == "auto":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{file.name}: {key}: found {value!r}, expected a whole number of at least 1")
        (file.settings if key in data else file.defaults)[target] = value
    table = file.settings if "max_grad_norm" in data else file.defaults
    table["training.gradient_clipping"] = _number(file, "max_grad_norm", data.get("max_grad_norm", 1.0))
    length = next((data[key] for key in _LENGTHS if isinstance(data.get(key), int)), None)
    if length is not None:
        file.settings["training.sequence_length"] = length


def _number(file: TrainingFile, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{file.name}: {key}: found {value!r}, expected a number")
    return float(value)


def _read_optimizer(file: TrainingFile, data: Mapping[str, Any]) -> None:
    name = data.get("optim", "adamw_torch_fused")
    if str(name) not in _OPTIMIZERS:
        raise NotSimulatedError(
            f"{file.name}: optim: zsim does not simulate '{name}' yet; expected {', '.join(_OPTIMIZERS)}"
        )
    table = file.settings if "optim" in data else file.defaults
    table["training.optimizer_implementation"] = _OPTIMIZERS[name]


def _read_deepspeed(file: TrainingFile, config: Any, folder: Path) -> None:
    """Read the JSON, whose "auto" zsim fills from these arguments, as the Trainer does."""
    file.settings["strategy.kind"] = "deepspeed"
    if isinstance(config, Mapping):
        file.settings["strategy.config_name"] = file.name
        file.settings["strategy.config"] = dict(config)
        return
    sibling = folder / str(config)
    file.settings["strategy.config"] = str(sibling if os.path.isfile(sibling) else config)


def _read_sharding(file: TrainingFile, data: Mapping[str, Any], folder: Path) -> None:
    """Read `fsdp` with `fsdp_config`, by default version 2 and wrapped by block. Without `fsdp` the strategy
    is DDP.
    """
    fsdp = data.get("fsdp")
    if not fsdp:
        file.settings["strategy.kind"] = "ddp"
        if data.get("ddp_bucket_cap_mb"):
            file.settings["strategy.bucket_cap_mb"] = _number(
                file, "ddp_bucket_cap_mb", data["ddp_bucket_cap_mb"]
            )
        return
    config = data.get("fsdp_config") or {}
    if isinstance(config, str):
        sibling = folder / config
        config = _load(sibling if os.path.isfile(sibling) else Path(config))
    if not isinstance(config, Mapping):
        raise InputError(f"{file.name}: fsdp_config: expected keys and values, found {config!r}")
    keys = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    keys.setdefault("version", 2)
    keys.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if "cpu_offload" in keys:
        keys["offload_params"] = keys.pop("cpu_offload")
    _read_fsdp_words(file, fsdp, keys)
    idle = [key for key in keys if key.startswith("xla")]
    for key in idle:
        if keys.pop(key):
            raise NotSimulatedError(f"{file.name}: fsdp_config.{key}: zsim does not simulate XLA's FSDP")
    read_fsdp(file, keys, {})


def _read_fsdp_words(file: TrainingFile, fsdp: Any, keys: dict[str, Any]) -> None:
    """Read `fsdp: "full_shard auto_wrap offload"`, the spelling before version 5."""
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    for word in words:
        if str(word).upper() in SHARDING:
            if str(keys["version"]) == "1":
                keys.setdefault("reshard_after_forward", str(word).upper())
            elif str(word).lower() in ("full_shard", "shard_grad_op"):
                keys.setdefault("reshard_after_forward", str(word).lower() == "full_shard")
            else:
                raise InputError(f"{file.name}: fsdp: '{word}' needs fsdp_config.version 1")
        elif word == "offload":
            keys["offload_params"] = True
        elif word not in ("auto_wrap", "true", "True"):
            strategies = ", ".join(SHARDING).lower()
            raise InputError(
                f"{file.name}: fsdp: found '{word}', expected {strategies}, offload or auto_wrap"
            )
