"""The values of a script's expressions: constants, names, fields of classes, and flags."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.programs.python_text import CLASS, LINE, Unknown, evaluate, unknown_in
from zsim.programs.training_script.names import Names, Scope
from zsim.programs.trl.keys import KEYS
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.formats.config_file import load_table, locate_named_file

CONFIG = re.compile(r"(Seq2Seq)?TrainingArguments|(SFT|DPO|ORPO|CPO|KTO|GRPO|RLOO|Reward)Config")
TRAINER = re.compile(r"(SFT|DPO|ORPO|CPO|KTO|GRPO|RLOO|Reward|Seq2Seq|)Trainer")
DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "torch.half")
# What bf16 is asked for by. Before Ampere unsloth's says no, and torch's, which transformers asks, yes from
# 2.4 on, where it is emulated.
_UNSLOTH_BF16 = "is_bfloat16_supported"
_BF16 = ("is_bf16_supported", "is_torch_bf16_gpu_available", _UNSLOTH_BF16)
PARSED = ("parse_args_into_dataclasses", "parse_args_and_config")
_CALLS: Mapping[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "Path": str, "list": list, "len": len, "max": max,
    "min": min,
}  # fmt: skip
_TEXT_METHODS = ("split", "strip", "lower", "upper", "replace", "startswith", "endswith", "removeprefix")
_LOADED_FILES = ("yaml.safe_load", "yaml.load", "json.load", "OmegaConf.load")
_RANKS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")  # variables that a launcher sets
OWN_TRAINER = "a trainer of the script's own"


class Values:
    """The values of a script's expressions."""

    def __init__(
        self,
        path: Path,
        tree: ast.Module,
        flags: Mapping[str, Any],
        variables: Mapping[str, str],
        settings: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.flags = flags
        self.variables = variables
        self.settings = settings
        """Of the experiment, by dotted key."""
        self.arguments: dict[str, Any] = {}
        """Of argparse."""
        self.declared: set[str] = set()
        """The flags that the script knows."""
        self.takes_bf16 = False
        """Whether bf16 is asked for before the GPU is known, which is answered with yes."""
        self.names = Names(tree, self.value, path.parent)
        self.names.module.cache["__name__"] = "__main__"
        for node, scope in self.names.declared:
            self.declare(node, scope)

    @cached_property
    def gpu(self) -> Gpu | None:
        """The job's GPU with the fewest types, or None before it is known."""
        name = self.settings.get("cluster")
        if not isinstance(name, str) or any(key.startswith("cluster.") for key in self.settings):
            return None
        try:
            gpus = load_cluster(name).gpus
        except InputError:  # which is told with the rest
            return None
        return min(gpus, key=lambda gpu: (gpu.peak.bf16 is not None, gpu.compute_capability or 0))

    @property
    def has_precision(self) -> bool:
        return self.settings.get("training.precision") is not None

    @property
    def has_bf16(self) -> bool:
        """Whether the job's GPUs compute in bf16, as far as the experiment lets them."""
        if self.has_precision:
            return self.settings["training.precision"] in ("bf16", "fp8")
        self.takes_bf16 |= self.gpu is None
        return self.gpu is None or self.gpu.peak.bf16 is not None

    def declare(self, node: ast.Call, scope: Scope) -> None:
        """Take the default of an argument of argparse, or the flag's value."""
        fields = self.built(node, scope)
        words = [str(fields[key]) for key in fields if key.isdecimal()]
        flags = [word.lstrip("-").replace("-", "_") for word in words]
        name = str(fields.get("dest") or max(flags, key=len, default=""))
        action = fields.get("action", "store")
        unknown = Unknown(f"--{name}", node.lineno)
        is_on = {"store_true": True, "store_false": False}.get(str(action))
        is_open = fields.get("required") is True or not all(word.startswith("-") for word in words)
        is_open |= "**" in fields or (action != "store" and is_on is None)
        value = fields.get("default", unknown if is_open else None if is_on is None else not is_on)
        self.declared.update(flags)
        for flag in flags:
            if flag in self.flags:
                value = self.flags[flag] if is_on is None else is_on
                value = unknown if action != "store" and is_on is None else value
        if name in self.arguments and self.arguments[name] != value:
            value = unknown
        self.arguments[name] = value

    def value(self, node: Any, scope: Scope) -> Any:
        """The value of a node, without those of its attributes and keys that are written to elsewhere."""
        if isinstance(node, ast.ClassDef):
            if any(TRAINER.fullmatch(last_name(base)) for base in node.bases):
                return Unknown(OWN_TRAINER, node.lineno)
            base = next((text for text in map(ast.unparse, node.bases) if is_config(text)), None)
            fields = {} if base is None else {CLASS: base, LINE: node.lineno}
            for entry in node.body:
                if isinstance(entry, ast.Assign | ast.AnnAssign):
                    for target in entry.targets if isinstance(entry, ast.Assign) else [entry.target]:
                        fields[ast.unparse(target)] = self.default(entry, ast.unparse(target), scope)
            return self.strip_changes(fields)
        value = evaluate(node, scope, partial(self.built, scope=scope))
        if isinstance(value, Unknown) and not value.line:
            value = Unknown(value.text, node.lineno)
        return self.strip_changes(value)

    def default(self, entry: ast.Assign | ast.AnnAssign, name: str, scope: Scope) -> Any:
        """The value of a field of a class, of which dataclasses may have it in a call."""
        if isinstance(entry.value, ast.Call) and last_name(entry.value.func) == "field":
            words = {word.arg: word.value for word in entry.value.keywords}
            factory = words.get("default_factory")
            node = words.get("default", factory.body if isinstance(factory, ast.Lambda) else None)
        else:
            node = entry.value
        return Unknown(name, entry.lineno) if node is None else self.value(node, scope)

    def parsed(self, call: ast.Call, scope: Scope) -> list[Any]:
        """The objects that a parser of dataclasses makes of the flags and of the defaults."""
        parser = self.value(call.func.value, scope) if isinstance(call.func, ast.Attribute) else None
        entries = parser.get("0", parser.get("dataclass_types")) if isinstance(parser, dict) else None
        classes = entries if isinstance(entries, list) else [entries]
        named = {key for entry in classes if isinstance(entry, dict) for key in entry}
        rest = {key: value for key, value in self.flags.items() if key not in named}
        self.declared |= {*self.flags}
        made: list[Any] = []
        for entry in classes:
            config = getattr(entry, "text", "")
            if isinstance(entry, dict):
                fields = {key: self.flags.get(key, value) for key, value in entry.items()}
                made.append({**rest, **fields} if CLASS in entry else fields)
            elif is_config(config):
                made.append({CLASS: config, LINE: call.lineno, **rest})
            else:
                made.append(entry)
        return made

    def strip_changes(self, value: Any) -> Any:
        if isinstance(value, Unknown) and value.text in DTYPES:
            return value.text[6:]
        if not isinstance(value, dict):
            return value
        changes = self.names.changed_outside if CLASS in value else self.names.changed
        return {key: changes.get(key) or self.strip_changes(part) for key, part in value.items()}

    def built(self, node: ast.Call, scope: Scope) -> Any:
        """The arguments of a call by name, or its value where it is a constant."""
        name, text = last_name(node.func), ast.unparse(node.func)
        arguments = [self.value(argument, scope) for argument in node.args]
        unknown = Unknown(ast.unparse(node)[:60], node.lineno)
        if text == "getattr" and len(arguments) > 1 and isinstance(arguments[1], str):
            owner = ast.Attribute(node.args[0], arguments[1], ast.Load())
            return self.value(ast.copy_location(owner, node), scope)
        if text == "len" and [*map(ast.unparse, node.args)] == ["sys.argv"]:
            return 1 + 2 * len(self.flags)
        if text == "torch.cuda.is_available":
            return True
        if text in ("os.getenv", "os.environ.get") and arguments:
            variable = str(arguments[0])
            if variable in _RANKS or variable in self.names.changed or isinstance(arguments[0], Unknown):
                return unknown
            return self.variables.get(variable, arguments[1] if len(arguments) == 2 else unknown)
        if text in _CALLS and arguments:
            try:
                return unknown if node.keywords or unknown_in(arguments) else _CALLS[text](*arguments)
            except (TypeError, ValueError):
                return unknown
        if name in _BF16:
            return self.has_bf16 or (False if name == _UNSLOTH_BF16 or self.has_precision else unknown)
        if name == "get_device_capability":
            capability = None if self.gpu is None else self.gpu.compute_capability
            return unknown if capability is None else [*map(int, str(capability).split("."))]
        if name in PARSED:
            return self.parsed(node, scope)
        if (function := self.names.function(text, scope)) is not None:
            result = self.names.scopes[function].returned()
            return unknown if isinstance(result, Unknown) else result
        if name in _TEXT_METHODS and isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            if isinstance(owner, str) and all(isinstance(argument, str) for argument in arguments):
                try:
                    return unknown if node.keywords else getattr(owner, name)(*arguments)
                except (TypeError, ValueError):
                    return unknown
        if text in _LOADED_FILES and arguments:
            return self.content(arguments[0], unknown)
        if name == "parse_args":
            return (
                unknown
                if node.keywords or arguments not in ([], [[]], [""])
                else self.strip_changes(self.arguments)
            )
        made = scope.get(text)
        if isinstance(made, dict) and CLASS not in made and text[:1].isupper():
            if node.args or not all(word.arg in made for word in node.keywords):
                return unknown
            return made | {str(word.arg): self.value(word.value, scope) for word in node.keywords}
        if name == "get" and len(arguments) == 2 and isinstance(node.func, ast.Attribute):
            table = self.value(node.func.value, scope)
            if isinstance(table, dict) and CLASS not in table and isinstance(arguments[0], str):
                return self.names.changed.get(arguments[0]) or table.get(*arguments)
        fields = self.fields(node, arguments, scope)
        return unknown if text == "dict" and (arguments or "**" in fields) else fields

    def fields(self, node: ast.Call, arguments: Sequence[Any], scope: Scope) -> dict[str, Any]:
        """The arguments of a call by name or number, with its name and line unless it makes a dict."""
        text = ast.unparse(node.func)
        fields: dict[str, Any] = {} if text == "dict" else {CLASS: text, LINE: node.lineno}
        fields |= {str(number): value for number, value in enumerate(arguments)}
        for word in node.keywords:
            value = self.value(word.value, scope)
            if word.arg is not None:
                fields[word.arg] = value
            elif isinstance(value, dict) and CLASS not in value:
                fields |= {str(key): change for key, change in self.names.changed.items() if key in KEYS}
                fields |= value
            else:
                fields["**"] = Unknown(ast.unparse(word.value)[:60], node.lineno)
        return fields

    def content(self, opened: Any, unknown: Unknown) -> Any:
        """The keys of a YAML or JSON that a script loads, where its name is known and it is here."""
        name = opened.get("0") if isinstance(opened, dict) and opened.get(CLASS) == "open" else opened
        if not isinstance(name, str):
            return unknown
        try:
            return load_table(locate_named_file(name, self.path.parent, str(self.path), "a file of settings"))
        except InputError:
            return unknown


def is_config(text: str) -> bool:
    return CONFIG.fullmatch(text.rpartition(".")[2]) is not None


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
