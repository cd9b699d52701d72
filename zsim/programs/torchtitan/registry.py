"""torchtitan's registered functions, read from the text of a `config_registry.py` and never run.

A function builds `Trainer.Config(...)`, or takes another function's and sets fields of it. What a line
computes from more than constants is unknown, and an error only where a step depends on it. Read in torchtitan
b5bcd76c of August 2026 (`config/configs.py`, `trainer.py`, `models/llama3/config_registry.py`).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean, unreadable_reason
from zsim.programs.torchtitan.keys import IDLE_KEYS
from zsim.reading import read_text

CLASS = "class"
"""The key of a built object under which the name that was called stands."""
_FOLDERS = (
    "torchtitan/models/{}",
    "torchtitan/experiments/{}",
    "torchtitan/experiments/*/{}",
    "models/{}",
    "{}",
)
_FILE = "config_registry.py"
_MAX_CALLS = 30  # functions that take one another's configuration
_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS = {"Float8LinearConverter": "float8", "MXFP8LinearConverter": "mx"}
# Arguments of `model_registry`: those that are settings elsewhere, and those without effect on a step.
_MODEL_OPTIONS = {"moe_comm_backend": "parallelism.expert_parallel_comm_backend"}
_READ_OPTIONS = (CLASS, "0", "flavor", "converters", "attn_backend")
_OTHER_TRAINERS = {
    "Controller.Config": "reinforcement learning of torchtitan's experiments",
    "FluxTrainer.Config": "diffusion models",
    "to_graph_trainer_config": "steps that are compiled as one graph",
}
# Sections of a configuration that a step depends on, whose fields are keys of the command line too.
_SECTIONS = ("training", "parallelism", "compile")


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that more than constants decide."""

    text: str
    line: int


def locate_registry(folder: Path, module: str) -> Path | None:
    """The file of a module's functions in a checkout of torchtitan, or None."""
    if not all(part.isidentifier() for part in module.split(".")):
        return None
    name = module.replace(".", "/")
    for pattern in _FOLDERS:
        for path in sorted(folder.glob(f"{pattern.format(name)}/{_FILE}")):
            return path
    return None


def read_registered(path: Path, function: str, module: str) -> dict[str, Any]:
    """Dotted settings of a registered function.

    Raises InputError if there is no such function, NotSimulatedError for one that does more than build a
    configuration.
    """
    try:
        tree = ast.parse(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {unreadable_reason(error)}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not Python: {error}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function not in functions:
        public = [name for name in functions if not name.startswith("_")]
        raise InputError(
            f"{path}: no function '{function}'{did_you_mean(function, public)}; expected one of "
            f"{', '.join(public)}"
        )
    config = _Functions(path, functions).call(function)
    if not isinstance(config, dict):
        raise NotSimulatedError(f"{path}: {function}: zsim does not follow what it returns")
    return dict(_settings(config, module, f"{path}: {function}"))


class _Functions:
    """Calls functions of a file on paper."""

    def __init__(self, path: Path, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.path = path
        self.functions = functions
        self.num_calls = 0

    def call(self, name: str) -> Any:
        self.num_calls += 1
        if self.num_calls > _MAX_CALLS:
            raise InputError(f"{self.path}: {name}: functions that call one another without end")
        values: dict[str, Any] = {}
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self._value(statement.value, values)
            self._run(statement, values, name)
        return None

    def _run(self, statement: ast.stmt, values: dict[str, Any], name: str) -> None:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                self._assign(target, self._value(statement.value, values), values)
        elif not isinstance(
            statement,
            ast.Expr | ast.Assert | ast.Import | ast.ImportFrom | ast.Pass | ast.AnnAssign | ast.FunctionDef,
        ):
            kind = type(statement).__name__.lower()
            raise NotSimulatedError(
                f"{self.path}: line {statement.lineno}: zsim does not follow the '{kind}' in {name}; give "
                "the JSON that --debug.save_config_file writes"
            )

    def _assign(self, target: ast.expr, value: Any, values: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            values[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, values)
            if isinstance(owner, Unknown) and isinstance(target.value, ast.Attribute):
                owner = {}  # a section of which the function says nothing else
                self._assign(target.value, owner, values)
            if isinstance(owner, dict):
                owner[target.attr] = value

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(element, values) for element in node.elts]
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value, values)
            if isinstance(owner, dict) and node.attr in owner:
                return owner[node.attr]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self._value(node.left, values), self._value(node.right, values)
            if all(isinstance(side, int) and not isinstance(side, bool) for side in (left, right)):
                return _OPERATIONS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand, values)
            return -number if isinstance(number, int | float) else Unknown(ast.unparse(node), node.lineno)
        if isinstance(node, ast.Call):
            return self._built(node, values)
        return Unknown(ast.unparse(node)[:60], node.lineno)

    def _built(self, node: ast.Call, values: Mapping[str, Any]) -> Any:
        """The fields of an object that is built, or the result of a function of this file."""
        name = ast.unparse(node.func)
        if name in self.functions and not node.args and not node.keywords:
            return self.call(name)
        fields: dict[str, Any] = {CLASS: name}
        fields |= {str(number): self._value(argument, values) for number, argument in enumerate(node.args)}
        fields |= {
            word.arg: self._value(word.value, values) for word in node.keywords if word.arg is not None
        }
        return fields


