"""The floors of the house: a module imports its own package and lower floors, siblings do not see each
other, and only five packages know the clock."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1] / "zsim"
# A part of a package that has a floor of its own is named with the package.
FLOOR: dict[str, float] = {
    "errors": -1,
    "arrays": 0, "dtypes": 0, "units": 0, "files": 0, "reading": 0, "version": 0,
    "extras": 0, "garbage_collection": 0, "memo": 0,
    "specs.strategy.fp8": 0.1, "specs.strategy.images": 0.1,
    "specs.lazy_model": 0.05, "specs.strategy.table": 0.1,
    "specs.strategy.registry": 0.15,
    "cost.kernels.kernel": 0.05,
    "cost.kernels.losses": 0.1, "cost.kernels.layer_kernels": 0.1,
    "specs.strategy.training": 0.2,
    "cost.kernels": 0.5,
    "operations": 0.7,
    "specs": 1, "trace": 1.5, "validated": 1.2,
    "cost": 2,
    "plan": 3,
    "fluid": 4,
    "fabric": 5, "devices": 5,
    "engine": 6,
    "explain": 7,
    "api": 8,
    "goodput": 9,
    "workflows": 9.5,
    "study": 10,
    "frameworks": 10.5, "programs": 10.7,
    "reference": 10.2, "ui": 10.2,
    "commands": 12,
    "cli": 13, "pytest_plugin": 13, "__main__": 14,
}  # fmt: skip
_READ = {
    "errors",
    "arrays",
    "dtypes",
    "units",
    "files",
    "reading",
    "extras",
    "version",
    "operations",
    "specs",
    "trace",
    "cost",
}
WINGS = {
    "report": (_READ | {"validated", "plan"}) - {"reading"},
    "comparison": (_READ | {"plan", "report", "validated"}) - {"reading"},
    "calibrate": _READ - {"files"},
}
VERTICAL = {"frameworks", "programs"}  # each folder knows one of them, and core finds it by its name
CLOCK = {"fluid", "fabric", "engine", "goodput", "workflows"}
HEAVY = {
    "torch",
    "pandas",
    "scipy",
    "plotly",
    "jinja2",
    "networkx",
    "dash",
    "flask",
    "werkzeug",
}  # never at import time
FILES = sorted(ROOT.rglob("*.py"))
# Core files that still name a framework or a program. The list may only become shorter.
NAMERS: set[str] = {
    "__init__.py",
    "specs/experiment/typed_tables.py",  # `zsim.Trainer`, the typed `[trainer]`
}
ENGINE = re.compile(r"megatron|deep_?speed|fsdp|ddp\b|nanotron|internevo|zero_?pp|mics\b", re.IGNORECASE)
PROGRAM = re.compile(
    r"torchtitan|torchtune|accelerate|trainer\b|nemo(?!tron)|composer|kempner|litgpt|axolotl"
    r"|llama_?factory|verl\b",
    re.IGNORECASE,
)
LOOP = re.compile(
    r"^(apply_)?trainer$|\bthe trainer\b|^\[trainer\]"
)  # the training loop of any program, `[trainer]`


def part_of(path: Path) -> str:
    """The package or top-level module that a file belongs to: `zsim/plan/ops.py` -> `plan`."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def room_of(module: str) -> str:
    """The part of the package with a floor of its own that a module is in: `zsim.cost.kernels.kernel` is in
    `cost.kernels`, `zsim.cost.flops` in `cost`.
    """
    names = module.split(".")[1:]
    rooms = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return next((room for room in rooms if room in FLOOR), names[0])


def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """(module, whether it is imported for types only) of every import, those inside functions included."""
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for child in block.body
        for node in ast.walk(child)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in guarded) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.module, id(node) in guarded))
    return found


def may_import(part: str, other: str) -> bool:
    if part == other:
        return True
    if other in VERTICAL:
        return part == "programs"
    if part in WINGS:
        return other.split(".")[0] in WINGS[part]
    if other in WINGS:
        return FLOOR[part] >= FLOOR["explain"]
    return FLOOR[other] < FLOOR[part]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_lower_floors(path: Path) -> None:
    part = room_of(module_of(path))
    if path == ROOT / "__init__.py":
        pytest.skip("the Python face may name everything; it loads lazily")
    for module, _ in imports(ast.parse(path.read_text())):
        if module.startswith("zsim."):
            other = room_of(module)
            assert may_import(part, other), f"{part} must not import {module}"


