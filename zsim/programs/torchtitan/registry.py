"""torchtitan's registered functions, read from the text of a `config_registry.py` and never run.

A function builds `Trainer.Config(...)`, or takes another function's and sets fields of it. What a line
computes from more than constants is unknown, and an error only where a step depends on it. Read in torchtitan
b5bcd76c of August 2026 (`config/configs.py`, `trainer.py`, `models/llama3/config_registry.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.programs.python_text import CLASS, Unknown, evaluate, parse_python
from zsim.programs.torchtitan.keys import IDLE_KEYS

_FOLDERS = (
    "torchtitan/models/{}", "torchtitan/experiments/{}", "torchtitan/experiments/*/{}", "models/{}", "{}",
)  # fmt: skip
_FILE = "config_registry.py"
_MAX_CALLS = 30  # functions that take one another's configuration
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
    functions = {node.name: node for node in parse_python(path).body if isinstance(node, ast.FunctionDef)}
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
        return evaluate(node, values, partial(self._built, values=values))

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
        yield "activation_checkpoint.mode", _POLICIES.get(name, policy.get("mode", name))
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
