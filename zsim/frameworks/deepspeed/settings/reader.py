"""From a JSON object to checked blocks: "auto", old spellings, unknown keys, keys of other releases.

Dotted keys of an experiment reach into the JSON too (`DeepSpeedJson`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zsim.errors import InputError, NotSimulatedError, nearest
from zsim.frameworks.deepspeed.settings.keys import Key, keys_of
from zsim.frameworks.deepspeed.settings.release import Release
from zsim.frameworks.deepspeed.settings.schema import FILE_KEYS, UNSIMULATED_KEYS, DeepSpeedFile
from zsim.frameworks.deepspeed.settings.text import drop_comments, load_object
from zsim.frameworks.deepspeed.settings.zero_schema import (
    ZERO_KEYS,
    OffloadOptimizerBlock,
    ZeroBlock,
    json_key,
)
from zsim.specs.experiment.overrides import ConfigFile, set_dotted_key
from zsim.specs.messages import raise_input_error

_ZERO = "zero_optimization"
_NEARLY = 0.8  # likeness of an unknown key to one of DeepSpeed's from which it is a slip
# Blocks in which DeepSpeed, or Hugging Face for it, takes the word "auto".
_AUTO_BLOCKS = (_ZERO, "bf16", "fp16", "aio", "activation_checkpointing", "tensor_parallel", "data_types")
# (first release, table in `zero_optimization` or "", key) of keys added later, in the order of the releases.
_LATER_KEYS = sorted(
    (
        (key.since, parent, bare)
        for parent, keys in (("", ZERO_KEYS), ("offload_optimizer", keys_of(OffloadOptimizerBlock)))
        for bare, key in keys.items()
        if any(key.since)
    ),
    key=lambda entry: entry[0],
)
_AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A checked file."""

    where: str
    file: DeepSpeedFile
    autos: frozenset[str]
    """The remaining keys that said "auto", as the file spells them."""
    filled: frozenset[str]
    """The dotted keys (bare names) that said "auto" and have their value from Hugging Face's rule."""
    notes: list[str] = field(default_factory=list)

    @property
    def zero(self) -> ZeroBlock:
        return self.file.zero_optimization or ZeroBlock.model_construct()

    def says(self, key: str) -> bool:
        """Whether the file gives `key` (dotted, bare names) a value."""
        block: Any = self.file
        *parents, last = key.split(".")
        for parent in parents:
            block = getattr(block, parent)
            if block is None:
                return False
        return last in block.model_fields_set and key not in self.filled


def read_deepspeed_file(
    source: str | Path | Mapping[str, Any],
    *,
    name: str | None,
    release: Release,
    hidden_size: int,
    lenient: bool,
) -> Reading:
    """Read and check a DeepSpeed JSON.

    Raises InputError for text, keys and values that DeepSpeed of that release would refuse.
    """
    where, data = load_object(source, name)
    notes: list[str] = []
    drop_comments(data, where, notes)
    _refuse_foreign_file(data, where)
    _refuse_removed(data, where, release, notes, lenient)
    _rename_old_spellings(data, where, notes)
    _drop_ignored(data, where, notes)
    _refuse_newer(data, where, release, notes, lenient)
    autos = _remove_autos(data)
    filled = _fill_autos(data, autos, hidden_size)
    file = _validate(data, where, notes, lenient)
    return Reading(where, file, frozenset(autos), frozenset(filled), notes)


def require_deepspeed_file(path: str | Path) -> None:
    """Raises InputError for a file that is not JSON, or that belongs to another program."""
    where, data = load_object(path, None)
    _refuse_foreign_file(data, where)


# Keys of other programs' files -> where zsim takes these.
_FOREIGN_KEYS = {
    "model_type": " (a model's config.json? --model takes it)",
    "peft_type": " (PEFT's adapter_config.json? training.lora.config takes it)",
}


def _refuse_foreign_file(data: Mapping[str, Any], where: str) -> None:
    """Raises InputError for a JSON without any key that DeepSpeed has or had, or that is spelt nearly so."""
    known_keys = {*DeepSpeedFile.model_fields, "bfloat16"}
    hint = next((owner for key, owner in _FOREIGN_KEYS.items() if key in data), "")
    if not data or any(key in known_keys or (nearest(key, known_keys) and not hint) for key in data):
        return
    first_keys = ", ".join(f"'{key}'" for key in list(data)[:4])
    raise InputError(
        f"{where}: read as a DeepSpeed JSON, but none of its keys is DeepSpeed's: found {first_keys}{hint}; "
        "expected train_micro_batch_size_per_gpu, zero_optimization, bf16 ..."
    )


