"""Values in the text of Python files, which is parsed and never run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.reading import parse_json, read_user_text

CLASS = "class"
"""The key of a built object under which the name that was called stands."""
LINE = "line of the call"
"""The key under which the line of that call stands, if it does."""
# Cells of another language, and lines of a notebook that are commands of a shell or its own.
_OTHER_CELL = re.compile(r"\s*%%(bash|sh|script|writefile|file|html|javascript|js|latex|markdown|R|sql)\b")
_COMMAND = re.compile(r"(?m)^([ \t]*)(?:(?:[\w, ]+=[ \t]*)?[!%](?:.*\\\n)*.*|\?.*|[\w.]+\?{1,2}[ \t]*)$")
CELL_LINES = 10**6
"""What a cell's number is multiplied by in the numbers of its lines."""
_OPERATIONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.GtE: operator.ge, ast.LtE: operator.le,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that more than constants decide."""

    text: str
    line: int


def parse_python(path: Path, text: str | None = None) -> ast.Module:
    """The tree of a file, or of `text` in its place. Raises InputError for one that is no Python."""
    try:
        return ast.parse(read_user_text(path) if text is None else text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not Python: {error}") from None


def parse_notebook(path: Path) -> ast.Module:
    """The Python of a notebook's cells. Raises InputError for another JSON."""
    try:
        content = parse_json(read_user_text(path), path)
    except ValueError:
        content = None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise InputError(f"{path}: is no notebook: it has no cells")
    statements: list[ast.stmt] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        lines = [source] if isinstance(source, str) else source
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise InputError(f"{path}: cell {number}: source: expected text, or a list of it")
        if not re.match(_OTHER_CELL, text := "".join(lines)):
            body = ast.Module(_parse_cell(text, f"{path}: cell {number}"), [])
            statements += ast.increment_lineno(body, number * CELL_LINES).body
    return ast.Module(statements, [])


def _parse_cell(text: str, where: str) -> list[ast.stmt]:
    """The statements of a cell, where commands of a shell and of the notebook do nothing."""
    for code in (text, re.sub(_COMMAND, _erase_command, text)):
        try:
            return ast.parse(code).body
        except SyntaxError as error:
            reason = f"line {error.lineno}: is not Python: {error.msg}"
        except (ValueError, RecursionError) as error:
            reason = f"is not Python: {error}"
    raise InputError(f"{where}: {reason}")


def _erase_command(match: re.Match[str]) -> str:
    return f"{match[1]}pass" + "\n" * match[0].count("\n")


def unknown_in(value: Any) -> Unknown | None:
    """The unknown part of a value, or of the first of its parts that is. The result of a call is."""
    if isinstance(value, dict) and CLASS in value:
        return Unknown(f"{value[CLASS]}(...)", value.get(LINE, 0))
    if isinstance(value, list | dict):
        entries = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(unknown_in, entries)), None)
    return value if isinstance(value, Unknown) else None


class _Filled(ast.NodeTransformer):
    """An expression with a constant in place of a name."""

    def __init__(self, name: str, entry: Any) -> None:
        self.name = name
        self.entry = entry

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(self.entry), node) if node.id == self.name else node


def evaluate(node: ast.expr, names: Mapping[str, Any], build: Callable[[ast.Call], Any]) -> Any:
    """The value of an expression of constants, `names` and calls, for which `build` has a value."""

    def value(inner: ast.expr) -> Any:
        return evaluate(inner, names, build)

    def unknown() -> Unknown:
        return Unknown(ast.unparse(node)[:60], node.lineno)

    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [value(element) for element in node.elts]
        case ast.Dict() if all(key is not None for key in node.keys):
            return {
                str(value(key)): value(entry)
                for key, entry in zip(node.keys, node.values, strict=True)
                if key
            }
        case ast.Name():
            return names[node.id] if node.id in names else unknown()
        case ast.Attribute() | ast.Subscript():
            owner = value(node.value)
            key = node.attr if isinstance(node, ast.Attribute) else value(node.slice)
            if isinstance(owner, list) and type(key) is int and -len(owner) <= key < len(owner):
                return owner[key]
            return (
                owner[key] if isinstance(owner, dict) and isinstance(key, str) and key in owner else unknown()
            )
        case ast.ListComp(elt=element, generators=[ast.comprehension(target=ast.Name(id=name)) as loop]):
            entries = value(loop.iter)
            if not isinstance(entries, list) or not all(isinstance(entry, str | int) for entry in entries):
                return unknown()
            filled = [
                [_Filled(name, entry).visit(deepcopy(part)) for part in (element, *loop.ifs)]
                for entry in entries
            ]
            tests = [[value(test) for test in pieces[1:]] for pieces in filled]
            if unknown_in(tests):
                return unknown()
            return [value(pieces[0]) for pieces, truths in zip(filled, tests, strict=True) if all(truths)]
        case ast.BoolOp():
            for operand in node.values[:-1]:
                result = value(operand)
                if unknown_in(result):
                    return unknown()
                if bool(result) == isinstance(node.op, ast.Or):
                    return result
            return value(node.values[-1])
        case ast.Compare(ops=[ast.Is() | ast.IsNot() as relation], comparators=[ast.Constant(value=None)]):
            entry = value(node.left)
            if isinstance(entry, Unknown):
                return unknown()
            return (entry is None) == isinstance(relation, ast.Is)
        case ast.Compare(ops=[ast.In() | ast.NotIn() as membership]):
            entry, group = value(node.left), value(node.comparators[0])
            if unknown_in(entry) or unknown_in(group) or not isinstance(group, list | dict):
                return unknown()
            return (entry in group) == isinstance(membership, ast.In)
        case ast.BinOp(op=ast.Div()):  # a path
            folder, name = value(node.left), value(node.right)
            return (
                f"{folder if isinstance(folder, str) else '.'}/{name}" if isinstance(name, str) else unknown()
            )
        case ast.BinOp() | ast.Compare(ops=[_]):
            right, sign = (
                (node.right, node.op) if isinstance(node, ast.BinOp) else (node.comparators[0], node.ops[0])
            )
            sides = [value(node.left), value(right)]
            is_number = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
            is_number &= sides[1] != 0 or not isinstance(sign, ast.FloorDiv)
            is_text = all(isinstance(side, str) for side in sides) and isinstance(sign, ast.Eq | ast.NotEq)
            return (
                _OPERATIONS[type(sign)](*sides)
                if type(sign) in _OPERATIONS and (is_number or is_text)
                else unknown()
            )
        case ast.UnaryOp(op=ast.USub()):
            number = value(node.operand)
            return -number if isinstance(number, int | float) else unknown()
        case ast.UnaryOp(op=ast.Not()):
            truth = value(node.operand)
            return unknown() if unknown_in(truth) else not truth
        case ast.IfExp():
            test = value(node.test)
            return unknown() if unknown_in(test) else value(node.body if test else node.orelse)
        case ast.Call():
            return build(node)
    return unknown()
