"""A launch -> an experiment: the program's own file or flags, on the launcher's machines.

Where Accelerate's file or flags choose an engine and the program's flags do not, Accelerate's is taken, as in
transformers 5.23 (`training_args.py`: a plugin of the launcher is kept unless the arguments name one).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.programs.accelerate.read import read_values as read_accelerate_values
from zsim.programs.environment import read_environment
from zsim.programs.huggingface.job import leave_row_counts
from zsim.programs.huggingface.models import write_types
from zsim.programs.huggingface.optimizers import allow_optimizer
from zsim.programs.huggingface.strategies import NO_ENGINE
from zsim.programs.launch.commands import (
    FLAG_MARKS,
    SWITCHES,
    TOP_FLAGS,
    TRAINERS,
    Launch,
    accelerate_flag,
    flag_values,
    script_path,
    section_of,
)
from zsim.programs.torchtitan.read import read_torchtitan
from zsim.programs.training_script.read import parses_arguments, parses_plain_arguments, read_script
from zsim.programs.trl.keys import ACCELERATE_CONFIGS
from zsim.reading import parse_whole_number
from zsim.specs.experiment.programs import programs, readable_programs
from zsim.specs.formats.config_file import (
    TrainingFile,
    change_values,
    flatten,
    load_table,
    locate_named_file,
)
from zsim.specs.formats.program import ProgramSource, TrainingProgram, ValuesProgram
from zsim.specs.formats.safe_yaml import load_yaml

Reader = Callable[[str, Mapping[str, Any]], TrainingFile]
# Flags of files that may be their keys instead.
_CONTENTS = ("deepspeed", "deepspeed_config", "fsdp", "fsdp_config")
_FILES = (".yaml", ".yml", ".json", ".toml")
_LLAMA_FACTORY, _MS_SWIFT, _TRL, _TRAINER = "llama-factory", "ms-swift", "trl", "transformers"
# Part of a target's name -> the program whose flags or file it takes.
_TARGETS = {
    "axolotl": "axolotl", "llamafactory": _LLAMA_FACTORY, "llama_factory": _LLAMA_FACTORY, "swift": _MS_SWIFT,
    "open_instruct": "open-instruct",
}  # fmt: skip
# Launchers of one program.
_TRAINERS = {"trl": _TRL, "swift": _MS_SWIFT, "megatron": _MS_SWIFT, "litgpt": "litgpt"}
# Mains of verl that update an actor by the keys of main_ppo (b178a3cd: trainer/, experimental/, recipe/dapo).
_VERL_TRAINERS = ("main_ppo", "fully_async_main", "main_dapo")
_VERL_SFT = "fsdp_sft_trainer"
_VERL_ENGINE_SFT = (".sft_trainer", ".sft_trainer_ray")
_VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
# A name in what a command starts -> the program of that name, whose trainers have arguments of their own.
_UNREAD = {
    re.compile(r"(^|/)open_instruct[/.](?!(finetune|dpo_tune_cache)(\.py)?$)"): "Open Instruct",
    re.compile(r"(^|/)align_anything[/.]"): "Align-Anything",
    re.compile(r"(^|/)flame[/.]train(\.py)?$"): "flame",  # which starts torchtitan with models of fla's
}
_TOML = "--job.config_file"  # torchtitan's file
_EXAMPLES = re.compile(r"run_(clm|mlm|plm|fim)\.py")  # transformers' examples/pytorch/language-modeling
# Parts of names of people's own scripts whose job their flags do not say.
_OTHER_JOB_NAME = re.compile(
    r"lora|peft|adapter|distil|train_reward|reward_(model|train)|rerank|(?<![a-z])(dpo|ppo|grpo|kto|rm)(?![a-z])"
)
_WEIGHTY_FLAG = re.compile(
    r"batch|seq_?len|max_len|max_length|block_size|lora|peft|adapter|accum|checkpointing|precision|bits?$|quant"
    r"|(^|_)(bs|bf16|fp16|dtype|optim|optimizer|stage)$|deepspeed|fsdp|vllm|num_generations|completion_len"
)
_DEEPSPEEDS = ("--deepspeed", "--deepspeed_config", "--local_rank")  # flags of scripts that take a JSON
_ABSENT = "not here"  # of a file that Hydra is told
_MAX_DEFAULTS = 20  # files that name one another in their `defaults`
_VERL_MACHINES = ("trainer.nnodes", "trainer.n_gpus_per_node")
_NODE_OPTIONS = ("num_machines", "nnodes", "num_nodes")
_GPU_OPTIONS = ("nproc_per_node", "num_gpus")


def read_launch(launch: Launch) -> TrainingFile:
    """The settings of a launch.

    Raises InputError for flags that the launcher or the program refuses, NotSimulatedError for a program
    whose flags zsim does not know.
    """
    if not launch.may_train:
        words = TRAINERS.get(launch.launcher)
        expected = f"{launch.launcher} {' or '.join(words)}" if words else "a command that trains"
        raise InputError(
            f"{launch.where}: {launch.launcher} {launch.target} trains nothing; expected {expected}"
        )
    file = _started(launch)
    if launch.launcher == "accelerate" or (launch.launcher == "trl" and launch.options):
        _add_accelerate(file, launch)
    else:
        _add_machines(file, launch)
    prepared = "training.lora.preparation"  # of a script, which does not know its launcher's engine
    if file.settings.get(prepared) == "peft" and file.settings.get("strategy.kind") != "ddp":
        file.settings[prepared] = "none"
        file.note("prepare_model_for_kbit_training: zsim has its fp32 under DDP with 4 bits alone")
    read_environment(file, launch.variables)
    for note in launch.notes:
        file.note(note)
    return file


def _started(launch: Launch) -> TrainingFile:
    """The experiment that the program's own file or flags say."""
    loose, values = flag_values(launch.words, launch.where)
    values |= {key: content for key in _CONTENTS if (content := launch.document(values.get(key))) is not None}
    if "openrlhf" in launch.target:
        from zsim.programs.openrlhf.read import read_values as read_openrlhf

        return read_openrlhf(launch.where, launch.target, values)
    if launch.target.startswith("verl.") or launch.target.endswith("main_dapo"):
        return _verl(launch, loose, values)
    named = (launch.target, *(word for word in launch.words if word.endswith(".py")))
    titles = (title for pattern, title in _UNREAD.items() if any(map(pattern.search, named)))
    if title := next(titles, None):
        raise NotSimulatedError(
            f"{launch.where}: {launch.target}: is of {title}, whose trainers zsim does not read; write an "
            "experiment file with its settings"
        )
    if isinstance(toml := values.get("job.config_file"), str):
        path = str(locate_named_file(toml, launch.folder, launch.where, "a torchtitan TOML"))
        paths = {toml: path, f"{_TOML}={toml}": f"{_TOML}={path}"}
        return read_torchtitan(shlex.join((path, *(paths.get(word, word) for word in launch.words))))
    config = next((word for word in loose if word.endswith(_FILES) and "=" not in word), None)
    config = config or values.pop("config", None) or values.pop("config_file", None)
    if launch.launcher == "litgpt" and (
        names := [word for word in loose if word != config and "=" not in word]
    ):
        values["model_name" if launch.target == "pretrain" else "checkpoint_dir"] = names[0]
    name = next((name for part, name in _TARGETS.items() if part in f"{launch.launcher} {launch.target}"), "")
    program = readable_programs().get(_TRAINERS.get(launch.launcher, name))
    if isinstance(config, str) and (config.endswith(_FILES) or launch.launcher == "tune"):
        return _read_named_file(launch, config, program, values, loose)
    if program is None and (script := script_path(launch.target, launch.where)) is not None:
        return read_script(script, launch.settings, values, launch.variables)
    script = script_path(launch.target, launch.where, parses_arguments)
    if program is not None or script is None or _EXAMPLES.fullmatch(script.name):
        return _read_flags(launch, values, program, loose)
    try:
        return read_script(script, launch.settings, values, launch.variables)
    except (InputError, NotSimulatedError) as error:
        with suppress(InputError, NotSimulatedError):
            file = _read_flags(launch, values, program, loose)
            file.note(f"taken by its flags alone, for its code was not read: {error}", is_first=True)
            return file
        raise


