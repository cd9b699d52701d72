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
from zsim.programs.trainer.keys import KEYS, LENGTH_KEYS
from zsim.reading import parse_json, read_text
from zsim.specs.formats.program_key import ProgramKey
from zsim.specs.formats.safe_yaml import load_yaml
from zsim.specs.formats.training_file import TrainingFile


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
    for key in ("gradient_checkpointing", "activation_checkpointing", "torch_compile", "use_liger_kernel"):
        _read_plain(file, data, key)
    _read_checkpoint_options(file, data)
    folder = Path(path).parent
    if data.get("deepspeed"):
        _read_deepspeed(file, data["deepspeed"], folder)
    else:
        _read_plain(file, data, "optim")
        _read_sharding(file, data, folder)
    unread_keys = [str(key) for key in data if key not in KEYS]
    if unread_keys:
        file.note(f"not read: {', '.join(unread_keys)}")
    return file


def _read_checkpoint_options(file: TrainingFile, data: Mapping[str, Any]) -> None:
    """Read `gradient_checkpointing_kwargs`, whose `offload` is torch's `save_on_cpu` with pinned memory
    around every checkpoint (transformers 5.17, pull request 48444).
    """
    key = "gradient_checkpointing_kwargs"
    options = data.get(key) or {}
    if not isinstance(options, Mapping):
        raise InputError(f"{file.name}: {key}: expected keys and values, found {options!r}")
    if options.get("offload") and data.get("gradient_checkpointing"):
        file.settings["training.checkpoint_offload"] = "pinned"
    elif options.get("offload"):
        file.note(f"{key}.offload: no effect without gradient_checkpointing")
    unread_keys = [str(name) for name in options if name != "offload"]
    if unread_keys:
        file.note(f"not read: {key}.{', '.join(unread_keys)}")


def _read_batch(file: TrainingFile, data: Mapping[str, Any]) -> None:
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if data.get(key) != "auto":
            _read_plain(file, data, key)
    _read_plain(file, data, "max_grad_norm")
    length = next((data[key.key] for key in LENGTH_KEYS if isinstance(data.get(key.key), int)), None)
    if length is not None:
        file.settings["training.sequence_length"] = length


def _read_plain(file: TrainingFile, data: Mapping[str, Any], key: str) -> None:
    """Write the setting of a plain key.

    Raises InputError for another type, and NotSimulatedError for another word than those that are declared.
    """

    def parse(plain_key: ProgramKey, value: Any) -> Any:
        if plain_key.type is bool:
            return bool(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if plain_key.type is float and is_number:
            return float(value)
        if plain_key.type is float:
            raise InputError(f"{file.name}: {key}: found {value!r}, expected a number")
        if plain_key.type is int and not (is_number and isinstance(value, int) and value >= 1):
            raise InputError(f"{file.name}: {key}: found {value!r}, expected a whole number of at least 1")
        if plain_key.values is not None and str(value) not in plain_key.values:
            raise NotSimulatedError(
                f"{file.name}: {key}: zsim does not simulate '{value}' yet; expected "
                f"{', '.join(plain_key.values)}"
            )
        return value

    KEYS[key].read(file, data, parse)


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
            _read_plain(file, data, "ddp_bucket_cap_mb")
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
