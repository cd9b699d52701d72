"""How zsim speaks: names are nouns of the field or verbs, and docstrings are sentences."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "zsim"
FILES = sorted(ROOT.rglob("*.py"))
VERBLESS = ("What ", "Of ", "With ", "That ", "Those ")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Participles, prepositions and pronouns that say nothing of what a thing is.
GRAMMAR = {
    "alike", "alone", "apart", "asked", "behind", "beside", "flight", "found", "given", "held", "home",
    "homes", "known", "laid", "lane", "meeting", "meetings", "one", "other", "own", "parts", "place",
    "places", "settled", "spread", "taken", "telling", "tellings", "together", "told", "whole", "works",
}  # fmt: skip
# Those that stay: keys that people write, columns and options, names of the public Python face.
MAX_GRAMMAR = {
    "spread": 40,
    "given": 20,
    "whole": 12,
    "other": 8,
    "settled": 6,
    "beside": 4,
    "alike": 4,
    "parts": 4,
}
PREPOSITIONS = (
    "with_", "to_", "by_", "in_", "on_", "of_", "without_", "as_", "beside_", "for_", "at_", "from_", "into_",
    "under_", "behind_",
)  # fmt: skip
CONVERSIONS = ("to_dict", "to_json", "to_frame", "to_plotly_json")  # as pandas and plotly name them
MAX_PREPOSITIONS = 10  # constructors `from_...`, most of them
MAX_SEMICOLONS = 30  # docstrings that quote a message or a program's own text
LONGEST_CLASS = 18  # lines of a class docstring: a law or a note, never a list of fields


def docstrings(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def names(source: str) -> Iterator[str]:
    """The names that a module binds or reads: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_without_its_noun(path: Path) -> None:
    assert [text for text in docstrings(path.read_text()) if text.startswith(VERBLESS)] == []


def test_a_verbless_docstring_is_seen_wherever_it_stands() -> None:
    source = 'class A:\n    def f(self):\n        """Of ten."""\n'
    assert docstrings(source)[0].startswith(VERBLESS)


def test_names_are_nouns_of_the_field() -> None:
    """A function's result is not `found`, and a loop does not run over `one`."""
    uses = Counter(name for path in FILES for name in names(path.read_text()) if name in GRAMMAR)
    assert {name: count for name, count in uses.items() if count > MAX_GRAMMAR.get(name, 0)} == {}


def test_a_grammatical_name_is_seen_wherever_it_stands() -> None:
    source = "def f(asked):\n    for one in asked.parts:\n        found = one\n"
    assert GRAMMAR & set(names(source)) == {"asked", "one", "parts", "found"}


def test_functions_are_verbs_or_nouns() -> None:
    functions = [
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.lstrip("_").startswith(PREPOSITIONS)
        and node.name not in CONVERSIONS
    ]
    assert len(functions) <= MAX_PREPOSITIONS, functions


def test_docstrings_are_sentences_and_not_lists() -> None:
    """A semicolon makes one sentence of several, which the reader has to take apart again."""
    texts = [text for path in FILES for text in docstrings(path.read_text()) if ";" in text]
    assert len(texts) <= MAX_SEMICOLONS, texts


def test_a_class_docstring_says_what_the_class_is() -> None:
    """The meaning of a field stands under the field."""
    lengths = {
        node.name: text.count("\n") + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node))
    }
    assert {name: count for name, count in lengths.items() if count > LONGEST_CLASS} == {}
