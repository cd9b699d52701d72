"""A command line of a launcher, cut into the launcher's flags, what it starts, and that one's flags.

Launchers as in torch 2.13 (`distributed/run.py`), DeepSpeed 0.19.8 (`launcher/runner.py`), accelerate 1.15.0
(`commands/launch.py`), and ms-swift 4.6 (`cli/main.py`), which takes its processes from NPROC_PER_NODE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.programs.megatron_lm.arguments import idle_program, is_command_line, starts_program
from zsim.programs.shell import script_call
from zsim.programs.training_script.read import makes_arguments
from zsim.specs.formats.config_file import load_text
from zsim.specs.formats.program import ProgramSource

# Programs that are launchers and trainers in one, and the words behind them that train.
TRAINERS: Mapping[str, tuple[str, ...]] = {
    "swift": ("sft", "pt", "rlhf"),
    "megatron": ("sft", "pt", "rlhf"),
    "llamafactory-cli": ("train", "sft", "dpo", "rm"),
    "axolotl": ("train",),
    "trl": ("sft", "dpo", "kto", "grpo", "reward", "rloo"),
    "litgpt": ("finetune", "finetune_full", "finetune_lora", "pretrain"),
}
# Flags of `accelerate launch` that are keys of a section of its file, those of its top, and others.
_DEEPSPEED_FLAGS = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag",
    "zero3_save_16bit_model", "deepspeed_config_file", "deepspeed_hostfile", "deepspeed_moe_layer_cls_names",
    "deepspeed_multinode_launcher",
)  # fmt: skip
TOP_FLAGS = ("mixed_precision", "num_machines", "num_processes", "dynamo_backend")
_OTHER_FLAGS = (
    "config_file", "use_deepspeed", "use_fsdp", "multi_gpu", "main_process_ip", "main_process_port",
    "machine_rank", "gpu_ids", "rdzv_backend", "same_network",
)  # fmt: skip
_TRAINING_ARGUMENTS = ("fsdp_config", "gradient_accumulation_steps")  # which TRL keeps to itself
_PRIME_RL = ("rl", "sft", "trainer")  # commands of prime-rl's package, whose files stand behind an @
# Flags of a script of one's own that trains by TrainingArguments.
FLAG_MARKS = ("per_device_train_batch_size", "gradient_checkpointing", "learning_rate", "do_train")
_TRAINING_NAME = re.compile(r"(?<![a-z])(train|sft|finetune|dpo)(?![a-z])")
_TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LAUNCHERS = ("deepspeed", "accelerate", "torchrun", "composer", "tune", "python", "python3", *TRAINERS)
# The word between a launcher and its flags, without which a word of that name is another's value.
_SUBCOMMANDS = {"accelerate": "launch", "tune": "run"}
# Flags of `uv run` with one.
_UV_OPTIONS = ("--extra", "--group", "--with", "--python", "-p", "--project", "--package", "--directory")
# Flags of launchers without a value.
SWITCHES = {
    "multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_cpu", "cpu", "quiet", "debug",
    "same_network", "tpu",
    "module", "no_python", "no_local_rank", "force_multi", "save_pid", "standalone", "run_path", "m", "u",
    "O",
    "use_env", "mps", "dynamo_use_fullgraph", "dynamo_use_dynamic",
}  # fmt: skip


@dataclass
class Launch:
    """A command that starts a training."""

    where: str
    """The script, or "command line"."""
    launcher: str
    """The name of the launcher, or of the trainer that launches itself."""
    options: dict[str, Any]
    """The launcher's flags, with _ for -."""
    target: str
    """The script, module or subcommand that is started."""
    words: list[str]
    """What stands behind the target."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The environment."""
    notes: list[str] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values of the experiment by dotted key."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """{file: text} that the script writes."""

    @property
    def trains(self) -> bool:
        """Whether what is started is a training, and not another of a trainer's words (`swift infer`)."""
        if self.launcher in TRAINERS:
            return self.target in TRAINERS[self.launcher]
        name = self.target if self.target.endswith(".py") else f"{self.target}.py"  # a module
        return idle_program([name]) is None or any(
            mark in flag_values(self.words, self.where)[1] for mark in FLAG_MARKS
        )

    @property
    def may_train(self) -> bool:
        """Whether it trains, or is a script whose name says so beside another of its jobs."""
        is_script = self.launcher not in TRAINERS
        return self.trains or (is_script and bool(_TRAINING_NAME.search(Path(self.target).name)))

    @property
    def is_beside(self) -> bool:
        """Whether it is a script of one process whose name says no training, as those behind one are."""
        return (
            self.launcher in ("python", "python3")
            and self.target.endswith(".py")
            and not _TRAINING_NAME.search(Path(self.target).name)
        )

    def document(self, name: Any) -> Mapping[str, Any] | None:
        """The keys of a YAML or JSON that the script writes, or None for another file."""
        text = self.documents.get(os.path.normpath(name)) if isinstance(name, str) and name else None
        content = None if text is None else load_text(text, Path(name))
        return content if isinstance(content, Mapping) else None

    @property
    def folder(self) -> Path:
        """The folder from which paths are tried first."""
        return Path(self.where).parent


