"""Accelerate's and the Trainer's FSDP keys -> FSDP1 or FSDP2, as `accelerate launch` 1.15.0 passes them
on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, NotSimulatedError, check_choice, did_you_mean
from zsim.programs.accelerate.keys import FSDP_KEYS, KEYS, PARALLELISM, SHARDING
from zsim.programs.torchtitan.keys import ROTATE_METHODS
from zsim.reading import parse_whole_number
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program_key import ProgramKey

_WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_IDLE = (
    "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type", "fsdp_sync_module_states",
    "fsdp_use_orig_params", "fsdp_transformer_layer_cls_to_wrap",
)  # fmt: skip
_OLD_PREFETCH = "fsdp_backward_prefetch_policy"
_IGNORED_IN_FSDP2 = ("fsdp_backward_prefetch", "fsdp_sharding_strategy", "fsdp_limit_all_gathers")


def read_fsdp(file: TrainingFile, config: Mapping[str, Any], parallelism: Mapping[str, Any]) -> None:
    """Write the strategy into `file`.

    As the launcher allows, keys may lack the prefix `fsdp_`.
    """
    keys = {key if str(key).startswith("fsdp_") else f"fsdp_{key}": value for key, value in config.items()}
    if _OLD_PREFETCH in keys:  # its name until Accelerate 0.25, which took both until 0.34
        keys.setdefault("fsdp_backward_prefetch", keys.pop(_OLD_PREFETCH))
        file.note(f"{_OLD_PREFETCH}: read as fsdp_backward_prefetch; from Accelerate 1.0 on it has no effect")
    note_idle_keys(file, "fsdp_config: ", keys, _IDLE)
    note_unknown_keys(file, "fsdp_config: ", keys, (*FSDP_KEYS, *_IDLE))
    if keys.get("fsdp_ignored_modules"):
        raise NotSimulatedError(f"{file.name}: fsdp_ignored_modules: zsim shards every module")
    if _flag(file, keys, "fsdp_activation_checkpointing_offload"):
        raise NotSimulatedError(
            f"{file.name}: fsdp_activation_checkpointing_offload: zsim does not simulate checkpoints that "
            "FSDP2 keeps on the host yet"
        )
    _read_plain(file, keys, "fsdp_activation_checkpointing")
    file.defaults["strategy.no_sync"] = True  # `accelerator.accumulate` and the Trainer
    precision = file.settings.get("training.precision", "fp32")
    low_dtype = "bf16" if precision == "fp8" else precision
    file.settings |= {"strategy.param_dtype": low_dtype, "strategy.reduce_dtype": low_dtype}
    version = str(keys.get("fsdp_version", 1))
    if version == "1":
        _read_fsdp1(file, keys)
    elif version == "2":
        _read_fsdp2(file, keys, parallelism)
    else:
        raise InputError(f"{file.name}: fsdp_version: found {version}, expected 1 or 2")


def note_idle_keys(file: TrainingFile, block: str, data: Mapping[str, Any], idle: tuple[str, ...]) -> None:
    """Add one note for the keys that have no effect on a step."""
    idle_keys = [key for key in data if key in idle]
    if idle_keys:
        file.note(f"{block}no effect on a step: {', '.join(idle_keys)}")


def note_unknown_keys(
    file: TrainingFile, block: str, data: Mapping[str, Any], valid_keys: tuple[str, ...]
) -> None:
    """Add a note for each key that the launcher does not know and so ignores."""
    for key in data:
        if key not in valid_keys:
            file.note(f"{block}no effect: Accelerate knows no '{key}'{did_you_mean(str(key), valid_keys)}")


def _read_fsdp1(file: TrainingFile, keys: Mapping[str, Any]) -> None:
    settings = file.settings
    settings["strategy.kind"] = "fsdp1"
    reshard = keys.get("fsdp_reshard_after_forward")
    strategy = _word(
        file, "fsdp_sharding_strategy", keys.get("fsdp_sharding_strategy", "FULL_SHARD"), SHARDING
    )
    if reshard is not None and "fsdp_sharding_strategy" not in keys:
        reshard_strategy = _word(file, "fsdp_reshard_after_forward", reshard, SHARDING)
        if reshard_strategy != strategy:
            file.note(
                f"fsdp_reshard_after_forward {reshard_strategy}: no effect: `accelerate launch` also passes "
                "fsdp_sharding_strategy, FULL_SHARD by default, which wins; give fsdp_sharding_strategy"
            )
    _read_plain(
        file,
        keys,
        "fsdp_sharding_strategy",
        "fsdp_backward_prefetch",
        "fsdp_forward_prefetch",
        "fsdp_limit_all_gathers",
        "fsdp_offload_params",
    )
    wrapping = _wrapping(file, keys)
    if wrapping == "NO_WRAP":
        settings["strategy.wrapping"] = "none"
    elif wrapping == "SIZE_BASED_WRAP":
        settings["strategy.wrapping"] = f"size:{keys.get('fsdp_min_num_params', 10**8)}"
        if "training.activation_checkpointing" in settings:
            file.note(
                "fsdp_activation_checkpointing: blocks are simulated as checkpointed, not wrapped modules"
            )


def _read_fsdp2(file: TrainingFile, keys: Mapping[str, Any], parallelism: Mapping[str, Any]) -> None:
    settings = file.settings
    settings["strategy.kind"] = "fsdp2"
    idle = [key for key in _IGNORED_IN_FSDP2 if key in keys]
    if idle:
        file.note(f"fsdp_config: no effect with fsdp_version 2: {', '.join(idle)}")
    if _flag(file, keys, "fsdp_forward_prefetch"):
        raise InputError(f"{file.name}: fsdp_forward_prefetch: Accelerate refuses it with fsdp_version 2")
    _read_plain(file, keys, "fsdp_reshard_after_forward", "fsdp_offload_params")
    wrapping = _wrapping(file, keys)
    if wrapping != "TRANSFORMER_BASED_WRAP":
        raise NotSimulatedError(
            f"{file.name}: fsdp_auto_wrap_policy: zsim does not simulate {wrapping} of FSDP2, only "
            "TRANSFORMER_BASED_WRAP"
        )
    file.defaults["strategy.wrapping"] = "torchtitan"
    file.note(
        "units as Accelerate 1.15 makes them (embedding alone; norm and head together); older ones leave "
        "both to the root: strategy.wrapping=huggingface"
    )
    _read_parallelism(file, parallelism)


def _read_parallelism(file: TrainingFile, parallelism: Mapping[str, Any]) -> None:
    """Read the sizes of `ParallelismConfig`, and refuse what its own checks refuse."""
    sizes = _sizes(file, parallelism)
    tensor, context, sequence = (sizes.pop(f"{name}_size", 1) for name in ("tp", "cp", "sp"))
    replicate, shard = sizes.pop("dp_replicate_size", 1), sizes.pop("dp_shard_size", 1)
    method = sizes.pop("cp_comm_strategy", "allgather")
    for key in sizes:
        if not key.startswith(("tp_", "cp_", "sp_")):
            raise InputError(f"{file.name}: parallelism_config: unknown key '{PARALLELISM}{key}'")
    if sequence > 1:
        raise InputError(
            f"{file.name}: {PARALLELISM}sp_size: found {sequence} with FSDP; its backend is DeepSpeed's "
            f"Ulysses: expected distributed_type DEEPSPEED, or {PARALLELISM}cp_size {sequence}"
        )
    if replicate > 1 and shard == 1:
        raise InputError(
            f"{file.name}: {PARALLELISM}dp_shard_size: found 1 with {replicate} replicas, which "
            "Accelerate refuses with fsdp_version 2; expected at least 2"
        )
    if tensor > 1 and shard == 1 and context == 1:
        raise InputError(
            f"{file.name}: {PARALLELISM}tp_size: found {tensor}, which leaves FSDP no ranks to shard over; "
            f"expected a {PARALLELISM}dp_shard_size above 1"
        )
    if not parallelism:
        return
    file.settings["strategy.replicate"] = replicate
    file.shard_degree = shard
    if tensor > 1:
        file.settings |= {"parallelism.tensor": tensor, "parallelism.sequence_parallel": False}
        file.note(
            f"{PARALLELISM}tp_size: simulated as torchtitan splits layers, without sequence parallelism"
        )
    if context > 1:
        if method not in ROTATE_METHODS:
            raise InputError(
                f"{file.name}: {PARALLELISM}cp_comm_strategy: found {method!r}, expected "
                f"{' or '.join(ROTATE_METHODS)}"
            )
        file.settings |= {
            "parallelism.context": context,
            "parallelism.context_method": ROTATE_METHODS[method],
        }


def _sizes(file: TrainingFile, parallelism: Mapping[str, Any]) -> dict[str, Any]:
    """The keys without their prefix. A size that is missing or null is 1."""
    sizes = {str(key).removeprefix(PARALLELISM): value for key, value in parallelism.items()}
    for key, value in sizes.items():
        if not key.endswith("_size"):
            continue
        name = f"parallelism_config: {PARALLELISM}{key}"
        if not isinstance(value, int | None) or isinstance(value, bool):
            raise InputError(f"{file.name}: {name}: found {value!r}, expected a whole number")
        if value is not None and value < 1:
            raise InputError(f"{file.name}: {name}: found {value}, expected at least 1")
        sizes[key] = value or 1
    return sizes


def read_sequence_parallelism(file: TrainingFile, parallelism: Mapping[str, Any]) -> None:
    """Write the degree of Ulysses into `file`.

    It is the one size of `ParallelismConfig` that DeepSpeed reads. Raises InputError for the sizes that it
    does not read.
    """
    sizes = _sizes(file, parallelism)
    for key in ("tp_size", "cp_size"):
        if sizes.get(key, 1) > 1:
            alternative = (
                "tensor_parallel.autotp_size in the JSON" if key == "tp_size" else f"{PARALLELISM}sp_size"
            )
            raise InputError(
                f"{file.name}: {PARALLELISM}{key}: found {sizes[key]} with DEEPSPEED, which reads none; "
                f"expected {alternative}"
            )
    if sizes.get("sp_size", 1) > 1:
        file.settings["parallelism.context"] = sizes["sp_size"]


def _read_plain(file: TrainingFile, values: Mapping[str, Any], *keys: str) -> None:
    """Write the settings of plain keys, as the launcher parses them."""

    def parse(key: ProgramKey, value: Any) -> Any:
        if key.type is bool:
            return _flag(file, {key.key: value}, key.key)
        return _word(file, key.key, value, tuple(key.values or ()))

    for key in keys:
        KEYS[key].read(file, values, parse)


def _wrapping(file: TrainingFile, keys: Mapping[str, Any]) -> str:
    return _word(file, "fsdp_auto_wrap_policy", keys.get("fsdp_auto_wrap_policy") or "NO_WRAP", _WRAPPING)


def _word(file: TrainingFile, key: str, value: Any, choices: tuple[str, ...]) -> str:
    """The choice that `value` names, or whose number it is (counted from 1)."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(choices):
        return choices[value - 1]
    word = str(value).upper().removeprefix("_")
    number = parse_whole_number(word)
    if number is not None and 1 <= number <= len(choices):
        return choices[number - 1]
    check_choice(f"{file.name}: {key}: found {value!r}, ", word, choices)
    return word


def _flag(file: TrainingFile, keys: Mapping[str, Any], key: str) -> bool:
    value = keys.get(key, False)
    word = str(value).lower()
    if word not in ("true", "false", "yes", "no", "1", "0"):
        raise InputError(f"{file.name}: {key}: found {value!r}, expected true or false")
    return word in ("true", "yes", "1")