def _read_flags(
    launch: Launch, values: dict[str, Any], program: TrainingProgram | None, loose: list[str]
) -> TrainingFile:
    """The experiment that the flags say, of a program's where it is known, or of a script of one's own."""
    if program is None:
        is_example = _EXAMPLES.fullmatch(Path(launch.target).name) is not None
        is_plain = is_example or script_path(launch.target, launch.where, parses_plain_arguments) is not None
        program = readable_programs()[_TRAINER] if is_plain else _owner(values)
    if program is None:
        return _own_script(launch, values, _assignments(loose))
    if program.name == _TRAINER:
        _check_name(launch)
        if "deepspeed_config" in values:  # a name that scripts of one's own have for it
            values.setdefault("deepspeed", values.pop("deepspeed_config"))
    values = {**_defaults(launch), **values, **_drop_ray_workers(launch, program)}
    return _reader(program, launch)(launch.where, values)


def _verl(launch: Launch, loose: list[str], values: Mapping[str, Any]) -> TrainingFile:
    """verl's overrides of its own files, as Hydra takes them: `key.key=value`, also behind plus signs."""
    from zsim.programs.verl.read import read_values
    from zsim.programs.verl.tuning import read_engine_values, read_sft_values

    is_sft = launch.target.endswith(_VERL_SFT)
    is_engine = launch.target.endswith(_VERL_ENGINE_SFT)
    if launch.target == "verl.trainer.main":  # EasyR1's, which takes a file and overrides
        changes = _assignments(loose)
        if isinstance(config := changes.pop("config", None), str):
            path = locate_named_file(config, launch.folder, launch.where, "EasyR1's file")
            return read_values(str(path), change_values(load_table(path), changes))
    is_read = is_sft or is_engine or launch.target.endswith(_VERL_TRAINERS)
    if not is_read or ".vla." in launch.target:
        raise NotSimulatedError(
            f"{launch.where}: {launch.target}: zsim does not read this trainer of verl's; expected "
            f"verl.trainer.main_ppo, one that updates its actor alike ({', '.join(_VERL_TRAINERS[1:])}), or "
            "verl.trainer.fsdp_sft_trainer or sft_trainer"
        )
    changes = _assignments(loose)
    for key in _VERL_MACHINES:
        if "$" in str(changes.get(key, "")):
            value = changes.pop(key)
            launch.notes.append(f"{key}: {value} is nothing that the script sets: --nodes and --gpus give it")
    engine = str(changes.pop("engine", "fsdp")) if is_engine else ""
    if is_engine:
        changes.pop("optim", None)  # the engine's
    overrides = change_values(_hydra_file(launch, values), changes)
    if is_engine:
        machines = TrainingFile(launch.where)
        _add_machines(machines, launch)
        gpus = machines.settings.get("gpus")
        return read_engine_values(launch.where, overrides, engine, gpus)
    if is_sft:
        return read_sft_values(launch.where, overrides)
    if "fully_async" in launch.target:
        overrides.setdefault("async_training", {}).setdefault("require_batches", 1)
    elif "one_step_off" in launch.target:
        overrides.setdefault("rollout", {}).setdefault("nnodes", 1)
    try:
        return read_values(launch.where, overrides)
    except InputError as error:
        absent = [note for note in launch.notes if _ABSENT in note]
        raise InputError("; ".join((str(error), *absent))) from None


