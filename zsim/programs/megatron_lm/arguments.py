"""The words of a command line -> Megatron's arguments, as its parser would take them."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, check_choice, did_you_mean
from zsim.programs.megatron_lm.flags import FLAGS, LISTS, SWITCHES
from zsim.programs.shell import SCRIPT_SUFFIXES, Script, ScriptCall, script_call
from zsim.reading import parse_whole_number, read_user_text

# Of 2019 to 2022 -> the name since. Today's parser only names the successors of the first five.
_RENAMED = {
    "batch-size": "micro-batch-size",
    "warmup": "lr-warmup-fraction",
    "model-parallel-size": "tensor-model-parallel-size",
    "checkpoint-activations": "recompute-granularity=full",
    "checkpoint-num-layers": "recompute-num-layers",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "layernorm-epsilon": "norm-epsilon",
    "use-custom-fsdp": "use-megatron-fsdp",
    "use-rotary-position-embeddings": "position-embedding-type=rope",
    "encoder-seq-length": "seq-length",
    "encoder-num-layers": "num-layers",
    "distribute-checkpointed-activations": "distribute-saved-activations",
}
_LAUNCHER_OPTIONS = {
    "nproc_per_node": "per_node", "nproc-per-node": "per_node", "nnodes": "nodes", "num_gpus": "per_node",
    "num_nodes": "nodes", "ntasks-per-node": "tasks_per_node", "nodes": "nodes",
    "-N": "nodes",
}  # fmt: skip
# Launchers that start a process per GPU in each task of Slurm.
_PROCESS_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate",
    "accelerate.commands.launch",
)  # fmt: skip
_EXACT, _MAX_LIST = 3, 10_000
_SCRIPTS = (*SCRIPT_SUFFIXES, ".args", ".txt")
# Of tools/, examples/ and tests/ of repositories, besides training.
_IDLE_PROGRAM = re.compile(
    r"generat|inference|text_gen|server|convert|export|quantize|preprocess|evaluate|validate|merge|prune|mmlu"
    r"|prepare|synthesize|roundtrip|dump_|check_|metrics|chatbot|evaluation|(?<![a-z])evals?(?![a-z])|embed_|hf2|2hf|2mcore|^(pip|venv)\."
)
_POSITIONAL = re.compile(r"\$\{?([1-9])\b")
# Flags whose numbers may be open in a script -> the setting that says them.
_OPEN = {
    "tensor-model-parallel-size": "parallelism.tensor",
    "pipeline-model-parallel-size": "parallelism.pipeline",
    "context-parallel-size": "parallelism.context", "expert-model-parallel-size": "parallelism.expert",
    "expert-tensor-parallel-size": "parallelism.expert_tensor",
    "micro-batch-size": "training.micro_batch_size", "seq-length": "training.sequence_length",
    "global-batch-size": "training.global_batch_size",
}  # fmt: skip
# Of programs on top of Megatron that train other models than its GPT: their flags, and their files.
_OTHER_MODELS = {
    "vision-model-type": "vision towers of Megatron's multimodal examples",
    "freeze-LM": "vision towers of Megatron's multimodal examples",
    "freeze-ViT": "vision towers of Megatron's multimodal examples",
    "retro-add-retriever": "RETRO",
    "retro-workdir": "RETRO",
    "bert-no-binary-head": "BERT",
    "bert-load": "BERT",
}
_OTHER_PROGRAMS = re.compile(
    r"(?:mimo|multimodal|tasks|msdp|retro)/|pretrain_(?:vlm|vision|bert|t5|ict|retro|mimo)|finetune_(?:race|mnli)"
)


@dataclass
class Arguments:
    """Megatron's arguments, as its parser would take them. Every lookup is recorded."""

    where: str
    """The name of their file, which begins error messages."""
    values: dict[str, Any] = field(default_factory=dict)
    """{flag: True, its value, or the list of its values}"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports."""
    nodes: int | None = None
    """Number of nodes, as the launcher's options give it."""
    gpus: int | None = None
    """Number of GPUs on all nodes, as the launcher's options give it."""
    notes: list[str] = field(default_factory=list)
    read_flags: set[str] = field(default_factory=set)
    """Flags that were looked up. The others have no effect on a step."""
    extra_flags: dict[str, str] = field(default_factory=dict)
    """{flag: its first value} of a program on top of Megatron. What a reader uses, it takes out."""
    documents: Mapping[str, str] = field(default_factory=dict)
    """{file: text} that the script writes."""
    hint: str = ""
    """How a value that a script takes from outside is given, where that is not by a variable."""

    def set_open_flags(self, settings: Mapping[str, Any]) -> None:
        """Set flags whose variables nothing sets to the experiment's values, by dotted key.

        The flag of an open global batch is dropped if the experiment has the accumulation instead.
        """
        has_steps = settings.get("training.gradient_accumulation_steps") is not None
        for flag, key in _OPEN.items():
            if not str(self.values.get(flag, "")).startswith("$"):
                continue
            if settings.get(key) is not None:
                self.values[flag] = str(settings[key])
            elif flag == "global-batch-size" and has_steps:
                del self.values[flag]

    def has(self, *flags: str) -> bool:
        """Whether one of the flags is given."""
        self.read_flags.update(flags)
        return any(flag in self.values for flag in flags)

    def text(self, flag: str, default: str | None = None, options: Sequence[str] = ()) -> str | None:
        """A flag's text, one of `options` if there are any."""
        self.read_flags.add(flag)
        value = self.values.get(flag, default)
        if value is None:
            return None
        if options:
            check_choice(f"{self.where}: --{flag}: found '{value}', ", str(value), options)
        return str(value)

    def integer(self, flag: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """A flag's whole number. Without the flag it is the default."""
        self.read_flags.add(flag)
        value = self.values.get(flag)
        if value is None:
            return default
        if flag in _OPEN and str(value).startswith("$"):
            raise InputError(
                f"{self.where}: --{flag}: found '{value}', which nothing sets{self._how_to_set(str(value))}, "
                f"and so does --set {_OPEN[flag]}="
            )
        number = parse_whole_number(str(value))
        if number is None or number < minimum:
            raise InputError(
                f"{self.where}: --{flag}: found '{value}', expected a whole number of at least {minimum}"
                f"{self._how_to_set(str(value))}"
            )
        return number

    def count(self, flag: str, default: int = 1) -> int:
        """A flag's whole number of at least 1."""
        number = self.integer(flag, default)
        assert number is not None
        return number

    def number(self, flag: str, default: float) -> float:
        """A flag's number of at least 0."""
        self.read_flags.add(flag)
        value = self.values.get(flag, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise InputError(f"{self.where}: --{flag}: found '{value}', expected a number of at least 0")
        return number

    def texts(self, flag: str) -> list[str]:
        """The texts of a flag that takes several."""
        self.read_flags.add(flag)
        value = self.values.get(flag, [])
        return [str(entry) for entry in value] if isinstance(value, list) else str(value).split()

    def extra_note(self) -> list[str]:
        """The note that names the flags of a program on top of Megatron, if it has any that are not read."""
        hints = {
            flag: get_close_matches(flag, FLAGS, 1, 0.92) for flag in self.extra_flags
        }  # a slip of the pen
        flags = ", ".join(
            f"--{flag} (or --{hint[0]}?)" if hint else f"--{flag}" for flag, hint in hints.items()
        )
        return [f"not Megatron's, and not read: {flags}"] if flags else []

    def _how_to_set(self, value: str) -> str:
        if not value.startswith("$"):
            return ""
        if self.hint and re.match(r"\$\{?[0-9@]", value):
            return f"; {self.hint}"
        name = re.match(r"\$\{?(\w+)", value)
        variable = f": '{name[1]}=... {self.where}' gives it" if name else ""
        return f"; the script takes it from its environment{variable}"


def is_command_line(words: Sequence[str]) -> bool:
    """Whether the words start Megatron: they name a `pretrain_*.py`, or are mostly its flags."""
    if any(Path(word).name.startswith("pretrain_") and word.endswith(".py") for word in words):
        return True
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    num_megatron_flags = sum(flag in FLAGS for flag in flags)
    return num_megatron_flags > 0 and 2 * num_megatron_flags >= len(flags)


def starts_program(words: Sequence[str]) -> bool:
    """Whether the words of a command begin with a program, and not with a flag."""
    return bool(words) and not words[0].startswith("-")


def idle_program(words: Sequence[str]) -> str | None:
    """The program that the words start and that trains nothing, by its name."""
    programs = [Path(word).name for word in words if word.endswith(".py")]
    names = (name for name in programs if not re.match(r"(pre)?train|finetune|sft", name))
    return next((name for name in names if _IDLE_PROGRAM.search(name)), None)


def _refuse_idle(where: str, words: Sequence[str]) -> None:
    if name := idle_program(words):
        raise InputError(
            f"{where}: {name} trains nothing; expected a command that trains, as pretrain_gpt.py"
        )


def names_script(words: Sequence[str]) -> bool:
    """Whether the words name a shell script, with variables for it before and flags after it."""
    return _call(words) is not None


def _call(words: Sequence[str]) -> ScriptCall | None:
    """The script that the words name, or None."""
    call = script_call(words, _SCRIPTS)
    if call is None or Path(call.path).suffix in SCRIPT_SUFFIXES:
        return call
    return None if call.parameters and not call.parameters[0].startswith("--") else call


def read_arguments(config: str | Sequence[str]) -> Arguments:
    """The arguments in a shell script, in a command line or in a list of arguments.

    A script may have `NAME=value` before it, and behind it its parameters and flags, which win over its own.
    Raises InputError for flags and numbers of values that Megatron's parser refuses.
    """
    if not isinstance(config, str):
        return _parse([str(word) for word in config], "strategy.config")
    words = _words(config)
    call = _call(words)
    if call is None:
        _refuse_idle("command line", words)
        return _parse(words, "command line")
    path, parameters = call.path, call.parameters
    num_positional = next((n for n, word in enumerate(parameters) if word.startswith("--")), len(parameters))
    text = read_user_text(Path(path), "a script that starts Megatron")
    try:
        script = call.run(parameters if num_positional else ())
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    pairs = zip(script.commands, script.environments, strict=True)
    started = [pair for pair in pairs if is_command_line(pair[0])]
    if any(starts_program(words) for words in script.commands):  # flags alone are what a comment cut off
        started = [pair for pair in started if starts_program(pair[0])]
    started = [pair for pair in started if not idle_program(pair[0])] or started
    if started:
        words, environment = started[-1]
        _refuse_idle(path, words)
    else:
        values = script.variables.values
        words = _flags_in_variables(values)
        words = words if is_command_line(words) else []
        environment = {name: texts[0] for name, texts in values.items() if texts}
    if not words:
        raise InputError(f"{path}: starts no Megatron: {_reason(script, text)}")
    parameters_read = sorted(set(_POSITIONAL.findall(f"{text} {script.notes}")))
    hint = (
        f"it takes parameters: '{path} {' '.join(f'ARG{n}' for n in parameters_read)}' gives them"
        if parameters_read
        else ""
    )
    hint = "" if num_positional else hint
    arguments = _parse(words, path, hint=hint, is_script=True, environment=environment)
    for flag, value in _parse(parameters[num_positional:], path).values.items():
        arguments.values[flag] = value
    if "micro-batch-size" not in arguments.values and any(word.endswith(".py") for word in words):
        raise InputError(f"{path}: --micro-batch-size: missing, as Megatron asks for it")
    arguments.notes += list(dict.fromkeys(script.notes))
    arguments.documents = script.documents
    if len(started) > 1:
        arguments.notes.append(f"{len(started)} commands start Megatron; the last one is simulated")
    return arguments


def _reason(script: Script, text: str) -> str:
    """Why a script was not seen to start Megatron."""
    skipped = [note for note in script.notes if note.startswith(("condition", "not read"))]
    uncalled = [
        name for name in script.functions if not re.search(rf"(?m)^\s*{re.escape(name)}\b(?!\s*\()", text)
    ]
    reasons = [*skipped, *(f"function '{name}' is not called" for name in uncalled)]
    expected = "expected pretrain_gpt.py with --num-layers and the like, or a launcher of another training"
    return f"{expected} ({'; '.join(reasons[:3])})" if reasons else expected


def _words(config: str) -> list[str]:
    if Path(config).suffix in _SCRIPTS and os.path.exists(config):  # False, too, for a name too long
        return [config]
    try:
        return shlex.split(config)
    except ValueError as error:
        raise InputError(f"'{config[:60]}': cannot be read as a command line: {error}") from None


def _flags_in_variables(variables: Mapping[str, list[str]]) -> list[str]:
    """The flags in all variables of a script that starts nothing itself, without variables that another one
    contains.
    """
    flag_groups: list[list[str]] = []
    for values in variables.values():
        words = [flag_word for value in values for flag_word in value.split()]
        if any(word[2:].partition("=")[0] in FLAGS for word in words if word.startswith("--")):
            flag_groups = [group for group in flag_groups if not _contains(words, group)]
            if not any(_contains(group, words) for group in flag_groups):
                flag_groups.append(words)
    return [word for group in flag_groups for word in group]


def _contains(words: list[str], group: list[str]) -> bool:
    return any(words[start : start + len(group)] == group for start in range(len(words) - len(group) + 1))


def _parse(
    words: Sequence[str],
    where: str,
    *,
    hint: str = "",
    is_script: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Arguments:
    """The flags of a command line.

    Programs on top of Megatron have flags of their own. Those of a script, and of a program that is not
    Megatron's, are noted with the number of values that they have there. Any other unknown flag is an error.
    """
    arguments = Arguments(where, hint=hint, environment=environment or {})
    program_index = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
    _set_shape(arguments, words[: program_index + 1] if program_index >= 0 else words)
    program = Path(words[program_index]).name if program_index >= 0 else ""
    has_extra_flags = is_script or (bool(program) and not program.startswith("pretrain_"))
    unknown = arguments.extra_flags
    open_words: list[str] = []
    remaining_words = list(words[program_index + 1 :])
    while remaining_words:
        word = remaining_words.pop(0)
        if re.match(r"\s|--[\w-]+\s", word) and "--" in word:  # flags in one text, for another script
            remaining_words[:0] = word.split()
            continue
        if not word.startswith("--"):
            is_shell_text = word.startswith(("$", "&", "|", ">", "`")) or has_extra_flags
            if re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[@\])?\}?", word):
                open_words.append(word)
            if program_index >= 0 and not is_shell_text:
                raise InputError(f"{where}: found '{word}' where a flag is expected, such as --num-layers 32")
            continue
        flag, equals, value = word[2:].partition("=")
        if program_index < 0 and flag in _LAUNCHER_OPTIONS:
            continue
        if flag not in FLAGS and has_extra_flags:
            extra_values = [value] if equals else []
            while remaining_words and not _is_flag(remaining_words[0]):
                extra_values.append(remaining_words.pop(0))
            unknown[flag] = extra_values[0] if extra_values else ""
            continue
        if flag not in FLAGS:
            raise InputError(f"{where}: --{flag}: Megatron has no such flag{did_you_mean(flag, FLAGS)}")
        values = [value] if equals else []
        while remaining_words and not _is_flag(remaining_words[0]) and not equals and flag not in SWITCHES:
            values.append(remaining_words.pop(0))
            if flag not in LISTS or len(values) >= _MAX_LIST:
                break
        _set_flag(arguments, flag, values)
    feature = next(
        (model for flag, model in _OTHER_MODELS.items() if flag in (*unknown, *arguments.values)), ""
    )
    program_path = "/".join(Path(words[program_index]).parts[-2:]) if program_index >= 0 else ""
    if feature or (program != "pretrain_gpt.py" and _OTHER_PROGRAMS.search(program_path)):
        feature = feature or f"the models of {words[program_index]}"
        raise NotSimulatedError(
            f"{where}: zsim does not simulate {feature}; expected pretrain_gpt.py's models"
        )
    is_started = is_script and program_index >= 0 and "micro-batch-size" not in arguments.values
    if is_started and open_words:
        raise InputError(
            f"{where}: {open_words[0]}: stands for flags, and nothing sets it"
            f"{arguments._how_to_set(open_words[0])}"
        )
    arguments.notes += [
        f"{word}: nothing sets it; flags that it stands for are not read" for word in open_words
    ]
    return arguments


def _is_flag(word: str) -> bool:
    return word.startswith("--") and len(word) > _EXACT - 1


def _set_flag(arguments: Arguments, flag: str, values: list[str]) -> None:
    if flag in SWITCHES:
        if values:
            raise InputError(f"{arguments.where}: --{flag}: takes no value, found '{values[0]}'")
    elif not values and flag not in LISTS:
        raise InputError(f"{arguments.where}: --{flag}: expected a value after it")
    if flag in ("activations-checkpoint-method", "checkpoint-activations"):
        # of whole layers, one by one unless a number is given
        arguments.values["recompute-granularity"] = "full"
        arguments.values.setdefault("recompute-num-layers", "1")
        arguments.values.setdefault("recompute-method", "uniform")
    current_flag, _, fixed_value = _RENAMED.get(flag, flag).partition("=")
    if fixed_value:
        arguments.values[current_flag] = fixed_value
    elif flag in SWITCHES:
        arguments.values[current_flag] = True
    else:
        arguments.values[current_flag] = values if flag in LISTS else values[0]


def _launcher(words: Sequence[str]) -> dict[str, str]:
    """The options of torchrun, srun and similar launchers that give numbers of nodes and GPUs."""
    options: dict[str, str] = {}
    for number, word in enumerate(words):
        flag, equals, value = word.removeprefix("--").partition("=")
        key = _LAUNCHER_OPTIONS.get(flag) if word.startswith("-") else None
        if key is not None:
            options[key] = value if equals else (words[number + 1] if number + 1 < len(words) else "")
    return options


def _set_shape(arguments: Arguments, words: Sequence[str]) -> None:
    """Set nodes and GPUs by the launcher's options.

    Where it has none, they are Slurm's GPUs if the launcher starts a process on each, else Slurm's tasks.
    """
    launcher = _launcher(words)
    job = arguments.environment if "per_node" not in launcher else {}
    nodes_text = launcher.get("nodes", job.get("SLURM_NNODES", "1"))
    nodes = parse_whole_number(nodes_text)
    slurm_gpus = job.get("SLURM_GPUS_ON_NODE", "")
    tasks = launcher.get("tasks_per_node", job.get("SLURM_NTASKS_PER_NODE", ""))
    has_task_per_gpu = not any(Path(word).name in _PROCESS_LAUNCHERS for word in words)
    per_node = parse_whole_number(launcher.get("per_node", tasks if has_task_per_gpu else slurm_gpus))
    if has_task_per_gpu and per_node and per_node < (parse_whole_number(slurm_gpus) or 0):
        arguments.notes.append(
            f"Slurm's tasks per node are {per_node}, its GPUs {slurm_gpus}: one GPU per task is simulated"
        )
    for key, number in (("nodes", nodes), ("GPUs of a node", per_node)):
        if number == 0:
            raise InputError(f"{arguments.where}: the launcher's {key}: found 0, expected at least 1")
    if nodes and per_node:
        arguments.nodes, arguments.gpus = nodes, nodes * per_node
    elif nodes_text.startswith("$"):
        arguments.notes.append(
            f"the launcher's nodes are {nodes_text}, which nothing sets: --nodes gives them"
        )


def refuse(arguments: Arguments, flag: str, feature: str) -> None:
    """Raises NotSimulatedError for a flag that is set to anything but 0 or "none"."""
    if arguments.has(flag) and str(arguments.values[flag]).lower() not in ("0", "none"):
        raise NotSimulatedError(f"{arguments.where}: --{flag}: zsim does not simulate {feature} yet")