def _refuse_removed(
    data: MutableMapping[str, Any], where: str, release: Release, notes: list[str], lenient: bool
) -> None:
    zero = data.get(_ZERO)
    blocks: list[tuple[str, MutableMapping[str, Any], Mapping[str, Key]]] = [("", data, FILE_KEYS)]
    if isinstance(zero, dict):
        blocks.append((f"{_ZERO}.", zero, ZERO_KEYS))
    for prefix, block, keys in blocks:
        for key in [key for key in block if key in keys and release.number >= keys[key].until]:
            major, minor, patch = keys[key].until
            message = f"{where}: {prefix}{key}: removed from DeepSpeed in {major}.{minor}.{patch}"
            behavior = UNSIMULATED_KEYS.get(key) if not prefix else None
            if not lenient and behavior is not None and behavior.is_on(block[key]):
                raise NotSimulatedError(
                    f"{message}, and zsim does not simulate {behavior.what} of any release; "
                    "expected the key to be left out"
                )
            if not lenient:
                raise InputError(
                    f"{message}, and {release} refuses it; expected the key to be left out, or [strategy] "
                    f"version '{major}.{minor}.{patch - 1}'"
                )
            notes.append(f"{message}; ignored")
            del block[key]


def _drop_ignored(data: MutableMapping[str, Any], where: str, notes: list[str]) -> None:
    """Remove keys at the top that DeepSpeed does not look for, with a note.

    Its `DeepSpeedConfig` looks up each key by name and leaves the others alone (0.19.6,
    deepspeed/runtime/config.py: `_initialize_params`). `deepspeed.initialize` looks up `data_parallel_size`
    (deepspeed/__init__.py). A key that is spelt nearly as one of DeepSpeed's stays, for an error that says
    so.
    """
    known_keys = list(DeepSpeedFile.model_fields)
    ignored_keys = [
        key
        for key in data
        if key not in known_keys
        and not difflib.get_close_matches(key.lower(), known_keys, n=1, cutoff=_NEARLY)
        and not any(known_key.startswith(key.lower()) for known_key in known_keys)
    ]
    for key in ignored_keys:
        del data[key]
    if ignored_keys:
        notes.append(f"{where}: no effect, since DeepSpeed reads no such key: {', '.join(ignored_keys)}")


def _rename_old_spellings(data: MutableMapping[str, Any], where: str, notes: list[str]) -> None:
    """Renames DeepSpeed's deprecated keys and converts a boolean `zero_optimization`.

    Raises InputError if both spellings of a key are given, as `stage3_x` and `x`.
    """
    if "bfloat16" in data:
        if data.get("bf16") is not None:
            raise InputError(f"{where}: bfloat16: is the old name of 'bf16', and both are there; give one")
        data["bf16"] = data.pop("bfloat16")
    zero = data.get(_ZERO)
    if isinstance(zero, bool):
        stage = 1 if zero else 0
        notes.append(f"{where}: {_ZERO}: {str(zero).lower()} is the old way to say stage {stage}")
        data[_ZERO] = zero = {"stage": stage}
        if "allgather_size" in data and stage:
            zero["allgather_bucket_size"] = data["allgather_size"]
    data.pop("allgather_size", None)
    if not isinstance(zero, dict):
        return
    for bare, info in ZeroBlock.model_fields.items():
        if info.alias and info.alias in zero and bare in zero:
            raise InputError(f"{where}: {_ZERO}: '{bare}' and '{info.alias}' are the same key; give one")
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.get(old) is not None:
            _refuse_both(zero, old, new, where)
            if _is_true(zero[old], f"{where}: {_ZERO}.{old}"):
                zero[new] = {"device": "cpu"}
            notes.append(f"{where}: {_ZERO}.{old}: deprecated, read as '{new}'")
        zero.pop(old, None)
    old, new = "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"
    if old in zero:
        _refuse_both(zero, old, _spelling(zero, "gather_16bit_weights_on_model_save"), where)
        zero[new] = zero.pop(old)
        notes.append(f"{where}: {_ZERO}.{old}: deprecated, read as '{new}'")
    if zero.pop("cpu_offload_use_pin_memory", None) is not None:
        notes.append(
            f"{where}: {_ZERO}.cpu_offload_use_pin_memory: deprecated and read by nothing; no effect"
        )


def _spelling(zero: Mapping[str, Any], bare: str) -> str:
    """The spelling of a key that this file uses, or the usual spelling if it has neither."""
    return bare if bare in zero else json_key(bare)


def _refuse_both(zero: Mapping[str, Any], old: str, new: str, where: str) -> None:
    if zero.get(new) is not None:
        raise InputError(f"{where}: {_ZERO}.{old}: deprecated for '{new}', and both are there; give '{new}'")


def _is_true(value: Any, where: str) -> bool:
    if value == "auto":
        return False
    if not isinstance(value, bool):
        raise InputError(f"{where}: found {value!r}, expected true or false")
    return value