def _hydra_file(launch: Launch, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the file that --config-name names, over verl's own, which its `defaults` name."""
    folder = str(values.get("config_path", values.get("config_dir", ".")))
    name = str(values.get("config_name", "")).removesuffix(".yaml")
    return _composed(launch, folder, name, "--config-name", 0) if name else {}


def _composed(launch: Launch, folder: str, name: str, said_by: str, depth: int) -> dict[str, Any]:
    """The keys of the file `name` of `folder`, or of verl's, in the order of its `defaults` (Hydra 1.3). The
    name tells the engine where the file is verl's or not here.
    """
    is_megatron = "megatron" in name and not launch.target.endswith(_VERL_SFT)
    named = {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}} if is_megatron else {}
    if name in _VERL_CONFIGS:
        return named
    try:
        path = locate_named_file(
            f"{folder}/{name}.yaml", launch.folder, launch.where, "a file of verl's keys"
        )
    except InputError:
        launch.notes.append(f"{said_by} {name}: {_ABSENT}, so verl's own defaults stand for it")
        return named
    content = dict(load_table(path))
    defaults = content.pop("defaults", None) or []
    if depth > _MAX_DEFAULTS or not isinstance(defaults, list):
        raise InputError(f"{path}: defaults: expected a list of files that do not name one another")
    content.pop("hydra", None)
    merged: dict[str, Any] = {}
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            below = content
        elif isinstance(entry, str):
            below = _composed(
                launch, folder, entry.removesuffix(".yaml"), f"{path.name}: defaults:", depth + 1
            )
        else:
            launch.notes.append(
                f"{path.name}: defaults: {entry}: not read; its keys can stand in the command"
            )
            continue
        merged = change_values(merged, dict(flatten(below)))
    return merged


