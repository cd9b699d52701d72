"""The study file: an experiment, and what varies.

Conditions and values are a small subset of Python's expressions, evaluated on the syntax tree.

    strategy.stage == 3 and nodes > 4        4096 // (gpus * training.micro_batch_size)

Numbers, strings, lists, arithmetic, comparisons, `in`, `and`, `or`, `not`, `a if b else c`, `min`, `max`,
`round`, `abs`, and the dotted keys of an experiment. A key that a point does not set is None. None equals
only None, and arithmetic and ordering with None are errors. Nothing is executed as Python.

experiment = "experiment.toml"           # or [base], a whole experiment or changes to that one

[axes]                                   # every combination of these ...
"strategy.stage" = [1, 2, 3]
nodes = { from = 1, to = 128, factor = 2 }

[[zip]]                                  # ... and of these, which go together
label = ["8B", "70B"]                    # a column of its own, no key of the experiment
model = ["llama-3-8b", "llama-3-70b"]

[[set]]                                  # what follows from the rest
when = "strategy.stage == 3 and nodes > 4"
"training.activation_checkpointing" = "full"
"training.gradient_accumulation_steps" = { value = "4096 // (gpus * training.micro_batch_size)" }

# before the first table
where = ["nodes * 8 >= 16"]              # which points to keep
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zsim.errors import InputError, expected_text
from zsim.specs.cluster.files import read_toml
from zsim.specs.experiment.load import resolve_paths
from zsim.specs.experiment.tables import Experiment
from zsim.specs.messages import format_problems
from zsim.specs.user_code import UserCode

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, many: item in many,
    ast.NotIn: lambda item, many: item not in many,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "round": round, "abs": abs}
_CONSTANTS = {"true": True, "false": False, "none": None}  # in the spelling of TOML and of prose
_LARGEST_EXPONENT = 64
_LONGEST = 500  # characters: short enough not to nest deeper than Python's recursion limit


@dataclass(frozen=True)
class Expression:
    """A parsed expression."""

    text: str
    where: str
    """Its position in the file, for errors."""
    tree: ast.expr
    names: tuple[str, ...]
    """The dotted keys that it reads."""

    def value(self, lookup: Callable[[str], Any]) -> Any:
        """The value of the expression. `lookup` gives the value of a dotted key. Raises InputError naming the
        expression.
        """
        try:
            return _value(self.tree, lookup)
        except InputError:
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            values = ", ".join(f"{name} = {lookup(name)!r}" for name in self.names)
            raise InputError(f"{self.where}: {self.text!r}: {error}; {values or 'no keys'}") from None


def parse_expression(text: object, where: str) -> Expression:
    """Parse an expression. `where` names its position in the file. Raises InputError for anything outside of
    the subset above.
    """
    if not isinstance(text, str):
        raise InputError(f"{where}: found {text!r}, expected an expression in quotes")
    if len(text) > _LONGEST:
        raise InputError(f"{where}: {len(text):,} characters, expected at most {_LONGEST:,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InputError(f"{where}: {text!r} is not an expression: {reason}") from None
    names: dict[str, None] = {}
    _check_syntax(tree, text, where, names)
    return Expression(text, where, tree, tuple(names))


def _check_syntax(node: ast.expr, text: str, where: str, names: dict[str, None]) -> None:
    """Refuse every kind of node that `_value` does not handle."""
    children: list[ast.expr]
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return
        case ast.Name() | ast.Attribute():
            key = _key(node)
            if key is not None:
                if key not in _CONSTANTS:
                    names[key] = None
                return
            children = []
        case ast.BoolOp():
            children = node.values
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd()):
            children = [node.operand]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            children = [node.left, node.right]
        case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
            children = [node.left, *node.comparators]
        case ast.IfExp():
            children = [node.test, node.body, node.orelse]
        case ast.List() | ast.Tuple():
            children = node.elts
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and not node.keywords:
            children = node.args
        case _:
            children = []
    if not children and not isinstance(node, ast.List | ast.Tuple):
        raise InputError(
            f"{where}: {text!r}: '{ast.unparse(node)}' is not allowed; expected keys, numbers, strings, "
            f"comparisons, arithmetic, and, or, not, in, {', '.join(_FUNCTIONS)}"
        )
    for child in children:
        _check_syntax(child, text, where, names)


def _key(node: ast.expr) -> str | None:
    """The node as a dotted key, e.g. `training.precision`, or None for any other node."""
    segments: list[str] = []
    while isinstance(node, ast.Attribute):
        segments.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(segments)]) if isinstance(node, ast.Name) else None


def _value(node: ast.expr, lookup: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            key = _key(node)
            assert key is not None
            return _CONSTANTS[key] if key in _CONSTANTS else lookup(key)
        case ast.BoolOp():
            result = None
            for part in node.values:
                result = _value(part, lookup)
                if bool(result) is isinstance(node.op, ast.Or):
                    break
            return result
        case ast.UnaryOp():
            operand = _value(node.operand, lookup)
            if isinstance(node.op, ast.Not):
                return not operand
            return -operand if isinstance(node.op, ast.USub) else +operand
        case ast.BinOp():
            return _calculate(node, _value(node.left, lookup), _value(node.right, lookup))
        case ast.Compare():
            left = _value(node.left, lookup)
            for op, part in zip(node.ops, node.comparators, strict=True):
                right = _value(part, lookup)
                if not _COMPARISONS[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.IfExp():
            return _value(node.body if _value(node.test, lookup) else node.orelse, lookup)
        case ast.List() | ast.Tuple():
            return [_value(part, lookup) for part in node.elts]
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(part, lookup) for part in node.args))
    raise AssertionError(ast.dump(node))


def _calculate(node: ast.BinOp, left: Any, right: Any) -> Any:
    """The result of an arithmetic operation on numbers. Text times a number and huge powers are refused,
    since they could exhaust the memory.
    """
    for side in (left, right):
        if isinstance(side, bool) or not isinstance(side, int | float):
            raise TypeError(f"'{ast.unparse(node)}' needs numbers, found {side!r}")
    if isinstance(node.op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
        raise ValueError(f"exponent {right!r}, expected at most {_LARGEST_EXPONENT}")
    result = _ARITHMETIC[type(node.op)](left, right)
    if isinstance(result, complex) or abs(result) > 1e300:
        raise ValueError(f"'{ast.unparse(node)}' is too large")
    return result


def nested_value(data: Mapping[str, Any], dotted: str) -> Any:
    """`data["a"]["b"]` for "a.b", or None if a key is missing."""
    value: Any = data
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


LABEL = "label"
_VALUES = {"type": ["string", "number", "boolean", "array", "object"]}
_PROPERTIES: Mapping[str, Mapping[str, Any]] = {
    "name": {"type": "string", "description": "the study's name, in its reports; left out: that of its file"},
    "experiment": {
        "type": "string",
        "description": "the experiment file that is varied; left out: `base` is all of it",
    },
    "base": {
        "type": "object",
        "description": "a whole experiment, or changes to that of `experiment`, in the shape of its file; "
        "left out: no changes",
    },
    "axes": {
        "type": "object",
        "additionalProperties": _VALUES,
        "description": "values by key, as a list or as a range {from, to, step or factor}; every "
        "combination is a point; left out: `zip` says what varies",
    },
    "zip": {
        "type": "array",
        "items": {"type": "object", "additionalProperties": _VALUES},
        "description": "keys whose values go together, the first with the first; `label` names them; left "
        "out: `axes` say what varies",
    },
    "set": {
        "type": "array",
        "items": {"type": "object", "additionalProperties": _VALUES},
        "description": 'keys that follow from others: values, or {value = "an expression"}, `when` a '
        "condition holds; left out: none",
    },
    "where": {
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "conditions on the keys; points that miss one are left out",
    },
}
_KEYS = tuple(_PROPERTIES)
_RANGES = {frozenset({"from", "to", "step"}), frozenset({"from", "to", "factor"})}
_MAX_POINTS = 1_000_000
Part = TypeVar("Part")


@dataclass(frozen=True)
class Axis:
    """Values of one or more keys that vary together. A grid is the product of the axes."""

    keys: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Rule:
    """`[[set]]`: where `when` holds, keys are set to values, and expressions among them are evaluated."""

    when: Expression | None
    values: tuple[tuple[str, Any | Expression], ...]


@dataclass(frozen=True)
class Study:
    """A study: an experiment, and what varies."""

    name: str
    base: Mapping[str, Any]
    """The experiment as file-shaped data."""
    overrides: Mapping[str, Any]
    """The changes to it by dotted key."""
    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...] = ()
    where: tuple[Expression, ...] = ()
    code: UserCode | None = None
    """The permission to run the functions that the experiment names as models."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all axes, in the file's order."""
        return tuple(key for axis in self.axes for key in axis.keys)

    @property
    def num_combinations(self) -> int:
        count = 1
        for axis in self.axes:
            count *= len(axis.rows)
        return count


