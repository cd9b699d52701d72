"""How the Trainer shards: `deepspeed`, else `fsdp` with `fsdp_config`, else DDP.

Read in transformers 5.23 training_args.py, and trainer.py, which refuses `fsdp` beside `deepspeed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.accelerate.fsdp_keys import read_fsdp
from zsim.programs.accelerate.keys import SHARDING
from zsim.programs.huggingface.job import is_of_release_4
from zsim.reading import parse_toml
from zsim.specs.formats.config_file import load_file, locate_named_file
from zsim.specs.formats.file_values import FileValues

_ZERO_FILES = Path(__file__).parent / "zero_files.toml"
_WRAPPED_CLASS = "fsdp_transformer_layer_cls_to_wrap"  # an argument of its own until transformers 4
# A DeepSpeed JSON's keys that the Trainer compares with its own arguments, by their names in the programs.
_COMPARED = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
}

NO_ENGINE = (
    "names neither deepspeed nor fsdp, so DDP is simulated; where a launcher brings another strategy, "
    "give it (--set strategy.kind=fsdp2)"
)


def read_strategy(values: FileValues) -> None:
    """Write the strategy. Raises InputError for words of FSDP beside DeepSpeed."""
    if values.has("deepspeed") and values.get("deepspeed") is not False:
        if values.get("fsdp"):
            raise InputError(
                f"{values.file.name}: fsdp stands beside deepspeed, and the Trainer refuses both together; "
                "expected one of them"
            )
        _read_deepspeed(values)
    elif words := values.get("fsdp"):
        _read_sharding(values, words)
    else:
        _read_ddp(values)


def _read_ddp(values: FileValues) -> None:
    values.file.settings["strategy.kind"] = "ddp"
    if values.has("ddp_bucket_cap_mb"):
        values.read("ddp_bucket_cap_mb")
    if values.has("fsdp_config"):
        values.file.note("fsdp_config: no effect without fsdp, so the strategy is DDP")
        return
    values.file.note(NO_ENGINE, is_first=True)


def _read_deepspeed(values: FileValues) -> None:
    """Read the JSON, whose "auto" zsim fills from these arguments, as the Trainer does. One of the program's
    own is known where it is not here.
    """
    file, config = values.file, values.get("deepspeed")
    file.settings["strategy.kind"] = "deepspeed"
    shipped = _zero_files(file.program)
    if isinstance(config, str) and "/" not in config and config in shipped:
        config = shipped[config]
    elif isinstance(config, str):
        names = [name for name in shipped if "/" not in name]
        expected = "a DeepSpeed JSON" + (f", or one of {', '.join(names)}" if names else "")
        try:
            path = locate_named_file(config, Path(file.name).parent, f"{file.name}: deepspeed", expected)
        except InputError:
            name = f"{Path(config).parent.name}/{Path(config).name}"
            if name not in shipped:
                raise
            file.note(f"deepspeed: {config} is not here, so it is taken as {values.title} has it")
            config = shipped[name]
        else:
            file.settings["strategy.config"] = str(path)
            _refuse_mismatch(values, load_file(path), str(path))
            return
    if not isinstance(config, Mapping):
        raise values.error("deepspeed", "the path of a DeepSpeed JSON, or its keys and values")
    file.settings["strategy.config_name"] = file.name
    file.settings["strategy.config"] = dict(config)
    _refuse_mismatch(values, config, "deepspeed")


def _zero_files(program: str | None) -> Mapping[str, Mapping[str, Any]]:
    """The content of the JSONs that a program has, by the end of their paths (zero_files.toml)."""
    tables = parse_toml(_ZERO_FILES.read_text(), _ZERO_FILES)
    files: dict[str, Mapping[str, Any]] = {}
    for name, entry in tables.get(program or "", {}).items():
        content = {**tables["all"], **files.get(entry.pop("like", ""), {})}
        if "bf16" in entry:
            content["bf16"] = {"enabled": entry.pop("bf16")}
        content |= {key: entry.pop(key) for key in [*entry] if key.startswith("zero_")}
        files[name] = {**content, "zero_optimization": {**content.get("zero_optimization", {}), **entry}}
    return files


def _refuse_mismatch(values: FileValues, config: Any, where: str) -> None:
    """Raises InputError where the JSON and the arguments differ, by the arguments' own names.

    The Trainer refuses the same (transformers 5.23 integrations/deepspeed.py, `trainer_config_finalize`).
    """
    for json_key, names in _COMPARED.items():
        json_value = config.get(json_key) if isinstance(config, Mapping) else None
        for name in names:
            value = values.get(name) if values.has(name) else None
            if isinstance(json_value, int | float) and isinstance(value, int | float) and json_value != value:
                raise InputError(
                    f"{where}: {json_key}: found {json_value:g}, but {name} of {values.file.name} is "
                    f'{value:g}; make them equal, or write "auto" in the JSON'
                )


def _read_sharding(values: FileValues, words: Any) -> None:
    """Read `fsdp` with `fsdp_config`, wrapped by block and of version 2 by default, of 1 before release 5."""
    file = values.file
    config = values.get("fsdp_config", {})
    if isinstance(config, str):
        where = f"{file.name}: fsdp_config"
        config = load_file(locate_named_file(config, Path(file.name).parent, where, "keys of FSDP"))
    if not isinstance(config, Mapping):
        raise InputError(f"{file.name}: fsdp_config: expected keys and values, found {config!r}")
    keys = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    keys.setdefault("version", 1 if is_of_release_4(values, _WRAPPED_CLASS) else 2)
    keys.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if "cpu_offload" in keys:
        keys["offload_params"] = keys.pop("cpu_offload")
    if keys.get("activation_cpu_offload") and values.file.program == "ms-swift":  # its trainers/arguments.py
        raise values.lack(
            "fsdp_config", "all activations on the host until backward (activation_cpu_offload)"
        )
    _read_fsdp_words(values, words, keys)
    idle = [key for key in keys if key.startswith("xla")]
    for key in idle:
        if keys.pop(key):
            raise NotSimulatedError(f"{file.name}: fsdp_config.{key}: zsim does not simulate XLA's FSDP")
    read_fsdp(file, keys, {})


def _read_fsdp_words(values: FileValues, fsdp: Any, keys: dict[str, Any]) -> None:
    """Read `fsdp: "full_shard auto_wrap offload"`, the spelling before version 5."""
    name = values.file.name
    words = (
        fsdp.replace(",", " ").split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    )
    for word in words:
        if str(word).upper() in SHARDING:
            if str(keys["version"]) == "1":
                keys.setdefault("reshard_after_forward", str(word).upper())
            elif str(word).lower() in ("full_shard", "shard_grad_op"):
                keys.setdefault("reshard_after_forward", str(word).lower() == "full_shard")
            else:
                raise InputError(f"{name}: fsdp: '{word}' needs fsdp_config.version 1")
        elif word == "offload":
            keys["offload_params"] = True
        elif word not in ("auto_wrap", "true", "True"):
            strategies = ", ".join(SHARDING).lower()
            raise InputError(f"{name}: fsdp: found '{word}', expected {strategies}, offload or auto_wrap")