def _reader(program: TrainingProgram, launch: Launch) -> Reader:
    """The function that reads values by key of a program. Some take the trainer that the name of the script
    says (trl/scripts/dpo.py, run_orpo.py).
    """
    module = program.reading_module()
    reader: Reader = module.read_values
    if hasattr(module, "trainer_in_name"):
        script = Path(launch.target.replace(".scripts.", "/").replace("open_instruct.", ""))
        reader = partial(module.read_values, trainer=module.trainer_in_name(script))
    return reader


def _owner(values: Mapping[str, Any]) -> TrainingProgram | None:
    """The program whose flags these are, by the marks of its files."""
    source = ProgramSource.make("flags.yaml", dict(values))
    for name in (_LLAMA_FACTORY, _TRL, _TRAINER):
        if (program := readable_programs()[name]).recognises(source):
            return program
    is_trainers = any(mark in values for mark in FLAG_MARKS if mark != "learning_rate")
    return readable_programs()[_TRAINER] if is_trainers else None


def _read_named_file(
    launch: Launch, config: str, program: TrainingProgram | None, values: Mapping[str, Any], loose: list[str]
) -> TrainingFile:
    """The content of the file that is given to the program, with the flags and `key=value` behind it."""
    document, repeats = launch.document(config), list[str]()
    path = _named_file(launch, config) if document is None else launch.folder / config
    table = load_table(path, repeats) if document is None else document
    source = ProgramSource.make(str(path), table)
    owner = program or next((entry for entry in programs() if entry.recognises(source)), None)
    if owner is None:
        raise NotSimulatedError(f"{launch.where}: {launch.target}: zsim does not know whose file {config} is")
    if owner.is_script or not owner.is_read or not (owner.file_nouns or isinstance(owner, ValuesProgram)):
        return owner.read(source)
    changes = {**values, **_assignments(loose), **_drop_ray_workers(launch, owner)}
    if launch.launcher == "trl":
        changes |= dict.fromkeys(_pass_on(launch, str(path), table))
    file = _reader(owner, launch)(str(path), change_values({**_defaults(launch), **table}, changes))
    file.notes = [*(f"{path}: {repeat}" for repeat in repeats), *file.notes]
    return file


def _pass_on(launch: Launch, path: str, content: Mapping[str, Any]) -> list[str]:
    """Add the keys of TRL's file that are Accelerate's to the launch's flags, which win, and return them.

    Raises InputError for a switch: TRL writes its value behind it, which Accelerate takes for the script.
    """
    flags = {key: flag for key in content if (flag := accelerate_flag(str(key))) and content[key] is not None}
    for key, flag in flags.items():
        if flag in SWITCHES:
            raise InputError(
                f"{path}: {key}: TRL passes it on as `--{key} {content[key]}`, which Accelerate refuses; "
                f"expected --{flag} in the command, or accelerate_config"
            )
        launch.options.setdefault(flag, str(content[key]))
    return [*flags]


def _named_file(launch: Launch, config: str) -> Path:
    """The file that a command names. torchtune takes the names of its own without ending."""
    if config.endswith(_FILES):
        return locate_named_file(config, launch.folder, launch.where, "the program's file")
    try:
        return locate_named_file(f"{config}.yaml", launch.folder, launch.where, "the program's file")
    except InputError:
        name = f"recipes/configs/{config}.yaml"
        return locate_named_file(name, launch.folder, launch.where, "torchtune's file, from its repository")


def _assignments(words: Iterable[str]) -> dict[str, Any]:
    """{dotted key: value} of overrides as Hydra takes them: `key.key=value`, also behind plus signs."""
    changes: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.@-]*", key):
            continue
        changes[key] = None if value in ("null", "None") else _typed(value.strip("'\""))
        if value[:1] in ("[", "{"):
            with suppress(InputError):  # `[${a},${b}]`, of variables or of Hydra, stays a text
                changes[key] = load_yaml(value, key)
    return changes


