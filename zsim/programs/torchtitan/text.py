"""torchtitan's settings as text: a TOML, a saved JSON or a command line. All become dotted keys and
values.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean, unreadable_reason
from zsim.programs.torchtitan.keys import KEYS, REGISTERED, RENAMED, SECTIONS
from zsim.reading import parse_json, parse_toml, parse_whole_number, read_text
from zsim.specs.cluster.files import read_toml

_CONFIG_FILE = "job.config_file"


def read_settings(config: str) -> tuple[str, dict[str, Any], bool]:
    """(name for messages, dotted settings in today's spelling, whether they are 0.3.0's)."""
    words = [config] if os.path.isfile(config) else _words(config)
    shape, options = _split_launcher(words)
    command_line_settings = dict(_parse_options(options))
    file = command_line_settings.pop(_CONFIG_FILE, None)
    file_words = [word for word in words if word.endswith((".toml", ".json")) and not word.startswith("--")]
    if file is None and file_words and file_words[0] == words[0]:
        file = file_words[0]
    module, registered = command_line_settings.pop("module", None), command_line_settings.pop("config", None)
    settings: dict[str, Any] = {}
    is_new = module is not None or registered is not None
    if is_new:
        settings |= _registered_settings(str(module), str(registered))
    if file is not None:
        if not os.path.exists(file):
            raise InputError(f"{file}: no such file; expected a torchtitan TOML")
        is_new = file.endswith(".json")
        data = _read(Path(file))
        settings |= dict(_flatten(_add_checkpointing_mode(data) if is_new else data))
    name = file or ("torchtitan" if module is None else f"torchtitan {registered}")
    settings |= command_line_settings
    return str(name), {**_rename_keys(settings, str(name)), **shape}, is_new


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(f"'{command[:60]}': cannot be read as a command line: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        return read_toml(path)
    try:
        data = parse_json(read_text(path), path)
    except OSError as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object at the top")
    return data


def _add_checkpointing_mode(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Name the checkpointing policy by its keys, since 0.3 saves it without its name."""
    policy = saved.get("activation_checkpoint", {})
    if not isinstance(policy, Mapping):
        mode = "none"
    elif "memory_budget" in policy:
        mode = "memory_budget"
    else:
        mode = "selective" if "force_recompute_mm_shapes_by_fqns" in policy else "full"
    settings = {key: value for key, value in saved.items() if value is not None}
    return {**settings, "activation_checkpoint": {**(policy or {}), "mode": mode}}


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _registered_settings(module: str, config: str) -> dict[str, Any]:
    if (module, config) not in REGISTERED:
        choices = [f"--module {name} --config {function}" for name, function in REGISTERED]
        raise InputError(
            f"torchtitan: --module {module} --config {config}: zsim knows {', '.join(choices)}; of any "
            "other, "
            "give the JSON that --debug.save_config_file writes"
        )
    return {"model.name": module, **REGISTERED[module, config]}


def _rename_keys(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings in today's spelling. Raises InputError for two different values of one setting."""
    current_settings: dict[str, Any] = {}
    for key, value in settings.items():
        current_key = RENAMED.get(key, key)
        if current_key in current_settings and current_settings[current_key] != value:
            raise InputError(
                f"{name}: '{key}' is the old name of '{current_key}', and both are there; give one"
            )
        current_settings[current_key] = value
    return current_settings


def _split_launcher(words: list[str]) -> tuple[dict[str, int], list[str]]:
    """(nodes and GPUs as torchrun or NGPU gives them, the options that are left for torchtitan). CONFIG_FILE
    is among the latter.
    """
    options: list[str] = []
    counts: dict[str, int] = {}
    pending_option = ""
    for word in words:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if pending_option:
            counts[pending_option], pending_option = _count(word, pending_option), ""
        elif key in ("__nproc_per_node", "__nnodes"):
            if value:
                counts[key] = _count(value, key)
            else:
                pending_option = key
        elif key == "NGPU":
            counts["__nproc_per_node"] = _count(value, key)
        elif key == "CONFIG_FILE":
            options.append(f"--{_CONFIG_FILE}={value}")
        else:
            options.append(word)
    if "__nproc_per_node" not in counts:
        return {}, options
    nodes = counts.get("__nnodes", 1)
    return {"nodes": nodes, "gpus": nodes * counts["__nproc_per_node"]}, options


def _count(text: str, option: str) -> int:
    count = parse_whole_number(text)
    if not count:
        excerpt = text[:40]
        raise InputError(f"{option.replace('__', '--')}: found '{excerpt}', expected a number of at least 1")
    return count


def _parse_options(words: list[str]) -> Iterator[tuple[str, Any]]:
    """`--section.key=value`, `--section.key value`, `--section.flag`, `section:choice` -> settings."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.startswith("activation-checkpoint:"):
            yield "activation_checkpoint.mode", word.partition(":")[2].replace("-", "_")
            continue
        if not word.startswith("--"):
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            is_flag = index == len(words) or words[index].startswith("--") or ":" in words[index]
            section, _, last = key.rpartition(".")
            if is_flag:
                is_off = bool(section) and last.startswith("no_")
                yield (f"{section}.{last[3:]}", False) if is_off else (key, True)
                continue
            value = words[index]
            index += 1
        _check_section(key)
        yield key, _value(key, value)


def _check_section(key: str) -> None:
    section, dot, _ = key.partition(".")
    if dot and section not in SECTIONS and section != "quantize":
        raise InputError(f"--{key}: torchtitan has no section '{section}'{did_you_mean(section, SECTIONS)}")


def _value(key: str, text: str) -> Any:
    declared_key = KEYS.get(RENAMED.get(key, key))
    if declared_key is not None and declared_key.type is list:
        return [entry for entry in text.strip("[]").replace('"', "").split(",") if entry]
    if text in ("True", "False"):
        return text == "True"
    try:
        return parse_toml(f"value = {text}", f"--{key}")["value"]
    except tomllib.TOMLDecodeError:
        return text
