"""Conditions and values of a study: a small subset of Python's expressions, evaluated on the syntax tree.

    strategy.stage == 3 and nodes > 4        4096 // (gpus * training.micro_batch_size)

Numbers, strings, lists, arithmetic, comparisons, `in`, `and`, `or`, `not`, `a if b else c`, `min`, `max`,
`round`, `abs`, and the dotted keys of an experiment. A key that a point does not set is None. None equals
only None, and arithmetic and ordering with None are errors. Nothing is executed as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zsim.errors import InputError

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
    _check(tree, text, where, names)
    return Expression(text, where, tree, tuple(names))


def _check(node: ast.expr, text: str, where: str, names: dict[str, None]) -> None:
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
        _check(child, text, where, names)


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
