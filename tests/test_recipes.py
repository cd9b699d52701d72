"""The recipes are followed by the letter, as other pages are; `--update` rewrites what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import followed

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "recipes"
ELSEWHERE = {
    "README.md",
    "regression-check.md",
    "replay.md",
    "tune.md",
}  # with tests of their own, or with a script
RECIPES = sorted(path for path in FOLDER.glob("*.md") if path.name not in ELSEWHERE)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_prints_what_it_shows(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = recipe.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    anew = followed(text, tmp_path)
    if request.config.getoption("--update"):
        recipe.write_text(anew, encoding="utf-8")
    else:
        assert anew == text


def test_every_recipe_runs_something() -> None:
    for recipe in RECIPES:
        assert re.search(r"(?m)^(```python|\$ zsim )", recipe.read_text(encoding="utf-8")), recipe.name


def test_every_recipe_is_in_the_index_and_every_question_has_an_answer() -> None:
    """docs/recipes/README.md has the 25 questions, each with a link or a command."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for recipe in FOLDER.glob("*.md"):
        assert recipe.name == "README.md" or f"({recipe.name}" in index, recipe.name
    rows = re.findall(r"^(\d+)\. (.+)$", index, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    for _, answer in rows:
        assert "](" in answer or "`zsim " in answer


def test_the_memory_trackers_questions_each_have_a_command() -> None:
    """Fourteen about tuning, some with one command, and three about debugging (pytorch#125323)."""
    page = (FOLDER / "memory-questions.md").read_text(encoding="utf-8")
    tuning, debugging = page.split("## Which module holds most activations?")
    assert len(re.findall(r"^\$ zsim ", tuning, re.MULTILINE)) == 12
    assert len(re.findall(r"^\$ zsim ", debugging, re.MULTILINE)) == 3