def study_schema() -> dict[str, Any]:
    """The JSON Schema of a study file."""
    return {"type": "object", "properties": deepcopy(dict(_PROPERTIES)), "additionalProperties": False}


def load_study(
    path: str | Path, overrides: Mapping[str, Any] | None = None, code: UserCode | None = None
) -> Study:
    """Read a study file. `overrides` are dotted keys of the experiment that take precedence over its file
    (not over axes). `code` is the permission to run the functions that the file names as models.
    """
    path = Path(path)
    return study_from(
        read_toml(path), folder=path.parent, file=path.name, name=path.stem, overrides=overrides, code=code
    )


def study_from(
    data: Mapping[str, Any],
    *,
    folder: Path,
    file: str = "study",
    name: str = "study",
    overrides: Mapping[str, Any] | None = None,
    code: UserCode | None = None,
) -> Study:
    """A study from file-shaped data. Raises InputError that lists everything wrong with it."""
    if "model" in data and not {"axes", "zip", "base", "experiment"} & set(data):
        raise InputError(
            f"{file}: is an experiment, not a study; expected a file with experiment = {file!r} and [axes] "
            "(zsim run simulates one experiment)"
        )
    problems = list(_unknown_keys(data))
    # the content of a misspelt key is not reported as missing too
    bases = list(_read_each(problems, file, [lambda: _base(data, folder, file)]))
    axes = list(_read_each(problems, file, _axis_readers(data, folder, file, problems)))
    if not axes and not problems:
        problems.append("nothing varies; expected [axes] or [[zip]]")
    rule_tables = _read_each(problems, file, [lambda: list(_tables(data, "set", file))])
    rules = tuple(
        _read_each(
            problems,
            file,
            [
                partial(_rule, table, f"{file}: set {number}")
                for rule_table_list in rule_tables
                for number, table in rule_table_list
            ],
        )
    )
    where = data.get("where", [])
    texts = where if isinstance(where, list) else [where]
    conditions = tuple(
        _read_each(problems, file, [partial(parse_expression, text, f"{file}: where") for text in texts])
    )
    if problems:
        raise InputError(format_problems(file, problems))
    (base,) = bases
    title, changes = str(data.get("name", name)), dict(overrides or {})
    study = Study(title, base, changes, tuple(axes), rules, conditions, code)
    _check(study, file)
    return study