def _defaults(launch: Launch) -> Mapping[str, Any]:
    """The values that the word behind a program stands for, where its file and flags say none."""
    if launch.launcher == "llamafactory-cli" and launch.target != "train":
        return {"stage": launch.target}
    if launch.launcher == "litgpt" and launch.target in ("finetune", "finetune_lora"):
        return {"lora_r": 8}  # litgpt 0.5.13, __main__.py and finetune/lora.py
    is_rlhf = _TRAINERS.get(launch.launcher) == _MS_SWIFT and launch.target == "rlhf"
    loss = {"rlhf_type": "dpo"} if is_rlhf else {}
    return {**loss, "micro_batch_size": 1} if launch.launcher == "megatron" else loss


def _drop_ray_workers(launch: Launch, program: TrainingProgram) -> Mapping[str, Any]:
    """Ray's workers as left out where LLaMA-Factory is not started under Ray (ff6d4d12 extras/misc.py)."""
    is_on = launch.variables.get("USE_RAY", "").lower() in ("true", "y", "1")
    return {"ray_num_workers": None} if program.name == _LLAMA_FACTORY and not is_on else {}


def _own_script(launch: Launch, values: Mapping[str, Any], overrides: Iterable[str]) -> TrainingFile:
    """A script with flags or overrides of its own, of which only DeepSpeed's JSON is known."""
    names = [*(f"--{name}" for name in values), *overrides]
    json = values.get("deepspeed_config", values.get("deepspeed"))
    if launch.launcher == "accelerate":
        _check_name(launch)
        file = TrainingFile(launch.where, program="accelerate")
        file.note(f"{launch.target}: batch, length and what is trained stand in its code: --set says them")
        _note_flags(file, launch, names)
        return file
    if isinstance(recipe := values.get("recipe"), str) and launch.target.endswith("run_recipe.py"):
        raise NotSimulatedError(
            f"{launch.where}: --recipe {recipe}: is a function of Megatron-Bridge, which zsim does not run; "
            "expected the run_config.yaml that Megatron-Bridge saves beside a run's checkpoints"
        )
    if not isinstance(json, str | Mapping):
        raise NotSimulatedError(
            f"{launch.where}: {launch.target}: zsim knows flags of TrainingArguments and programs on top of "
            "them, and of a script of one's own only --deepspeed_config FILE.json; give an experiment file"
        )
    file = TrainingFile(launch.where, program="deepspeed")
    if isinstance(json, str):
        json = str(locate_named_file(json, launch.folder, launch.where, "a DeepSpeed JSON"))
    file.settings |= {"strategy.kind": "deepspeed", "strategy.config": json}
    _note_flags(file, launch, [name for name in names if name not in _DEEPSPEEDS])
    return file


def _check_name(launch: Launch) -> None:
    """Raise NotSimulatedError for a script of one's own whose name says another job than its flags do."""
    if _OTHER_JOB_NAME.search(Path(launch.target).stem.lower()):
        raise NotSimulatedError(
            f"{launch.where}: {launch.target}: is a script whose name says another job than its flags do, "
            "which zsim does not read; write an experiment file"
        )


def _note_flags(file: TrainingFile, launch: Launch, names: Sequence[str]) -> None:
    """Name the flags of a script of one's own.

    Raises NotSimulatedError for one that by its name says the batch, the length, or what is trained.
    """
    if name := next((name for name in names if _WEIGHTY_FLAG.search(name.lstrip("-"))), None):
        raise NotSimulatedError(
            f"{launch.where}: {launch.target}: {name}: is a script's own, and a step may depend on "
            "it; zsim knows flags of TrainingArguments and programs on top of them: write an experiment "
            "file, or give the launcher's file alone"
        )
    if names:
        file.note(f"{launch.target}: its own flags are not read: {', '.join(names)}")


def _add_machines(file: TrainingFile, launch: Launch) -> None:
    """Nodes and GPUs of torchrun, deepspeed, or a trainer that reads variables."""
    options, variables = launch.options, launch.variables
    nodes_text = next((options[key] for key in _NODE_OPTIONS if key in options), variables.get("NNODES", "1"))
    text = next((options[key] for key in _GPU_OPTIONS if key in options), variables.get("NPROC_PER_NODE", ""))
    include = str(options.get("include", ""))
    gpus = parse_whole_number(str(text)) or _visible(
        include.partition(":")[2] or variables.get("CUDA_VISIBLE_DEVICES", "")
    )
    nodes = parse_whole_number(str(nodes_text).partition(":")[0])
    if launch.launcher == "torchrun" and not text and not gpus:
        gpus = 1
        file.note("torchrun starts one process of a node where nothing says how many: --gpus says otherwise")
    if nodes and gpus:
        file.settings |= {"nodes": nodes, "gpus": nodes * gpus}
    elif nodes and nodes > 1:
        file.settings["nodes"] = nodes
    for key, words in (("nodes", nodes_text), ("gpus", text)):
        if "$" in str(words) and key not in file.settings:
            file.note(f"the launcher's number of {key} is {words}, which nothing sets: --{key} gives it")
    if (
        launch.launcher in ("python", "python3", "trl", "axolotl", "swift", "megatron")
        and "gpus" not in file.settings
    ):
        file.note("the command says no number of GPUs: --gpus or --nodes gives it")


