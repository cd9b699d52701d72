"""Every script and notebook of examples/ runs, and its cells show something."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# What a script must come to say.
SAID = {
    "fit": ["would fit with", "Should I believe this?"],
    "offload": ["nvme  step", "drives"],
    "whole_run": ["days (", "of the time is kept"],
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_and_prints_lines_that_a_terminal_holds(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert [words for words in SAID[path.stem] if words not in printed] == []
    assert max(map(len, printed.splitlines())) <= 80


def cells(path: Path) -> list[str]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


def shown(source: str, names: dict[str, Any]) -> Any:
    """The cell run as Jupyter does: the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr), "a cell ends with what it shows"
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_every_cell_shows_something(path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for source in cells(path):
        value = shown(source, names)
        html = getattr(value, "_repr_html_", None)
        assert isinstance(value, float) or (html is not None and len(html()) > 50), source


def test_notebooks_are_stored_without_output_and_the_table_names_every_example() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in [*SCRIPTS, *NOTEBOOKS]:
        assert f"]({path.name})" in listed
    for path in NOTEBOOKS:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert all(not cell.get("outputs") for cell in content["cells"])
