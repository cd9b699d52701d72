"""torchtitan's settings as text: a TOML, a saved JSON or a command line. All become dotted keys and
values.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.programs.shell import ScriptCall, script_call
from zsim.programs.torchtitan.keys import KEYS, REGISTERED, RENAMED, SECTIONS
from zsim.programs.torchtitan.registry import locate_registry, read_registered
from zsim.reading import parse_toml, parse_whole_number, read_text
from zsim.specs.cluster.files import read_toml
from zsim.specs.formats.config_file import flatten, load_table, locate_named_file

_CONFIG_FILE = "job.config_file"
# What in a script starts torchtitan: its module, script or options, and no other of its folders.
_STARTS = re.compile(r"torchtitan[./][\w./]*train(?!_configs)|run_train\.sh|--job[._]|--module")
# Variables that run_train.sh reads -> the options that it makes of them.
_VARIABLES = {"CONFIG_FILE": _CONFIG_FILE, "MODULE": "module", "CONFIG": "config"}
_MICRO_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_STEP_TOKENS, _LENGTH = "training.num_tokens_per_train_step", "training.max_context_length"


def names_launch_script(words: list[str]) -> bool:
    """Whether the words start a script that starts torchtitan, with variables for it before."""
    call = script_call(words)
    if call is None or not os.path.isfile(call.path):
        return False
    try:
        text = read_text(call.path)
        return "torchtitan" in text and _STARTS.search(text) is not None
    except (OSError, UnicodeDecodeError, InputError):
        return False


def _script_words(call: ScriptCall) -> tuple[list[str], Path]:
    """(the command line that a launch script starts, the script's folder). Nothing of it is run."""
    script = call.run(call.parameters or ("",))
    commands = [command for command in script.commands if any("torchtitan" in word for word in command)]
    if not commands:
        raise InputError(f"{call.path}: starts no torchtitan: expected torchrun -m torchtitan.train ...")
    return [word for word in commands[-1] if word], Path(call.path).parent


def read_settings(config: str) -> tuple[str, dict[str, Any], bool]:
    """(name for messages, dotted settings in today's spelling, whether they are 0.3.0's)."""
    words = [config] if os.path.isfile(config) else _words(config)
    folder = Path()
    if names_launch_script(words) and (call := script_call(words)) is not None:
        words, folder = _script_words(call)
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
        settings |= _registered_settings(str(module), str(registered), folder)
    if file is not None:
        path = locate_named_file(file, folder, "torchtitan", "a torchtitan TOML")
        file, is_new = str(path), path.suffix == ".json"
        data = load_table(path) if is_new else read_toml(path)
        values = flatten(_add_checkpointing_mode(data) if is_new else data)
        settings |= {key: value for key, value in values if value is not None and value != {}}
    name = file or ("torchtitan" if module is None else f"torchtitan {registered}")
    settings = _sequences(settings | command_line_settings, str(name))
    return str(name), {**_rename_keys(settings, str(name)), **shape}, is_new


def _sequences(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Batches of tokens, as torchtitan counts them since 2026, as batches of sequences."""
    token_keys = (_MICRO_TOKENS, _STEP_TOKENS, _LENGTH)
    if not set(token_keys) & set(settings):
        return dict(settings)
    result = {key: value for key, value in settings.items() if key not in token_keys}
    length = settings.get(_LENGTH, settings.get("training.seq_len", 2048))
    micro = settings.get(_MICRO_TOKENS, 16384)
    step = settings.get(_STEP_TOKENS, -1)
    for key, tokens in ((_MICRO_TOKENS, micro), (_STEP_TOKENS, step)):
        is_count = isinstance(tokens, int) and isinstance(length, int) and length > 0
        if not is_count or (tokens != -1 and (tokens < length or tokens % length)):
            raise InputError(
                f"{name}: {key}: found {tokens!r}, expected a multiple of max_context_length, {length!r}: "
                "zsim simulates whole sequences"
            )
    result |= {"training.seq_len": length, "training.local_batch_size": micro // length}
    if step != -1:
        result["training.global_batch_size"] = step // length
    return result


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(f"'{command[:60]}': cannot be read as a command line: {error}") from None


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


def _registered_settings(module: str, config: str, folder: Path) -> dict[str, Any]:
    """The settings of a registered function: as a checkout around has it, else as 0.3.0 had it."""
    for start in dict.fromkeys((folder, Path())):
        if (path := locate_registry(start, module)) is not None:
            return read_registered(path, config, module)
    if (module, config) not in REGISTERED:
        choices = [f"--module {name} --config {function}" for name, function in REGISTERED]
        raise InputError(
            f"torchtitan: --module {module} --config {config}: zsim knows {', '.join(choices)} without "
            "torchtitan; of any other, start from a checkout, which has "
            f"torchtitan/models/{module}/config_registry.py, or give the JSON that --debug.save_config_file "
            "writes"
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
        elif key in _VARIABLES:
            options.append(f"--{_VARIABLES[key]}={value}")
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
