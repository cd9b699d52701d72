"""How prose begins: a docstring says what is returned or done, not "What ...", "Of ..." or "With ..."."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "zsim"
FILES = sorted(ROOT.rglob("*.py"))
VERBLESS = ("What ", "Of ", "With ", "That ", "Those ")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_without_its_noun(path: Path) -> None:
    assert [text for text in docstrings(path.read_text()) if text.startswith(VERBLESS)] == []


def test_a_verbless_docstring_is_seen_wherever_it_stands() -> None:
    source = 'class A:\n    def f(self):\n        """Of ten."""\n'
    assert docstrings(source)[0].startswith(VERBLESS)