def _settings(config: Mapping[str, Any], module: str, where: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of what a step depends on."""
    if (feature := _OTHER_TRAINERS.get(str(config.get(CLASS)))) is not None:
        raise NotSimulatedError(f"{where}: zsim does not simulate {feature}; expected a Trainer.Config")
    for section in _SECTIONS:
        fields = config.get(section)
        for key, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, Unknown) and key in IDLE_KEYS.get(section, ()):
                continue
            if isinstance(value, Unknown):
                raise NotSimulatedError(
                    f"{where}: line {value.line}: {section}.{key}: zsim does not follow '{value.text}'; "
                    f"give it behind, "
                    f"as --{section}.{key} VALUE, or the JSON that --debug.save_config_file writes"
                )
            if key != CLASS:
                yield f"{section}.{key}", value
    training = config.get("training")
    yield (
        "training.disable_cuda_graphs",
        isinstance(training, dict) and training.get("disable_cuda_graphs") is True,
    )
    policy = config.get("activation_checkpoint", {CLASS: "SelectiveAC.Config"})
    if isinstance(policy, dict):
        name = str(policy.get(CLASS)).partition(".")[0]
        yield "activation_checkpoint.mode", _POLICIES.get(name, name)
    elif policy is None:
        yield "activation_checkpoint.mode", "none"
    else:
        raise NotSimulatedError(
            f"{where}: activation_checkpoint: zsim does not follow it; expected FullAC.Config()"
        )
    optimizer = config.get("optimizer")
    kind = optimizer.get(CLASS) if isinstance(optimizer, dict) else "default_adamw"
    if kind != "default_adamw":
        raise NotSimulatedError(f"{where}: optimizer: zsim reads default_adamw only, found '{kind}'")
    yield from _model_settings(config.get("model_spec"), module, where)


def _model_settings(spec: Any, module: str, where: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `model_registry(flavor, converters=[...])`."""
    flavor = spec.get("0", spec.get("flavor")) if isinstance(spec, dict) else None
    if not isinstance(flavor, str):
        raise NotSimulatedError(
            f"{where}: model_spec: zsim does not follow it; expected model_registry('8B')"
        )
    yield "model.name", module.rpartition(".")[2]
    yield "model.flavor", flavor
    for option, value in spec.items():
        if option in _MODEL_OPTIONS and isinstance(value, str):
            yield _MODEL_OPTIONS[option], value
        elif option == "attn_backend" and value != "sdpa":
            yield "model.attn_backend", value.text if isinstance(value, Unknown) else str(value)
        elif option not in _READ_OPTIONS and value not in (None, False, 0, "default", "standard"):
            shown = value.text if isinstance(value, Unknown) else repr(value)
            raise NotSimulatedError(
                f"{where}: model_registry: zsim does not simulate {option} {shown}; expected it left out"
            )
    converters = spec.get("converters", []) if isinstance(spec, dict) else []
    names: list[str] = []
    for converter in converters if isinstance(converters, list) else [converters]:
        name = converter[CLASS].partition(".")[0] if isinstance(converter, dict) else str(converter)
        names.append(_CONVERTERS.get(name, name))
        if isinstance(converter, dict) and isinstance(recipe := converter.get("recipe_name"), str):
            yield f"{names[-1]}.recipe_name", recipe
        if isinstance(converter, dict) and converter.get("emulate") is True:
            yield "float8.emulate", True
    if names:
        yield "model.converters", names
