"""A Python script with `TrainingArguments(...)` or a config of TRL's -> an experiment, by TRL's reader.

The script is parsed and never run. Read in transformers 5.23 (training_args.py), TRL f2cd5771 and PEFT 0.21.2
(tuners/lora/config.py, utils/other.py `prepare_model_for_kbit_training`). Values are constants, names that
stand for one value, fields of classes, defaults of argparse and of variables of the environment. What else a
step depends on must be given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.python_text import CLASS, LINE, Unknown, evaluate, parse_python, unknown_in
from zsim.programs.trl.keys import KEYS, SILENT
from zsim.programs.trl.read import read_values
from zsim.programs.trl.rollout import ROLLOUTS
from zsim.reading import parse_json, read_text
from zsim.specs.formats.config_file import TrainingFile

_CONFIG = re.compile(r"(Seq2Seq)?TrainingArguments|(SFT|DPO|ORPO|CPO|KTO|GRPO|RLOO|Reward)Config")
_TRAINER = re.compile(r"(SFT|DPO|ORPO|CPO|KTO|GRPO|RLOO|Reward|Seq2Seq|)Trainer")
_MODEL = re.compile(
    r"(AutoModelFor|\w+For)(CausalLM|ConditionalGeneration|ImageTextToText)|AutoModelForVision2Seq"
)
_OTHER_MODEL = re.compile(r"AutoModel\w*|\w+For[A-Z]\w+")
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
_TRUE_CALLS = ("is_bfloat16_supported", "is_bf16_supported", "is_available")  # on GPUs of today
_SETTINGS = {"model_name_or_path": "model", "load_in_4bit": "training.lora.quantized"}
_OWN_TRAINER = "a trainer of the script's own"
_DECLARED = "parse_args()"  # the arguments of argparse, among the names
_UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")


def read_script(path: Path, flags: Mapping[str, Any] | None = None) -> TrainingFile:
    """The settings in a script. `flags` are those behind it, for those that its argparse declares.

    Raises InputError for a script without arguments of the Trainer's, NotSimulatedError for what it does
    besides, and for conditions on which it depends and that are not constants.
    """
    tree = parse_python(path, _notebook(path) if path.suffix == ".ipynb" else None)
    names = _Script(path, flags or {}, {}, is_taking=False)  # a function may stand before what it uses
    try:
        names.visit(tree)
        script = _Script(path, flags or {}, names.names, is_taking=True)
        script.visit(tree)
    except RecursionError:
        raise InputError(f"{path}: has an expression that is nested too deeply to be read") from None
    return script.read()


def makes_arguments(path: Path) -> bool:
    """Whether a script makes the arguments of a trainer in its code, and takes none from flags by itself."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError):
        return False
    is_made = re.search(rf"(?<!class )\b({_CONFIG.pattern})\(", text) is not None
    return is_made and re.search(r"(Hf|H4)ArgumentParser|TrlParser", text) is None


def _notebook(path: Path) -> str:
    """The Python of a notebook's cells. Raises InputError for another JSON."""
    try:
        content = parse_json(read_text(path), path)
    except (OSError, ValueError):
        content = None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise InputError(f"{path}: is no notebook: it has no cells")
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    texts = ["".join(cell.get("source", ())) for cell in code]
    texts = [text for text in texts if not re.match(r"\s*%%(bash|sh|script|writefile|file|html)", text)]
    # commands of a shell and of the notebook, with the lines that continue them
    return re.sub(r"(?m)^([ \t]*)[!%](?:.*\\\n)*.*$", r"\1pass", "\n".join(texts))