def _remove_autos(data: MutableMapping[str, Any]) -> set[str]:
    """Remove every "auto". Returns the keys that said it."""
    autos: set[str] = set()

    def take(block: MutableMapping[str, Any], prefix: str) -> None:
        for key in list(block):
            if block[key] == "auto":
                autos.add(prefix + key)
                del block[key]
            elif isinstance(block[key], dict):
                take(block[key], f"{prefix}{key}.")

    for key in _AUTO_KEYS:
        if data.get(key) == "auto":
            autos.add(key)
            del data[key]
    for key in _AUTO_BLOCKS:
        if isinstance(data.get(key), dict):
            take(data[key], f"{key}.")
    return autos


def _fill_autos(data: MutableMapping[str, Any], autos: set[str], hidden_size: int) -> set[str]:
    """Fill the sizes that Hugging Face derives from the model's hidden size for "auto" (transformers 5.23).

    Returns their dotted keys.
    """
    zero = data.get(_ZERO)
    if not isinstance(zero, dict):
        return set()
    sizes = {"reduce_bucket_size": hidden_size * hidden_size}
    if zero.get("stage") == 3:
        sizes["prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        sizes["param_persistence_threshold"] = 10 * hidden_size
    filled: set[str] = set()
    for bare, size in sizes.items():
        for spelling in (bare, json_key(bare)):
            if f"{_ZERO}.{spelling}" in autos:
                zero[spelling] = size
                autos.discard(f"{_ZERO}.{spelling}")
                filled.add(f"{_ZERO}.{bare}")
    return filled


def _validate(data: dict[str, Any], where: str, notes: list[str], lenient: bool) -> DeepSpeedFile:
    while True:
        try:
            return DeepSpeedFile.model_validate(data)
        except ValidationError as error:
            unknown = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
            if not (lenient and unknown):
                raise_input_error(error, where, DeepSpeedFile)
            for location in unknown:
                block: Any = data
                for part in location[:-1]:
                    block = block[part]
                del block[location[-1]]
                path = ".".join(str(part) for part in location)
                notes.append(f"{where}: {path}: unknown to DeepSpeed; ignored")


def _refuse_newer(
    data: Mapping[str, Any], where: str, release: Release, notes: list[str], lenient: bool
) -> None:
    zero = data.get(_ZERO)
    if not isinstance(zero, dict):
        return
    for since, parent, bare in _LATER_KEYS:
        block = zero.get(parent) if parent else zero
        if release.number >= since or not isinstance(block, dict):
            continue
        spelling = _spelling(block, bare)
        if spelling not in block:
            continue
        path = f"{_ZERO}.{parent}.{spelling}" if parent else f"{_ZERO}.{spelling}"
        first_release = ".".join(str(part) for part in since)
        message = f"{where}: {path}: DeepSpeed {release} does not know it; it came with {first_release}"
        if not lenient:
            raise InputError(message)
        notes.append(f"{message}; ignored")
        del block[spelling]


_CONFIG = "strategy.config."
# With a stage alone, batch size and precision are the experiment's, or as Hugging Face fills "auto".
_STAGE_DEFAULTS = {"train_micro_batch_size_per_gpu": "auto"}
_PRECISION_BLOCKS = ("bf16", "fp16")


class DeepSpeedJson(ConfigFile):
    noun = "DeepSpeed's JSON"
    keys = ("strategy.stage", "strategy.config")

    def change(
        self, table: dict[str, Any], changes: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        base = table.get("config")
        if base is None:
            config: dict[str, Any] = dict(_STAGE_DEFAULTS)
            if not any(key.split(".")[0] in (*_PRECISION_BLOCKS, "bfloat16") for key in changes):
                config |= {block: {"enabled": "auto"} for block in _PRECISION_BLOCKS}
            if table.get("stage") is not None:
                config["zero_optimization"] = {"stage": table["stage"]}
            name = "DeepSpeed config"
        else:
            name, config = load_object(base, table.get("config_name"))
        for key, value in changes.items():
            path = _existing_spelling(config, key)
            set_dotted_key(config, path, value, prefix=_CONFIG)
            if key == "zero_optimization.stage" and "strategy.stage" not in overrides:
                table.pop("stage", None)
        return {**table, "config": config, "config_name": name}

    def require(self, path: str | Path) -> None:
        require_deepspeed_file(path)


CONFIG_FILE = DeepSpeedJson()


def _existing_spelling(config: Mapping[str, Any], key: str) -> str:
    """`key` in the spelling that the JSON already uses: `stage3_x` or `x`, `bfloat16` or `bf16`."""
    block, _, subkey = key.partition(".")
    if block in ("bf16", "bfloat16"):
        return f"{'bfloat16' if 'bfloat16' in config else 'bf16'}.{subkey}" if subkey else block
    zero = config.get(block)
    if block != "zero_optimization" or not isinstance(zero, Mapping):
        return key
    for bare, info in ZeroBlock.model_fields.items():
        if subkey in (bare, info.alias):
            json_spelling = next((spelling for spelling in (bare, info.alias) if spelling in zero), subkey)
            return f"{block}.{json_spelling}"
    return key