def core_names(source: str) -> set[str]:
    """Identifiers and strings of a module that name a framework or a program. Texts that explain are left
    out: docstrings, also those of fields, and comments.
    """
    tree = ast.parse(source)
    explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
            names.add(node.value)
    return {name for name in names if ENGINE.search(name) or PROGRAM.search(LOOP.sub("", name))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_names_no_framework_and_no_program(path: Path) -> None:
    """To add one is to add a folder, not to change core."""
    if part_of(path) not in VERTICAL and str(path.relative_to(ROOT)) not in NAMERS:
        assert core_names(path.read_text()) == set()


def test_a_name_is_seen_wherever_it_stands() -> None:
    """As a class, an argument, an attribute or a word of a string, but not where something is explained."""
    function = "def f(megatron):\n    'DDP is slow.'\n"
    source = function + "    return table.is_fsdp, 'of DeepSpeed', Trainer, job.trainer, 'the trainer'\n"
    assert core_names(source) == {"megatron", "is_fsdp", "of DeepSpeed", "Trainer"}


# Modules and packages of `plan` from the ground up: the vocabulary, modules at work, stages and
# their hooks, the walk through them, pipelines and split models, memory, frameworks, plans.
PLAN = (
    "actions", "ops", "columns", "builder", "checks", "node_types", "passes",
    "recorded", "workload", "stage", "hooks", "shared", "walk", "pipeline",
    "parallel", "memory", "moments", "framework_hooks", "make", "plans",
)  # fmt: skip


def room_of_plan(module: str) -> int:
    """The place of a module of `plan` in `PLAN`."""
    return PLAN.index(module.split(".")[2])


@pytest.mark.parametrize("path", sorted((ROOT / "plan").rglob("*.py")), ids=lambda path: path.name)
def test_a_module_of_plan_imports_only_what_stands_below(path: Path) -> None:
    own = module_of(path)
    if own in ("zsim.plan", "zsim.plan.__init__"):
        return
    for module, _ in imports(ast.parse(path.read_text())):
        if module.startswith("zsim.plan."):
            assert room_of_plan(module) <= room_of_plan(own), f"{own} must not import {module}"


def test_the_package_imports_nothing_of_its_proof() -> None:
    """`validation/` is not in the wheel. `zsim check` loads its recorded cases by name, where they are."""
    modules = {module for path in FILES for module, _ in imports(ast.parse(path.read_text()))}
    assert {module for module in modules if module.split(".")[0] in ("validation", "tests")} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_four_clock_packages_import_simpy(path: Path) -> None:
    names = {module.split(".")[0] for module, _ in imports(ast.parse(path.read_text()))}
    assert "simpy" not in names or part_of(path) in CLOCK


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_heavy_is_imported_at_module_level(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for module, _ in imports(ast.Module(body=top, type_ignores=[])):
        assert module.split(".")[0] not in HEAVY


def test_the_rules_above_refuse_what_they_should() -> None:
    """plan must not see engine, specs must not see trace, report must not see the clock."""
    assert not may_import("plan", "engine")
    assert not may_import("specs", "trace")
    assert not may_import("report", "engine")
    assert not may_import("engine", "report")
    assert not may_import("report", "comparison")
    assert not may_import("operations", "specs")
    assert not may_import("cost.kernels", room_of("zsim.cost.rates.gpu"))
    assert may_import("specs", room_of("zsim.cost.kernels.kernel"))
    assert not may_import("specs", "frameworks")
    assert not may_import("commands", "programs")
    assert not may_import("frameworks", "programs")
    assert may_import("frameworks", "study")
    assert may_import("engine", "plan")
    assert may_import("cli", "report")


def test_no_file_is_longer_than_a_person_reads() -> None:
    """600 lines. A file of that length is a wall, which asks to be split by what it is about."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lengths.items() if count > 600} == {}


def module_of(path: Path) -> str:
    return ".".join(("zsim", *path.relative_to(ROOT).with_suffix("").parts))


def links(sources: dict[str, str]) -> networkx.DiGraph[str]:
    """Module -> the modules that it imports, anywhere in its text; `sources` is text by module."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", node.module, f"{node.module}.__init__")
                target = next((name for name in names if name in sources), None)
                if target is not None and node.module != "zsim":
                    graph.add_edge(module, target)
    return graph


def circles(graph: networkx.DiGraph[str]) -> list[list[str]]:
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def test_no_modules_import_each_other() -> None:
    """Not within a package either, and neither late nor for types only: what two modules need of each other
    has a module of its own."""
    graph = links({module_of(path): path.read_text() for path in FILES})
    assert graph.number_of_edges() > 1000
    assert circles(graph) == []


def test_a_circle_is_found_wherever_the_import_stands() -> None:
    """b imports a inside a function, a imports b for its types only."""
    for_types = "if TYPE_CHECKING:\n    from zsim.x.b import B\n"
    late = "def f():\n    from zsim.x.a import A\n"
    assert circles(links({"zsim.x.a": for_types, "zsim.x.b": late})) == [["zsim.x.a", "zsim.x.b"]]


def definitions(source: str) -> tuple[list[str], list[str]]:
    """Names of the classes and of the functions of a module, at its top level."""
    body = ast.parse(source).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return classes, functions


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for name in definitions(path.read_text())[0]:
            if not name.startswith("_"):
                homes.setdefault(name, []).append(module_of(path))
    assert len(homes) > 300
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


# Modules of one function whose name is a noun all the same: the thing that the function gives or does.
# The last is the role `read` of a program, which core looks up by its name.
NOUNS = {"zsim.extras", "zsim.programs.trainer.read"}


def test_a_file_is_a_noun() -> None:
    """One function is none, but for commands, which have a file each."""
    single = set()
    for path in FILES:
        classes, functions = definitions(path.read_text())
        if len(functions) == 1 and not classes and part_of(path) not in ("commands", "__main__"):
            single.add(module_of(path))
    assert single == NOUNS