def launched(source: ProgramSource) -> Launch | None:
    """The launch of a command line or a script, or None for one that starts no training, or Megatron's."""
    words = source.words
    call = script_call(words)
    if call is None or not os.path.isfile(call.path):
        return None if len(words) < 2 else parse_command(words, "command line", {})
    try:
        ran = call.run(call.parameters)
    except (OSError, UnicodeDecodeError, InputError):
        return None
    if any(is_command_line(command) and starts_program(command) for command in ran.commands):
        return None
    started = zip(ran.commands, ran.environments, strict=True)
    launches = [launch for words, names in started if (launch := parse_command(words, call.path, names))]
    launches = [launch for launch in launches if launch.trains] or launches
    launches = [launch for launch in launches if not launch.is_beside] or launches
    if not launches:
        return None
    launch = launches[-1]
    launch.notes += dict.fromkeys(ran.notes)
    launch.documents = ran.documents
    if len(launches) > 1:
        launch.notes.append(f"{len(launches)} commands start a training; the last one is simulated")
    return launch


def parse_command(words: Sequence[str], where: str, variables: Mapping[str, str]) -> Launch | None:
    """The launch in the words of a command, or None for another command.

    Words before the launcher are variables, or programs that start it (`srun`, `nohup`).
    """
    if "--" in words and any(Path(word).name == "mason.py" for word in words[: words.index("--")]):
        words = words[words.index("--") + 1 :]  # Open Instruct's starts what stands behind
    begin = _after_uv(words)
    started = list(words[begin : begin + 1]) if begin else []
    if started and (started[0].endswith(".py") or (started[0] in _PRIME_RL and "@" in words)):
        words = [*words[:begin], "python", *words[begin:]]
    index = next((n for n in range(begin, len(words)) if _is_launcher(words[n], words[n + 1 : n + 2])), None)
    is_own = any(script_path(word, where) for word in words)
    if index is None or (is_command_line(words) and not is_own):
        return None
    variables = {**variables, **dict(word.partition("=")[::2] for word in words[:index] if "=" in word)}
    launcher, rest = Path(words[index]).name, list(words[index + 1 :])
    if launcher in TRAINERS:
        if not rest or not re.fullmatch(r"[a-z][a-z_-]*", rest[0]):
            return None
        options, rest[1:] = _launcher_flags(rest[1:]) if launcher == "trl" else ({}, rest[1:])
        return Launch(where, launcher, options, rest[0], rest[1:], variables)
    options, rest = _options(rest[launcher in _SUBCOMMANDS :])
    if launcher in ("python", "python3"):
        if rest[:1] and rest[0] in _TORCH_MODULES:
            options, rest = _options(rest[1:])
            launcher = "torchrun"
        elif len(rest) < 2 and not (rest and script_path(rest[0], where)):
            return None
    if not rest or not (rest[0].endswith(".py") or re.fullmatch(r"[A-Za-z_][\w.]*", rest[0])):
        return None
    return Launch(where, launcher, options, rest[0], rest[1:], variables)