def _visible(text: str) -> int:
    """The number of devices in a list such as "0,1,2"."""
    return len(text.split(",")) if re.fullmatch(r"\d+(,\d+)*", text) else 0


def _add_accelerate(file: TrainingFile, launch: Launch) -> None:
    """The part of `accelerate launch`: machines, an engine, and the type of products."""
    options = launch.options
    config = options.get("config_file")
    values: dict[str, Any] = {}
    name = launch.where
    if launch.launcher == "trl" and isinstance(config, str) and config in ACCELERATE_CONFIGS:
        values = dict(ACCELERATE_CONFIGS[config])
    elif (content := launch.document(config)) is not None:
        values = dict(content)
    elif isinstance(config, str):
        try:
            name = str(locate_named_file(config, launch.folder, launch.where, "an Accelerate YAML"))
        except InputError as error:
            if launch.launcher != "trl":
                raise
            names = f"{', '.join(ACCELERATE_CONFIGS)}{did_you_mean(config, ACCELERATE_CONFIGS)}"
            raise InputError(f"{error}, or one of TRL's own: {names}") from None
        values = dict(load_table(Path(name)))
    for flag, value in options.items():
        if section := section_of(flag):
            values[section] = {**(values.get(section) or {}), flag: _typed(value)}
        elif flag in TOP_FLAGS and "$" in str(value):
            values.pop(flag, None)
            file.note(f"--{flag} {value}: nothing sets it: --nodes and --gpus give the machines")
        elif flag in TOP_FLAGS:
            values[flag] = _typed(value)
    for switch, kind in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")):
        if options.get(switch):
            values["distributed_type"] = kind
    if "deepspeed_config" in values and "distributed_type" not in values:
        values["distributed_type"] = "DEEPSPEED"
    values.setdefault("distributed_type", "MULTI_GPU")
    types = file.weight_types
    precision = types[0] if types else file.settings.get("training.precision", "fp32")
    if precision != "fp32":  # TrainingArguments write theirs over the launcher's, where they have one
        values["mixed_precision"] = precision
    accelerate = read_accelerate_values(name, values)
    launched = accelerate.settings.get("training.precision", "")
    if launched and types is None:
        file.settings["training.precision"] = launched
    own_kind = file.settings.get("strategy.kind")
    stays = own_kind not in (None, "ddp") or accelerate.settings.get("strategy.kind") == "ddp"
    for table, added in ((file.settings, accelerate.settings), (file.defaults, accelerate.defaults)):
        if not stays:
            for key in [key for key in table if key.startswith("strategy.")]:
                del table[key]
        for key, value in added.items():
            if not (stays and key.startswith("strategy.") and own_kind is not None):
                table.setdefault(key, value)
    if file.has_pairs:
        leave_row_counts(file)
    engine = file.settings.get("strategy.kind")
    if not stays:
        allow_optimizer(file)
        if file.clips_in_loop and engine == "deepspeed":
            file.settings.pop("training.gradient_clipping", None)  # Accelerate's 1, or the JSON's
        if types is not None:  # what it keeps in which type was said for DDP
            for key in ("training.stored_dtype", "training.frozen_dtype"):
                file.settings.pop(key, None)
            if types[2] and engine == "fsdp1":
                file.settings["strategy.wrapping"] = "peft"  # as of a file that names FSDP1 itself
    if types is not None and (launched or not stays):
        write_types(file, launched or precision, types[1], has_adapters=types[2])
    file.notes = [note for note in file.notes if not note.endswith(NO_ENGINE)] + accelerate.notes


def _typed(value: Any) -> Any:
    return flag_values(["--flag", value], "")[1]["flag"] if isinstance(value, str) else value