def _unknown_keys(data: Mapping[str, Any]) -> Iterator[str]:
    for key in data:
        if key in Experiment.model_fields:
            yield (
                f"unknown key '{key}': it belongs to the experiment; expected experiment = \"FILE\", "
                f"or the experiment's keys in the table [base], or '{key}' in [axes] where it varies"
            )
        elif key not in _KEYS:
            yield f"unknown key '{key}'{expected_text(key, _KEYS)}"


def _axis_readers(
    data: Mapping[str, Any], folder: Path, file: str, problems: list[str]
) -> Iterator[Callable[[], Axis]]:
    for table in _read_each(problems, file, [lambda: _table(data.get("axes", {}), f"{file}: axes")]):
        for key, value in flatten(table):
            yield partial(_axis, {key: value}, f"{file}: axes", folder)
    for tables in _read_each(problems, file, [lambda: list(_tables(data, "zip", file))]):
        for number, table in tables:
            yield partial(_axis, dict(flatten(table)), f"{file}: zip {number}", folder)


def _read_each(problems: list[str], file: str, readers: Iterable[Callable[[], Part]]) -> Iterator[Part]:
    """The value of each reader. Errors are appended to `problems`, without the file's name."""
    for reader in readers:
        try:
            yield reader()
        except InputError as error:
            problems.append(str(error).removeprefix(f"{file}: "))


