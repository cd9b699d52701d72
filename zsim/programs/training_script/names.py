"""The names of a script: what is bound to each of them, and where.

A name has a value where everything that binds it in its scope is understood and says the same. Another is
unknown: one of a loop, an unpacking, a change in place, or a parameter of a function with more than one call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.programs.python_text import Unknown, parse_python, unknown_in

_CHANGES = ("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove")
# Functions and methods whose result is the model that they are given.
_PASSING = ("get_peft_model", "prepare_model_for_kbit_training")
_PASSING_METHODS = ("to", "cuda", "train", "get_peft_model")
_RETURN = "return"  # what a function's results are bound to
MODULE_LINES = 10**9  # what a module's number is multiplied by in the numbers of its lines
Tests = tuple[tuple[ast.expr, bool], ...]


@dataclass
class Scope(Mapping[str, Any]):
    """The names of a function or of the module, as a mapping of values."""

    value: Callable[[Any, Scope], Any]
    """The value of a node in a scope."""
    parent: Scope | None = None
    bindings: dict[str, list[tuple[ast.AST | None, Scope, Tests]]] = field(default_factory=dict)
    """By name: the node that is bound, or None where it is not understood, its scope, and the conditions."""
    cache: dict[str, Any] = field(default_factory=dict)
    """The values that were looked up."""

    def __contains__(self, name: object) -> bool:
        return (
            name in self.cache or name in self.bindings or (self.parent is not None and name in self.parent)
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.bindings)

    def __len__(self) -> int:
        return len(self.bindings)

    def __getitem__(self, name: str) -> Any:
        if name not in self.cache:
            if name not in self.bindings:
                if self.parent is None:
                    raise KeyError(name)
                return self.parent[name]
            self.cache[name] = Unknown(name, 0)  # for a name that is bound to itself
            self.cache[name] = self._look_up(name)
        return self.cache[name]

    def _look_up(self, name: str) -> Any:
        reached = [*self._reached(name)]
        candidates = [value for value, _ in reached]
        is_certain = all(is_known for _, is_known in reached)
        if len(candidates) > 1 and candidates[0] is None and is_certain:  # a place for a value that follows
            del candidates[0]
        is_one = bool(candidates) and (is_certain or len(self.bindings[name]) == 1)
        is_one &= all(type(value) is type(candidates[0]) and value == candidates[0] for value in candidates)
        return candidates[0] if is_one else Unknown(name, 0)

    def returned(self) -> Any:
        """The result of the function of this scope, of the first return whose conditions hold."""
        if _RETURN not in self.cache:
            self.cache[_RETURN] = Unknown(_RETURN, 0)  # for a function that calls itself
            value, is_known = next(self._reached(_RETURN), (None, True))
            self.cache[_RETURN] = value if is_known else Unknown(_RETURN, 0)
        return self.cache[_RETURN]

    def _reached(self, name: str) -> Iterator[tuple[Any, bool]]:
        """(value, whether its conditions are known to hold) of what a name may be bound to."""
        for node, scope, tests in self.bindings.get(name, ()):
            truths = [(self.value(test, scope), branch) for test, branch in tests]
            if not any(not unknown_in(truth) and bool(truth) != branch for truth, branch in truths):
                is_known = not any(unknown_in(truth) for truth, _ in truths)
                yield Unknown(name, 0) if node is None else self.value(node, scope), is_known

    def bind(self, name: str, node: ast.AST | None, scope: Scope | None = None, tests: Tests = ()) -> None:
        self.bindings.setdefault(name, []).append((node, scope or self, tests))


class Names(ast.NodeVisitor):
    """The bindings and changes of the names of a script."""

    def __init__(self, tree: ast.Module, value: Callable[[Any, Scope], Any], folder: Path) -> None:
        self.scope = self.module = Scope(value)
        self.folders = [folder]
        self.modules: dict[Path, tuple[ast.Module, Scope]] = {}
        """By file: the script's own modules, which it imports."""
        self.scopes: dict[ast.AST, Scope] = {}
        """By function."""
        self.changed: dict[str | None, Unknown] = {}
        """Attributes and keys that are written to, of objects of any kind."""
        self.changed_outside: dict[str | None, Unknown] = {}
        """Those that not only methods write to, of their own object."""
        self.declared: list[tuple[ast.Call, Scope]] = []
        """The calls of argparse's add_argument."""
        self._tests: Tests = ()
        self._functions: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]] = []
        self._calls: dict[str, list[tuple[ast.Call, Scope]]] = {}
        self._loads: dict[str, int] = {}
        self._is_class = False
        self.visit(tree)
        for function, is_method in self._functions:
            self._bind_parameters(function, is_method)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.bind(node.name, node if not node.decorator_list and not self._is_class else None)
        self._functions.append((node, self._is_class))
        outer, tests, is_class = self.scope, self._tests, self._is_class
        around = outer.parent if is_class else outer
        assert around is not None
        for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(part)
        self.scope = self.scopes[node] = Scope(outer.value, around)
        self._tests, self._is_class = (), False
        for statement in node.body:
            self.visit(statement)
        self.scope, self._tests, self._is_class = outer, tests, is_class

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.bind(node.name, node, tests=self._tests)
        outer, self._is_class = (self.scope, self._is_class), True
        self.scope = Scope(self.scope.value, self.scope)  # whose names are fields
        self.generic_visit(node)
        self.scope, self._is_class = outer

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        outer = self._tests
        for statements, branch in ((node.body, True), (node.orelse, False)):
            self._tests = (*outer, (node.test, branch))
            for statement in statements:
                self.visit(statement)
        self._tests = outer

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            if isinstance(item.optional_vars, ast.Name):
                self.scope.bind(item.optional_vars.id, item.context_expr, tests=self._tests)
            elif item.optional_vars is not None:
                self.visit(item.optional_vars)
            self.visit(item.context_expr)
        for statement in node.body:
            self.visit(statement)

    def visit_Return(self, node: ast.Return) -> None:
        self.scope.bind(_RETURN, node.value or ast.Constant(None), tests=self._tests)
        self.generic_visit(node)

    def visit_loop(
        self, node: ast.For | ast.AsyncFor | ast.While | ast.Try | ast.TryStar | ast.Match
    ) -> None:
        """Results in a loop, a try or a match are not followed, nor are those behind them."""
        if any(isinstance(part, ast.Return) for part in ast.walk(node)):
            self.scope.bind(_RETURN, None)
        self.generic_visit(node)

    visit_For = visit_AsyncFor = visit_While = visit_Try = visit_TryStar = visit_Match = visit_loop

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self._module(node.module or "", node.level)
        for alias in node.names:
            if module is None:
                self.visit(alias)
            elif alias.name == "*":
                for name in module.bindings:
                    self._import(name, name, module, node)
            else:
                self._import(alias.asname or alias.name, alias.name, module, node)

    def _import(self, name: str, source: str, module: Scope, node: ast.stmt) -> None:
        load = ast.copy_location(ast.Name(source, ast.Load()), node)
        self.scope.bind(name, load if source in module.bindings else None, module)

    def _module(self, name: str, level: int) -> Scope | None:
        """The names of a script's own module, in the folders where Python looks for it."""
        bases = (self.folders[-1] / Path(*[".."] * (level - 1)),) if level else (self.folders[0], Path())
        paths = [base / f"{name.replace('.', '/')}.py" for base in bases] if name else []
        path = next(filter(Path.is_file, paths), None)
        if path is None:
            return None
        if path not in self.modules:
            tree, scope = parse_python(path), Scope(self.module.value)
            ast.increment_lineno(tree, (len(self.modules) + 1) * MODULE_LINES)
            scope.cache["__name__"] = name
            self.modules[path] = tree, scope
            outer, self.scope = (self.scope, self._tests, self._is_class), scope
            self._tests, self._is_class = (), False
            self.folders.append(path.parent)
            self.visit(tree)
            self.folders.pop()
            self.scope, self._tests, self._is_class = outer
        return self.modules[path][1]

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        if node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                self.scope.bind(target.id, node.value, tests=self._tests)
            elif isinstance(target, ast.Tuple) and all(isinstance(part, ast.Name) for part in target.elts):
                for number, part in enumerate(target.elts):
                    element = ast.Subscript(node.value, ast.Constant(number), ast.Load())
                    ast.fix_missing_locations(ast.copy_location(element, node))
                    self.scope.bind(ast.unparse(part), element, tests=self._tests)
            else:
                self.visit(target)
        self.visit(node.value)

    visit_AnnAssign = visit_Assign

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._loads[node.id] = self._loads.get(node.id, 0) + 1
        elif isinstance(node.ctx, ast.Store):
            self.scope.bind(node.id, None)

    def visit_arg(self, node: ast.arg) -> None:
        self.scope.bind(node.arg, None)  # of a lambda

    def visit_alias(self, node: ast.alias) -> None:
        self.scope.bind((node.asname or node.name).partition(".")[0], None)

    def visit_ExceptHandler(self, node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar) -> None:
        if node.name is not None:
            self.scope.bind(node.name, None)
        self.generic_visit(node)

    visit_MatchAs = visit_MatchStar = visit_ExceptHandler

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            self._unbind(name)

    visit_Nonlocal = visit_Global

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node, node.attr)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            key = node.slice.value if isinstance(node.slice, ast.Constant) else 0
            self._change(node, key)
            if not isinstance(key, str):
                self._forget(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            self._calls.setdefault(function.id, []).append((node, self.scope))
            if function.id == "setattr" and len(node.args) > 1:
                self._change(node, node.args[1].value if isinstance(node.args[1], ast.Constant) else None)
        elif isinstance(function, ast.Attribute):
            if function.attr == "add_argument":
                self.declared.append((node, self.scope))
            elif function.attr in (*_CHANGES, "set_defaults"):
                self._forget(function.value)
                keys = [key for part in node.args if isinstance(part, ast.Dict) for key in part.keys]
                for key in (*keys, *(ast.Constant(word.arg or 0) for word in node.keywords)):
                    self._change(node, key.value if isinstance(key, ast.Constant) else 0)
        self.generic_visit(node)

    def _change(self, node: ast.expr, key: Any) -> None:
        """Note an attribute or key that is written to. `None` is an attribute that is not a constant."""
        if key is not None and not isinstance(key, str):
            return
        unknown = Unknown(ast.unparse(node)[:60], node.lineno)
        self.changed.setdefault(key, unknown)
        owner = node.value if isinstance(node, ast.Attribute | ast.Subscript) else None
        if not (isinstance(owner, ast.Name) and owner.id == "self"):
            self.changed_outside.setdefault(key, unknown)

    def _forget(self, node: ast.expr) -> None:
        """Take the value from the names in an expression whose value is changed in place."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                self._unbind(part.id)

    def _unbind(self, name: str) -> None:
        """Take the value from a name in this scope and in those around it."""
        scope: Scope | None = self.scope
        while scope is not None:
            scope.bind(name, None)
            scope = scope.parent

    def _bind_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> None:
        """Bind the parameters of a function to the arguments of its one call, and others to nothing."""
        scope, arguments = self.scopes[function], function.args
        names = [entry.arg for entry in (*arguments.posonlyargs, *arguments.args)]
        calls = self._calls.get(function.name, [])
        is_single = len(calls) == self._loads.get(function.name, 0) == 1 and not function.decorator_list
        is_single &= sum(entry.name == function.name for entry, _ in self._functions) == 1 and not is_method
        values: dict[str, tuple[ast.expr, Scope | None]] = {}
        call, caller = calls[0] if is_single else (None, None)
        is_plain = call is not None and all(word.arg for word in call.keywords)
        if call is not None and is_plain and not any(isinstance(part, ast.Starred) for part in call.args):
            defaults: list[tuple[str, ast.expr | None]] = [
                *zip(reversed(names), reversed(arguments.defaults), strict=False)
            ]
            defaults += zip([entry.arg for entry in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
            values = {name: (default, scope.parent) for name, default in defaults if default is not None}
            values |= {name: (part, caller) for name, part in zip(names, call.args, strict=False)}
            values |= {str(word.arg): (word.value, caller) for word in call.keywords}
        for entry in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            node, origin = values.get(entry.arg, (None, None))
            scope.bind(entry.arg, node, origin)
        for extra in filter(None, (arguments.vararg, arguments.kwarg)):
            scope.bind(extra.arg, None)

    def function(self, name: str, scope: Scope | None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function of the script that a name stands for in a scope, or None."""
        while scope is not None and name not in scope.bindings:
            scope = scope.parent
        bound = scope.bindings[name] if scope is not None else []
        if len(bound) != 1:
            return None
        node, origin, _ = bound[0]
        if isinstance(node, ast.Name) and origin is not scope:
            return self.function(node.id, origin)
        return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def calls(self, node: ast.AST | None, scope: Scope, index: int | None = None) -> list[ast.Call] | None:
        """The calls whose results an expression is, or one of its elements, or None where that is not
        understood. Calls that hand on the model that they are given are not among them.
        """
        self._visited: set[int] = set()
        return self._calls_of(node, scope, index)

    def _calls_of(self, node: ast.AST | None, scope: Scope, index: int | None) -> list[ast.Call] | None:
        nodes: list[tuple[ast.AST | None, Scope, int | None]] = []
        if isinstance(node, ast.Name):
            owner: Scope | None = scope
            while owner is not None and node.id not in owner.bindings:
                owner = owner.parent
            if owner is None:
                return None
            nodes = [(part, origin, index) for part, origin, _ in owner.bindings[node.id]]
        elif isinstance(node, ast.IfExp):
            nodes = [(node.body, scope, index), (node.orelse, scope, index)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            number = node.slice.value
            nodes = [(node.value, scope, number if isinstance(number, int) else None)]
        elif isinstance(node, ast.Tuple) and index is not None and index < len(node.elts):
            nodes = [(node.elts[index], scope, None)]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            function = self.function(name, scope)
            if name in _PASSING:
                models = [*node.args, *(word.value for word in node.keywords if word.arg == "model")]
                nodes = [(models[0], scope, None)] if models else []
            elif isinstance(node.func, ast.Attribute) and name in _PASSING_METHODS:
                nodes = [(node.func.value, scope, None)]
            elif function is not None and isinstance(node.func, ast.Name):
                returns = [part for part in ast.walk(function) if isinstance(part, ast.Return)]
                nodes = [(part.value, self.scopes[function], index) for part in returns]
            else:
                return [node]
        if not nodes:
            return None
        calls: list[ast.Call] = []
        for part, origin, number in nodes:
            if part is not None and id(part) in self._visited:
                continue
            self._visited.add(id(part))
            inner = self._calls_of(part, origin, number)
            if inner is None:
                return None
            calls += [call for call in inner if call not in calls]
        return calls
