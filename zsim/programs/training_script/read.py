"""A Python script with `TrainingArguments(...)` or a config of TRL's -> an experiment, by TRL's reader.

The script is parsed and never run. Read in transformers 5.23 (training_args.py), TRL f2cd5771 and PEFT 0.21.2
(tuners/lora/config.py, utils/other.py `prepare_model_for_kbit_training`). Values are constants, names that
stand for one value, fields of classes, defaults of argparse and of variables of the environment. What else a
step depends on must be given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.python_text import (
    CELL_LINES,
    CLASS,
    LINE,
    Unknown,
    parse_notebook,
    parse_python,
    unknown_in,
)
from zsim.programs.training_script.names import MODULE_LINES, Scope
from zsim.programs.training_script.values import (
    CONFIG,
    DTYPES,
    OWN_TRAINER,
    PARSED,
    TRAINER,
    Values,
    last_name,
)  # fmt: skip
from zsim.programs.trl.keys import KEYS, SILENT
from zsim.programs.trl.read import read_values
from zsim.programs.trl.rollout import ROLLOUTS
from zsim.reading import read_text
from zsim.specs.formats.config_file import TrainingFile

_MODEL = re.compile(
    r"(AutoModelFor|\w+For)(CausalLM|ConditionalGeneration|ImageTextToText|SpeechSeq2Seq|Seq2SeqLM)"
    r"|AutoModelForVision2Seq"
)
_OTHER_MODEL = re.compile(r"AutoModel\w*|\w+For[A-Z]\w+|Fast(Language|Vision|)Model")
# Objects -> (their arguments, as TRL's keys), None for arguments of other names.
_LORA = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_dora": "use_dora",
    "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
}  # fmt: skip
_IDLE_LORA = (
    "bias", "task_type", "use_rslora", "inference_mode", "init_lora_weights", "fan_in_fan_out",
)  # fmt: skip
_QUANTISED = {
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}  # fmt: skip
_LOADED = {
    "0": "model_name_or_path", "pretrained_model_name_or_path": "model_name_or_path", "dtype": "dtype",
    "torch_dtype": "torch_dtype", "attn_implementation": "attn_implementation",
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
}  # fmt: skip
_TRAINED = {key: key for key in ("max_seq_length", "max_length", "max_prompt_length", "packing", "beta")}
_PLACED = ("auto", "balanced", "balanced_low_0", "sequential", {"": 0}, {"": "cuda:0"})
# Arguments of trainers and methods of their arguments that change a step in ways that zsim does not read.
_REFUSED = ("optimizers", "optimizer_cls_and_kwargs", "compute_loss_func", "model_init")
_RESET = re.compile("set_(training|optimizer|dataloader)|exec|globals")
_PARSERS = re.compile("(Hf|H4)ArgumentParser|TrlParser")  # of dataclasses of arguments
_LENGTH_NAME = re.compile(
    r"(max_?(seq|sequence|context)?|seq|sequence|context)_?len(gth)?|cutoff_len|block_size", re.IGNORECASE
)
_LOADS = ("from_pretrained", "from_config")
_SETTINGS = {"model_name_or_path": "model", "load_in_4bit": "training.lora.quantized"}
_UNSLOTH_TEXT = ("FastLanguageModel", "FastModel")
_UNSLOTH = (*_UNSLOTH_TEXT, "FastVisionModel")
# What `FastLanguageModel` takes where it is not told (unsloth 015bdef0, models/loader.py and llama.py).
_UNSLOTH_LOADS = {
    "load_in_4bit": True, "max_seq_length": 2048, "device_map": "sequential", "dtype": None,
    "full_finetuning": False,
}  # fmt: skip
_UNSLOTH_ADAPTER = {
    "r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "use_gradient_checkpointing": "unsloth",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
# What FastModel adapts where it is told no modules (models/vision.py).
_UNSLOTH_PARTS = {
    "finetune_vision_layers": False, "finetune_language_layers": True, "finetune_attention_modules": True,
    "finetune_mlp_modules": True,
}  # fmt: skip
_SHORTEST_OFFLOADED = 512  # tokens of the shortest sequence whose checkpoints unsloth keeps on the host


def read_script(
    path: Path,
    settings: Mapping[str, Any],
    flags: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> TrainingFile:
    """The settings in a script. `settings` are the experiment's by dotted key, for what it asks its GPU,
    `flags` those behind it, for those that its argparse declares, and `variables` the environment's.

    Raises InputError for a script without arguments of the Trainer's, NotSimulatedError for what it does
    besides, and for conditions on which it depends and that are not constants.
    """
    tree = parse_notebook(path) if path.suffix == ".ipynb" else parse_python(path)
    try:
        script = _Script(path, tree, flags or {}, variables or {}, settings)
        for module, scope in ((tree, script.scope), *script.names.modules.values()):
            script.scope = scope
            script.visit(module)
        return script.read()
    except RecursionError:
        raise InputError(f"{path}: has an expression that is nested too deeply to be read") from None


def makes_arguments(path: Path) -> bool:
    """Whether a script makes the arguments of a trainer in its code, and takes none from flags by itself."""
    text = _text_of(path)
    return bool(re.search(rf"(?<!class )\b({CONFIG.pattern})\(", text) and not _PARSERS.search(text))


def parses_arguments(path: Path) -> bool:
    """Whether a script takes the arguments of a trainer from flags."""
    return _PARSERS.search(_text_of(path)) is not None


def parses_plain_arguments(path: Path) -> bool:
    """Whether a script takes the arguments of transformers' own Trainer from flags, without TRL and PEFT."""
    text = _text_of(path)
    is_plain = re.search(r"(?<!\w)(Seq2Seq)?Trainer\(", text) and not re.search(r"\b(trl|peft)\b", text)
    return bool(is_plain and _PARSERS.search(text))


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError):
        return ""