def _base(data: Mapping[str, Any], folder: Path, file: str) -> dict[str, Any]:
    """The experiment's file with the study's `[base]` applied, as file-shaped data."""
    base: dict[str, Any] = {}
    if "experiment" in data:
        if not isinstance(data["experiment"], str):
            raise InputError(
                f"{file}: experiment: expected the path of an experiment file, or the table [base]"
            )
        path = folder / data["experiment"]
        base = resolve_paths(read_toml(path), path.parent)
    changes = _table(data.get("base", {}), f"{file}: base")
    if not base and not changes and set(data) <= set(_KEYS):
        raise InputError(f"{file}: what to vary? expected 'experiment' (a file), or [base]")
    for key, value in changes.items():
        is_table = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = {**base[key], **value} if is_table else value
    return resolve_paths(base, folder)


def _check(study: Study, file: str) -> None:
    seen: set[str] = set()
    for key in study.keys:
        if key in seen:
            raise InputError(f"{file}: '{key}' varies twice")
        seen.add(key)
        if key in study.overrides:
            raise InputError(f"--set {key}: is an axis of {file}")
    if study.num_combinations > _MAX_POINTS:
        raise InputError(f"{file}: {study.num_combinations:,} combinations, expected at most {_MAX_POINTS:,}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a table")
    return value


def _tables(data: Mapping[str, Any], key: str, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    tables = data.get(key, [])
    if not isinstance(tables, list):
        raise InputError(f"{file}: {key}: expected tables, [[{key}]]")
    for number, table in enumerate(tables, 1):
        yield number, _table(table, f"{file}: {key} {number}")


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all leaves, with quoted or bare keys. Ranges and calculated values are
    leaves.
    """
    for key, value in table.items():
        if isinstance(value, dict) and frozenset(value) not in _RANGES and set(value) != {"value"}:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _values(value: Any, where: str) -> list[Any]:
    """The values of an axis: a list, or a range."""
    if isinstance(value, dict) and frozenset(value) in _RANGES:
        return _range(value, where)
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{where}: found {value!r}, expected a list of values, or {{ from, to, step }} or "
            "{ from, to, factor }"
        )
    return value


def _range(value: Mapping[str, Any], where: str) -> list[Any]:
    first, last = value["from"], value["to"]
    increment = value.get("step", value.get("factor"))
    for number in (first, last, increment):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InputError(f"{where}: found {number!r}, expected a number")
    least = 1 if "factor" in value else 0
    if increment <= least or first > last or (least and first <= 0):
        raise InputError(f"{where}: from {first} to {last} by {increment} never gets there")
    values = []
    while first <= last * (1 + 1e-12):
        values.append(first)
        first = first * increment if least else first + increment
        if len(values) > _MAX_POINTS:
            raise InputError(f"{where}: more than {_MAX_POINTS:,} values")
    return values


def _axis(table: Mapping[str, Any], where: str, folder: Path) -> Axis:
    columns = {key: _values(value, f"{where}: {key}") for key, value in table.items()}
    if not columns:
        raise InputError(f"{where}: is empty")
    first = next(iter(columns))
    for key, column in columns.items():
        if len(column) != len(columns[first]):
            raise InputError(
                f"{where}: '{key}' has {len(column)} values and '{first}' {len(columns[first])}; expected "
                "as many"
            )
    rows = zip(*(_resolve_paths(key, column, folder) for key, column in columns.items()), strict=True)
    return Axis(tuple(columns), tuple(rows))


def _resolve_paths(key: str, values: list[Any], folder: Path) -> list[Any]:
    """The values with relative paths resolved against `folder`."""
    if key not in ("model", "cluster", "strategy.config"):
        return values
    return [
        str(folder / value) if isinstance(value, str) and os.path.isfile(folder / value) else value
        for value in values
    ]


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    when = parse_expression(table["when"], f"{where}: when") if "when" in table else None
    values: list[tuple[str, Any]] = []
    for key, value in flatten({key: value for key, value in table.items() if key != "when"}):
        if isinstance(value, dict):
            values.append((key, parse_expression(value["value"], f"{where}: {key}")))
        else:
            values.append((key, value))
    if not values:
        raise InputError(f"{where}: sets nothing")
    return Rule(when, tuple(values))
