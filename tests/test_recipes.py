"""Every recipe in docs/recipes runs as it stands and prints what it shows; `--update` rewrites that."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zsim.cli import app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "recipes"
NUMBERED = sorted(FOLDER.glob("[0-9][0-9]-*.md"))
SHARDING = [FOLDER / "zeropp.md", FOLDER / "hsdp-or-full-shard.md"]
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("recipe", [*NUMBERED, *SHARDING], ids=lambda path: path.stem)
def test_the_recipe_prints_what_it_shows(recipe: Path, request: pytest.FixtureRequest) -> None:
    text = recipe.read_text(encoding="utf-8")
    (block,) = BLOCK.finditer(text)
    names: dict[str, Any] = {"__name__": "recipe"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block[1], recipe.name, "exec"), names)
    assert printed.getvalue().strip()
    if request.config.getoption("--update"):
        shown = text[: block.start(2)] + printed.getvalue() + text[block.end(2) :]
        recipe.write_text(shown, encoding="utf-8")
    else:
        assert block[2] == printed.getvalue()


@pytest.mark.parametrize("recipe", SHARDING, ids=lambda path: path.stem)
def test_its_commands_run(recipe: Path) -> None:
    commands = re.findall(r"^    zsim (.+)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
        assert "Sent per GPU and step" in result.output


def test_every_recipe_is_in_the_index_and_every_question_has_an_answer() -> None:
    """docs/recipes/README.md has the 25 questions, each with a link or a command."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for recipe in FOLDER.glob("*.md"):
        assert recipe.name == "README.md" or f"({recipe.name})" in index, recipe.name
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", index, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    for _, answer in rows:
        for name in re.findall(r"\(([\w-]+\.md)\)", answer):
            assert (FOLDER / name).exists(), name
        assert "](" in answer or "`zsim " in answer