def script_path(word: str, where: str, is_read: Callable[[Path], bool] = makes_arguments) -> Path | None:
    """The script that a word names, where it is here and makes its arguments in code."""
    paths = (Path(where).parent / word, Path(word)) if word.endswith(".py") else ()
    path = next(filter(Path.is_file, paths), None)
    return path if path is not None and is_read(path) else None


def _launcher_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the flags that `trl` passes on to Accelerate, the other words), see trl f2cd5771 cli/."""
    options: dict[str, Any] = {}
    rest, position = [], 0
    while position < len(words):
        name, equals, value = words[position].removeprefix("--").partition("=")
        flag = accelerate_flag(name) if words[position].startswith("--") else None
        position += 1
        if flag is None:
            rest.append(words[position - 1])
        elif equals or flag in SWITCHES:
            options[flag] = value if equals else True
        elif position < len(words):
            options[flag] = words[position]
            position += 1
        else:
            raise InputError(f"command line: --{name}: found nothing behind it, expected a value")
    return options, rest


def accelerate_flag(name: str) -> str | None:
    """The flag of `accelerate launch` for which `trl` takes a flag or key, or None for one of its trainers.

    TRL's parser passes on what is no field of its own (trl f2cd5771 cli/commands/training.py).
    """
    flag = name.replace("-", "_")
    if flag == "accelerate_config":
        return "config_file"
    is_known = flag in (*TOP_FLAGS, *_OTHER_FLAGS) or section_of(flag) is not None
    return flag if is_known and flag not in _TRAINING_ARGUMENTS else None


def section_of(flag: str) -> str | None:
    """The section of Accelerate's file that a flag of its launcher writes to."""
    if flag in _DEEPSPEED_FLAGS:
        return "deepspeed_config"
    return next((f"{part}_config" for part in ("fsdp", "fp8") if flag.startswith(f"{part}_")), None)


def _is_launcher(word: str, following: Sequence[str]) -> bool:
    """Whether a word, with the one that follows it, is a launcher. `tune` may be the name of a job."""
    name = Path(word).name
    if name in _SUBCOMMANDS:
        return list(following) == [_SUBCOMMANDS[name]]
    if name == "composer":
        return any(next_word.startswith("-") or next_word.endswith(".py") for next_word in following)
    return name in _LAUNCHERS


def _after_uv(words: Sequence[str]) -> int:
    """The position behind the flags of `uv run`, whose extras may be named as launchers are."""
    position = next((n + 2 for n in range(len(words) - 1) if list(words[n : n + 2]) == ["uv", "run"]), 0)
    while position and position < len(words) and words[position].startswith("-"):
        position += 1 + (words[position] in _UV_OPTIONS)
    return position


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(a launcher's flags, the words from the first that is none)."""
    options: dict[str, Any] = {}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        name, equals, value = words[position].lstrip("-").partition("=")
        name = name.replace("-", "_")
        position += 1
        if not name:  # "--", behind which stands what is started
            break
        if equals:
            options[name] = value
        elif name in SWITCHES or position >= len(words):
            options[name] = True
        else:
            options[name] = words[position]
            position += 1
    return options, list(words[position:])


def flag_values(words: Sequence[str], where: str) -> tuple[list[str], dict[str, Any]]:
    """(words that belong to no flag, values by key) of a program's flags,
    as transformers' `HfArgumentParser` takes
    them.

    A flag without a value is true, one with several a list. Numbers and truths are such.
    """
    loose: list[str] = []
    values: dict[str, Any] = {}
    key: str | None = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values[key] = _value(value) if equals else True
            key = None if equals else key
        elif key is None or (values[key] is not True and re.match(r"\+*[A-Za-z_][\w.@]*=", word)):
            loose.append(word)  # also an override behind a flag's value
        elif values[key] is True:
            values[key] = _value(word)
        else:
            before = values[key]
            values[key] = [*(before if isinstance(before, list) else [before]), _value(word)]
    return loose, values


def _value(word: str) -> Any:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,15}", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d{1,15}\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", word):
        return float(word)
    return word
