"""No data of a user's reaches import, eval, exec, pickle or a loader that builds objects: what could do so is
listed here, place by place, each with the reason why it is harmless."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules that run code, start programs or make objects of bytes, however they are used.
MODULES = frozenset({
    "importlib", "imp", "runpy", "pkgutil", "zipimport", "pickle", "cPickle", "_pickle", "cloudpickle",
    "dill", "marshal", "shelve", "copyreg", "code", "codeop", "ctypes", "cffi", "subprocess", "builtins",
    "pty", "yaml", "jsonpickle", "xml.sax", "xml.etree", "xml.dom",
})  # fmt: skip
# Functions of the language that do.
BUILTINS = frozenset({"exec", "eval", "__import__", "breakpoint"})
# Functions of packages that do, by the name behind the dot.
ATTRIBUTES = frozenset({
    "system", "popen", "execv", "execve", "execvp", "execl", "spawnv", "spawnl", "posix_spawn", "startfile",
    "exec_module", "load_module", "unsafe_load", "full_load", "UnsafeLoader", "FullLoader",
    "read_pickle", "loads_pickle", "entry_points", "fromfile", "memmap", "allow_pickle",
})  # fmt: skip
# Readers that make objects of files.
LOADERS = frozenset({"torch.load", "numpy.load", "np.load", "joblib.load", "yaml.load"})

ALLOWED = {
    ("cli.py", "importlib"): "the module of a command, by its name in the list of commands",
    ("__init__.py", "importlib"): "the modules of zsim's own public names, when one is first asked for",
    ("extras.py", "importlib"): "whether a package is installed that zsim names itself",
    ("study/progress.py", "importlib"): "whether rich is installed",
    ("specs/strategy/registry.py", "importlib"): "a module of zsim's own folder of a framework",
    ("specs/experiment/programs.py", "importlib"): "a module of zsim's own folder of a program",
    ("specs/formats/program.py", "importlib"): "the module `read` of a program's own folder",
    ("specs/lazy_model.py", "importlib"): "a table of zsim's own, by the name in its annotation",
    ("specs/model/families/__init__.py", "importlib"): "the module of a builder of models",
    ("report/views/html/page.py", "importlib"): "the file plotly.min.js of the installed plotly",
    ("study/check/targets.py", "importlib"): "the checkout's own checks of recorded cases, by a fixed name",
    ("specs/capture/capture.py", "importlib"): "the function of the user's own that --model or Python names",
    ("specs/formats/topology/hwloc.py", "xml.etree"): "a type alone; defusedxml reads",
    ("specs/formats/topology/nccl_xml.py", "xml.etree"): "a type alone; defusedxml reads",
    ("study/check/check.py", "xml.etree"): "it writes",
}  # fmt: skip


def _module(name: str) -> str | None:
    return next((one for one in MODULES if name == one or name.startswith(f"{one}.")), None)


def dangers(tree: ast.AST) -> Iterator[str]:
    """What in a module could run code, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from filter(None, (_module(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from filter(None, map(_module, names))
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "compile":
            yield "compile"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "YAML":
            if 'typ="safe"' not in ast.unparse(node).replace("'", '"'):
                yield "YAML"
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            yield ast.unparse(node)


def calls(tree: ast.AST) -> Iterator[str]:
    """The names of what a module calls, with what stands before the last dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    """zsim's modules, and the checks of recorded cases, by their paths in the checkout."""
    paths = sorted([*(ROOT / "zsim").rglob("*.py"), *(ROOT / "validation" / "cases").rglob("*.py")])
    return [
        (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths
    ]


def in_zsim() -> Iterator[tuple[str, ast.Module]]:
    return ((path.removeprefix("zsim/"), tree) for path, tree in trees() if path.startswith("zsim/"))


def test_every_place_that_could_run_code_is_listed_with_its_reason() -> None:
    """In both directions, so that the list stays as short as it can be."""
    assert {(path, name) for path, tree in in_zsim() for name in dangers(tree)} == set(ALLOWED)


@pytest.mark.parametrize("text", [
    "exec(text)", "from importlib import import_module as get", "import pickle", "np.load(x)", "run = eval",
    "numpy.loadtxt(x, allow_pickle=True)", "os.system(x)", "torch.load(x)", "import yaml.constructor",
    "pandas.read_pickle(x)", "YAML(typ='unsafe').load(x)", "compile(x, y, z)", "import xml.dom.minidom",
])  # fmt: skip
def test_the_scan_sees_what_runs_code(text: str) -> None:
    assert list(dangers(ast.parse(text)))


def test_a_function_of_the_users_is_run_by_a_permission_alone() -> None:
    """Called in one place, and the permission is made in two: for options of the command line, and for
    Python's `zsim.Experiment(...)`."""
    users = {path for path, tree in in_zsim() if "capture_function" in set(calls(tree))}
    makers = {path for path, tree in in_zsim() if "UserCode" in set(calls(tree))}
    assert users == {"specs/user_code.py"}
    assert makers == {"commands/options.py", "specs/experiment/tables.py"}


def test_zsim_itself_makes_experiments_only_of_data() -> None:
    """`Experiment(...)` runs functions, since whoever writes it in Python names them himself; a recorded case
    or a row of a table does not."""
    constructors = {"Experiment", "zsim.Experiment", "Experiment.model_validate"}
    makers = {path for path, tree in trees() if constructors & set(calls(tree))}
    assert makers == set()