class _Script(Values, ast.NodeVisitor):
    """The objects that a script builds and that decide how a step runs."""

    def __init__(self, path: Path, tree: ast.Module, *given: Mapping[str, Any]) -> None:
        super().__init__(path, tree, *given)
        self.unused = _unused_functions(tree, [module for module, _ in self.names.modules.values()])
        self.scope = self.names.module
        self.lengths: list[Any] = []
        self.values: dict[str, Any] = {}
        self.configs: list[str] = []
        self.adapters: list[Any] = []
        self.trainers: list[str] = []
        self.models: list[tuple[ast.expr | None, Scope]] = []
        self.loads: dict[ast.Call, tuple[Scope, Unknown | None]] = {}
        self.preparation: Any = None
        self.checkpointing: dict[str, Any] = {}
        self.unsloth: dict[str, Any] = {}
        self.condition: Unknown | None = None

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node not in self.unused:
            outer, self.scope = self.scope, self.names.scopes[node]
            self.generic_visit(node)
            self.scope = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "requires_grad" and isinstance(node.ctx, ast.Store):
            raise self.lack(node.lineno, "requires_grad: zsim does not follow which parameters train")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        test, outer = self.value(node.test, self.scope), self.condition
        self.visit(node.test)
        unknown = unknown_in(test)
        body, orelse = (part if isinstance(part, list) else [part] for part in (node.body, node.orelse))
        self.condition = unknown or outer
        for statement in [*body, *orelse] if unknown else body if test else orelse:
            self.visit(statement)
        self.condition = outer

    visit_IfExp = visit_If

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name, fields = last_name(node.func), self.built(node, self.scope)
        fields = fields if isinstance(fields, dict) else {}
        if ("tokenize" in name.lower() or "truncation" in fields) and fields.get("max_length") is not None:
            self.lengths.append(fields["max_length"])
        if CONFIG.fullmatch(name):
            self.configs.append(name)
            if len(node.args) > 1:
                raise self.lack(node.lineno, f"{name}: zsim reads its arguments by name alone")
            self.take(fields, None)
        elif name in PARSED:
            for entry in self.parsed(node, self.scope):
                if isinstance(entry, dict) and CLASS in entry:
                    self.configs.append(str(entry[CLASS]))
                    self.take(entry, None)
        elif TRAINER.fullmatch(name):
            self.trainers.append(name)
            self.take(fields, _TRAINED)
            for key in _REFUSED:
                if fields.get(key) not in (None, [None, None]):
                    raise self.lack(node.lineno, f"{key}: zsim does not read what {name} is told by it")
            words = [word.value for word in node.keywords if word.arg == "model"]
            self.models.append((next(iter((*words, *node.args[:1])), None), self.scope))
            self.add_adapter(fields.get("peft_config"), node.lineno)
        elif name == "get_peft_model" and _owner(node) in _UNSLOTH_TEXT:
            self.unsloth = {**_UNSLOTH_ADAPTER, **fields}
            if _owner(node) == "FastModel" and "target_modules" not in fields:
                self.unsloth["target_modules"] = "all-linear"
                modules = {part: fields.get(part, True) for part in _UNSLOTH_PARTS}
                if modules != _UNSLOTH_PARTS:
                    raise self.lack(
                        node.lineno, f"FastModel: zsim adapts all of the text model alone: {modules}"
                    )
            lora = {key: value for key, value in self.unsloth.items() if key in _LORA}
            self.add_adapter({CLASS: "LoraConfig", LINE: node.lineno, **lora}, node.lineno)
        elif name in ("get_peft_model", "add_adapter"):
            adapter = fields.get("1", fields.get("0") if name == "add_adapter" else None)
            adapter = fields.get("peft_config", fields.get("adapter_config", adapter))
            self.add_adapter(adapter, node.lineno)
        elif name in _LOADS:
            self.loads[node] = (self.scope, self.condition)
        elif name == "prepare_model_for_kbit_training":
            self.take(fields, {})
            self.preparation = fields.get("use_gradient_checkpointing", True)
        elif name in ("gradient_checkpointing_enable", "gradient_checkpointing_disable"):
            kwargs = fields.get("gradient_checkpointing_kwargs", fields.get("0"))
            is_on = name.endswith("enable") and not self.checkpointing and self.condition is None
            unknown = Unknown(ast.unparse(node)[:60], node.lineno)
            self.checkpointing["gradient_checkpointing"] = True if is_on else unknown
            if kwargs is not None:
                self.checkpointing["gradient_checkpointing_kwargs"] = kwargs
        elif name == "requires_grad_":
            raise self.lack(node.lineno, f"{name}: zsim does not follow which parameters train")
        elif fields.get(CLASS) == "torch.compile":
            raise self.lack(
                node.lineno, "torch.compile: zsim reads torch_compile=True of the arguments alone"
            )
        elif _RESET.fullmatch(name) or (name == "replace" and node.keywords):
            raise self.lack(node.lineno, f"{name}: zsim does not follow what it changes")
        elif name in ("to", "half", "bfloat16", "float") and isinstance(node.func, ast.Attribute):
            is_cast = name != "to" or any(f"torch.{value}" in DTYPES for value in fields.values())
            calls = self.names.calls(node.func.value, self.scope) if is_cast else None
            if calls and all(last_name(call.func) in _LOADS for call in calls):
                raise self.lack(node.lineno, f"{name}: zsim reads the model's dtype where it is loaded alone")
        elif getattr(self.scope.get(name), "text", "") == OWN_TRAINER:
            raise self.lack(node.lineno, f"{name}: is {OWN_TRAINER}, whose loss zsim does not read")

    def add_adapter(self, config: Any, line: int) -> None:
        """Take the adapter that a model or trainer is given. Raises NotSimulatedError for all but LoRA."""
        if config is None or config in self.adapters:
            return
        name = str(config[CLASS]) if isinstance(config, dict) and CLASS in config else ""
        if name.rpartition(".")[2] != "LoraConfig":
            what = name or f"'{config.text}'" if isinstance(config, Unknown) else name or str(config)
            raise self.lack(line, f"{what}: zsim simulates the adapters of a LoraConfig alone")
        if self.adapters:
            raise self.lack(line, "LoraConfig: zsim simulates one adapter, found two")
        self.adapters.append(config)
        self.values |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        self.take(config, _LORA)

    def load(self, trainer: str) -> None:
        """Take what the trained model is loaded by: what all calls agree on that may have made it."""
        made: list[ast.Call] | None = []
        for node, scope in self.models:
            name = None if node is None else self.value(node, scope)
            if isinstance(name, str):
                self.values["model_name_or_path"] = name
                continue
            calls = self.names.calls(node, scope)
            if calls is not None:  # without those of branches that are not taken
                calls = [call for call in calls if call in self.loads or last_name(call.func) not in _LOADS]
            made = None if calls is None or made is None else [*made, *calls]
        is_certain = made is not None and all(call in self.loads for call in made)
        if not is_certain or made is None:
            made = [call for call in self.loads if _OTHER_MODEL.fullmatch(_owner(call))]
        merged: dict[str, Any] = {}
        for call in made:
            scope, self.condition = self.loads[call]
            owner, fields = _owner(call), self.built(call, scope)
            is_reward = owner.endswith("ForSequenceClassification") and fields.get("num_labels") == 1
            if not (_MODEL.fullmatch(owner) or owner in _UNSLOTH or (is_reward and trainer == "reward")):
                if not is_certain:
                    continue
                raise self.lack(call.lineno, f"zsim does not simulate {owner} of scripts yet")
            unknown = Unknown(ast.unparse(call)[:60], call.lineno)
            if last_name(call.func) == "from_config" or not is_certain:
                fields = {key: value for key, value in fields.items() if key != "0"}
                fields["pretrained_model_name_or_path"] = unknown
            if owner in _UNSLOTH_TEXT:
                fields = {**_UNSLOTH_LOADS, **fields}
                fields.setdefault("0", fields.get("model_name"))
                is_full = unknown_in(fields["full_finetuning"]) or bool(fields["full_finetuning"])
                if is_full and fields["load_in_4bit"]:
                    fields["load_in_4bit"] = is_full if isinstance(is_full, Unknown) else False
            fields["use_unsloth"] = owner in _UNSLOTH or None
            keys = {*fields, *merged} - {LINE}
            merged = {
                key: fields.get(key) if not merged or fields.get(key) == merged.get(key) else unknown
                for key in sorted(keys)
            }
            self.take(fields, {})
        self.condition = None
        self.values["use_unsloth"] = merged.get("use_unsloth")
        if merged.get("use_unsloth") and "device_map" in merged and trainer in ("", "sft"):
            self.read_unsloth(merged)
        self.is_placed = merged.get("device_map") in _PLACED
        quantised = merged.get("quantization_config")
        if isinstance(quantised, dict) and str(quantised.get(CLASS)).endswith("BitsAndBytesConfig"):
            self.take(quantised, _QUANTISED)
        elif quantised is not None:
            text = getattr(unknown_in(quantised), "text", str(quantised))
            raise self.lack(made[0].lineno, f"quantization_config: zsim does not simulate '{text}'")
        self.take(merged, _LOADED)

    def read_unsloth(self, merged: Mapping[str, Any]) -> None:
        """Take what unsloth puts in place of transformers: the types, the length and checkpoints."""
        self.unsloth = self.unsloth or {"use_gradient_checkpointing": "unsloth"}
        is_on = self.unsloth["use_gradient_checkpointing"]
        self.values |= {"use_unsloth": None, "use_liger_kernel": True, "use_bnb_nested_quant": True}
        self.values["gradient_checkpointing"] = is_on if unknown_in(is_on) else bool(is_on)
        if not any(self.values.get(key) for key in ("bf16", "fp16")):
            self.values["bf16" if self.has_bf16 else "fp16"] = True
        if merged.get("dtype") is None:
            self.values["dtype"] = "float16" if self.values.get("fp16") is True else "bfloat16"
        if not any(self.values.get(key) for key in ("max_length", "max_seq_length")):
            self.values["max_length"] = merged["max_seq_length"]

    def write_unsloth(self, file: TrainingFile) -> None:
        """Write what TRL has no key for. unsloth casts what is trained to fp32, and nothing else."""
        length = file.settings.get("training.sequence_length", _SHORTEST_OFFLOADED)
        if self.unsloth["use_gradient_checkpointing"] == "unsloth" and length >= _SHORTEST_OFFLOADED:
            file.settings["training.checkpoint_offload"] = "pinned"
        file.settings["training.cross_entropy"] = "unsloth-fused"
        if self.adapters:
            file.settings.pop("training.lora.dtype", None)
            if self.unsloth.get("lora_dropout") == 0 and self.unsloth.get("bias", "none") == "none":
                file.settings["training.lora.kernels"] = "unsloth"  # models/llama.py `patch_peft_model`
        # docs.unsloth.ai/basics/unsloth-benchmarks has for Llama-3.1-8B in 4 bits (rank 32, batch 1) 78,475
        # tokens in 24 GB, 153,977 in 40 and 342,733 in 80: zsim needs 20.9, 34.4 and 67.7 GB. Steps:
        # validation/published/experiments.json, surogate-unsloth.
        file.note(
            "unsloth: its norms and activations are taken as Liger's; memory is 13 to 15 % below GPUs' at "
            "the longest contexts it publishes, and steps of models up to 2B take 1.1 to 1.8 times as long"
        )

    def lack(self, line: int, text: str) -> NotSimulatedError:
        return NotSimulatedError(f"{self.location_of(line)}: {text}; write an experiment file")

    def location_of(self, line: int) -> str:
        module, line = divmod(line, MODULE_LINES)
        cell, line = divmod(line, CELL_LINES)
        path = [self.path, *self.names.modules][module]
        return f"{path}: cell {cell}, line {line}" if cell else f"{path}: line {line}"

    def take(self, fields: Mapping[str, Any], keys: Mapping[str, str] | None) -> None:
        """Take the arguments of an object that decides how a step runs, by `keys` or as they are called."""
        name, line = str(fields.get(CLASS)), int(fields.get(LINE, 0))
        if self.condition is not None:
            text = self.condition.text
            raise self.lack(line, f"{name}: depends on '{text}', which zsim does not follow")
        for argument, value in fields.items():
            key = argument if keys is None else keys.get(argument)
            if keys is _LORA and key is None and argument not in (*_IDLE_LORA, CLASS, LINE):
                key = f"lora_{argument}"
            if argument == "**":
                raise self.lack(line, f"zsim does not follow '{value.text}'")
            if key not in (None, CLASS, LINE) and not str(key).isdecimal() and value is not None:
                self.values[key] = value

    def cut_length(self, trainer: str) -> Any:
        """The length to which a script cuts its texts, which transformers' own trainers do not."""
        lengths = [length for n, length in enumerate(self.lengths) if length not in self.lengths[:n]]
        texts = [unknown.text if (unknown := unknown_in(length)) else str(length) for length in lengths]
        limit = self.values.get("model_max_length")
        if limit is not None and all(text.endswith("model_max_length") for text in texts):
            return limit
        if len(lengths) > 1:
            return Unknown(", ".join(texts), 1)
        return lengths[0] if lengths else self.named_length(trainer)

    def named_length(self, trainer: str) -> Any:
        """The length that a flag, or names of the script, stand for where no tokenizer is told one."""
        lengths = {value for key, value in self.flags.items() if _LENGTH_NAME.fullmatch(key)}
        if len(lengths) == 1 and not trainer:
            return lengths.pop()
        scopes = (self.names.module, *self.names.scopes.values())
        candidates = {
            value
            for scope in scopes
            for name in scope
            if _LENGTH_NAME.fullmatch(name) and type(value := scope[name]) is int
        }
        unknown = Unknown("the length of a sequence, as no tokenizer call has max_length", 1)
        is_speech = any(re.search("Speech|Whisper", _owner(call)) for call in self.loads)
        return candidates.pop() if len(candidates) == 1 else None if trainer or is_speech else unknown

    def read(self) -> TrainingFile:
        """The experiment of what was taken."""
        kinds = {*self.trainers}
        if len(kinds) != 1 or not self.configs:
            names = ", ".join(sorted(kinds)) or "none"
            raise InputError(
                f"{self.path}: expected a script that makes TrainingArguments, or a config of TRL's, and one "
                f"trainer (found {names}); of another give an experiment file, or the command that starts it"
            )
        if len(self.configs) > 1:
            raise self.lack(1, f"makes {len(self.configs)} of {self.configs[0]}; zsim reads scripts with one")
        if None in self.names.changed:
            change = self.names.changed[None]
            raise self.lack(change.line, f"zsim does not follow '{change.text}'")
        trainer = kinds.pop().removesuffix("Trainer").lower()
        self.load(trainer)
        if self.preparation:  # or unknown
            self.values["gradient_checkpointing"] = self.preparation
            self.values.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": True})
        self.values |= self.checkpointing
        is_plain = trainer in ("", "seq2seq")
        if is_plain:
            length = self.cut_length(trainer)
            defaults = {"bf16": False, "gradient_checkpointing": False, "max_length": length}
            self.values = {**defaults, **self.values}
        for word, change in self.names.changed_outside.items():
            key = word if word in KEYS else (_LORA if self.adapters else {}).get(str(word))
            if key is not None and (self.adapters or not key.startswith("lora_")):
                self.values[key] = change
        missing = self.take_unknown(trainer)
        file = read_values(str(self.path), self.values, trainer="hf" if is_plain else trainer)
        file.program = "transformers" if is_plain else file.program
        file.missing |= missing
        if self.unsloth and not self.values.get("use_unsloth"):
            self.write_unsloth(file)
        if self.takes_bf16:
            asks = "unsloth asks" if self.unsloth else "the script asks"
            file.note(f"{asks} whether the GPUs have bf16: taken as yes, which those before Ampere have not")
        if self.is_placed:
            file.defaults["gpus"] = 1
            file.note(
                "device_map: one process, so one GPU; zsim does not simulate layers that are spread over more"
            )
        if self.preparation is not None:
            is_ddp = file.settings.get("strategy.kind") == "ddp"
            if is_ddp and "4" in str(file.settings.get("training.lora.quantized", "")):
                file.settings["training.lora.preparation"] = "peft"
                file.settings.pop("training.stored_dtype", None)  # it casts all that is not in 4 bits to fp32
            else:
                file.note("prepare_model_for_kbit_training: zsim has its fp32 under DDP with 4 bits alone")
        if loose := sorted({*self.flags} - self.declared):
            file.note(f"--{', --'.join(loose)}: not read, for the script's argparse declares no such flag")
        return file

    def take_unknown(self, trainer: str) -> dict[str, str]:
        """Remove the values that are not known, and return what asks for those that a step needs, by the
        experiment's key. Raises NotSimulatedError for one that no key of the experiment has.
        """
        idle = ("num_train_epochs", *(() if trainer in ("sft", *ROLLOUTS) else ("beta", "loss_type")))
        missing = {}
        for key, value in self.values.items():
            unknown = unknown_in(value)
            if unknown is None:
                continue
            self.values[key] = None
            if key in SILENT or key in idle:
                continue
            setting = _SETTINGS.get(key) or (KEYS[key].setting if key in KEYS else "")
            reason = f"{key}: zsim does not follow '{unknown.text}'"
            if not setting:
                raise self.lack(unknown.line, reason)
            location = self.location_of(unknown.line).removeprefix(f"{self.path}: ")
            missing[setting] = f"{location}: {reason}: give --set {setting}=VALUE"
        return missing


def _unused_functions(tree: ast.Module, modules: Sequence[ast.Module]) -> set[ast.stmt]:
    """The functions of imported modules whose names nothing mentions that may run."""
    pending = [entry for module in modules for entry in module.body]
    used: set[ast.AST] = {tree}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    names: set[str] = set()
    while used:
        for part in (part for entry in used for part in ast.walk(entry)):
            names |= {part.id} if isinstance(part, ast.Name) else set()
            names |= {part.attr} if isinstance(part, ast.Attribute) else set()
            names |= {part.name} if isinstance(part, ast.alias) and part.asname else set()
        used = {entry for entry in pending if not isinstance(entry, kinds) or entry.name in names}
        pending = [entry for entry in pending if entry not in used]
    return {*pending}


def _owner(node: ast.Call) -> str:
    return last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