class _Script(ast.NodeVisitor):
    """The values that a script's names have, and the objects that it builds."""

    def __init__(
        self, path: Path, flags: Mapping[str, Any], names: dict[str, Any], *, is_taking: bool
    ) -> None:
        self.path = path
        self.names = {"__name__": "__main__", _DECLARED: {}, **names}
        self.flags = flags
        self.is_taking = is_taking
        self.lengths: set[int] = set()
        self.values: dict[str, Any] = {}
        self.configs: list[str] = []
        self.trainers: list[str] = []
        self.preparation: bool | None = None
        self.is_placed = False
        self.condition: Unknown | None = None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        values = {
            ast.unparse(entry.targets[0] if isinstance(entry, ast.Assign) else entry.target): self.value(
                entry.value
            )
            for entry in node.body
            if isinstance(entry, ast.Assign | ast.AnnAssign) and entry.value is not None
        }
        is_trainer = any(_TRAINER.fullmatch(_last_name(base)) for base in node.bases)
        self.names[node.name] = Unknown(_OWN_TRAINER, node.lineno) if is_trainer else values
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign([node.target], node.value)

    def assign(self, targets: list[ast.expr], node: ast.expr) -> None:
        """Keep the value of names. One with two values has none."""
        value = self.value(node)
        for target in targets:
            if isinstance(target, ast.Name):
                before = self.names.get(target.id, value)
                is_new = isinstance(before, Unknown) and before.text != target.id
                self.names[target.id] = (
                    value if is_new or before == value else Unknown(target.id, node.lineno)
                )
        self.visit(node)

    def visit_If(self, node: ast.If) -> None:
        test, outer = self.value(node.test), self.condition
        test = unknown_in(test) or test
        if isinstance(test, Unknown):
            self.condition = test
        for statement in (
            [*node.body, *node.orelse] if isinstance(test, Unknown) else node.body if test else node.orelse
        ):
            self.visit(statement)
        self.condition = outer

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _last_name(node.func)
        if name == "add_argument":
            self.declare(node)
        if not self.is_taking:
            return
        owner = _last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if "tokenize" in name.lower() and isinstance(length := self.built(node).get("max_length"), int):
            self.lengths.add(length)
        if _CONFIG.fullmatch(name):
            self.configs.append(name)
            self.take(node, None)
        elif name in ("LoraConfig", "BitsAndBytesConfig") or _TRAINER.fullmatch(name):
            if name.endswith("Trainer"):
                self.trainers.append(name)
            self.take(node, {"LoraConfig": _LORA, "BitsAndBytesConfig": _QUANTISED}.get(name, _TRAINED))
        elif name == "from_pretrained" and "model_name_or_path" in self.values:
            return  # a model of another purpose, such as one to merge adapters with
        elif name == "from_pretrained" and (_MODEL.fullmatch(owner) or owner in _UNSLOTH):
            self.values["use_unsloth"] = owner in _UNSLOTH or None
            self.is_placed = self.built(node).get("device_map") in _PLACED
            self.take(node, _LOADED)
        elif name == "from_pretrained" and _OTHER_MODEL.fullmatch(owner):
            raise self.lack(node.lineno, f"zsim does not simulate {owner} of scripts yet")
        elif name == "prepare_model_for_kbit_training":
            self.preparation = self.built(node).get("use_gradient_checkpointing", True) is not False
        elif name == "gradient_checkpointing_enable":
            self.values["gradient_checkpointing"] = True
        elif getattr(self.names.get(name), "text", "") == _OWN_TRAINER:
            raise self.lack(node.lineno, f"{name}: is {_OWN_TRAINER}, whose loss zsim does not read")

    def lack(self, line: int, text: str) -> NotSimulatedError:
        return NotSimulatedError(f"{self.path}: line {line}: {text}; write an experiment file")

    def declare(self, node: ast.Call) -> None:
        """Take the default of an argument of argparse."""
        fields = self.built(node)
        words = [str(fields[key]).lstrip("-").replace("-", "_") for key in fields if key.isdecimal()]
        name = str(fields.get("dest") or max(words, key=len, default=""))
        default = Unknown(f"--{name}", node.lineno) if fields.get("required") is True else None
        default = fields.get("default", False if fields.get("action") == "store_true" else default)
        said = next((self.flags[word] for word in words if word in self.flags), default)
        if isinstance(self.names[_DECLARED].get(name, Unknown("", 0)), Unknown):  # the first of two of a name
            self.names[_DECLARED][name] = said

    def take(self, node: ast.Call, keys: Mapping[str, str] | None) -> None:
        """Take the arguments of an object that decides how a step runs, by `keys` or as they are called."""
        if self.condition is not None:
            name, test = _last_name(node.func), self.condition.text
            raise self.lack(node.lineno, f"{name}: depends on '{test}', which zsim does not follow")
        if _last_name(node.func) == "LoraConfig":
            self.values |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        for name, value in self.built(node).items():
            key = name if keys is None else keys.get(name)
            if keys is _LORA and key is None and name not in (*_IDLE_LORA, CLASS, LINE):
                key = f"lora_{name}"
            if name == "**":
                raise self.lack(node.lineno, f"zsim does not follow '{value.text}'")
            if key not in (None, CLASS, LINE) and not str(key).isdecimal() and value is not None:
                self.values[key] = value

    def value(self, node: ast.expr) -> Any:
        value = evaluate(node, self.names, self.built)
        text = value.text if isinstance(value, Unknown) else ""
        return (
            text[6:] if text in ("torch.bfloat16", "torch.float16", "torch.float32", "torch.half") else value
        )

    def built(self, node: ast.Call) -> Any:
        """The arguments of a call by name, or its value where it is a constant."""
        name, text = _last_name(node.func), ast.unparse(node.func)
        arguments = [self.value(argument) for argument in node.args]
        if name in _TRUE_CALLS:
            return True
        if text in ("os.getenv", "os.environ.get") and len(arguments) == 2:
            return arguments[1]
        if text in ("int", "float", "str", "Path") and len(arguments) == 1:
            converted = arguments[0]
            convert = {"int": int, "float": float}.get(text, str)
            try:
                return converted if isinstance(converted, Unknown) else convert(converted)
            except (TypeError, ValueError):
                return Unknown(ast.unparse(node)[:60], node.lineno)
        if name == "parse_args":
            return self.names[_DECLARED]
        if text in self.names and isinstance(self.names[text], dict) and text[:1].isupper():
            return self.names[text] | {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if name == "get" and len(arguments) == 2 and isinstance(node.func, ast.Attribute):
            table = self.value(node.func.value)
            if isinstance(table, dict) and CLASS not in table and isinstance(arguments[0], str):
                return table.get(*arguments)
        if text in ("max", "min") and arguments and all(type(value) is int for value in arguments):
            return (max if text == "max" else min)(arguments)
        fields: dict[str, Any] = {CLASS: text, LINE: node.lineno}
        fields |= {str(number): value for number, value in enumerate(arguments)}
        for word in node.keywords:
            value = self.value(word.value)
            if word.arg is not None:
                fields[word.arg] = value
            elif isinstance(value, dict):
                fields |= value
            else:
                fields["**"] = Unknown(ast.unparse(word.value)[:60], node.lineno)
        return fields

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
        trainer = kinds.pop().removesuffix("Trainer").lower()
        if self.preparation:
            self.values["gradient_checkpointing"] = True
            self.values.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": True})
        is_plain = trainer in ("", "seq2seq")
        if is_plain:
            length = self.lengths.pop() if len(self.lengths) == 1 else None
            defaults = {"bf16": False, "gradient_checkpointing": False, "max_length": length}
            self.values = {**defaults, **self.values}
        idle = ("num_train_epochs", *(() if trainer in ("sft", *ROLLOUTS) else ("beta", "loss_type")))
        missing = {}
        for key, value in self.values.items():
            unknown = unknown_in(value)
            if unknown is None:
                continue
            self.values[key] = None
            setting = _SETTINGS.get(key) or (KEYS[key].setting if key in KEYS else "")
            if key in SILENT or key in idle:
                continue
            reason = f"{key}: zsim does not follow '{unknown.text}'"
            if not setting:
                raise self.lack(unknown.line, reason)
            missing[setting] = f"line {unknown.line}: {reason}: give --set {setting}=VALUE"
        file = read_values(str(self.path), self.values, trainer="hf" if is_plain else trainer)
        file.program = "transformers" if is_plain else file.program
        file.missing |= missing
        if self.is_placed:
            file.defaults["gpus"] = 1
            file.note(
                "device_map: one process, so one GPU; zsim does not simulate layers that are spread over more"
            )
        if self.preparation is not None:
            file.settings["training.lora.preparation"] = "peft"
        return file


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
